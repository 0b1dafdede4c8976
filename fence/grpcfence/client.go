package grpcfence

import (
	"context"
	"fmt"

	"aegis/fence"
	"aegis/fence/internal/gate"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

type termOption struct {
	grpc.EmptyCallOption
	term fence.Term
}

// UnderTerm has one call carry the term; it goes before that of the context.
func UnderTerm(t fence.Term) grpc.CallOption { return termOption{term: t} }

// UnaryClientInterceptor puts the term of the call's option ([UnderTerm]) or context ([WithTerm]) into its metadata and
// makes refusals errors of package fence: use [errors.As] and [errors.Is]. Calls without a term are made as they are.
//
// CANCELED, DEADLINE_EXCEEDED and UNAVAILABLE of a call that was sent under a term may have come after the work was
// done: such errors are [fence.ErrUnknown], too, unless the server's guard says that its handler did not run.
func UnaryClientInterceptor() grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		ctx, guarded, err := outgoing(ctx, opts)
		if err != nil {
			return err
		}
		if !guarded {
			err, _ := fromStatus(invoke(ctx, method, req, reply, cc, opts...))
			return err
		}
		var sentTo peer.Peer // stays empty while there is no connection
		err, told := fromStatus(invoke(ctx, method, req, reply, cc, append(opts[:len(opts):len(opts)], grpc.Peer(&sentTo))...))
		if err != nil && !told && sentTo.Addr != nil {
			err = lost(err)
		}
		return err
	}
}

// StreamClientInterceptor is UnaryClientInterceptor for streams. A refusal in the middle of a stream concerns the
// messages that were not answered yet; what became of them when the connection is lost is for the stream's own
// protocol to find out.
func StreamClientInterceptor() grpc.StreamClientInterceptor {
	return func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
		ctx, _, err := outgoing(ctx, opts)
		if err != nil {
			return nil, err
		}
		cs, err := open(ctx, desc, cc, method, opts...)
		if err != nil {
			err, _ := fromStatus(err)
			return nil, err
		}
		return clientStream{cs}, nil
	}
}

// outgoing returns ctx with the term in its metadata, exactly once however often interceptors run.
func outgoing(ctx context.Context, opts []grpc.CallOption) (_ context.Context, guarded bool, err error) {
	t, ok := TermFromContext(ctx)
	for _, opt := range opts {
		if o, is := opt.(termOption); is {
			t, ok = o.term, true
		}
	}
	if !ok {
		return ctx, false, nil
	}
	s, err := gate.Encode(t)
	if err != nil {
		return ctx, false, toStatus(explain(err), t)
	}
	md, _ := metadata.FromOutgoingContext(ctx) // a copy
	if md == nil {
		md = metadata.MD{}
	}
	md.Set(Metadata, s)
	return metadata.NewOutgoingContext(ctx, md), true, nil
}

type clientStream struct{ grpc.ClientStream }

func (s clientStream) SendMsg(m any) error {
	err, _ := fromStatus(s.ClientStream.SendMsg(m))
	return err
}

func (s clientStream) RecvMsg(m any) error {
	err, _ := fromStatus(s.ClientStream.RecvMsg(m))
	return err
}

func (s clientStream) Header() (metadata.MD, error) {
	md, err := s.ClientStream.Header()
	err, _ = fromStatus(err)
	return md, err
}

// Remote is a [fence.Guard] on a service elsewhere, for WithGuards. It is safe for concurrent use.
type Remote struct{ conn grpc.ClientConnInterface }

var _ fence.Guard = (*Remote)(nil)

// NewRemote returns the guard of the service at the other end of conn, which has registered it ([Guard.Register]). The
// connection may have this package's interceptors or not.
func NewRemote(conn grpc.ClientConnInterface) *Remote { return &Remote{conn} }

// Advance has the service take the terms' tokens: see [fence.Guard] and [Guard.Advance], whose errors it returns, and
// whose waiting for older handlers it shares. All terms are taken or none, unless the reply is lost; advancing again
// is harmless. It blocks until ctx ends at the latest.
func (r *Remote) Advance(ctx context.Context, terms ...fence.Term) error {
	lines, err := gate.EncodeTerms(terms)
	if err != nil {
		return fmt.Errorf("grpcfence: advance: %w", err)
	}
	return r.call(ctx, "Advance", lines, new(emptypb.Empty))
}

// Newest returns what the service has taken for the name; the zero Record if nothing.
func (r *Remote) Newest(ctx context.Context, name string) (fence.Record, error) {
	out := new(wrapperspb.StringValue)
	if err := r.call(ctx, "Newest", name, out); err != nil {
		return fence.Record{}, err
	}
	rec, err := gate.DecodeRecord(out.Value)
	if err != nil {
		return fence.Record{}, fmt.Errorf("grpcfence: the service answers %.80q: %w", out.Value, err)
	}
	return rec, nil
}

func (r *Remote) call(ctx context.Context, method, in string, out any) error {
	err, _ := fromStatus(r.conn.Invoke(ctx, "/"+service+"/"+method, wrapperspb.String(in), out))
	return err
}
