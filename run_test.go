package aegis_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"aegis"
	"aegis/internal/etcdsim"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// run calls Run in the background.
func (w *world) run(ctx context.Context, e *aegis.Election, fn func(context.Context, *aegis.Leadership) error) *result {
	r := &result{}
	go func() {
		err := e.Run(ctx, fn)
		w.mu.Lock()
		defer w.mu.Unlock()
		r.err, r.done = err, true
	}()
	return r
}

func untilDone(ctx context.Context, _ *aegis.Leadership) error {
	<-ctx.Done()
	return context.Cause(ctx)
}

func TestRun(t *testing.T) {
	t.Run("TenTermsLostAreTenTermsEnteredWithGrowingTokens", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a")
			var terms []aegis.Term
			r := w.run(w.ctx, a.Election("boss"), func(ctx context.Context, l *aegis.Leadership) error {
				w.mu.Lock()
				terms = append(terms, l.Term)
				w.mu.Unlock()
				<-ctx.Done()
				return errors.New("whatever it returns after its term is not Run's result")
			})
			for i := range 10 {
				w.within(2*ttl, "a term", func() bool { w.mu.Lock(); defer w.mu.Unlock(); return len(terms) == i+1 })
				if i%2 == 0 {
					_ = w.Revoke(w.leaseOf(a))
				} else {
					w.Cut("a", etcdsim.Both)
					time.Sleep(2 * ttl)
					w.Heal("a")
				}
			}
			w.within(2*ttl, "a term", func() bool { w.mu.Lock(); defer w.mu.Unlock(); return len(terms) == 11 })
			if w.over(r) {
				w.Fatalf("Run returned %v", r.err)
			}
			for i := 1; i < len(terms); i++ {
				if terms[i].Token <= terms[i-1].Token {
					w.Fatalf("tokens %v", terms)
				}
			}
		})
	})
	t.Run("WorkThatIgnoresItsContextIsNeverJoinedByASecondWorker", func(t *testing.T) {
		simulate(t, func(w *world) {
			a, b := w.join("a"), w.join("b")
			var workers, most, terms atomic.Int32
			stop := make(chan struct{})
			w.run(w.ctx, a.Election("boss"), func(context.Context, *aegis.Leadership) error {
				most.Store(max(most.Load(), workers.Add(1)))
				defer workers.Add(-1)
				terms.Add(1)
				<-stop
				return nil
			})
			w.within(ttl, "a works", func() bool { return workers.Load() == 1 })
			old := w.Dump(aegis.DefaultPrefix + "election/boss")[0].Modified
			w.Cut("a", etcdsim.Both)
			time.Sleep(2 * ttl)
			w.Heal("a")
			w.within(3*ttl, "a is joined again", func() bool { return a.Health().Ready() })
			w.within(ttl, "an overrun is told", func() bool { return w.saw("a", aegis.EventOverrun) })
			time.Sleep(3 * ttl)
			if most.Load() != 1 || terms.Load() != 1 {
				w.Fatalf("%d workers at once, %d terms", most.Load(), terms.Load())
			}
			_, err := a.Election("boss").Campaign(w.ctx)
			w.mustIs(err, aegis.ErrNotLeader)
			other := w.lead(b, "boss") // the old lease has run out: others may lead meanwhile
			if other.Token <= old {
				w.Fatalf("token %d after %d", other.Token, old)
			}
			_ = other.Resign(w.ctx)
			close(stop)
			w.within(2*ttl, "a works again", func() bool { return terms.Load() > 1 })
		})
	})
	t.Run("ReturnWhileHeldReleasesAndIsTheResult", func(t *testing.T) {
		for _, want := range []error{nil, errors.New("out of loot")} {
			simulate(t, func(w *world) {
				a := w.join("a")
				err := a.Election("boss").Run(w.ctx, func(_ context.Context, l *aegis.Leadership) error {
					if cur, ok := a.Election("boss").Current(); !ok || cur != l {
						w.Error("Current is not the leadership that Run passed")
					}
					return want
				})
				if err != want {
					w.Fatalf("%v; want %v", err, want)
				}
				if got := w.keys("election/"); len(got) != 0 {
					w.Fatalf("keys left: %q", got)
				}
			})
		}
	})
	t.Run("FencedEntersAgain", func(t *testing.T) {
		simulate(t, func(w *world) {
			terms := 0
			err := w.join("a").Election("boss").Run(w.ctx, func(_ context.Context, l *aegis.Leadership) error {
				if terms++; terms < 3 {
					return fmt.Errorf("settle: %w", &aegis.FencedError{Name: "boss", Token: l.Token, Newest: l.Token + 1})
				}
				return nil
			})
			if err != nil || terms != 3 {
				w.Fatalf("%d terms, %v", terms, err)
			}
		})
	})
	t.Run("CancelledFlushesUnderTheTermThenReleases", func(t *testing.T) {
		// What a program does on SIGTERM: the context that Run passes says stop, the leadership's own still lets it write.
		simulate(t, func(w *world) {
			a := w.join("a")
			shutdown := errors.New("SIGTERM")
			ctx, cancel := context.WithCancelCause(w.ctx)
			var flushed error = errors.New("not flushed")
			r := w.run(ctx, a.Election("boss"), func(ctx context.Context, l *aegis.Leadership) error {
				<-ctx.Done()
				time.Sleep(100 * time.Millisecond) // the flush takes its time
				if l.Context().Err() != nil || !l.Held() {
					return errors.New("the term ended before the flush")
				}
				_, flushed = l.Commit(l.Context(), clientv3.OpPut("saved", "yes"))
				return nil
			})
			w.within(ttl, "a leads", func() bool { _, ok := a.Election("boss").Current(); return ok })
			cancel(shutdown)
			w.within(time.Second, "Run returns", func() bool { return w.over(r) })
			if r.err != shutdown || flushed != nil {
				w.Fatalf("Run: %v, flush: %v", r.err, flushed)
			}
			if got := w.keys("election/"); len(got) != 0 {
				w.Fatalf("keys left: %q", got)
			}
		})
	})
	t.Run("ResignInsideAsksAndRunReleasesAfterTheReturn", func(t *testing.T) {
		simulate(t, func(w *world) {
			a, b := w.join("a"), w.join("b")
			var working, stale atomic.Bool
			r := w.await(w.ctx, b.Election("boss"))
			w.within(ttl, "b leads", func() bool { return w.won(r) })
			w.run(w.ctx, a.Election("boss"), func(ctx context.Context, l *aegis.Leadership) error {
				working.Store(true)
				defer working.Store(false)
				if err := l.Resign(w.ctx); err != nil {
					w.Error(err)
				}
				if l.Held() || ctx.Err() == nil || l.Context().Err() == nil {
					w.Error("the term goes on")
				}
				time.Sleep(50 * time.Millisecond)
				if kv := w.Dump(aegis.DefaultPrefix + "election/boss"); len(kv) != 1 || kv[0].Value != "a" {
					stale.Store(true)
				}
				return nil
			})
			w.queue(1)
			_ = r.led.Resign(w.ctx)
			w.within(time.Second, "a works", working.Load)
			r = w.await(w.ctx, b.Election("boss"))
			w.within(time.Second, "b leads", func() bool { return w.won(r) })
			if working.Load() || stale.Load() {
				w.Fatal("the key was released before the work had returned")
			}
		})
	})
	t.Run("TransferInsideHandsOverAfterTheReturn", func(t *testing.T) {
		simulate(t, func(w *world) {
			a, b := w.join("a"), w.join("b")
			var working atomic.Bool
			w.run(w.ctx, a.Election("boss"), func(ctx context.Context, l *aegis.Leadership) error {
				working.Store(true)
				<-ctx.Done()
				time.Sleep(50 * time.Millisecond)
				working.Store(false)
				return nil
			})
			w.within(time.Second, "a works", working.Load)
			r := w.await(w.ctx, b.Election("boss"))
			w.queue(1)
			if err := aegis.Open(w.Client("ops"), "").Request(w.ctx, mustLeader(w, b), "b"); err != nil {
				w.Fatal(err)
			}
			w.within(time.Second, "b leads", func() bool {
				if w.won(r) && working.Load() {
					w.Fatal("two workers")
				}
				return w.won(r)
			})
		})
	})
	t.Run("PanicIsNotRecoveredAndTheKeyIsLeftToTheLease", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a")
			func() {
				defer func() {
					if recover() == nil {
						w.Error("recovered by Run")
					}
				}()
				_ = a.Election("boss").Run(w.ctx, func(context.Context, *aegis.Leadership) error { panic("loot") })
			}()
			if got := w.keys("election/"); len(got) != 1 {
				w.Fatalf("keys: %q", got)
			}
			w.within(ttl+time.Second, "the key is gone", func() bool { return len(w.keys("election/")) == 0 })
		})
	})
	t.Run("SecondRunIsNotLeaderNamingThisNode", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a")
			w.run(w.ctx, a.Election("boss"), untilDone)
			w.within(time.Second, "a leads", func() bool { _, ok := a.Election("boss").Current(); return ok })
			for _, f := range []func() error{
				func() error { return a.Election("boss").Run(w.ctx, untilDone) },
				func() error { _, err := a.Election("boss").Await(w.ctx); return err },
				func() error { _, err := a.Election("boss").Campaign(w.ctx); return err },
			} {
				err := f()
				var nl *aegis.NotLeaderError
				if !errors.As(err, &nl) || !nl.Self || nl.Term.Node != "a" {
					w.Fatalf("%v", err)
				}
			}
		})
	})
}

