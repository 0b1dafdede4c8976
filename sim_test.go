package aegis_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"aegis"
	"aegis/internal/etcdsim"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// world is a simulated cluster in virtual time: machines with the real client on an etcd in memory.
type world struct {
	*testing.T
	*etcdsim.Cluster
	ctx context.Context

	mu       sync.Mutex
	events   map[aegis.NodeID][]aegis.Event
	nodes    []*aegis.Node
	releases []bool // see watchRelease
}

const ttl = 2 * time.Second

// simulate runs f in a bubble of virtual time. Whatever goroutine is left at the end fails the test.
func simulate(t *testing.T, f func(w *world), opts ...etcdsim.Option) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		w := &world{T: t, Cluster: etcdsim.New(opts...), ctx: ctx, events: map[aegis.NodeID][]aegis.Event{}}
		defer w.Close()
		defer func() {
			for _, id := range w.Machines() {
				w.Heal(id)
				w.Intercept(id, nil)
			}
			for _, n := range w.nodes {
				ctx, cancel := context.WithTimeout(ctx, time.Minute)
				_ = n.Leave(ctx)
				cancel()
			}
		}()
		f(w)
	})
}

// join makes the machine called id a node.
func (w *world) join(id string, change ...func(*aegis.Config)) *aegis.Node {
	w.Helper()
	n, err := w.tryJoin(id, change...)
	if err != nil {
		w.Fatal(err)
	}
	return n
}

func (w *world) tryJoin(id string, change ...func(*aegis.Config)) (*aegis.Node, error) {
	cfg := aegis.Config{ID: aegis.NodeID(id), TTL: ttl, Logger: slog.New(slog.DiscardHandler)}
	cfg.OnEvent = func(e aegis.Event) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.events[cfg.ID] = append(w.events[cfg.ID], e)
	}
	for _, c := range change {
		c(&cfg)
	}
	n, err := aegis.Join(w.ctx, w.Client(id), cfg)
	if err == nil {
		w.nodes = append(w.nodes, n)
	}
	return n, err
}

func (w *world) saw(id string, kind aegis.EventKind) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.ContainsFunc(w.events[aegis.NodeID(id)], func(e aegis.Event) bool { return e.Kind == kind })
}

// within waits, in steps of a virtual millisecond, until the thing has come about, and returns how long that took.
func (w *world) within(bound time.Duration, what string, thing func() bool) time.Duration {
	w.Helper()
	began := time.Now()
	for {
		synctest.Wait()
		if thing() {
			return time.Since(began)
		}
		if time.Since(began) > bound {
			w.Fatalf("not within %v: %s", bound, what)
		}
		time.Sleep(time.Millisecond)
	}
}

// result is what a call in the background ends with.
type result struct {
	led  *aegis.Leadership
	err  error
	done bool
}

// background calls Await in the background; the result is read after synctest.Wait.
func (w *world) await(ctx context.Context, e *aegis.Election) *result {
	r := &result{}
	go func() {
		led, err := e.Await(ctx)
		w.mu.Lock()
		defer w.mu.Unlock()
		r.led, r.err, r.done = led, err, true
	}()
	return r
}

func (w *world) won(r *result) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return r.done && r.err == nil
}

func (w *world) over(r *result) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return r.done
}

func (w *world) lead(n *aegis.Node, name string) *aegis.Leadership {
	w.Helper()
	led, err := n.Election(name).Campaign(w.ctx)
	if err != nil {
		w.Fatal(err)
	}
	return led
}

// queue waits until n candidates have their keys.
func (w *world) queue(n int) {
	w.Helper()
	w.within(time.Second, fmt.Sprintf("%d candidates", n), func() bool { return len(w.keys("candidate/")) == n })
}

// shown waits until the node's watch has shown the term.
func (w *world) shown(n *aegis.Node, led *aegis.Leadership) {
	w.Helper()
	w.within(ttl, "the watch has shown the win", func() bool {
		for term := range n.Election(led.Election).Observe(w.ctx) {
			return term == led.Term
		}
		return false
	})
}

