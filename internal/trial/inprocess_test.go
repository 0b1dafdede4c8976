package trial

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"aegis"
	"aegis/internal/lab"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"
)

// client is a client of a node that lives in this process.
func (t *trial) client(node string) *clientv3.Client {
	t.Helper()
	cli, err := t.cluster.Client(node)
	if err != nil {
		t.Fatal(err)
	}
	return cli
}

// join joins a node that lives in this process; it leaves at the test's end.
func (t *trial) join(id string, cli *clientv3.Client, change ...func(*aegis.Config)) *aegis.Node {
	t.Helper()
	cfg := aegis.Config{ID: aegis.NodeID(id), Prefix: t.prefix, TTL: ttl, Logger: slog.New(slog.NewTextHandler(t.Output(), nil)).With("of", id)}
	for _, c := range change {
		c(&cfg)
	}
	node, err := aegis.Join(within(t.T, 10*time.Second), cli, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = node.Leave(ctx)
	})
	return node
}

func (t *trial) await(e *aegis.Election) *aegis.Leadership {
	t.Helper()
	led, err := e.Await(within(t.T, 15*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	return led
}

// ended waits for a leadership's end, at most d from now, and returns when it had ended.
func (t *trial) ended(led *aegis.Leadership, d time.Duration) int64 {
	t.Helper()
	select {
	case <-led.Context().Done():
	case <-time.After(d):
		t.Fatalf("%v is still held after %v", led.Term, d)
	}
	at := lab.Now()
	if led.Held() {
		t.Errorf("%v: Held is true after its context's end", led.Term)
	}
	return at
}

// lease returns the lease of the leader key.
func (t *trial) lease() clientv3.LeaseID {
	t.Helper()
	resp, err := t.admin.Get(within(t.T, 5*time.Second), t.prefix+"election/"+election)
	if err != nil || len(resp.Kvs) != 1 {
		t.Fatalf("the leader key: %v, %v", resp, err)
	}
	return clientv3.LeaseID(resp.Kvs[0].Lease)
}

// TestLiar: while renewals are acknowledged, the lease goes on the server, by being revoked or by running out: the
// leadership ends within 2 s all the same, since the node watches its key.
func TestLiar(t *testing.T) {
	x := newTrial(t, lab.Options{})
	cli := x.client("scene-01")
	liar := lab.NewLyingLease(cli.Lease)
	cli.Lease = liar
	node := x.join("scene-01", cli)
	led := x.await(node.Election(election))
	rival := x.join("scene-02", x.client("scene-02"))

	for _, c := range []struct {
		name   string
		revoke bool
	}{{"Revoked", true}, {"RunOut", false}} {
		t.Run(c.name, func(t *testing.T) {
			x := x.in(t)
			type win struct {
				led *aegis.Leadership
				at  int64
				err error
			}
			next := make(chan win, 1)
			go func() {
				l, err := rival.Election(election).Await(within(t, 20*time.Second))
				next <- win{l, lab.Now(), err}
			}()
			x.queued(10*time.Second, "scene-02")

			liar.Lie(true)
			if c.revoke {
				if _, err := x.admin.Revoke(within(t, 5*time.Second), x.lease()); err != nil {
					t.Fatal(err)
				}
			}
			ended := make(chan int64, 1)
			stop := context.AfterFunc(led.Context(), func() { ended <- lab.Now() })
			defer stop()
			w := <-next
			if w.err != nil {
				t.Fatal(w.err)
			}
			x.ended(led, 2*time.Second)
			late := time.Duration(<-ended - w.at)
			t.Logf("the old term ended %v after the rival had won: %v", late.Round(10*time.Microsecond), context.Cause(led.Context()))
			if late > 2*time.Second {
				t.Errorf("the leadership ended %v after the rival had won", late)
			}
			if !c.revoke && liar.Lies() == 0 {
				t.Error("no renewal was lied about")
			}

			liar.Lie(false)
			if err := w.led.Resign(within(t, 5*time.Second)); err != nil {
				t.Fatal(err)
			}
			before := led.Token
			if led = x.await(node.Election(election)); led.Token <= before {
				t.Errorf("the next token is %d, the lost one was %d", led.Token, before)
			}
		})
	}
}

// TestReplyOfTheWinningTransactionLost swallows all replies from before Campaign is called on: either it ends as won,
// by finding its win in etcd while trust lasts, or it fails and nothing is left.
func TestReplyOfTheWinningTransactionLost(t *testing.T) {
	const long = 2 * ttl // time for all the phases
	x := newTrial(t, lab.Options{})
	node := x.join("scene-01", x.client("scene-01"), func(c *aegis.Config) { c.TTL = long })
	for _, c := range []struct {
		name string
		heal time.Duration // from the transaction's commit; 0: when Campaign has returned
		give time.Duration // how long the caller waits; 0: as long as it takes
		wins bool
	}{
		{name: "HealedAtOnceItIsWon", heal: time.Nanosecond, wins: true},
		{name: "HealedAfterItsTimeoutItIsWon", heal: long/3 + 200*time.Millisecond, wins: true},
		{name: "HealedAfterTrustNothingIsLeft"},
		{name: "CallerGivesUpNothingIsLeft", give: 200 * time.Millisecond},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := x.in(t)
			from := time.Now()
			err := lab.Eventually(within(t, 2*long), "a fresh renewal", func(context.Context) (bool, error) {
				h := node.Health()
				return h.Ready() && h.LastRenewal.After(from), h.Err
			})
			if err != nil {
				t.Fatal(err)
			}

			type outcome struct {
				led *aegis.Leadership
				err error
			}
			result := make(chan outcome, 1)
			x.cluster.Cut("scene-01", lab.FromServer)
			defer x.cluster.Heal("scene-01")
			began := time.Now()
			go func() {
				ctx := within(t, 20*time.Second)
				if c.give > 0 {
					ctx = within(t, c.give)
				}
				led, err := node.Election(election).Campaign(ctx)
				result <- outcome{led, err}
			}()
			op := aegis.Open(x.admin, x.prefix)
			err = lab.Eventually(within(t, 5*time.Second), "the transaction to commit", func(ctx context.Context) (bool, error) {
				_, err := op.Leader(ctx, election)
				return err == nil, err
			})
			if err != nil {
				t.Fatal(err)
			}
			if c.heal > 0 {
				select {
				case r := <-result:
					t.Fatalf("Campaign returned %v, %v before any reply", r.led, r.err)
				case <-time.After(c.heal):
				}
				x.cluster.Heal("scene-01")
			}
			r := <-result
			t.Logf("Campaign returned after %v: %v", time.Since(began).Round(time.Millisecond), r.err)
			x.cluster.Heal("scene-01")
			if c.wins {
				if r.err != nil {
					t.Fatalf("Campaign returned %v; want it won", r.err)
				}
				if term, err := op.Leader(within(t, 5*time.Second), election); err != nil || term != r.led.Term || !r.led.Held() {
					t.Errorf("etcd says that %v leads, %v; Campaign returned %v, held %v", term, err, r.led.Term, r.led.Held())
				}
				if err := r.led.Resign(within(t, 5*time.Second)); err != nil {
					t.Error(err)
				}
				return
			}
			if r.err == nil {
				t.Fatalf("Campaign returned %v", r.led.Term)
			}
			if c.give > 0 && !errors.Is(r.err, context.DeadlineExceeded) {
				t.Errorf("the error is not the caller's: %v", r.err)
			}
			healed := time.Now()
			x.vacant(long + time.Second)
			t.Logf("nothing was left %v after the link was healed", time.Since(healed).Round(time.Millisecond))
			if led, ok := node.Election(election).Current(); ok {
				t.Errorf("the node believes to lead: %v", led.Term)
			}
		})
	}
	if led := x.await(node.Election(election)); !led.Held() {
		t.Error("after all that the node does not lead")
	}
}