// The order of stopping: a term's key is deleted or handed over only when Held is false and the context has ended.
func TestTheTermEndsBeforeItsKeyGoes(t *testing.T) {
	for name, finish := range map[string]func(w *world, a *aegis.Node){
		"RunReturns": func(w *world, a *aegis.Node) {
			_ = a.Election("boss").Run(w.ctx, func(_ context.Context, l *aegis.Leadership) error {
				watchRelease(w, l)
				return nil
			})
		},
		"Resign": func(w *world, a *aegis.Node) {
			led := w.lead(a, "boss")
			watchRelease(w, led)
			_ = led.Resign(w.ctx)
		},
		"Transfer": func(w *world, a *aegis.Node) {
			led := w.lead(a, "boss")
			w.await(w.ctx, w.join("b").Election("boss"))
			w.queue(1)
			watchRelease(w, led)
			_ = led.Transfer(w.ctx, "b")
		},
		"Leave": func(w *world, a *aegis.Node) {
			led := w.lead(a, "boss")
			watchRelease(w, led)
			_ = a.Leave(w.ctx)
		},
	} {
		t.Run(name, func(t *testing.T) {
			simulate(t, func(w *world) {
				finish(w, w.join("a"))
				w.mu.Lock()
				defer w.mu.Unlock()
				if releases := w.releases; len(releases) == 0 || slices.Contains(releases, true) {
					w.Fatalf("held at its releases: %v", releases)
				}
			})
		})
	}
}

