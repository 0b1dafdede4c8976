package etcdsim_test

import (
	"context"
	"errors"
	"maps"
	"testing"
	"testing/synctest"
	"time"

	"aegis/internal/etcdsim"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

type (
	T       = testing.T
	Cluster = etcdsim.Cluster
	Client  = clientv3.Client
)

// on has the machine's hook answer the first request of a method with v, and let everything else pass.
func on(c *Cluster, id, method string, v etcdsim.Verdict) {
	first := true
	c.Intercept(id, func(call etcdsim.Call) etcdsim.Verdict {
		if call.Method == method && first {
			first = false
			return v
		}
		return etcdsim.Verdict{}
	})
}

func isTimeout(t *T, err error) {
	t.Helper()
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("error %v, want a timeout", err)
	}
}

func versionOf(c *Cluster, key string) int64 {
	for _, kv := range c.Dump(key) {
		if kv.Key == key {
			return kv.Version
		}
	}
	return 0
}

func silent(t *T, w clientv3.WatchChan, d time.Duration) {
	t.Helper()
	select {
	case r := <-w:
		t.Fatalf("a silent watch says %+v", r)
	case <-time.After(d):
	}
}

func TestRevokeAndCompactActAtOnce(t *testing.T) {
	bubble(t, func(t *T, c *Cluster, cli *Client) {
		g := must(cli.Grant(t.Context(), 10))(t)
		must(cli.Put(t.Context(), "k", "v", clientv3.WithLease(g.ID)))(t)
		if err := c.Revoke(g.ID); err != nil || len(c.Dump("")) != 0 || c.Revision() != 3 {
			t.Errorf("%v, %v at %d", err, c.Dump(""), c.Revision())
		}
		if err := c.Revoke(g.ID); !errors.Is(err, rpctypes.ErrLeaseNotFound) {
			t.Errorf("again: %v", err)
		}
		if err := c.Compact(3); err != nil {
			t.Error(err)
		}
		if err := c.Compact(3); !errors.Is(err, rpctypes.ErrCompacted) {
			t.Error(err)
		}
		if _, err := cli.Get(t.Context(), "k", clientv3.WithRev(2)); !errors.Is(err, rpctypes.ErrCompacted) {
			t.Error(err)
		}
	})
}

func TestALeaderChangeRenewsLeasesAndEndsStreamsThatRequireALeader(t *testing.T) {
	bubble(t, func(t *T, c *Cluster, cli *Client) {
		g := must(cli.Grant(t.Context(), 10))(t)
		strict := cli.Watch(clientv3.WithRequireLeader(cli.Ctx()), "k", clientv3.WithCreatedNotify())
		other := cli.Watch(cli.Ctx(), "k", clientv3.WithCreatedNotify())
		term := next(t, strict).Header.RaftTerm
		next(t, other)
		time.Sleep(9 * time.Second)
		c.LeaderChange()
		r := next(t, strict)
		if !errors.Is(r.Err(), rpctypes.ErrNoLeader) {
			t.Errorf("%v", r.Err())
		}
		if left := c.Leases()[g.ID]; left < 9*time.Second {
			t.Errorf("the lease has %v left", left)
		}
		if p := must(cli.Put(t.Context(), "k", "v"))(t); p.Header.RaftTerm <= term {
			t.Errorf("term %d after %d", p.Header.RaftTerm, term)
		}
		next(t, other)
	})
}

func TestARestoreTakesTheRevisionBackAndLeavesWatchesSilent(t *testing.T) {
	bubble(t, func(t *T, c *Cluster, cli *Client) {
		old := must(cli.Grant(t.Context(), 10))(t)
		must(cli.Put(t.Context(), "k", "old", clientv3.WithLease(old.ID)))(t) // 2
		time.Sleep(9 * time.Second)
		sn := c.Snapshot()
		young := must(cli.Grant(t.Context(), 10))(t)
		w := cli.Watch(cli.Ctx(), "", clientv3.WithPrefix(), clientv3.WithRev(3))
		for range 5 {
			must(cli.Put(t.Context(), "k", "new", clientv3.WithLease(young.ID)))(t) // 3 to 7
			next(t, w)
		}
		c.Restore(sn, etcdsim.AsCluster(7))
		if got := c.Dump(""); len(got) != 1 || got[0].Value != "old" || got[0].Lease != old.ID || c.Revision() != 2 {
			t.Fatalf("%v at %d", got, c.Revision())
		}
		if l := c.Leases(); len(l) != 1 || l[old.ID] != 10*time.Second {
			t.Errorf("leases %v", l)
		}
		must(cli.KeepAliveOnce(t.Context(), old.ID))(t)
		for range 5 {
			p := must(cli.Put(t.Context(), "k", "restored"))(t) // 3 to 7 once more
			if p.Header.ClusterId != 7 {
				t.Errorf("cluster %x", p.Header.ClusterId)
			}
			_ = cli.RequestProgress(cli.Ctx())
		}
		silent(t, w, 5*time.Second)
		must(cli.Put(t.Context(), "k", "8"))(t)
		if r := next(t, w); r.Header.Revision != 8 {
			t.Errorf("got %+v", r)
		}
		c.Restore(sn, etcdsim.BumpRevision(1000)) // a second time
		if c.Revision() != 1002 || len(c.Dump("k")) != 1 {
			t.Errorf("%v at %d", c.Dump(""), c.Revision())
		}
		if r := next(t, w); !errors.Is(r.Err(), rpctypes.ErrCompacted) || r.CompactRevision != 1002 {
			t.Errorf("got %+v", r)
		}
	})
}