// TestLeaveAndCloseLeaveNoGoroutine: after all that a node can do, and a cut, Leave and the client's Close leave
// nothing running, and nothing under a lease in etcd.
func TestLeaveAndCloseLeaveNoGoroutine(t *testing.T) {
	x := newTrial(t, lab.Options{Fast: true})
	x.comeAndGo() // what etcd's server and the lab start at a first connection stays
	before := goleak.IgnoreCurrent()
	x.comeAndGo()
	if err := goleak.Find(before); err != nil {
		t.Error(err)
	}
	resp, err := x.admin.Get(within(t, 5*time.Second), x.prefix, clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	for _, kv := range resp.Kvs {
		if kv.Lease != 0 {
			t.Errorf("%s is left, under lease %x", kv.Key, kv.Lease)
		}
	}
}

// comeAndGo has two nodes join, lead, wait, observe, lose the term by a cut, leave and close their clients.
func (t *trial) comeAndGo() {
	t.Helper()
	ctx := within(t.T, 30*time.Second)
	leading, waiting := t.client("scene-01"), t.client("scene-02")
	leader, waiter := t.join("scene-01", leading), t.join("scene-02", waiting)
	led := t.await(leader.Election(election))
	returned := make(chan error, 2)
	go func() {
		_, err := waiter.Election(election).Await(ctx)
		returned <- err
	}()
	go func() {
		var last error
		for term, err := range waiter.Election(election).Observe(ctx) {
			if last = err; err == nil && term.Node == "scene-02" {
				break
			}
		}
		returned <- last
	}()
	t.queued(10*time.Second, "scene-02")
	t.cluster.Cut("scene-01", lab.Both)
	t.ended(led, 2*ttl)
	for range 2 {
		if err := <-returned; err != nil {
			t.Error(err)
		}
	}
	t.cluster.Heal("scene-01")
	for _, n := range []*aegis.Node{leader, waiter} {
		if err := n.Leave(ctx); err != nil {
			t.Error(err)
		}
	}
	_, _ = leading.Close(), waiting.Close()
}
