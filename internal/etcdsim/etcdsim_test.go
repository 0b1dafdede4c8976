package etcdsim_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"aegis/internal/clock"
	"aegis/internal/etcdsim"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bubble runs f in virtual time with a cluster and a client of machine "a".
func bubble(t *testing.T, f func(t *testing.T, c *etcdsim.Cluster, cli *clientv3.Client), opts ...etcdsim.Option) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		c := etcdsim.New(opts...)
		t.Cleanup(c.Close)
		f(t, c, c.Client("a"))
	})
}

func within(d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	context.AfterFunc(ctx, cancel)
	return ctx
}

func must[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func next(t *testing.T, w clientv3.WatchChan) clientv3.WatchResponse {
	t.Helper()
	select {
	case r, ok := <-w:
		if !ok {
			t.Fatal("the watch is closed")
		}
		return r
	case <-time.After(time.Minute):
		t.Fatal("the watch says nothing for a minute")
		panic("unreachable")
	}
}

func TestACallCostsOneMillisecond(t *testing.T) {
	bubble(t, func(t *testing.T, c *etcdsim.Cluster, cli *clientv3.Client) {
		start := time.Now()
		p := must(cli.Put(t.Context(), "k", "v"))(t)
		if d := time.Since(start); d != time.Millisecond {
			t.Errorf("took %v", d)
		}
		if p.Header.Revision != 2 {
			t.Errorf("first put has revision %d, want 2", p.Header.Revision)
		}
		g := must(cli.Get(t.Context(), "k"))(t)
		if len(g.Kvs) != 1 || string(g.Kvs[0].Value) != "v" {
			t.Errorf("got %v", g.Kvs)
		}
		if clock.From(cli.Ctx()) != clock.Clock(c.Clock("a")) {
			t.Error("the client's context does not carry its machine's clock")
		}
	})
}

func TestAnOpenWatchSeesWritesAndALateOneThePast(t *testing.T) {
	bubble(t, func(t *testing.T, c *etcdsim.Cluster, cli *clientv3.Client) {
		w := cli.Watch(cli.Ctx(), "k", clientv3.WithPrefix(), clientv3.WithCreatedNotify())
		if r := next(t, w); !r.Created {
			t.Fatalf("got %+v", r)
		}
		must(cli.Put(t.Context(), "k1", "v"))(t)
		must(cli.Delete(t.Context(), "k1"))(t)
		if r := next(t, w); len(r.Events) != 1 || !r.Events[0].IsCreate() || r.Header.Revision != 2 {
			t.Fatalf("got %+v", r)
		}
		if r := next(t, w); len(r.Events) != 1 || r.Events[0].Type != clientv3.EventTypeDelete || r.Header.Revision != 3 {
			t.Fatalf("got %+v", r)
		}
		start := time.Now()
		late := cli.Watch(cli.Ctx(), "k1", clientv3.WithRev(2))
		if r := next(t, late); len(r.Events) != 2 {
			t.Fatalf("got %+v", r)
		}
		if d := time.Since(start); d < 10*time.Millisecond || d > 101*time.Millisecond {
			t.Errorf("the past came after %v, want up to 100 ms later", d)
		}
	})
}

func TestALeaseEndsLateAndNeverEarly(t *testing.T) {
	bubble(t, func(t *testing.T, c *etcdsim.Cluster, cli *clientv3.Client) {
		time.Sleep(123 * time.Millisecond)
		g := must(cli.Grant(t.Context(), 1))(t)
		if g.TTL != 2 {
			t.Fatalf("granted %d s, want the least, 2 s", g.TTL)
		}
		start := time.Now()
		must(cli.Put(t.Context(), "k", "v", clientv3.WithLease(g.ID)))(t)
		must(cli.Put(t.Context(), "l", "v", clientv3.WithLease(g.ID)))(t)
		w := cli.Watch(cli.Ctx(), "", clientv3.WithPrefix(), clientv3.WithRev(4))
		r := next(t, w)
		if d := time.Since(start); d < 2*time.Second || d > 2502*time.Millisecond {
			t.Errorf("ended after %v", d)
		}
		if len(r.Events) != 2 || r.Header.Revision != 4 {
			t.Errorf("got %+v, want both keys gone in one revision", r)
		}
		if _, err := cli.KeepAliveOnce(t.Context(), g.ID); !errors.Is(err, rpctypes.ErrLeaseNotFound) {
			t.Errorf("renewal: %v", err)
		}
	})
}

func TestACutSwallowsCallsAndHealingResumesWatches(t *testing.T) {
	bubble(t, func(t *testing.T, c *etcdsim.Cluster, cli *clientv3.Client) {
		b := c.Client("b")
		w := cli.Watch(cli.Ctx(), "k", clientv3.WithCreatedNotify())
		next(t, w)
		c.Cut("a", etcdsim.FromServer)
		if _, err := cli.Put(within(time.Second), "k", "swallowed reply"); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("put through a cut: %v", err)
		}
		c.Cut("a", etcdsim.Both)
		if _, err := cli.Put(within(time.Second), "k", "swallowed request"); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("put through a cut: %v", err)
		}
		g := must(b.Get(t.Context(), "k"))(t)
		if len(g.Kvs) != 1 || string(g.Kvs[0].Value) != "swallowed reply" || g.Kvs[0].Version != 1 {
			t.Fatalf("got %v", g.Kvs)
		}
		select {
		case r := <-w:
			t.Fatalf("the cut watch says %+v", r)
		default:
		}
		c.Heal("a")
		if r := next(t, w); len(r.Events) != 1 || string(r.Events[0].Kv.Value) != "swallowed reply" {
			t.Fatalf("got %+v", r)
		}
		if opened, open := c.WatchStreams("a"); opened != 2 || open != 1 {
			t.Errorf("%d streams opened, %d open", opened, open)
		}
	})
}

func TestAStoppedServerFailsCallsAndStartsLeasesAnew(t *testing.T) {
	bubble(t, func(t *testing.T, c *etcdsim.Cluster, cli *clientv3.Client) {
		g := must(cli.Grant(t.Context(), 10))(t)
		w := cli.Watch(cli.Ctx(), "k", clientv3.WithCreatedNotify())
		next(t, w)
		time.Sleep(8 * time.Second)
		c.Stop()
		if _, err := cli.Get(t.Context(), "k"); err == nil {
			t.Fatal("a stopped server answers")
		}
		if _, err := cli.KeepAliveOnce(within(time.Second), g.ID); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("renewal: %v", err)
		}
		time.Sleep(time.Minute)
		c.Start()
		l := must(cli.TimeToLive(t.Context(), g.ID))(t)
		if l.TTL != 9 {
			t.Errorf("has %d s left", l.TTL)
		}
		must(cli.Put(t.Context(), "k", "v"))(t)
		if r := next(t, w); len(r.Events) != 1 {
			t.Errorf("got %+v", r)
		}
	})
}