// watchRelease notes whether the term is held whenever a's requests would delete or replace its key.
func watchRelease(w *world, led *aegis.Leadership) {
	w.Intercept("a", func(c etcdsim.Call) etcdsim.Verdict {
		releases := c.Method == "LeaseRevoke"
		if txn, ok := c.Request.(*pb.TxnRequest); ok && len(txn.Success) > 0 {
			op := txn.Success[0]
			releases = strings.Contains(string(op.GetRequestDeleteRange().GetKey())+string(op.GetRequestPut().GetKey()), "election/")
		}
		if releases {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.releases = append(w.releases, led.Held() || led.Context().Err() == nil)
		}
		return etcdsim.Verdict{}
	})
}

func mustLeader(w *world, n *aegis.Node) aegis.Term {
	w.Helper()
	term, err := n.Election("boss").Leader(w.ctx)
	if err != nil {
		w.Fatal(err)
	}
	return term
}

func TestLeave(t *testing.T) {
	t.Run("WithADeadContextStillReleases", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a")
			w.lead(a, "boss")
			dead, cancel := context.WithCancel(w.ctx)
			cancel()
			if err := a.Leave(dead); err != nil {
				w.Fatal(err)
			}
			if got := w.keys(""); len(got) != 0 {
				w.Fatalf("keys left: %q", got)
			}
		})
	})
	t.Run("StopsRunAndWaitsForItsWork", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a")
			var ended atomic.Bool
			r := w.run(w.ctx, a.Election("boss"), func(ctx context.Context, l *aegis.Leadership) error {
				<-ctx.Done()
				time.Sleep(time.Second)
				ended.Store(l.Held())
				return nil
			})
			w.within(time.Second, "a leads", func() bool { _, ok := a.Election("boss").Current(); return ok })
			if err := a.Leave(w.ctx); err != nil {
				w.Fatal(err)
			}
			synctest.Wait()
			if !ended.Load() || !errors.Is(r.err, aegis.ErrLeft) {
				w.Fatalf("work ended under its term: %v; Run: %v", ended.Load(), r.err)
			}
			if got := w.keys(""); len(got) != 0 {
				w.Fatalf("keys left: %q", got)
			}
		})
	})
	t.Run("LeavesTheKeyOfWorkThatOverrunsUntilItReturns", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a")
			stop := make(chan struct{})
			var led *aegis.Leadership
			r := w.run(w.ctx, a.Election("boss"), func(_ context.Context, l *aegis.Leadership) error {
				w.mu.Lock()
				led = l
				w.mu.Unlock()
				<-stop
				return nil
			})
			w.within(time.Second, "a leads", func() bool { _, ok := a.Election("boss").Current(); return ok })
			ctx, cancel := context.WithTimeout(w.ctx, 100*time.Millisecond)
			defer cancel()
			w.mustIs(a.Leave(ctx), context.DeadlineExceeded)
			if led.Held() || led.Context().Err() == nil {
				w.Fatal("the term goes on")
			}
			if got := w.keys(""); len(got) != 1 || got[0] != "election/boss" {
				w.Fatalf("keys: %q", got)
			}
			close(stop)
			w.within(time.Second, "the key is gone", func() bool { return len(w.keys("")) == 0 })
			w.within(time.Second, "Run returns", func() bool { return w.over(r) })
			if err := a.Leave(w.ctx); err != nil {
				w.Fatal(err)
			}
		})
	})
	t.Run("WhileEtcdIsAwayIsBoundedAndCanBeRepeated", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a")
			w.lead(a, "boss")
			w.Cut("a", etcdsim.Both)
			began := time.Now()
			if err := a.Leave(w.ctx); err == nil {
				w.Fatal("left without etcd")
			}
			if took := time.Since(began); took > ttl/3+50*time.Millisecond {
				w.Fatalf("took %v", took)
			}
			w.Heal("a")
			if err := a.Leave(w.ctx); err != nil {
				w.Fatal(err)
			}
			if got := w.keys(""); len(got) != 0 {
				w.Fatalf("keys left: %q", got)
			}
		})
	})
}

