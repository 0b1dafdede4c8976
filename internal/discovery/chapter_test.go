package discovery_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"aegis"
	"aegis/internal/discovery"
	"aegis/internal/lab"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"
)

// links starts an etcd whose links can be cut, with a client per node.
func links(t *testing.T) (context.Context, *lab.Cluster, func(node string) *clientv3.Client) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	cluster, err := lab.Start(ctx, lab.Options{Members: 1, NoFsync: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cluster.Close() })
	return ctx, cluster, func(node string) *clientv3.Client {
		cli, err := cluster.Client(node)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cli.Close() })
		return cli
	}
}

// TestEtcdCrashTakeover: the leader vanishes without a word; when its lease has run out another wins with a greater
// token.
func TestEtcdCrashTakeover(t *testing.T) {
	ctx, cluster, connect := links(t)
	victim, next := connect("victim"), connect("next")
	old, err := discovery.NewElection(victim, "/t/", "boss", time.Second).Campaign(ctx, "scene-01")
	if err != nil {
		t.Fatal(err)
	}
	cluster.Cut("victim", lab.Both)
	began := time.Now()
	election := discovery.NewElection(next, "/t/", "boss", time.Second)
	var led *discovery.Leadership
	err = lab.Eventually(ctx, "takeover", func(ctx context.Context) (bool, error) {
		led, err = election.Campaign(ctx, "scene-02")
		if err != nil && err != discovery.ErrNotLeader {
			return false, err
		}
		return err == nil, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("takeover leader=%s token=%d (was %d) after %v", led.Node, led.Token, old.Token, time.Since(began).Round(time.Millisecond))
	if led.Token <= old.Token {
		t.Fatalf("token %d after %d", led.Token, old.Token)
	}
	if err := led.Resign(ctx); err != nil {
		t.Fatal(err)
	}
	cluster.Heal("victim")
	if err := old.Resign(ctx); err != nil {
		t.Fatal(err)
	}
}

// TestEtcdSplitBrainTimeline plays t0 to t4: the old leader comes back from behind a partition and writes.
func TestEtcdSplitBrainTimeline(t *testing.T) {
	ctx, cluster, connect := links(t)
	var loot discovery.Fencer // of the store that both write to
	one, err := discovery.NewElection(connect("scene-01"), "", "boss", 2*time.Second).Campaign(ctx, "scene-01")
	if err != nil {
		t.Fatal(err)
	}
	if err := loot.Admit(one.Token); err != nil {
		t.Fatal(err)
	}
	t.Logf("t0 elected leader=%s token=%d", one.Node, one.Token)
	cluster.Cut("scene-01", lab.Both)
	t.Log("t1 scene-01 is parted from etcd")
	election := discovery.NewElection(connect("scene-02"), "", "boss", 2*time.Second)
	var two *discovery.Leadership
	if err := lab.Eventually(ctx, "scene-02 leads", func(ctx context.Context) (bool, error) {
		two, err = election.Campaign(ctx, "scene-02")
		return err == nil, nil
	}); err != nil {
		t.Fatal(err)
	}
	t.Logf("t2 takeover leader=%s token=%d (was %d)", two.Node, two.Token, one.Token)
	if err := loot.Admit(two.Token); err != nil {
		t.Fatal(err)
	}
	cluster.Heal("scene-01")
	t.Log("t3 the network heals")
	err = loot.Admit(one.Token)
	t.Logf("t4 scene-01 writes: %v", err)
	if !errors.Is(err, discovery.ErrFenced) {
		t.Fatal("two leaders wrote")
	}
	for _, l := range []*discovery.Leadership{one, two} {
		if err := l.Resign(ctx); err != nil {
			t.Fatal(err)
		}
	}
}

// TestEtcdContract holds the rest of the chapter's contract.
func TestEtcdContract(t *testing.T) {
	ctx, _, connect := links(t)
	cli := connect("test")
	keys := func() (out []string) {
		resp, err := cli.Get(ctx, "", clientv3.WithPrefix())
		if err != nil {
			t.Fatal(err)
		}
		for _, kv := range resp.Kvs {
			if !strings.Contains(string(kv.Key), "term/") {
				out = append(out, string(kv.Key))
			}
		}
		return out
	}
	t.Run("AWinIsOneRevisionAndTheKeyIsRaw", func(t *testing.T) {
		for _, prefix := range []string{"", "/p/", "odd"} {
			before, err := cli.Get(ctx, "x")
			if err != nil {
				t.Fatal(err)
			}
			l, err := discovery.NewElection(cli, prefix, "boss", 0).Campaign(ctx, "scene-01")
			if err != nil {
				t.Fatal(err)
			}
			if l.Token != before.Header.Revision+1 {
				t.Errorf("token %d at revision %d", l.Token, before.Header.Revision)
			}
			if got := keys(); len(got) != 1 || got[0] != prefix+"election/boss" {
				t.Errorf("keys %q", got)
			}
			if err := l.Resign(ctx); err != nil {
				t.Fatal(err)
			}
			if got := keys(); len(got) != 0 {
				t.Errorf("keys left: %q", got)
			}
		}
	})
	t.Run("LeadershipOutlivesTheContextOfCampaign", func(t *testing.T) {
		short, cancel := context.WithCancel(ctx)
		e := discovery.NewElection(cli, "/p/", "boss", time.Second)
		l, err := e.Campaign(short, "scene-01")
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		lease, began := leases(t, ctx, cli), time.Now()
		if err := lab.Eventually(ctx, "a renewal", func(ctx context.Context) (bool, error) {
			ttl, err := cli.TimeToLive(ctx, lease[0])
			return err == nil && ttl.TTL >= 0 && time.Since(began) > 2500*time.Millisecond, err
		}); err != nil {
			t.Fatal(err)
		}
		if id, _, err := e.Leader(ctx); err != nil || id != "scene-01" {
			t.Fatalf("%s, %v", id, err)
		}
		if err := l.Resign(ctx); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("OneIDLeadsSeveralAndCampaignsTwice", func(t *testing.T) {
		a := discovery.NewElection(cli, "/p/", "a", time.Second)
		b := discovery.NewElection(cli, "/p/", "b", time.Second)
		la, err := a.Campaign(ctx, "scene-01")
		if err != nil {
			t.Fatal(err)
		}
		lb, err := b.Campaign(ctx, "scene-01")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := a.Campaign(ctx, "scene-01"); err != discovery.ErrNotLeader {
			t.Fatalf("twice in one: %v", err)
		}
		for _, l := range []*discovery.Leadership{la, lb} {
			if err := l.Resign(ctx); err != nil {
				t.Fatal(err)
			}
		}
	})
	t.Run("FailedCampaignLeavesNoLeaseAndNoGoroutine", func(t *testing.T) {
		e := discovery.NewElection(cli, "/p/", "boss", time.Second)
		l, err := e.Campaign(ctx, "scene-01")
		if err != nil {
			t.Fatal(err)
		}
		leaks := goleak.IgnoreCurrent()
		before := len(leases(t, ctx, cli))
		if _, err := e.Campaign(ctx, "scene-02"); err != discovery.ErrNotLeader {
			t.Fatal(err)
		}
		goleak.VerifyNone(t, leaks)
		if after := len(leases(t, ctx, cli)); after != before {
			t.Fatalf("%d leases, then %d", before, after)
		}
		if err := l.Resign(ctx); err != nil {
			t.Fatal(err)
		}
		if got := leases(t, ctx, cli); len(got) != 0 {
			t.Fatalf("leases left: %v", got)
		}
	})
	t.Run("LiteralWorks", func(t *testing.T) {
		l := &discovery.Leadership{Node: "scene-01", Token: 7}
		if err := l.Resign(ctx); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("NamesAreTheRootsOwn", func(t *testing.T) {
		var _ *aegis.Fencer = &discovery.Fencer{}
		var _ aegis.NodeID = discovery.NodeID("x")
		if discovery.ErrFenced != aegis.ErrFenced || discovery.ErrNotLeader != aegis.ErrNotLeader {
			t.Fatal("errors of its own")
		}
	})
	t.Run("FencerPassesEachTokenOnce", func(t *testing.T) {
		var f discovery.Fencer
		for _, step := range []struct {
			token int64
			ok    bool
		}{{1, true}, {1, false}, {5, true}, {4, false}, {0, false}, {-1, false}, {6, true}} {
			err := f.Check(step.token)
			if (err == nil) != step.ok || err != nil && (!errors.Is(err, discovery.ErrFenced) || !strings.Contains(err.Error(), fmt.Sprint(step.token))) {
				t.Fatalf("Check(%d): %v", step.token, err)
			}
		}
		if f.LastSeen() != 6 {
			t.Fatalf("last seen %d", f.LastSeen())
		}
	})
}

func leases(t *testing.T, ctx context.Context, cli *clientv3.Client) (out []clientv3.LeaseID) {
	t.Helper()
	resp, err := cli.Leases(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range resp.Leases {
		out = append(out, l.ID)
	}
	return out
}
