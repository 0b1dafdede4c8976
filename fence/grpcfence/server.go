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
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
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
// receive: see the package's comment. A handler runs on a goroutine of its own, and after a takeover its stream may end
// before it has returned; its panics are raised where the server's other interceptors expect them.
func (g *Guard) StreamServerInterceptor() grpc.StreamServerInterceptor {
	return func(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		hold, err := g.admit(ss.Context(), info.FullMethod)
		if err != nil {
			return err
		}
		if hold == nil {
			return handler(srv, ss)
		}
		return g.serve(ss, hold, func(ss grpc.ServerStream) error { return handler(srv, ss) })
	}
}

// serve runs a stream's handler on a goroutine of its own, because a handler that waits for a silent client can be woken
// in one way only: by returning from here, which ends the stream. It then outlives this call, for as long as it takes
// to return; its hold ends when it has.
func (g *Guard) serve(ss grpc.ServerStream, hold *gate.Hold, handler func(grpc.ServerStream) error) error {
	s := &serverStream{ServerStream: ss, hold: hold}
	done := make(chan func() error, 1)
	go func() {
		end := func() error { return status.Error(codes.Internal, "grpcfence: the handler ended its goroutine") }
		defer func() {
			if r := recover(); r != nil {
				end = func() error { panic(r) } // where the server's own interceptors expect it
			}
			hold.End()
			done <- end
		}()
		err := handler(s)
		end = func() error { return err }
	}()
	select {
	case end := <-done:
		return s.outcome(end())
	case <-hold.Context().Done():
	}
	if hold.Fenced() == nil { // the client is gone, the handler will notice
		return s.outcome((<-done)())
	}
	if hold.Idle() {
		return s.refusal()
	}
	tick := time.NewTicker(g.gate.Drain() / 2)
	defer tick.Stop()
	for {
		select {
		case end := <-done:
			return s.outcome(end())
		case <-tick.C:
			if s.sending.Load() > 0 { // to a client that takes nothing
				return toStatus(explain(gate.Superseded(hold.Fenced())), fence.Term{})
			}
		}
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

// serverStream holds the name but for the time that it waits for its client's messages.
type serverStream struct {
	grpc.ServerStream
	hold    *gate.Hold
	sending atomic.Int32
	refused atomic.Bool // some RecvMsg was
}

func (s *serverStream) Context() context.Context { return s.hold.Context() }

func (s *serverStream) RecvMsg(m any) error {
	s.hold.Pause()
	var err error
	if s.hold.Fenced() == nil { // else nobody would end the wait: serve looks but once whether the hold is idle
		err = s.ServerStream.RecvMsg(m)
	}
	if refused := s.hold.Resume(); refused != nil {
		s.refused.Store(true)
		return toStatus(explain(refused), fence.Term{})
	}
	return err
}

func (s *serverStream) SendMsg(m any) error {
	s.sending.Add(1)
	defer s.sending.Add(-1)
	return s.ServerStream.SendMsg(m)
}

// outcome does not let a handler that ignores the refusal of a message say that all is done.
func (s *serverStream) outcome(err error) error {
	if err == nil && s.refused.Load() && s.hold.Fenced() != nil {
		return s.refusal()
	}
	return outcome(err, s.hold)
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
