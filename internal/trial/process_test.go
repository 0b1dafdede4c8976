package trial

import (
	"database/sql"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"aegis/internal/lab"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// guarded gives the trial's nodes a store with a guard, and the test a way to look into it.
func (t *trial) guarded() *sql.DB {
	t.Helper()
	t.guard = filepath.Join(t.TempDir(), "loot.db")
	g, err := openGuard(t.guard)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = g.Close() })
	return g.DB()
}

// rows returns how often an item was written.
func rows(t *testing.T, db *sql.DB, item string) (n int) {
	t.Helper()
	if err := db.QueryRowContext(within(t, 5*time.Second), "SELECT count(*) FROM loot WHERE item = ?", item).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// writes has a node write under a term, which must work.
func (n *node) writes(token int64, item string) {
	n.t.Helper()
	if r := n.do(10*time.Second, "write", fmt.Sprintf("write %d %s", token, item)); r.Err != "" {
		n.t.Fatalf("%s, token %d: write %s: %s", n, token, item, r.Err)
	}
}

// refused checks that a write was refused by the guard, naming both tokens.
func (t *trial) refused(r report, token, newest int64) {
	t.Helper()
	if !r.Fenced || r.Token != token || r.Newest != newest ||
		!strings.Contains(r.Err, fmt.Sprint(token)) || !strings.Contains(r.Err, fmt.Sprint(newest)) {
		t.Errorf("the late write of token %d was answered with %q (fenced %v, token %d, newest %d); want it refused, naming %d and %d",
			token, r.Err, r.Fenced, r.Token, r.Newest, token, newest)
	}
}

// TestStoppedProcessWakesUpNotLeading: a leader that is stopped past its lease and continued has Held false at its
// first call and its context ended within 50 ms, and what it still writes is refused.
func TestStoppedProcessWakesUpNotLeading(t *testing.T) {
	x := newTrial(t, lab.Options{})
	db := x.guarded()
	leader := x.start("scene-01")
	won := leader.wins(10*time.Second, 0)
	follower := x.start("scene-02")
	for i := range 2 {
		x.queued(10*time.Second, follower.id)
		leader.writes(won.Token, fmt.Sprintf("good-%d", i))

		if err := leader.Stop(); err != nil {
			t.Fatal(err)
		}
		stopped := lab.Now()
		next := follower.wins(10*time.Second, won.Token)
		if took := time.Duration(next.First.After - stopped); took > ttl+time.Second {
			t.Errorf("the next leader came %v after the stop", took)
		}
		late := fmt.Sprintf("late-%d", i)
		if err := leader.Send(fmt.Sprintf("write %d %s", won.Token, late)); err != nil {
			t.Fatal(err)
		}
		woken := lab.Now()
		if err := leader.Continue(); err != nil {
			t.Fatal(err)
		}
		end := leader.ends(10*time.Second, won.Token)
		// Only a call that had begun before the stop may have said yes; the first one after it said no.
		if end.Last.Before > stopped {
			t.Errorf("Held said yes at a call that began %v after the stop", time.Duration(end.Last.Before-stopped))
		}
		if end.Last.Before > next.First.Before {
			t.Errorf("Held said yes at a call that began after the next leader's first")
		}
		// Running again: at the process's own first look at the clock, which may end a call that the stop has interrupted.
		running := end.No.Before
		if end.Last.After > woken {
			running = end.Last.After
		}
		if took := time.Duration(end.Ended - running); took > 50*time.Millisecond {
			t.Errorf("the context ended %v after the process ran again", took)
		}
		r := leader.await(10*time.Second, "the late write", func(r report) bool { return r.Kind == "write" && r.Note == late })
		x.refused(r, won.Token, next.Token)
		if n := rows(t, db, late); n != 0 {
			t.Errorf("the late write is in the store %d times", n)
		}
		follower.writes(next.Token, fmt.Sprintf("next-%d", i))
		t.Logf("stopped for %v; its context ended %v after SIGCONT; %s",
			time.Duration(woken-stopped).Round(time.Millisecond), time.Duration(end.Ended-woken).Round(time.Microsecond), r.Err)
		leader, follower, won = follower, leader, next
	}
	x.growingTokens()
}

// TestKilledLeaderIsFollowedWithinTTLPlusOneSecond kills the leader's process, and starts it again at once under the
// same name: the new process waits until the dead one's lease has run out, and stands behind who waited already. A
// second process under a living one's name is refused, naming the living one.
func TestKilledLeaderIsFollowedWithinTTLPlusOneSecond(t *testing.T) {
	x := newTrial(t, lab.Options{})
	leader := x.start("scene-01")
	won := leader.wins(10*time.Second, 0)
	follower := x.start("scene-02")
	x.queued(10*time.Second, follower.id)
	impostor := x.start("scene-02")
	nodeKey := x.prefix + "node/scene-01"
	old, err := x.admin.Get(within(t, 5*time.Second), nodeKey)
	if err != nil || len(old.Kvs) != 1 {
		t.Fatalf("%s: %v, %v", nodeKey, old, err)
	}

	killed := lab.Now()
	leader.kill()
	again := x.start("scene-01")
	next := follower.wins(10*time.Second, won.Token)
	took := time.Duration(next.First.After - killed)
	t.Logf("the next leader came %v after the kill", took.Round(time.Millisecond))
	if took > ttl+time.Second {
		t.Errorf("the next leader came %v after the kill; want at most TTL + 1 s", took)
	}

	joined := again.await(10*time.Second, "that it has joined", func(r report) bool { return r.Kind == "joined" })
	t.Logf("the process that was started again had joined %v after the kill", time.Duration(joined.At-killed).Round(time.Millisecond))
	if log := again.Stderr(); !strings.Contains(log, fmt.Sprintf("pid %d", leader.Pid())) {
		t.Errorf("it did not say that it waits for the dead one, pid %d; its log: %s", leader.Pid(), log)
	}
	states := x.history(nodeKey, old.Kvs[0].CreateRevision, x.revision())
	if len(states) != 3 || states[0].lease == 0 || states[1].lease != 0 || states[2].lease == 0 || states[2].lease == states[0].lease {
		t.Fatalf("%s: %v; want it written, gone with the lease, and written anew", nodeKey, states)
	}
	if gone := states[1].rev; gone >= next.Token {
		t.Errorf("the dead node's key went at revision %d, after the next leader had won at %d", gone, next.Token)
	}
	x.queued(10*time.Second, again.id)

	refused := impostor.await(15*time.Second, "that its name is taken", func(r report) bool { return r.Kind == "refused" })
	if !refused.Taken || !strings.Contains(refused.Err, fmt.Sprintf("pid %d", follower.Pid())) {
		t.Errorf("a second %s got %q; want it to name the living one, pid %d", follower, refused.Err, follower.Pid())
	}
	x.noOverlap()
}

// kill kills the process and waits until it is gone.
func (n *node) kill() {
	n.t.Helper()
	if err := n.Kill(); err != nil {
		n.t.Fatal(err)
	}
	_ = n.Wait(within(n.t.T, 5*time.Second)) // it says that the process was killed
	n.mu.Lock()
	defer n.mu.Unlock()
	n.killed = lab.Now()
}

// state is a key's at some revision: written then, or, with no lease, gone.
type state struct {
	rev   int64
	value string
	lease int64
}

// history returns what became of a key in revisions from to to, a state for each change.
func (t *trial) history(key string, from, to int64) (states []state) {
	t.Helper()
	for rev := from; rev <= to; rev++ {
		resp, err := t.admin.Get(within(t.T, 5*time.Second), key, clientv3.WithRev(rev))
		if err != nil {
			t.Fatal(err)
		}
		now := state{rev: rev}
		for _, kv := range resp.Kvs {
			now = state{rev: kv.ModRevision, value: string(kv.Value), lease: kv.Lease}
		}
		if n := len(states); n == 0 || now.lease != states[n-1].lease || now.lease != 0 && now.rev != states[n-1].rev {
			states = append(states, now)
		}
	}
	return states
}

// revision returns etcd's present revision.
func (t *trial) revision() int64 {
	t.Helper()
	resp, err := t.admin.Get(within(t.T, 5*time.Second), "revision")
	if err != nil {
		t.Fatal(err)
	}
	return resp.Header.Revision
}
