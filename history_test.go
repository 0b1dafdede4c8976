package aegis_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"aegis"
	"aegis/internal/etcdsim"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// What a second reading found: histories of etcd that replace each other, and answers that come late.
func TestFoundByReadingAgain(t *testing.T) {
	t.Run("ViewOfTheOldHistoryIsForgottenWhenTheOffsetIsRaised", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a")
			cli := w.Client("x")
			snap := w.Snapshot()
			for range 50 { // watched keys, so that the old view is far ahead
				if _, err := cli.Put(w.ctx, aegis.DefaultPrefix+"request/other", "x"); err != nil {
					w.Fatal(err)
				}
			}
			time.Sleep(ttl)
			w.Restore(snap)
			w.within(2*ttl, "a halts", func() bool { return w.saw("a", aegis.EventHalted) })
			time.Sleep(3 * ttl)
			if _, err := aegis.Open(cli, "").RaiseToken(w.ctx, 0); err != nil {
				w.Fatal(err)
			}
			var led *aegis.Leadership
			w.within(5*ttl, "a leads", func() (ok bool) {
				l, err := a.Election("boss").Campaign(w.ctx)
				led = l
				return err == nil
			})
			if time.Sleep(5 * ttl); !led.Held() {
				w.Fatalf("lost: %v; keys %q", context.Cause(led.Context()), w.keys("election/"))
			}
		})
	})
	t.Run("LateAnswerFromBeforeTheRaiseDoesNotHaltAnew", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a")
			led := w.lead(a, "boss")
			cli := w.Client("x")
			snap := w.Snapshot()
			for range 50 {
				if _, err := cli.Put(w.ctx, aegis.DefaultPrefix+"request/other", "x"); err != nil {
					w.Fatal(err)
				}
			}
			time.Sleep(ttl)
			w.Restore(snap)
			if _, err := aegis.Open(cli, "").RaiseToken(w.ctx, 0); err != nil { // the operator is quick
				w.Fatal(err)
			}
			w.Intercept("a", once(func(c etcdsim.Call) bool { return c.Method == "Txn" }, etcdsim.Verdict{DelayReply: 650 * time.Millisecond}))
			_, err := led.Commit(w.ctx, clientv3.OpPut("loot", "1")) // its answer comes when the raise has been taken
			w.mustIs(err, aegis.ErrUnknown)
			w.within(5*ttl, "a is back", func() bool { return a.Health().Ready() })
			if time.Sleep(5 * ttl); !a.Health().Ready() {
				w.Fatalf("halted anew: %+v", a.Health())
			}
		})
	})
	t.Run("OneSnapshotRestoredAndRaisedTwiceGivesGrowingTokens", func(t *testing.T) {
		// The offset's key has the same revision in both histories, so its value must not come from the old one.
		simulate(t, func(w *world) {
			a := w.join("a")
			cli := w.Client("x")
			ops := aegis.Open(cli, "")
			snap := w.Snapshot()
			put := func(n int) {
				var wg sync.WaitGroup
				for range n {
					wg.Go(func() { _, _ = cli.Put(w.ctx, "elsewhere", "x") })
				}
				wg.Wait()
			}
			w.Restore(snap)
			if _, err := ops.RaiseToken(w.ctx, 1000); err != nil {
				w.Fatal(err)
			}
			time.Sleep(3 * ttl)
			put(2000)
			led := w.lead(a, "boss")
			_ = led.Resign(w.ctx)
			time.Sleep(ttl)
			w.Intercept("a", func(c etcdsim.Call) (v etcdsim.Verdict) {
				if txn, ok := c.Request.(*pb.TxnRequest); ok && len(txn.Compare) == 0 && len(txn.Success) == 5 {
					v.DelayRequest = 400 * time.Millisecond // a list
				}
				return v
			})
			w.Restore(snap)
			if _, err := ops.RaiseToken(w.ctx, led.Token); err != nil {
				w.Fatal(err)
			}
			put(100)
			b := w.join("b")
			w.within(2*ttl, "a halts", func() bool { return w.saw("a", aegis.EventHalted) })
			put(2500)
			theirs := w.lead(b, "fresh")
			_ = theirs.Resign(w.ctx)
			w.within(5*ttl, "a leads", func() bool {
				l, err := a.Election("fresh").Campaign(w.ctx)
				if err == nil && l.Token <= theirs.Token {
					w.Fatalf("token %d after %d", l.Token, theirs.Token)
				}
				return err == nil
			})
		})
	})
	t.Run("CommitSentAgainAfterARivalsCommitIsUnknownNotRefused", func(t *testing.T) {
		simulate(t, func(w *world) {
			a, b := w.join("a"), w.join("b")
			led := w.lead(a, "boss")
			r := w.await(w.ctx, b.Election("boss"))
			w.queue(1)
			lease := w.leaseOf(a)
			w.Intercept("a", once(func(c etcdsim.Call) bool { return c.Method == "Txn" },
				etcdsim.Verdict{FailAfter: status.Error(codes.Canceled, "proxy"), Applied: func() { _ = w.Revoke(lease) }}))
			go func() {
				for !w.won(r) {
					time.Sleep(time.Millisecond)
				}
				if _, err := r.led.Commit(w.ctx, clientv3.OpPut("loot2", "b")); err != nil {
					w.Error(err)
				}
			}()
			_, err := led.Commit(w.ctx, clientv3.OpPut("loot", "1"))
			if len(w.Dump("loot")) != 2 {
				w.Fatal("not both done; the case is not tried")
			}
			if !errors.Is(err, aegis.ErrUnknown) || errors.Is(err, aegis.ErrFenced) {
				w.Fatalf("%v", err)
			}
		}, etcdsim.WithResend())
	})
	t.Run("NewWaiterOnASilentWatchDoesNotWaitForTheLongPeriod", func(t *testing.T) {
		simulate(t, func(w *world) {
			long := func(c *aegis.Config) { c.TTL = 60 * time.Second }
			a := w.join("a", long)
			w.lead(a, "boss")
			time.Sleep(19 * time.Second)
			b := w.join("b", long)
			time.Sleep(2 * time.Second)
			w.Cut("a", etcdsim.Both)
			time.Sleep(58*time.Second + 400*time.Millisecond)
			w.SilenceWatches("b")
			r := w.await(w.ctx, b.Election("boss"))
			w.within(2*time.Minute, "the key is gone", func() bool { return len(w.keys("election/")) == 0 || w.won(r) })
			w.within(1100*time.Millisecond, "b leads", func() bool { return w.won(r) })
		})
	})
	t.Run("WatchThatNeverOpensIsNotWaitedFor", func(t *testing.T) {
		simulate(t, func(w *world) {
			a, b := w.join("a"), w.join("b")
			led := w.lead(a, "boss")
			r := w.await(w.ctx, b.Election("boss"))
			w.queue(1)
			w.SilenceWatches("b")
			time.Sleep(5 * time.Second) // the silence is found, a new stream is opened, and is as silent
			_ = led.Resign(w.ctx)
			w.within(5*time.Second, "b leads by listing", func() bool { return w.won(r) })
		})
	})
	t.Run("TransferThatComesTooLateSaysSo", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a")
			var led *aegis.Leadership
			stop := make(chan struct{})
			w.run(w.ctx, a.Election("boss"), func(_ context.Context, l *aegis.Leadership) error {
				w.mu.Lock()
				led = l
				w.mu.Unlock()
				<-stop
				return nil
			})
			w.within(time.Second, "a leads", func() bool { w.mu.Lock(); defer w.mu.Unlock(); return led != nil })
			w.await(w.ctx, w.join("b").Election("boss"))
			w.queue(1)
			w.await(w.ctx, w.join("c").Election("boss"))
			w.queue(2)
			close(stop)
			w.within(time.Second, "the term has ended", func() bool { return !led.Held() })
			w.mustIs(led.Transfer(w.ctx, "c"), aegis.ErrLost)
		})
	})
	t.Run("TransferRequestedWhileTheGuardsOfAnAwaitAdvanceIsDone", func(t *testing.T) {
		simulate(t, func(w *world) {
			a, b, c := w.join("a"), w.join("b"), w.join("c")
			slow := guardFunc(func(context.Context, ...aegis.Term) error { time.Sleep(200 * time.Millisecond); return nil })
			go func() { _, _ = a.Election("boss", aegis.WithGuards(slow)).Campaign(w.ctx) }()
			w.within(time.Second, "a has won", func() bool { return len(w.keys("election/")) == 1 })
			rb := w.await(w.ctx, b.Election("boss"))
			w.queue(1)
			rc := w.await(w.ctx, c.Election("boss"))
			w.queue(2)
			if err := aegis.Open(w.Client("ops"), "").Request(w.ctx, mustLeader(w, b), "c"); err != nil {
				w.Fatal(err)
			}
			w.within(time.Second, "c leads", func() bool { return w.won(rc) })
			if w.over(rb) {
				w.Fatal("b led, but c was asked for")
			}
		})
	})
	t.Run("RivalsKeyOfTheSameRevisionInARestoredEtcdIsLeftAlone", func(t *testing.T) {
		for name, act := range map[string]func(w *world, led *aegis.Leadership) error{
			"Resign":   func(w *world, led *aegis.Leadership) error { return led.Resign(w.ctx) },
			"Transfer": func(w *world, led *aegis.Leadership) error { return led.Transfer(w.ctx, "c") },
			"Commit": func(w *world, led *aegis.Leadership) error {
				_, err := led.Commit(w.ctx, clientv3.OpPut("loot", "stale"))
				return err
			},
		} {
			t.Run(name, func(t *testing.T) {
				simulate(t, func(w *world) {
					a := w.join("a")
					cli := w.Client("x")
					snap := w.Snapshot()
					put := func(until int64) {
						for w.Revision() < until {
							if _, err := cli.Put(w.ctx, "elsewhere", "x"); err != nil {
								w.Fatal(err)
							}
						}
					}
					put(30)
					led := w.lead(a, "boss")
					w.Restore(snap)
					b, c := w.join("b"), w.join("c")
					put(led.Token - 1)
					rival := w.lead(b, "boss")
					if rival.Token != led.Token || !led.Held() {
						w.Fatalf("tokens %d and %d, held %v: the case is not tried", rival.Token, led.Token, led.Held())
					}
					w.await(w.ctx, c.Election("boss"))
					w.queue(1)
					err := act(w, led)
					t.Log(err)
					if kv := w.Dump(aegis.DefaultPrefix + "election/boss"); len(kv) != 1 || kv[0].Modified != rival.Token || kv[0].Value != "b" {
						w.Fatalf("the rival's key is %v", kv)
					}
					if kv := w.Dump("loot"); len(kv) != 0 {
						w.Fatalf("written: %v", kv)
					}
				})
			})
		}
	})
	t.Run("EvictionSentTwiceIsOneEviction", func(t *testing.T) {
		simulate(t, func(w *world) {
			led := w.lead(w.join("a"), "boss")
			n := 0
			w.Intercept("ops", func(c etcdsim.Call) (v etcdsim.Verdict) {
				if n++; n == 2 {
					v.FailAfter = status.Error(codes.Canceled, "proxy")
				}
				return v
			})
			if err := aegis.Open(w.Client("ops"), "").Evict(w.ctx, led.Term); err != nil {
				w.Fatal(err)
			}
			w.within(time.Second, "the term ends", func() bool { return !led.Held() })
		}, etcdsim.WithResend())
	})
}