func TestASilencedWatchIsOpenAndSaysNothing(t *testing.T) {
	bubble(t, func(t *T, c *Cluster, cli *Client) {
		w := cli.Watch(cli.Ctx(), "k", clientv3.WithCreatedNotify())
		next(t, w)
		c.SilenceWatches("a")
		must(cli.Put(t.Context(), "k", "v"))(t)
		_ = cli.RequestProgress(cli.Ctx())
		silent(t, w, time.Hour)
		if opened, open := c.WatchStreams("a"); opened != 1 || open != 1 {
			t.Errorf("%d opened, %d open", opened, open)
		}
		c.Heal("a")
		if r := next(t, w); len(r.Events) != 1 {
			t.Errorf("got %+v", r)
		}
	})
}

func TestABrokenWatchIsResumedWithoutLoss(t *testing.T) {
	bubble(t, func(t *T, c *Cluster, cli *Client) {
		w := cli.Watch(cli.Ctx(), "k", clientv3.WithCreatedNotify())
		next(t, w)
		for i := range 10 {
			c.BreakWatches("a")
			must(cli.Put(t.Context(), "k", "v"))(t)
			if r := next(t, w); len(r.Events) != 1 || r.Events[0].Kv.Version != int64(i+1) {
				t.Fatalf("got %+v", r)
			}
		}
	})
}

func TestACutOneWayLetsTheOtherPass(t *testing.T) {
	bubble(t, func(t *T, c *Cluster, cli *Client) {
		b := c.Client("b")
		w := cli.Watch(cli.Ctx(), "k", clientv3.WithCreatedNotify())
		next(t, w)
		c.Cut("a", etcdsim.ToServer)
		_, err := cli.Put(within(time.Second), "k", "no")
		isTimeout(t, err)
		must(b.Put(t.Context(), "k", "yes"))(t)
		if r := next(t, w); string(r.Events[0].Kv.Value) != "yes" || r.Events[0].Kv.Version != 1 {
			t.Errorf("got %+v", r)
		}
		c.Heal("a")
		must(cli.Get(t.Context(), "k"))(t)
		if opened, _ := c.WatchStreams("a"); opened != 1 {
			t.Errorf("%d streams: one that lost nothing goes on", opened)
		}
	})
}

func TestACutSwallowsWhatIsOnItsWay(t *testing.T) {
	bubble(t, func(t *T, c *Cluster, cli *Client) {
		done := make(chan error)
		go func() {
			_, err := cli.Put(within(time.Second), "k", "v")
			done <- err
		}()
		time.Sleep(200 * time.Microsecond) // it arrives after 500
		c.Cut("a", etcdsim.ToServer)
		c.Heal("a")
		isTimeout(t, <-done)
		if v := versionOf(c, "k"); v != 0 {
			t.Errorf("version %d", v)
		}
	})
}

func TestARenewalThatACutSwallowedIsSentAgainAfterHealing(t *testing.T) {
	bubble(t, func(t *T, c *Cluster, cli *Client) {
		g := must(cli.Grant(t.Context(), 10))(t)
		c.Cut("a", etcdsim.Both)
		go func() { time.Sleep(time.Second); c.Heal("a") }()
		start := time.Now()
		must(cli.KeepAliveOnce(within(3*time.Second), g.ID))(t) // clientv3 does so on its own
		if d := time.Since(start); d < time.Second || d > time.Second+10*time.Millisecond {
			t.Errorf("took %v", d)
		}
	})
}

func TestKeepAliveGoesOnThroughARestart(t *testing.T) {
	bubble(t, func(t *T, c *Cluster, cli *Client) {
		g := must(cli.Grant(t.Context(), 5))(t)
		ka := must(cli.KeepAlive(cli.Ctx(), g.ID))(t)
		go func() {
			for range ka {
			}
		}()
		time.Sleep(time.Minute)
		c.Stop()
		time.Sleep(2 * time.Second)
		c.Start()
		time.Sleep(time.Minute)
		if left := c.Leases()[g.ID]; left < time.Second {
			t.Errorf("%v left", left)
		}
	})
}