// failing is a guard that cannot be reached until told so.
type failing struct {
	memoryGuard
	err   atomic.Pointer[error]
	calls atomic.Int32
}

func (g *failing) Advance(ctx context.Context, terms ...aegis.Term) error {
	g.calls.Add(1)
	if err := g.err.Load(); err != nil {
		return *err
	}
	return g.memoryGuard.Advance(ctx, terms...)
}

type guardFunc func(context.Context, ...aegis.Term) error

func (g guardFunc) Advance(ctx context.Context, terms ...aegis.Term) error { return g(ctx, terms...) }

func TestGuardsOfAnElection(t *testing.T) {
	down := errors.New("connection refused")
	t.Run("AreAdvancedBeforeTheTermIsHandedOut", func(t *testing.T) {
		simulate(t, func(w *world) {
			g := memoryGuard{}
			e := w.join("a").Election("boss", aegis.WithGuards(g))
			for _, start := range []func() (aegis.Term, error){
				func() (aegis.Term, error) { l, err := e.Campaign(w.ctx); defer l.Resign(w.ctx); return l.Term, err },
				func() (aegis.Term, error) { l, err := e.Await(w.ctx); defer l.Resign(w.ctx); return l.Term, err },
				func() (term aegis.Term, err error) {
					err = e.Run(w.ctx, func(_ context.Context, l *aegis.Leadership) error { term = l.Term; return nil })
					return term, err
				},
			} {
				term, err := start()
				if err != nil || g["boss"].Admit(term) != nil {
					w.Fatalf("%v: %v, %v", term, err, g["boss"].Admit(term))
				}
			}
		})
	})
	t.Run("UnreachableAreTriedForTTLThenTheTermIsGivenBack", func(t *testing.T) {
		simulate(t, func(w *world) {
			g := &failing{memoryGuard: memoryGuard{}}
			g.err.Store(&down)
			e := w.join("a").Election("boss", aegis.WithGuards(g))
			began := time.Now()
			l, err := e.Campaign(w.ctx)
			if l != nil || !errors.Is(err, down) || !w.saw("a", aegis.EventGuardUnreachable) {
				w.Fatalf("%v, %v", l, err)
			}
			if took := time.Since(began); took < ttl-100*time.Millisecond || took > ttl+100*time.Millisecond || g.calls.Load() < 5 {
				w.Fatalf("gave up after %v and %d tries", took, g.calls.Load())
			}
			if _, ok := e.Current(); ok || len(w.keys("election/")) != 0 {
				w.Fatalf("keys left: %q", w.keys("election/"))
			}
			// Run goes on by itself and nobody works without the guard.
			var works atomic.Int32
			w.run(w.ctx, e, func(ctx context.Context, l *aegis.Leadership) error {
				works.Add(1)
				return untilDone(ctx, l)
			})
			time.Sleep(5 * ttl)
			if works.Load() != 0 {
				w.Fatal("worked without its guard")
			}
			g.err.Store(nil)
			w.within(2*ttl, "work begins", func() bool { return works.Load() == 1 })
		})
	})
	t.Run("TermLostWhileTheyAdvanceIsNotHandedOut", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a")
			evicting := true
			e := a.Election("boss", aegis.WithGuards(guardFunc(func(_ context.Context, terms ...aegis.Term) error {
				if evicting {
					evicting = false
					if err := aegis.Open(w.Client("ops"), "").Evict(w.ctx, terms[0]); err != nil {
						w.Error(err)
					}
					time.Sleep(100 * time.Millisecond) // the watch tells a
				}
				return nil
			})))
			l, err := e.Campaign(w.ctx)
			if l != nil || !errors.Is(err, aegis.ErrLost) {
				w.Fatalf("%v, %v", l, err)
			}
			evicting = true
			if l, err = e.Await(w.ctx); err != nil || !l.Held() { // goes on by itself
				w.Fatalf("%v, %v", l, err)
			}
		})
	})
	t.Run("AboveARestoredEtcdSayTokenWentBack", func(t *testing.T) {
		simulate(t, func(w *world) {
			g := memoryGuard{"boss": {Token: 1_000_000, Nonce: 7}}
			e := w.join("a").Election("boss", aegis.WithGuards(g))
			_, err := e.Campaign(w.ctx)
			w.mustIs(err, aegis.ErrTokenWentBack)
			if _, err := aegis.Open(w.Client("ops"), "").RaiseToken(w.ctx, 1_000_000); err != nil {
				w.Fatal(err)
			}
			if _, err := e.Await(w.ctx); err != nil {
				w.Fatal(err)
			}
		})
	})
}

