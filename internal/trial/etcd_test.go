package trial

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"aegis"
	"aegis/internal/lab"
)

// anyWin waits until one of the nodes has won above a token, and returns it.
func (t *trial) anyWin(d time.Duration, above int64, nodes ...*node) (winner *node, won report) {
	t.Helper()
	err := lab.Eventually(within(t.T, d), fmt.Sprintf("anybody to win above token %d", above), func(context.Context) (bool, error) {
		for _, n := range nodes {
			if r, ok := n.find(func(r report) bool { return r.Kind == "won" && r.Token > above }); ok {
				winner, won = n, r
				return true, nil
			}
		}
		return false, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return winner, won
}

// until waits until a node's lease has been renewed once more, or its health is in the given state.
func (n *node) until(what string) {
	n.t.Helper()
	if r := n.do(15*time.Second, "until", "until "+what); r.Err != "" {
		n.t.Fatal(r.Err)
	}
}

// TestEtcdStoppedForTwiceTheTTL stops all members and starts them again: the leader stops before its lease could have
// run out; when etcd is back, one leader follows with a greater token, and the guard refuses the old token before the
// new leader's first write.
func TestEtcdStoppedForTwiceTheTTL(t *testing.T) {
	x := newTrial(t, lab.Options{Members: 3, Fast: true})
	db := x.guarded()
	leader := x.start("scene-01")
	won := leader.wins(10*time.Second, 0)
	follower := x.start("scene-02")
	x.queued(10*time.Second, follower.id)
	leader.writes(won.Token, "good")

	for m := range x.cluster.Size() {
		x.cluster.Stop(m)
	}
	gone := lab.Now() // no renewal has begun later and was answered
	outage := time.After(2 * ttl)
	end := leader.ends(ttl, won.Token)
	if late := time.Duration(end.Last.Before - gone - int64(ttl-margin)); late > 0 {
		t.Errorf("Held said yes %v after trust must have ended", late)
	}
	t.Logf("the leader had stopped %v after etcd", time.Duration(end.Last.After-gone).Round(time.Millisecond))
	<-outage // the experiment's length, not a wait

	for m := range x.cluster.Size() {
		// Without a quorum the first one starts but does not become ready.
		d := 30 * time.Second
		if m == 0 {
			d = 100 * time.Millisecond
		}
		if err := x.cluster.Restart(within(t, d), m); err != nil && m > 0 {
			t.Fatal(err)
		}
	}
	back := lab.Now()
	winner, next := x.anyWin(15*time.Second, won.Token, leader, follower)
	took := time.Duration(next.First.After - back)
	t.Logf("%s leads %v after etcd is back, token %d (was %d)", winner, took.Round(time.Millisecond), next.Token, won.Token)
	if took > ttl+time.Second {
		t.Errorf("the next leader came %v after etcd; want at most TTL + 1 s", took)
	}
	x.refused(leader.do(10*time.Second, "write", fmt.Sprintf("write %d late", won.Token)), won.Token, next.Token)
	winner.writes(next.Token, "next")
	if late, good := rows(t, db, "late"), rows(t, db, "next"); late != 0 || good != 1 {
		t.Errorf("the late write is in the store %d times, the next leader's %d times", late, good)
	}
	x.noOverlap()
}

// TestRestoredEtcdStopsEverybodyUntilTheOffsetIsRaised replaces etcd by an older state of itself behind the same
// addresses: leaders stop within TTL, nobody campaigns until the token offset is raised, and then tokens are above all
// given out before. A newcomer, which cannot know of the restore, is refused by its guard.
func TestRestoredEtcdStopsEverybodyUntilTheOffsetIsRaised(t *testing.T) {
	for _, c := range []struct {
		name     string
		transfer bool // between snapshot and restore
		opts     lab.RestoreOptions
	}{
		{name: "TheLeaderIsTheSnapshotsToo"},
		{name: "AnotherLedAtTheSnapshot", transfer: true},
		{name: "TheRestoredClusterHasAnotherID", opts: lab.RestoreOptions{NewClusterID: true}},
	} {
		t.Run(c.name, func(t *testing.T) { restored(t, c.transfer, c.opts) })
	}
}

func restored(t *testing.T, transfer bool, opts lab.RestoreOptions) {
	x := newTrial(t, lab.Options{Fast: true})
	x.guarded()
	ctx := within(t, time.Minute)
	leader := x.start("scene-01")
	won := leader.wins(10*time.Second, 0)
	follower := x.start("scene-02")
	x.queued(10*time.Second, follower.id)
	file := filepath.Join(t.TempDir(), "snapshot")
	if err := x.cluster.Snapshot(ctx, 0, file); err != nil {
		t.Fatal(err)
	}

	// What happens now, etcd will have forgotten.
	for range 20 {
		if _, err := x.admin.Put(ctx, "other", "writers"); err != nil {
			t.Fatal(err)
		}
	}
	op := aegis.Open(x.admin, x.prefix)
	if transfer {
		term, err := op.Leader(ctx, election)
		if err != nil {
			t.Fatal(err)
		}
		if err := op.Request(ctx, term, "scene-02"); err != nil {
			t.Fatal(err)
		}
		won = follower.wins(10*time.Second, won.Token)
		leader, follower = follower, leader
		x.queued(10*time.Second, follower.id)
	}
	// Both nodes have seen a later revision than the snapshot's: they look with each renewal.
	for _, n := range []*node{leader, follower} {
		n.until("renewed")
	}
	leader.writes(won.Token, "good")

	if err := x.cluster.Restore(ctx, file, opts); err != nil {
		t.Fatal(err)
	}
	back := lab.Now()
	start := x.revision()
	end := leader.ends(10*time.Second, won.Token)
	t.Logf("the leader had stopped %v after etcd was back: %s", time.Duration(end.Last.After-back).Round(time.Millisecond), end.Cause)
	if late := time.Duration(end.Last.Before - back); late > ttl {
		t.Errorf("Held said yes %v after the restored etcd was there", late)
	}
	for _, n := range []*node{leader, follower} {
		n.until("halted")
	}
	// Vacant, and time for anybody to campaign who would.
	x.vacant(10 * time.Second)
	<-time.After(time.Second)
	for _, n := range []*node{leader, follower} {
		if r, ok := n.find(func(r report) bool { return r.Kind == "won" && r.At > back }); ok {
			t.Errorf("%s has won on the restored etcd: token %d", n, r.Token)
		}
	}
	for _, s := range x.history(x.prefix+"election/"+election, start, x.revision())[1:] {
		if s.lease != 0 {
			t.Errorf("%s has written the leader key at revision %d of the restored etcd", s.value, s.rev)
		}
	}

	g, err := openGuard(x.guard)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	switch {
	case opts.NewClusterID: // a newcomer sees whose keys these are
		_, err := aegis.Join(ctx, x.client("newcomer"), aegis.Config{ID: "newcomer", Prefix: x.prefix, TTL: ttl})
		t.Logf("a newcomer is told: %v", err)
		if !errors.Is(err, aegis.ErrTokenWentBack) {
			t.Errorf("a newcomer joined the restored etcd: %v; want ErrTokenWentBack", err)
		}
	case transfer: // it sees nothing, but its token is one that the guard knows to be old
		node := x.join("newcomer", x.client("newcomer"))
		led, err := node.Election(election, aegis.WithGuards(g)).Campaign(ctx)
		t.Logf("a newcomer is told: %v", err)
		if led != nil || !errors.Is(err, aegis.ErrTokenWentBack) {
			t.Errorf("a newcomer's campaign on the restored etcd: %v, %v; want ErrTokenWentBack", led, err)
		}
		if err := node.Leave(ctx); err != nil {
			t.Error(err)
		}
	}

	newest, err := g.Newest(ctx, election)
	if err != nil {
		t.Fatal(err)
	}
	greatest := slices.MaxFunc(x.reigns(), func(a, b reign) int { return int(a.token - b.token) }).token
	if newest.Token != greatest {
		t.Errorf("the guard's newest token is %d, the greatest given out %d", newest.Token, greatest)
	}
	offset, err := op.RaiseToken(ctx, newest.Token)
	if err != nil {
		t.Fatal(err)
	}
	raised := lab.Now()
	if opts.NewClusterID { // the guard waits to be told that the new cluster is meant
		return
	}
	winner, next := x.anyWin(10*time.Second, greatest, leader, follower)
	t.Logf("offset raised to %d; %s leads %v later with token %d (the greatest before was %d)",
		offset, winner, time.Duration(next.First.After-raised).Round(time.Millisecond), next.Token, greatest)
	x.refused(leader.do(10*time.Second, "write", fmt.Sprintf("write %d late", won.Token)), won.Token, next.Token)
	winner.writes(next.Token, "next")
	x.noOverlap()
}

// vacant waits until the election has no leader in etcd.
func (t *trial) vacant(d time.Duration) {
	t.Helper()
	err := lab.Eventually(within(t.T, d), election+" to be vacant", func(ctx context.Context) (bool, error) {
		term, err := aegis.Open(t.admin, t.prefix).Leader(ctx, election)
		if errors.Is(err, aegis.ErrNoLeader) {
			return true, nil
		}
		return false, cmp.Or(err, fmt.Errorf("%v leads", term))
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestLosingEtcdsOwnLeaderCostsNoTerm: the member that leads etcd stops, or is cut off from the others while clients
// still reach it: the leader goes on, those who wait go on waiting, and whoever watches sees the next term.
func TestLosingEtcdsOwnLeaderCostsNoTerm(t *testing.T) {
	for _, c := range []struct {
		name string
		lose func(*lab.Cluster, int)
	}{
		{"Stopped", (*lab.Cluster).Stop},
		{"Isolated", (*lab.Cluster).Isolate},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := newTrial(t, lab.Options{Members: 3, Fast: true})
			leader := x.start("scene-01")
			won := leader.wins(10*time.Second, 0)
			follower := x.start("scene-02")
			x.queued(10*time.Second, follower.id)
			observer := x.client("observer")
			seen := make(chan aegis.Term, 100)
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() {
				defer close(done)
				for term, err := range aegis.Open(observer, x.prefix).Observe(ctx, election) {
					if err != nil {
						return
					}
					seen <- term
				}
			}()
			defer func() { cancel(); <-done }()

			member, ok := x.cluster.Leader()
			if !ok {
				t.Fatal("etcd has no leader")
			}
			c.lose(x.cluster, member)
			err := lab.Eventually(within(t, 10*time.Second), "etcd to have another leader", func(context.Context) (bool, error) {
				now, ok := x.cluster.Leader()
				return ok && now != member, nil
			})
			if err != nil {
				t.Fatal(err)
			}
			for _, n := range []*node{leader, follower} {
				n.until("renewed")
			}
			if end, lost := leader.find(func(r report) bool { return r.Kind == "end" }); lost {
				t.Errorf("the leader lost its term: %s", end.Cause)
			}

			reign := x.etcdTerm()
			killed := lab.Now()
			leader.kill()
			next := follower.wins(10*time.Second, won.Token)
			took := time.Duration(next.First.After - killed)
			t.Logf("the follower leads %v after the leader's death", took.Round(time.Millisecond))
			bound := ttl + time.Second
			if now := x.etcdTerm(); now != reign {
				t.Logf("etcd has elected again meanwhile, which starts every lease anew: its term is %d, was %d", now, reign)
				bound += ttl
			}
			if took > bound {
				t.Errorf("the follower leads %v after the leader's death; want at most %v", took, bound)
			}
			for term := range receive(within(t, 5*time.Second), seen) {
				if term.Token == next.Token {
					return
				}
			}
			t.Error("the observer did not see the next term within 5 s")
		})
	}
}

// etcdTerm returns the term of etcd's own leader.
func (t *trial) etcdTerm() (term uint64) {
	t.Helper()
	err := lab.Eventually(within(t.T, 10*time.Second), "etcd to answer", func(ctx context.Context) (bool, error) {
		ctx, cancel := context.WithTimeout(ctx, 300*time.Millisecond) // a member without a quorum does not answer
		defer cancel()
		resp, err := t.admin.Get(ctx, "term")
		if err == nil {
			term = resp.Header.RaftTerm
		}
		return err == nil, err
	})
	if err != nil {
		t.Fatal(err)
	}
	return term
}

// receive yields what comes on a channel until ctx ends.
func receive[T any](ctx context.Context, c <-chan T) func(func(T) bool) {
	return func(yield func(T) bool) {
		for {
			select {
			case v := <-c:
				if !yield(v) {
					return
				}
			case <-ctx.Done():
				return
			}
		}
	}
}