// keys returns the keys in etcd that begin so, without what survives terms on purpose.
func (w *world) keys(dir string) []string {
	var out []string
	for _, kv := range w.Dump(aegis.DefaultPrefix + dir) {
		if !strings.HasPrefix(kv.Key, aegis.DefaultPrefix+"term/") && !strings.HasPrefix(kv.Key, aegis.DefaultPrefix+"meta/") {
			out = append(out, strings.TrimPrefix(kv.Key, aegis.DefaultPrefix))
		}
	}
	return out
}

func (w *world) mustIs(err, target error) {
	w.Helper()
	if !errors.Is(err, target) {
		w.Fatalf("error is %v; want %v", err, target)
	}
}

func (w *world) leaseOf(n *aegis.Node) clientv3.LeaseID {
	w.Helper()
	for _, kv := range w.Dump(aegis.DefaultPrefix + "node/" + string(n.ID())) {
		return kv.Lease
	}
	w.Fatalf("%s has no node key", n.ID())
	return 0
}

func TestElection(t *testing.T) {
	t.Run("OneOfManyWinsAndTheOthersLearnWho", func(t *testing.T) {
		simulate(t, func(w *world) {
			var won []*aegis.Leadership
			for i := range 5 {
				n := w.join(fmt.Sprintf("n%d", i))
				led, err := n.Election("boss").Campaign(w.ctx)
				if err == nil {
					won = append(won, led)
					continue
				}
				w.mustIs(err, aegis.ErrNotLeader)
				var nl *aegis.NotLeaderError
				if !errors.As(err, &nl) || nl.Term != won[0].Term {
					w.Fatalf("%v does not name the holder %v", err, won[0].Term)
				}
			}
			if len(won) != 1 || !won[0].Held() {
				w.Fatalf("%d won", len(won))
			}
			term, err := w.nodes[3].Election("boss").Leader(w.ctx)
			if err != nil || term != won[0].Term {
				w.Fatalf("leader is %v, %v; want %v", term, err, won[0].Term)
			}
		})
	})
	t.Run("ResignLetsTheNextWaiterWinWithTokenPlusTwo", func(t *testing.T) {
		simulate(t, func(w *world) {
			a, b := w.join("a"), w.join("b")
			led := w.lead(a, "boss")
			r := w.await(w.ctx, b.Election("boss"))
			w.queue(1)
			if err := led.Resign(w.ctx); err != nil {
				w.Fatal(err)
			}
			if led.Held() {
				w.Fatal("held after Resign")
			}
			w.mustIs(context.Cause(led.Context()), aegis.ErrLost)
			w.within(20*time.Millisecond, "b leads", func() bool { return w.won(r) })
			if r.led.Token != led.Token+3 { // b's candidate key, the resignation, b's win
				w.Fatalf("token %d after %d", r.led.Token, led.Token)
			}
			if got := w.keys(""); len(got) != 3 {
				w.Fatalf("keys left: %q", got)
			}
		})
	})
	t.Run("LeaveLeavesNothing", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a")
			w.lead(a, "boss")
			w.lead(a, "loot")
			r := w.await(w.ctx, w.join("b").Election("boss"))
			w.queue(1)
			for range 2 {
				if err := a.Leave(w.ctx); err != nil {
					w.Fatal(err)
				}
			}
			w.within(50*time.Millisecond, "b leads", func() bool { return w.won(r) })
			infos, err := aegis.Open(w.Client("ops"), "").Elections(w.ctx)
			if err != nil || len(infos) != 2 || !strings.HasSuffix(infos[0].LastEnd, "left") || !strings.HasSuffix(infos[1].LastEnd, "left") {
				w.Fatalf("%+v, %v; want to read that a left", infos, err)
			}
			if err := w.nodes[1].Leave(w.ctx); err != nil {
				w.Fatal(err)
			}
			if got := w.keys(""); len(got) != 0 {
				w.Fatalf("keys left: %q", got)
			}
			if _, err := a.Election("boss").Campaign(w.ctx); !errors.Is(err, aegis.ErrLeft) {
				w.Fatalf("campaign after Leave: %v", err)
			}
		})
	})
}