func TestCommit(t *testing.T) {
	simulate(t, func(w *world) {
		a, b := w.join("a"), w.join("b")
		led := w.lead(a, "boss")
		if _, err := led.Commit(w.ctx, clientv3.OpPut("loot", "1")); err != nil {
			w.Fatal(err)
		}
		w.Intercept("a", once(func(c etcdsim.Call) bool { return c.Method == "Txn" }, etcdsim.Verdict{DropReply: true}))
		_, err := led.Commit(w.ctx, clientv3.OpPut("loot", "2"))
		w.mustIs(err, aegis.ErrUnknown)
		// A rival takes over behind a's back: the compare refuses, whatever a believes.
		w.SilenceWatches("a")
		if err := aegis.Open(w.Client("ops"), "").Evict(w.ctx, led.Term); err != nil {
			w.Fatal(err)
		}
		rival := w.lead(b, "boss")
		if !led.Held() {
			w.Fatal("a has noticed; the compare is not tried")
		}
		if _, err := rival.Commit(w.ctx, clientv3.OpPut("loot", "2")); err != nil {
			w.Fatal(err)
		}
		_, err = led.Commit(w.ctx, clientv3.OpPut("loot", "stale"))
		var fenced *aegis.FencedError
		if !errors.As(err, &fenced) || fenced.Token != led.Token || fenced.Newest != rival.Token {
			w.Fatalf("%v", err)
		}
		if kv := w.Dump("loot"); kv[0].Value != "2" {
			w.Fatalf("loot is %v", kv)
		}
		// The fields are for reading; changing them changes nothing.
		rival.Token, rival.Election = 1, "other"
		if _, err := rival.Commit(w.ctx, clientv3.OpPut("loot", "3")); err != nil {
			w.Fatal(err)
		}
	})
}

