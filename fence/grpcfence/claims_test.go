package grpcfence_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"aegis/fence"
	"aegis/fence/grpcfence"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

func boss(token fence.Token) fence.Term {
	return fence.Term{Election: "boss/北境", Node: "scene-01", Token: token, Nonce: uint64(token) * 11, Cluster: 1}
}

func bounded(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func under(t testing.TB, term fence.Term) context.Context {
	return grpcfence.WithTerm(bounded(t), term)
}

func advance(t testing.TB, g fence.Guard, terms ...fence.Term) {
	t.Helper()
	if err := g.Advance(bounded(t), terms...); err != nil {
		t.Fatal(err)
	}
}

func refused(t testing.TB, err error, token, newest fence.Token) {
	t.Helper()
	var fenced *fence.FencedError
	if !errors.As(err, &fenced) || fenced.Token != token || fenced.Newest != newest || fenced.Name != boss(1).Election {
		t.Fatalf("got %v, want token %d refused by %d", err, token, newest)
	}
	if status.Code(err) != codes.FailedPrecondition {
		t.Errorf("the status is %v", status.Code(err))
	}
}

func wait[T any](t testing.TB, what string, done <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-done:
	case <-time.After(10 * time.Second):
		t.Fatal("waited in vain for ", what)
	}
	return v
}

func async(fn func() error) <-chan error {
	done := make(chan error, 1)
	go func() { done <- fn() }()
	return done
}

const message = "0\x00key\x00value"

