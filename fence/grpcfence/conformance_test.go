package grpcfence_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"aegis/fence"
	"aegis/fence/fencetest"
	"aegis/fence/grpcfence"
	"aegis/fence/sqlitefence"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestConformance(t *testing.T) {
	fencetest.Test(t, func(t *testing.T) fencetest.Subject { return newKV(t, grpcfence.Config{}).subject(t, viaCall) })
}

// Each write is a message of a stream.
func TestConformanceOfStreams(t *testing.T) {
	fencetest.Test(t, func(t *testing.T) fencetest.Subject { return newKV(t, grpcfence.Config{}).subject(t, viaStream) })
}

// The service dies with its memory and comes back; the fence lies in a file.
func TestConformanceWithADurableGuardBehind(t *testing.T) {
	fencetest.Test(t, func(t *testing.T) fencetest.Subject {
		durable, err := sqlitefence.Open(filepath.Join(t.TempDir(), "fence.db"), sqlitefence.Config{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { durable.Close() })
		return newKV(t, grpcfence.Config{Durable: durable}).subject(t, viaCall)
	})
}

// kv is a service under test: strings at keys, in memory, behind a guard, on a real server of the loopback.
type kv struct {
	cfg    grpcfence.Config
	guard  *grpcfence.Guard
	server *grpc.Server
	addr   string
	conn   *grpc.ClientConn

	put  func(ctx context.Context, key, value string) error                           // replaces the unary handler's work
	feed func(stream grpc.ServerStream, recv func() (string, error), work work) error // the stream's handler

	mu      sync.Mutex
	values  map[string]string
	between map[string]func()
	n       int
}

type work func(ctx context.Context, in string) error

func newKV(t testing.TB, cfg grpcfence.Config) *kv {
	t.Helper()
	s := &kv{cfg: cfg, values: map[string]string{}, between: map[string]func(){}}
	s.start(t)
	return s
}

// start serves what s holds with a new guard, as a new process would.
func (s *kv) start(t testing.TB) {
	t.Helper()
	guard, err := grpcfence.New(s.cfg)
	if err != nil {
		t.Fatal(err)
	}
	s.guard = guard
	s.server = grpc.NewServer(
		grpc.UnaryInterceptor(guard.UnaryServerInterceptor()), grpc.ChainStreamInterceptor(recovered, guard.StreamServerInterceptor()))
	guard.Register(s.server)
	s.server.RegisterService(s.desc(), s)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := s.server
	go server.Serve(l)
	t.Cleanup(server.Stop)
	s.addr = l.Addr().String()
	s.conn = s.dial(t)
}

// recovered is what most servers have.
func recovered(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("recovered: %v", r)
		}
	}()
	return handler(srv, stream)
}

// desc is what generated code has.
func (s *kv) desc() *grpc.ServiceDesc {
	return &grpc.ServiceDesc{
		ServiceName: "test.KV", HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Put", Handler: func(_ any, ctx context.Context, dec func(any) error, i grpc.UnaryServerInterceptor) (any, error) {
			in := new(wrapperspb.StringValue)
			if err := dec(in); err != nil {
				return nil, err
			}
			return i(ctx, in, &grpc.UnaryServerInfo{FullMethod: "/test.KV/Put"}, func(ctx context.Context, _ any) (any, error) {
				return wrapperspb.String("done"), s.work(ctx, in.Value)
			})
		}}},
		Streams: []grpc.StreamDesc{{StreamName: "Feed", ServerStreams: true, ClientStreams: true, Handler: func(_ any, stream grpc.ServerStream) error {
			recv := func() (string, error) {
				in := new(wrapperspb.StringValue)
				err := stream.RecvMsg(in)
				return in.Value, err
			}
			if s.feed != nil {
				return s.feed(stream, recv, s.work)
			}
			for {
				in, err := recv()
				if err == io.EOF {
					return nil
				}
				if err == nil {
					err = s.work(stream.Context(), in)
				}
				if err == nil {
					err = stream.SendMsg(wrapperspb.String("done"))
				}
				if err != nil {
					return err
				}
			}
		}}},
	}
}

