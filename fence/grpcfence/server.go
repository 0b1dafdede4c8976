package grpcfence

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"aegis/fence"
	"aegis/fence/internal/gate"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

const (
	// Metadata is the key of the term in a call's metadata.
	Metadata = "aegis-term"

	service = "aegis.fence.v1.Guard"
)

// UnaryServerInterceptor admits calls by their term and runs the handlers of those that are admitted, holding the
// name shared until the handler has returned. Its context carries the term and ends when a newer one is taken. Errors
// of guards that a handler returns reach the client as what they are; when a handler returns context.Canceled after a
// newer term interrupted it, the client gets [fence.ErrUnknown]. The package's comment lists the statuses.
func (g *Guard) UnaryServerInterceptor() grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		hold, err := g.admit(ctx, info.FullMethod)
		if err != nil {
			return nil, err
		}
		if hold == nil {
			return handler(ctx, req)
		}
		defer hold.End()
		resp, err := handler(hold.Context(), req)
		return resp, outcome(err, hold)
	}
}

// StreamServerInterceptor is UnaryServerInterceptor for streams, which are admitted again with each message that they
// receive: see the package's comment.
func (g *Guard) StreamServerInterceptor() grpc.StreamServerInterceptor {
	return func(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		hold, err := g.admit(ss.Context(), info.FullMethod)
		if err != nil {
			return err
		}
		if hold == nil {
			return handler(srv, ss)
		}
		defer hold.End()
		return outcome(handler(srv, &serverStream{ServerStream: ss, hold: hold, patience: g.gate.Drain() / 2}), hold)
	}
}

// admit returns nil and nil for a call that needs no term.
func (g *Guard) admit(ctx context.Context, method string) (*gate.Hold, error) {
	if strings.HasPrefix(method, "/"+service+"/") || g.unguarded(method) {
		return nil, nil
	}
	values := metadata.ValueFromIncomingContext(ctx, Metadata)
	t, err := gate.One("metadata "+Metadata, values)
	if len(values) == 0 && g.gate.Reports() && g.gate.Verdict(fmt.Errorf("%w: %w", fence.ErrFenced, err)) == nil {
		return nil, nil
	}
	if err != nil {
		return nil, toStatus(explain(err), t)
	}
	hold, err := g.gate.Enter(ctx, t, func() string { return describe(ctx, method) })
	if err != nil {
		return nil, toStatus(explain(err), t)
	}
	return hold, nil
}

// describe names a call to the operator who reads what blocks an advance.
func describe(ctx context.Context, method string) string {
	if p, ok := peer.FromContext(ctx); ok {
		return method + " from " + p.Addr.String()
	}
	return method
}

// outcome is what the client is told about a handler that returned err.
func outcome(err error, hold *gate.Hold) error {
	if err == nil {
		return nil
	}
	t, _ := gate.TermFrom(hold.Context())
	if gate.Refusal(err, t) != nil {
		return toStatus(err, t)
	}
	if fenced := hold.Fenced(); fenced != nil && interrupted(err) {
		return toStatus(explain(gate.Superseded(fenced)), t)
	}
	return err
}

// serverStream holds the name but for the time that it waits for its client.
type serverStream struct {
	grpc.ServerStream
	hold     *gate.Hold
	patience time.Duration // with a client that takes nothing, once a newer term is taken
	deaf     atomic.Bool   // a RecvMsg was left behind, still waiting
	mute     atomic.Bool   // a SendMsg was
}

func (s *serverStream) Context() context.Context { return s.hold.Context() }

func (s *serverStream) RecvMsg(m any) error {
	if s.deaf.Load() {
		return s.refusal()
	}
	s.hold.Pause()
	err := s.await(func() error { return s.ServerStream.RecvMsg(m) }, 0, &s.deaf)
	if refused := s.hold.Resume(); refused != nil {
		return toStatus(refused, fence.Term{})
	}
	return err
}

func (s *serverStream) SendMsg(m any) error {
	if s.mute.Load() {
		return s.refusal()
	}
	return s.await(func() error { return s.ServerStream.SendMsg(m) }, s.patience, &s.mute)
}

// await runs fn, which ends with the stream at the latest, and leaves it behind, noting this, once a newer term has
// been taken for longer than patience.
func (s *serverStream) await(fn func() error, patience time.Duration, left *atomic.Bool) error {
	done := make(chan error, 1)
	go func() { done <- fn() }()
	select {
	case err := <-done:
		return err
	case <-s.Context().Done():
	}
	if s.hold.Fenced() == nil {
		return <-done // the stream itself has ended
	}
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case err := <-done:
		return err
	case <-timer.C:
		left.Store(true)
		return s.refusal()
	}
}

func (s *serverStream) refusal() error { return toStatus(s.hold.Fenced(), fence.Term{}) }

// Register adds the service aegis.fence.v1.Guard to a server: the server's side of [Remote]. Its methods take a
// google.protobuf.StringValue. Advance takes the terms in it, one per line in the form of the metadata, all or none;
// Newest answers a StringValue with the newest token of the election that is named, as token=…&nonce=…&cluster=…;
// token=0 if there is none. Who may call it may shut out any leader: authenticate it as other calls are.
func (g *Guard) Register(s grpc.ServiceRegistrar) {
	s.RegisterService(&grpc.ServiceDesc{
		ServiceName: service,
		HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{
			{MethodName: "Advance", Handler: unary("Advance", func(ctx context.Context, in string) (any, error) {
				terms, err := gate.DecodeTerms(strings.NewReader(in))
				if err == nil {
					err = g.Advance(ctx, terms...)
				}
				if err != nil {
					t := fence.Term{}
					if len(terms) > 0 {
						t = terms[len(terms)-1]
					}
					return nil, toStatus(err, t)
				}
				return &emptypb.Empty{}, nil
			})},
			{MethodName: "Newest", Handler: unary("Newest", func(ctx context.Context, in string) (any, error) {
				rec, err := g.Newest(ctx, in)
				if err != nil {
					return nil, toStatus(err, fence.Term{})
				}
				return wrapperspb.String(gate.EncodeRecord(rec)), nil
			})},
		},
		Metadata: "fence/grpcfence/guard.proto",
	}, g)
}

// unary is what protoc would generate.
func unary(method string, fn func(ctx context.Context, in string) (any, error)) grpc.MethodHandler {
	return func(srv any, ctx context.Context, dec func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
		in := new(wrapperspb.StringValue)
		if err := dec(in); err != nil {
			return nil, err
		}
		handler := func(ctx context.Context, in any) (any, error) { return fn(ctx, in.(*wrapperspb.StringValue).Value) }
		if interceptor == nil {
			return handler(ctx, in)
		}
		return interceptor(ctx, in, &grpc.UnaryServerInfo{Server: srv, FullMethod: "/" + service + "/" + method}, handler)
	}
}