func TestTakeoverEndsRunningHandlers(t *testing.T) {
	for name, c := range map[string]struct {
		returns func(ctx context.Context) error
		want    func(err error) bool
	}{
		"CauseOfTheContextIsTheRefusal": {func(ctx context.Context) error { return context.Cause(ctx) }, func(err error) bool {
			var fenced *fence.FencedError
			return errors.As(err, &fenced) && fenced.Newest == 8 && status.Code(err) == codes.FailedPrecondition
		}},
		"BareCancellationIsUnknown": {func(ctx context.Context) error { return ctx.Err() }, func(err error) bool {
			return errors.Is(err, fence.ErrUnknown) && !errors.Is(err, fence.ErrFenced) && status.Code(err) == codes.Aborted
		}},
		"ItsStatusIsUnknownToo": {func(ctx context.Context) error { return status.FromContextError(ctx.Err()).Err() }, func(err error) bool {
			return errors.Is(err, fence.ErrUnknown) && !errors.Is(err, fence.ErrFenced)
		}},
		"DoneIsDone":                {func(context.Context) error { return nil }, func(err error) bool { return err == nil }},
		"OtherErrorsAreTheHandlers": {func(context.Context) error { return status.Error(codes.NotFound, "no such boss") }, func(err error) bool { return status.Code(err) == codes.NotFound }},
	} {
		t.Run(name, func(t *testing.T) {
			s := newKV(t, grpcfence.Config{})
			advance(t, s.guard, boss(7))
			started := make(chan struct{})
			var left atomic.Bool
			s.put = func(ctx context.Context, _, _ string) error {
				close(started)
				<-ctx.Done()
				left.Store(true)
				return c.returns(ctx)
			}
			answered := async(func() error { return viaCall(under(t, boss(7)), s.conn, message) })
			wait(t, "the handler", started)
			advance(t, s.guard, boss(8))
			if !left.Load() {
				t.Error("Advance returned before the handler had")
			}
			if err := wait(t, "the answer", answered); !c.want(err) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestHandlerThatIgnoresItsContextIsNamed(t *testing.T) {
	s := newKV(t, grpcfence.Config{Drain: 100 * time.Millisecond})
	advance(t, s.guard, boss(7))
	started, let := make(chan struct{}), make(chan struct{})
	s.put = func(context.Context, string, string) error { close(started); <-let; return nil }
	answered := async(func() error { return viaCall(under(t, boss(7)), s.conn, message) })
	wait(t, "the handler", started)
	for what, err := range map[string]error{
		"Advance":        grpcfence.NewRemote(s.conn).Advance(bounded(t), boss(8)),
		"a call under 8": viaCall(under(t, boss(8)), s.conn, message),
	} {
		if status.Code(err) != codes.Unavailable || errors.Is(err, fence.ErrFenced) || errors.Is(err, fence.ErrUnknown) {
			t.Fatalf("%s: got %v", what, err)
		}
		for _, want := range []string{"/test.KV/Put from 127.0.0.1:", "token 7, node scene-01", "token 8 is taken"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %q does not contain %q", what, err, want)
			}
		}
	}
	refused(t, viaCall(under(t, boss(7)), s.conn, message), 7, 8)
	close(let)
	if err := wait(t, "the answer", answered); err != nil {
		t.Errorf("the handler did its work before anybody of 8 could begin: got %v", err)
	}
	advance(t, grpcfence.NewRemote(s.conn), boss(8))
}

func TestMissingDoubledAndMalformedTermsAreExplained(t *testing.T) {
	s := newKV(t, grpcfence.Config{Known: func(name string) bool { return name == "boss" }})
	s.put = func(context.Context, string, string) error { t.Error("the handler ran"); return nil }
	for name, c := range map[string]struct {
		values []string
		want   string
	}{
		"Missing":        {nil, "metadata aegis-term is missing"},
		"Doubled":        {[]string{"election=boss&token=7", "election=boss&token=8"}, "2 values of metadata aegis-term"},
		"Joined":         {[]string{"election=boss&token=7,election=boss&token=8"}, "several terms"},
		"Malformed":      {[]string{"7"}, "election is 0 bytes long"},
		"InvalidToken":   {[]string{"election=boss&token=0"}, "0 is outside 1 … 9007199254740991"},
		"NotOurElection": {[]string{"election=guild&token=7"}, `no election "guild"`},
	} {
		t.Run(name, func(t *testing.T) {
			for kind, send := range map[string]via{"call": viaCall, "stream": viaStream} {
				ctx := metadata.NewOutgoingContext(bounded(t), metadata.MD{grpcfence.Metadata: c.values})
				if err := send(ctx, s.conn, message); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), c.want) {
					t.Errorf("%s: got %v", kind, err)
				}
			}
		})
	}
}

func TestTermIsSentOnceHoweverOftenItIsGiven(t *testing.T) {
	s := newKV(t, grpcfence.Config{})
	advance(t, s.guard, boss(7))
	ctx := metadata.AppendToOutgoingContext(under(t, boss(5)), grpcfence.Metadata, "election=a&token=1", grpcfence.Metadata, "election=b&token=2")
	got := make(chan fence.Term, 1)
	s.put = func(ctx context.Context, _, _ string) error {
		term, _ := grpcfence.TermFromContext(ctx)
		got <- term
		return nil
	}
	if err := viaCall(ctx, s.conn, message, grpcfence.UnderTerm(boss(7))); err != nil {
		t.Fatal(err)
	}
	if term := <-got; term != boss(7) {
		t.Errorf("the handler saw %v", term)
	}
	if err := viaCall(ctx, s.conn, message, grpcfence.UnderTerm(fence.Term{Election: "boss"})); !errors.Is(err, fence.ErrInvalidToken) {
		t.Errorf("got %v", err)
	}
}

// gRPC sends calls again by itself where a policy says so.
func TestRetriesCarryOneTerm(t *testing.T) {
	s := newKV(t, grpcfence.Config{})
	advance(t, s.guard, boss(7))
	var tries atomic.Int32
	s.put = func(context.Context, string, string) error {
		if tries.Add(1) < 3 {
			return status.Error(codes.Unavailable, "try again")
		}
		return nil
	}
	conn, err := grpc.NewClient("dns:///"+s.addr, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithUnaryInterceptor(grpcfence.UnaryClientInterceptor()), grpc.WithDefaultServiceConfig(`{"methodConfig": [{"name": [{}],
			"retryPolicy": {"maxAttempts": 4, "initialBackoff": "0.001s", "maxBackoff": "0.001s", "backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}}]}`))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := viaCall(under(t, boss(7)), conn, message); err != nil || tries.Load() != 3 {
		t.Errorf("%d tries, %v", tries.Load(), err)
	}
}

func TestLostReplyIsUnknown(t *testing.T) {
	s := newKV(t, grpcfence.Config{})
	advance(t, s.guard, boss(7))
	s.put = func(ctx context.Context, _, _ string) error { go s.server.Stop(); <-ctx.Done(); return nil }
	if err := viaCall(under(t, boss(7)), s.conn, message); !errors.Is(err, fence.ErrUnknown) || status.Code(err) != codes.Unavailable {
		t.Errorf("got %v", err)
	}
	if err := viaCall(under(t, boss(7)), s.dial(t), message); err == nil || errors.Is(err, fence.ErrUnknown) {
		t.Errorf("nothing was sent, but: %v", err)
	}
	s.put = nil
	s.start(t)
	advance(t, s.guard, boss(8))
	ctx, cancel := context.WithCancel(under(t, boss(8)))
	s.put = func(ctx context.Context, _, _ string) error { cancel(); <-ctx.Done(); return nil }
	if err := viaCall(ctx, s.conn, message); !errors.Is(err, fence.ErrUnknown) || status.Code(err) != codes.Canceled {
		t.Errorf("got %v", err)
	}
}

func TestRefusalsOfTheHandlersOwnStoreKeepTheirKind(t *testing.T) {
	s := newKV(t, grpcfence.Config{})
	advance(t, s.guard, boss(7))
	for _, want := range []error{
		&fence.FencedError{Name: "boss", Token: 7, Newest: 8},
		&fence.TokenWentBackError{Name: "boss", Token: 7, Newest: 7},
		&fence.ForeignClusterError{Name: "boss", Cluster: 1 << 63, Known: 5},
	} {
		s.put = func(context.Context, string, string) error { return fmt.Errorf("store: %w", want) }
		for kind, send := range map[string]via{"call": viaCall, "stream": viaStream} {
			if err := send(under(t, boss(7)), s.conn, message); err == nil || err.Error() != want.Error() || status.Code(err) != codes.FailedPrecondition {
				t.Errorf("%s: %v became %v", kind, want, err)
			}
		}
	}
}

func TestHandlersOfOneTermRunSideBySide(t *testing.T) {
	const n = 16
	s := newKV(t, grpcfence.Config{})
	advance(t, s.guard, boss(7))
	var inside atomic.Int32
	all := make(chan struct{})
	s.put = func(context.Context, string, string) error {
		if inside.Add(1) == n {
			close(all)
		}
		<-all
		return nil
	}
	var done [n]<-chan error
	for i := range done {
		send := []via{viaCall, viaStream}[i%2]
		done[i] = async(func() error { return send(under(t, boss(7)), s.conn, message) })
	}
	for _, d := range done {
		if err := wait(t, "a handler", d); err != nil {
			t.Error(err)
		}
	}
}

func TestReportLetsAllIn(t *testing.T) {
	report := &fence.Report{}
	s := newKV(t, grpcfence.Config{Report: report})
	advance(t, s.guard, boss(8))
	for _, send := range []via{viaCall, viaStream} {
		if err := send(under(t, boss(7)), s.conn, message); err != nil {
			t.Errorf("stale: %v", err)
		}
		if err := send(bounded(t), s.conn, message); err != nil {
			t.Errorf("without a term: %v", err)
		}
		ctx := metadata.AppendToOutgoingContext(bounded(t), grpcfence.Metadata, "election=boss&token=0")
		if err := send(ctx, s.conn, message); !errors.Is(err, fence.ErrInvalidToken) {
			t.Errorf("invalid: %v", err)
		}
	}
	if report.Count() != 4 {
		t.Errorf("%d counted", report.Count())
	}
}

func TestHealthNeedsNoTermUnlessToldSo(t *testing.T) {
	for want, cfg := range map[codes.Code]grpcfence.Config{
		codes.OK:              {},
		codes.InvalidArgument: {Unguarded: func(string) bool { return false }},
	} {
		guard, err := grpcfence.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		server := grpc.NewServer(grpc.UnaryInterceptor(guard.UnaryServerInterceptor()))
		healthpb.RegisterHealthServer(server, health.NewServer())
		guard.Register(server)
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		go server.Serve(l)
		conn, err := grpc.NewClient("dns:///"+l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		_, err = healthpb.NewHealthClient(conn).Check(bounded(t), &healthpb.HealthCheckRequest{})
		if status.Code(err) != want {
			t.Errorf("got %v, want %v", err, want)
		}
		advance(t, grpcfence.NewRemote(conn), boss(7)) // needs no term of its own in either case
		conn.Close()
		server.Stop()
	}
}

func TestRemoteAdvances(t *testing.T) {
	s := newKV(t, grpcfence.Config{MaxNames: 2})
	remote := grpcfence.NewRemote(s.conn)
	advance(t, remote, boss(7), fence.Term{Election: "guild", Token: 5})
	for name, want := range map[string]fence.Record{boss(7).Election: {Token: 7, Nonce: 77, Cluster: 1}, "guild": {Token: 5}, "none": {}} {
		if got, err := remote.Newest(bounded(t), name); err != nil || got != want {
			t.Errorf("%s: got %v, %v", name, got, err)
		}
	}
	refused(t, remote.Advance(bounded(t), boss(6)), 6, 7)
	if err := remote.Advance(bounded(t), fence.Term{Election: "third", Token: 5}); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("got %v", err)
	}
	err := s.conn.Invoke(bounded(t), "/aegis.fence.v1.Guard/Advance", wrapperspb.String("election=guild&token=6\nelection=guild"), new(wrapperspb.StringValue))
	if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "line 2") {
		t.Errorf("got %v", err)
	}
	if rec, err := remote.Newest(bounded(t), "guild"); err != nil || rec.Token != 5 {
		t.Errorf("a part of a wrong message was taken: %v, %v", rec, err)
	}
}

func TestLinksNoEtcd(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", "aegis/fence/grpcfence").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for dep := range strings.FieldsSeq(string(out)) {
		switch {
		case dep == "aegis/fence", dep == "aegis/fence/internal/gate", dep == "aegis/fence/grpcfence":
		case strings.HasPrefix(dep, "google.golang.org/"), strings.HasPrefix(dep, "golang.org/x/"): // gRPC and what it links
		default:
			t.Errorf("links %s", dep)
		}
	}
}

var _ grpcfence.Durable = (*grpcfence.Remote)(nil)