func TestCallsAreCounted(t *testing.T) {
	bubble(t, func(t *T, c *Cluster, cli *Client) {
		second := c.Client("a") // of the same machine
		g := must(cli.Grant(t.Context(), 10))(t)
		for range 3 {
			must(cli.KeepAliveOnce(t.Context(), g.ID))(t)
			must(second.Get(t.Context(), "k"))(t)
		}
		w := cli.Watch(cli.Ctx(), "k", clientv3.WithCreatedNotify())
		next(t, w)
		w2 := cli.Watch(cli.Ctx(), "l", clientv3.WithCreatedNotify())
		next(t, w2)
		must(c.Client("b").Put(t.Context(), "k", "v"))(t)
		want := map[string]int{"LeaseGrant": 1, "LeaseKeepAlive": 3, "Range": 3, "WatchCreate": 2}
		if got := c.Calls("a"); !maps.Equal(got, want) {
			t.Errorf("calls %v, want %v", got, want)
		}
		if opened, open := c.WatchStreams("a"); opened != 1 || open != 1 {
			t.Errorf("%d streams opened, %d open, want one for both watches", opened, open)
		}
		_ = cli.Close()
		synctest.Wait()
		if _, open := c.WatchStreams("a"); open != 0 {
			t.Errorf("%d open after Close", open)
		}
	})
}

func TestProgressIsToldFromTimeToTime(t *testing.T) {
	bubble(t, func(t *T, c *Cluster, cli *Client) {
		w := cli.Watch(cli.Ctx(), "k", clientv3.WithCreatedNotify(), clientv3.WithProgressNotify())
		next(t, w)
		must(cli.Put(t.Context(), "other", "v"))(t)
		start := time.Now()
		if r := next(t, w); !r.IsProgressNotify() || r.Header.Revision != 2 {
			t.Errorf("got %+v", r)
		}
		if d := time.Since(start); d < 9*time.Second || d > 10*time.Second {
			t.Errorf("after %v", d)
		}
	}, etcdsim.WithProgressInterval(10*time.Second))
}

func TestTheClusterMayBeMadeOutsideTheBubble(t *testing.T) {
	c := etcdsim.New(etcdsim.WithLatency(time.Second, 2*time.Second), etcdsim.WithClusterID(9),
		etcdsim.WithMinTTL(5*time.Second), etcdsim.WithExpiryTick(0))
	synctest.Test(t, func(t *testing.T) {
		defer c.Close()
		cli := c.Client("a")
		start := time.Now()
		g := must(cli.Grant(t.Context(), 1))(t)
		if g.TTL != 5 || g.ClusterId != 9 || time.Since(start) != 3*time.Second {
			t.Errorf("%+v after %v", g, time.Since(start))
		}
		time.Sleep(3*time.Second - 1) // it was granted two seconds ago
		if len(c.Leases()) != 1 {
			t.Error("ended early")
		}
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		if len(c.Leases()) != 0 {
			t.Error("ended late")
		}
	})
}

// TestAnHourOfRenewalsIsQuick is the reason for the package. The bound is generous: it takes about 20 ms.
func TestAnHourOfRenewalsIsQuick(t *testing.T) {
	start := time.Now()
	bubble(t, func(t *T, c *Cluster, cli *Client) {
		g := must(cli.Grant(t.Context(), 10))(t)
		for end := time.Now().Add(time.Hour); time.Now().Before(end); time.Sleep(3300 * time.Millisecond) {
			must(cli.KeepAliveOnce(t.Context(), g.ID))(t)
		}
		if len(c.Leases()) != 1 {
			t.Error("the lease has run out")
		}
	})
	d := time.Since(start)
	t.Logf("took %v", d)
	if d > 2*time.Second {
		t.Error("too slow")
	}
}

func TestAWatchFarBehindIsServedInPortions(t *testing.T) {
	bubble(t, func(t *T, c *Cluster, cli *Client) {
		for range 2500 {
			must(cli.Put(t.Context(), "k", "v"))(t)
		}
		start := time.Now()
		w := cli.Watch(cli.Ctx(), "k", clientv3.WithRev(1))
		for _, want := range []int{1000, 1000, 500} {
			if r := next(t, w); len(r.Events) != want {
				t.Errorf("%d events, want %d", len(r.Events), want)
			}
		}
		if d := time.Since(start); d < 200*time.Millisecond || d > 301*time.Millisecond {
			t.Errorf("took %v", d)
		}
	})
}

func TestWhatIsNotSimulatedSaysSo(t *testing.T) {
	bubble(t, func(t *T, c *Cluster, cli *Client) {
		_, err := cli.MemberList(t.Context())
		_, err2 := cli.GetStream(t.Context(), "k")
		if status.Code(err) != codes.Unimplemented || status.Code(err2) != codes.Unimplemented {
			t.Errorf("%v, %v", err, err2)
		}
	})
}