func TestThousandElections(t *testing.T) {
	simulate(t, func(w *world) {
		a := w.join("a")
		var held []*aegis.Leadership
		for i := range 1000 {
			held = append(held, w.lead(a, fmt.Sprintf("guild/%d", i)))
		}
		before, began := w.Calls("a"), time.Now()
		for time.Since(began) < 3*ttl {
			time.Sleep(ttl / 3)
			for _, l := range held {
				if !l.Held() {
					w.Fatalf("lost %s: %v", l.Term, context.Cause(l.Context()))
				}
			}
		}
		after := w.Calls("a")
		rounds := int(time.Since(began)/(ttl/3)) + 1
		if n := after["LeaseKeepAlive"] - before["LeaseKeepAlive"]; n > rounds {
			w.Fatalf("%d renewals in %d rounds", n, rounds)
		}
		if n := after["Range"] - before["Range"]; n > rounds {
			w.Fatalf("%d reads in %d rounds", n, rounds)
		}
		for _, m := range []string{"Txn", "Put", "DeleteRange", "LeaseGrant", "WatchCreate"} {
			if after[m] != before[m] {
				w.Fatalf("%d %s", after[m]-before[m], m)
			}
		}
		if opened, open := w.WatchStreams("a"); opened != 1 || open != 1 {
			w.Fatalf("%d watch streams opened, %d open", opened, open)
		}
		if err := w.Revoke(w.leaseOf(a)); err != nil {
			w.Fatal(err)
		}
		w.within(ttl/3+50*time.Millisecond, "all are lost", func() bool {
			for _, l := range held {
				if l.Held() || l.Context().Err() == nil {
					return false
				}
			}
			return true
		})
	})
}
