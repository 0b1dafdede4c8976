package lab

import (
	"context"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// leader waits for a member that leads, other than the given one (-1: any).
func leader(t *testing.T, c *Cluster, not int) int {
	t.Helper()
	var member int
	err := Eventually(within(t, 10*time.Second), "another leader", func(context.Context) (bool, error) {
		m, ok := c.Leader()
		member = m
		return ok && m != not, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return member
}

func TestThreeMembersKeepQuorumWithoutOne(t *testing.T) {
	c := start(t, 3)
	cli := client(t, c, "a")
	put(t, cli, "k", "three")
	addresses := c.Endpoints("a")
	old := leader(t, c, -1)
	c.Stop(old)
	if c.Running(old) {
		t.Fatal("the member runs on")
	}
	leader(t, c, old)
	put(t, cli, "k", "two")
	if err := c.Restart(within(t, 20*time.Second), old); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(addresses, c.Endpoints("a")) {
		t.Fatal("the addresses have changed")
	}
	// The restarted member alone answers, with what it missed.
	cli.SetEndpoints(addresses[old])
	sees(t, cli, "k", "two")
}

func TestRestartWithoutAQuorumSaysWhichMemberIsNotReady(t *testing.T) {
	c := start(t, 3)
	for i := range c.Size() {
		c.Stop(i)
	}
	err := c.Restart(within(t, 300*time.Millisecond), 1)
	if err == nil || !strings.Contains(err.Error(), "member 1 is not ready") {
		t.Fatalf("%v", err)
	}
	if err := c.Restart(within(t, 20*time.Second), 2); err != nil {
		t.Fatal(err)
	}
	if err := c.Restart(within(t, 20*time.Second), 1); err != nil {
		t.Fatal(err)
	}
	put(t, client(t, c, "a"), "k", "v")
}

func TestIsolatedLeaderIsReplacedAndServesNoLinearizableRead(t *testing.T) {
	c := start(t, 3)
	cli := client(t, c, "a")
	put(t, cli, "k", "before")
	old := leader(t, c, -1)
	c.Isolate(old)
	now := leader(t, c, old)
	cli.SetEndpoints(c.Endpoints("a")[now])
	put(t, cli, "k", "after")
	alone := client(t, c, "b")
	alone.SetEndpoints(c.Endpoints("b")[old])
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if resp, err := alone.Get(ctx, "k"); err == nil {
		t.Fatalf("an isolated member answered %v", resp.Kvs)
	}
	c.HealAll()
	sees(t, alone, "k", "after")
}

func TestMuteLeaderIsReplacedAndHearsOfIt(t *testing.T) {
	c := start(t, 3)
	old := leader(t, c, -1)
	for other := range c.Size() {
		if other != old {
			c.CutPeers(old, other, ToServer)
		}
	}
	now := leader(t, c, old)
	cli := client(t, c, "a")
	err := Eventually(within(t, 10*time.Second), "the old leader to follow the new", func(ctx context.Context) (bool, error) {
		theirs, err := cli.Status(ctx, c.Endpoints("a")[now])
		if err != nil {
			return false, err
		}
		mine, err := cli.Status(ctx, c.Endpoints("a")[old])
		return err == nil && mine.Leader == theirs.Header.MemberId, err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// A member that is cut off from the leader alone must not reach it by requests that carry no sender's name, as
// forwarded lease renewals do.
func TestForwardedRenewalsRespectThePeersCut(t *testing.T) {
	c := start(t, 3)
	cli := client(t, c, "a")
	lead := leader(t, c, -1)
	follower, third := (lead+1)%3, (lead+2)%3
	c.CutPeers(third, follower, Both) // or the follower would win an election through the third
	cli.SetEndpoints(c.Endpoints("a")[follower])
	lease, err := cli.Grant(within(t, 10*time.Second), 60)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cli.KeepAliveOnce(within(t, 10*time.Second), lease.ID); err != nil {
		t.Fatal(err)
	}
	c.CutPeers(follower, lead, ToServer)
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	if _, err := cli.KeepAliveOnce(ctx, lease.ID); err == nil {
		t.Fatal("a renewal passed the cut between the members")
	}
	c.HealAll()
	if _, err := cli.KeepAliveOnce(within(t, 10*time.Second), lease.ID); err != nil {
		t.Fatalf("after healing: %v", err)
	}
}

func TestRestoredClusterBehindTheSameAddressesHasASmallerRevision(t *testing.T) {
	for _, members := range []int{1, 3} {
		c := start(t, members)
		cli := client(t, c, "a")
		put(t, cli, "k", "in the snapshot")
		file := filepath.Join(t.TempDir(), "snapshot.db")
		if err := c.Snapshot(within(t, 10*time.Second), 0, file); err != nil {
			t.Fatal(err)
		}
		for range 10 {
			put(t, cli, "k", "lost")
		}
		before := get(t, cli, "k")
		if err := c.Restore(within(t, 30*time.Second), file, RestoreOptions{}); err != nil {
			t.Fatal(err)
		}
		sees(t, cli, "k", "in the snapshot") // the same client, which has dialed nothing new
		after := get(t, cli, "k")
		if after.Header.Revision >= before.Header.Revision || after.Header.ClusterId != before.Header.ClusterId {
			t.Fatalf("%d members: revision %d of cluster %x became %d of %x", members, before.Header.Revision,
				before.Header.ClusterId, after.Header.Revision, after.Header.ClusterId)
		}
		if members > 1 {
			continue
		}
		if err := c.Restore(within(t, 30*time.Second), file, RestoreOptions{NewClusterID: true, BumpRevision: 1000}); err != nil {
			t.Fatal(err)
		}
		sees(t, cli, "k", "in the snapshot")
		again := get(t, cli, "k")
		if again.Header.Revision < 1000 || again.Header.ClusterId == before.Header.ClusterId {
			t.Fatalf("revision %d, cluster %x", again.Header.Revision, again.Header.ClusterId)
		}
	}
}

func get(t *testing.T, cli *clientv3.Client, key string) *clientv3.GetResponse {
	t.Helper()
	resp, err := cli.Get(within(t, 10*time.Second), key)
	if err != nil {
		t.Fatal(err)
	}
	return resp
}

func TestLiarSaysThatALeaseLivesWhichIsGone(t *testing.T) {
	c := start(t, 1)
	cli := client(t, c, "a")
	truth := cli.Lease
	liar := NewLyingLease(truth)
	cli.Lease = liar
	lease, err := cli.Grant(within(t, 10*time.Second), 60)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := truth.Revoke(within(t, 10*time.Second), lease.ID); err != nil {
		t.Fatal(err)
	}
	liar.Lie(true)
	resp, err := cli.KeepAliveOnce(within(t, 10*time.Second), lease.ID)
	if err != nil || resp.TTL != lease.TTL || resp.ClusterId != lease.ClusterId || liar.Lies() != 1 {
		t.Fatalf("the lie was %+v, %v", resp, err)
	}
	liar.Lie(false)
	if _, err := cli.KeepAliveOnce(within(t, 10*time.Second), lease.ID); err == nil {
		t.Fatal("the truth was not told")
	}
}

func TestTicksDecideTheLeastLease(t *testing.T) {
	for _, fast := range []bool{true, false} {
		c, err := Start(within(t, 30*time.Second), Options{Fast: fast, NoFsync: true})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		lease, err := client(t, c, "a").Grant(within(t, 10*time.Second), 1)
		if want := map[bool]int64{true: 1, false: 2}[fast]; err != nil || lease.TTL != want {
			t.Errorf("fast %v: asked for 1 s, got %+v, %v", fast, lease, err)
		}
	}
}

func TestMembersStopWithinSecondsWhateverClientsHoldOpen(t *testing.T) {
	c, err := Start(within(t, 30*time.Second), Options{Members: 3}) // etcd's own ticks, synced
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var watches []clientv3.WatchChan
	for _, node := range []string{"a", "b", "c"} {
		watches = append(watches, client(t, c, node).Watch(t.Context(), "k", clientv3.WithCreatedNotify()))
	}
	for _, w := range watches {
		<-w
	}
	c.Cut("c", Both)
	began := time.Now()
	c.Stop(leader(t, c, -1))
	one := time.Since(began)
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if all := time.Since(began); all > 4*time.Second {
		t.Fatalf("stopping one took %v, all %v", one, all)
	}
	t.Logf("stopping one took %v, all %v", one, time.Since(began))
}

func TestStartNamesWhatIsWrong(t *testing.T) {
	if _, err := Start(t.Context(), Options{Members: 2}); err == nil || !strings.Contains(err.Error(), "Members is 2") {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	dir := t.TempDir()
	if _, err := Start(ctx, Options{Members: 3, Fast: true, Dir: dir}); err == nil || !strings.Contains(err.Error(), "is not ready") {
		t.Errorf("%v", err)
	}
	if _, err := Start(t.Context(), Options{Dir: dir}); err == nil || !strings.Contains(err.Error(), "earlier cluster") {
		t.Errorf("%v", err)
	}
}

func TestEventuallyNamesWhatItWaitedForAndWhy(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	err := Eventually(ctx, "godot", func(context.Context) (bool, error) { return false, context.Canceled })
	for _, part := range []string{"godot", context.DeadlineExceeded.Error(), context.Canceled.Error()} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%q is missing in: %v", part, err)
		}
	}
}