// dial returns a connection of its own.
func (s *kv) dial(t testing.TB) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("dns:///"+s.addr, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithUnaryInterceptor(grpcfence.UnaryClientInterceptor()), grpc.WithStreamInterceptor(grpcfence.StreamClientInterceptor()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// work is what a handler does with one message: "number of the write\x00key\x00value".
func (s *kv) work(ctx context.Context, in string) error {
	part := strings.SplitN(in, "\x00", 3)
	s.mu.Lock()
	between, put := s.between[part[0]], s.put
	s.mu.Unlock()
	if between != nil {
		between()
	}
	if put != nil {
		return put(ctx, part[1], part[2])
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.values[part[1]] = part[2]
	return nil
}

func (s *kv) read(key string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.values[key]
}

type via func(ctx context.Context, conn *grpc.ClientConn, in string, opts ...grpc.CallOption) error

func viaCall(ctx context.Context, conn *grpc.ClientConn, in string, opts ...grpc.CallOption) error {
	return conn.Invoke(ctx, "/test.KV/Put", wrapperspb.String(in), new(wrapperspb.StringValue), opts...)
}

func viaStream(ctx context.Context, conn *grpc.ClientConn, in string, opts ...grpc.CallOption) error {
	stream, err := openFeed(ctx, conn, opts...)
	if err != nil {
		return err
	}
	err = tell(stream, in)
	_ = end(stream) // the answer to the message is what counts: a takeover may end the stream after it
	return err
}

func openFeed(ctx context.Context, conn *grpc.ClientConn, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	return conn.NewStream(ctx, &grpc.StreamDesc{StreamName: "Feed", ServerStreams: true, ClientStreams: true}, "/test.KV/Feed", opts...)
}

// tell sends one message and waits for its answer.
func tell(stream grpc.ClientStream, in string) error {
	if err := stream.SendMsg(wrapperspb.String(in)); err != nil && err != io.EOF {
		return err
	}
	return stream.RecvMsg(new(wrapperspb.StringValue))
}

func end(stream grpc.ClientStream) error {
	if err := stream.CloseSend(); err != nil {
		return err
	}
	for {
		if err := stream.RecvMsg(new(wrapperspb.StringValue)); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
	}
}

func (s *kv) subject(t *testing.T, send via) fencetest.Subject { return s.subjectOn(t, s.conn, send) }

func (s *kv) subjectOn(t *testing.T, conn *grpc.ClientConn, send via) fencetest.Subject {
	subject := fencetest.Subject{
		Guard: grpcfence.NewRemote(conn),
		Write: func(ctx context.Context, term fence.Term, key, value string, between func()) error {
			s.mu.Lock()
			s.n++
			i, n := s.n, fmt.Sprint(s.n)
			s.between[n] = between
			s.mu.Unlock()
			in := n + "\x00" + key + "\x00" + value
			if fence.ValidToken(term.Token) != nil { // have the server say so
				ctx = metadata.AppendToOutgoingContext(ctx, grpcfence.Metadata,
					fmt.Sprintf("election=%s&token=%d", url.QueryEscape(term.Election), term.Token))
				return send(ctx, conn, in)
			}
			if i%2 == 0 {
				return send(ctx, conn, in, grpcfence.UnderTerm(term))
			}
			return send(grpcfence.WithTerm(ctx, term), conn, in)
		},
		Read: func(ctx context.Context, key string) (string, error) { return s.read(key), nil },
		Peer: func() (fencetest.Subject, error) { return s.subjectOn(t, s.dial(t), send), nil },
	}
	if s.cfg.Durable != nil {
		subject.Reopen = func() (fencetest.Subject, error) {
			s.server.Stop()
			s.start(t)
			return s.subject(t, send), nil
		}
	}
	return subject
}
