package aegis_test

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"aegis"
	"aegis/fence"
	"aegis/internal/etcdsim"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// memoryGuard is a guard that keeps its records in memory by the rules that durable guards follow.
type memoryGuard map[string]fence.Record

func (g memoryGuard) Advance(_ context.Context, terms ...aegis.Term) error {
	for _, t := range terms {
		r, err := g[t.Election].Advance(t)
		if err != nil {
			return err
		}
		g[t.Election] = r
	}
	return nil
}

func TestTrustEndsInTime(t *testing.T) {
	t.Run("CutLeaderStopsBeforeItsRivalCanWin", func(t *testing.T) {
		// With no expiry tick the lease ends on the dot, the earliest that etcd may.
		for _, dir := range []etcdsim.Direction{etcdsim.ToServer, etcdsim.FromServer, etcdsim.Both} {
			simulate(t, func(w *world) {
				a, b := w.join("a"), w.join("b")
				led := w.lead(a, "boss")
				r := w.await(w.ctx, b.Election("boss"))
				time.Sleep(ttl) // some renewals
				w.Cut("a", dir)
				cut := time.Now()
				lost := w.within(ttl, "a stops", func() bool { return led.Context().Err() != nil })
				if led.Held() {
					w.Fatal("context ended, but held")
				}
				if w.won(r) {
					w.Fatal("the rival won before the leader's context ended")
				}
				if led.Left() != 0 {
					w.Fatalf("%v left of a term that is over", led.Left())
				}
				w.within(2*ttl+time.Second, "b leads", func() bool { return w.won(r) })
				if left := r.led.Left(); left <= 0 || left > ttl-ttl/5 {
					w.Fatalf("%v left", left)
				}
				leaseEnd := ttl // after the cut, at the latest
				if dir == etcdsim.FromServer {
					leaseEnd += lost // renewals went on arriving while trust lasted; only their answers were lost
				}
				if took := time.Since(cut); took > leaseEnd+time.Second {
					w.Fatalf("direction %v: the new leader came %v after the cut", dir, took)
				}
				if margin := time.Since(cut) - lost; margin < ttl/5-10*time.Millisecond {
					w.Fatalf("only %v between the end of trust and the rival's win", margin)
				}
				if r.led.Token <= led.Token {
					w.Fatalf("token %d after %d", r.led.Token, led.Token)
				}
			}, etcdsim.WithExpiryTick(0))
		}
	})
	t.Run("SlowRenewalDoesNotExtendTrust", func(t *testing.T) {
		// The answer to a renewal comes late; the server counted from the request.
		simulate(t, func(w *world) {
			// A margin so small that it does not hide what trust is counted from.
			a := w.join("a", func(c *aegis.Config) { c.Margin = 10 * time.Millisecond })
			b := w.join("b")
			led := w.lead(a, "boss")
			r := w.await(w.ctx, b.Election("boss"))
			w.Intercept("a", func(c etcdsim.Call) (v etcdsim.Verdict) {
				if c.Method == "LeaseKeepAlive" {
					v.DelayReply = 300 * time.Millisecond // less than TTL/6
				}
				return v
			})
			time.Sleep(ttl)
			calls := w.Calls("a")["LeaseKeepAlive"]
			w.within(ttl, "a renewal is under way", func() bool { return w.Calls("a")["LeaseKeepAlive"] > calls })
			time.Sleep(10 * time.Millisecond)
			w.Cut("a", etcdsim.ToServer) // the next ones do not arrive
			for !w.won(r) {
				if time.Sleep(time.Millisecond); w.won(r) && led.Held() {
					w.Fatal("two leaders")
				}
				synctest.Wait()
			}
			if led.Context().Err() == nil {
				w.Fatal("the rival won before the leader's context ended")
			}
		}, etcdsim.WithExpiryTick(0))
	})
	t.Run("LateReplyDoesNotRevive", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a")
			led := w.lead(a, "boss")
			lease := w.leaseOf(a)
			// Every renewal takes effect at once and is answered only after trust has ended.
			w.Intercept("a", func(c etcdsim.Call) (v etcdsim.Verdict) {
				if c.Method == "LeaseKeepAlive" {
					v.DelayReply = 2 * ttl
				}
				return v
			})
			w.within(ttl, "a stops", func() bool { return !led.Held() })
			for range 3000 {
				time.Sleep(time.Millisecond)
				if led.Held() {
					w.Fatal("held again")
				}
			}
			w.Intercept("a", nil)
			w.within(2*ttl, "a is back under another lease", func() bool { return a.Health().Ready() && w.leaseOf(a) != lease })
		})
	})
	t.Run("LeaseRevokedUnderALiarEndsWithinTwoSeconds", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a", func(c *aegis.Config) { c.TTL = 30 * time.Second })
			led := w.lead(a, "boss")
			w.AckRenewals("a", true)
			if err := w.Revoke(w.leaseOf(a)); err != nil {
				w.Fatal(err)
			}
			took := w.within(2*time.Second, "the term ends", func() bool { return led.Context().Err() != nil })
			w.Logf("ended after %v: %v", took, context.Cause(led.Context()))
		})
	})
	t.Run("RevokedLeaseEndsWithTheNextRenewalThoughNoWatchTells", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a", func(c *aegis.Config) { c.TTL = 30 * time.Second })
			led := w.lead(a, "boss")
			time.Sleep(time.Second)
			w.SilenceWatches("a")
			w.Intercept("a", func(c etcdsim.Call) (v etcdsim.Verdict) {
				if txn, ok := c.Request.(*pb.TxnRequest); ok && len(txn.Success) > 3 {
					v.DropRequest = true // and no list
				}
				return v
			})
			_ = w.Revoke(w.leaseOf(a))
			w.within(10*time.Second, "the term ends", func() bool { return led.Context().Err() != nil })
		})
	})
	t.Run("EtcdStoppedForTwiceTheTTL", func(t *testing.T) {
		simulate(t, func(w *world) {
			guard := memoryGuard{}
			elect := func(n *aegis.Node) *aegis.Election { return n.Election("boss", aegis.WithGuards(guard)) }
			a, b := w.join("a"), w.join("b")
			led, err := elect(a).Campaign(w.ctx)
			if err != nil {
				w.Fatal(err)
			}
			r := w.await(w.ctx, elect(b))
			time.Sleep(ttl)
			w.Stop()
			stopped := w.within(ttl-ttl/5, "the leader stops by itself", func() bool { return led.Context().Err() != nil })
			if stopped > ttl-ttl/5 {
				w.Fatalf("trust ended %v after the stop", stopped)
			}
			time.Sleep(2 * ttl)
			w.Start()
			w.within(ttl+time.Second, "b leads", func() bool { return w.won(r) })
			if r.led.Token <= led.Token {
				w.Fatalf("token %d after %d", r.led.Token, led.Token)
			}
			// Before the new leader's first write.
			w.mustIs(guard["boss"].Admit(led.Term), aegis.ErrFenced)
			w.within(ttl, "a is back", func() bool { return a.Health().Ready() })
		})
	})
	t.Run("ChangeOfEtcdsLeaderIsNoLoss", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a")
			led := w.lead(a, "boss")
			for range 5 {
				w.LeaderChange()
				time.Sleep(ttl)
			}
			if !led.Held() {
				w.Fatalf("lost: %v", context.Cause(led.Context()))
			}
		})
	})
}

func TestClocks(t *testing.T) {
	const long = 30 * time.Second
	join := func(w *world, id string) *aegis.Node {
		return w.join(id, func(c *aegis.Config) { c.TTL = long })
	}
	t.Run("SleepingMachineIsNotHeldWhenItWakes", func(t *testing.T) {
		simulate(t, func(w *world) {
			led := w.lead(join(w, "a"), "boss")
			time.Sleep(time.Second)
			w.Clock("a").Sleep(time.Minute)
			if led.Held() {
				w.Fatal("held after a minute's sleep")
			}
			w.within(50*time.Millisecond, "the context ends", func() bool { return led.Context().Err() != nil })
		})
	})
	t.Run("SleepEndsTheContextWithoutAnybodyAsking", func(t *testing.T) {
		simulate(t, func(w *world) {
			led := w.lead(join(w, "a"), "boss")
			w.Clock("a").Sleep(time.Minute)
			w.within(50*time.Millisecond, "the context ends", func() bool { return led.Context().Err() != nil })
		})
	})
	t.Run("ShortSleepCountsInFull", func(t *testing.T) {
		simulate(t, func(w *world) {
			led := w.lead(join(w, "a"), "boss")
			w.Cut("a", etcdsim.Both)
			began := time.Now()
			w.Clock("a").Sleep(15 * time.Second)
			w.within(long, "the term ends", func() bool { return led.Context().Err() != nil })
			if took := time.Since(began) + 15*time.Second; took > long-long/5+time.Second/10 {
				w.Fatalf("ended %v after the grant", took)
			}
		})
	})
	t.Run("WallClockSetEitherWayChangesNothing", func(t *testing.T) {
		for _, d := range []time.Duration{-time.Hour, time.Hour, -60 * time.Second, 60 * time.Second} {
			simulate(t, func(w *world) {
				led := w.lead(join(w, "a"), "boss")
				time.Sleep(time.Second)
				w.Clock("a").SetWall(d)
				time.Sleep(3 * long)
				if !led.Held() {
					w.Fatalf("wall clock set by %v: lost: %v", d, context.Cause(led.Context()))
				}
			})
		}
	})
	t.Run("WallClockSetBackDoesNotExtendTrust", func(t *testing.T) {
		simulate(t, func(w *world) {
			led := w.lead(join(w, "a"), "boss")
			w.Cut("a", etcdsim.Both)
			w.Clock("a").SetWall(-time.Hour)
			w.within(long-long/5, "the term ends", func() bool { return led.Context().Err() != nil })
		})
	})
	t.Run("WithARivalNoLateWriteLands", func(t *testing.T) {
		simulate(t, func(w *world) {
			guard := memoryGuard{}
			a, b := join(w, "a"), join(w, "b")
			led, err := a.Election("boss", aegis.WithGuards(guard)).Campaign(w.ctx)
			if err != nil {
				w.Fatal(err)
			}
			r := w.await(w.ctx, b.Election("boss", aegis.WithGuards(guard)))
			w.Cut("a", etcdsim.Both) // a sleeping machine is off the net as well
			w.Clock("a").Sleep(long)
			time.Sleep(long + time.Second) // for etcd and b
			w.within(time.Second, "b leads", func() bool { return w.won(r) })
			w.mustIs(guard["boss"].Admit(led.Term), aegis.ErrFenced)
			if err := guard["boss"].Admit(r.led.Term); err != nil {
				w.Fatal(err)
			}
		})
	})
}

func TestWatch(t *testing.T) {
	t.Run("WaiterAndObserverSurviveCompaction", func(t *testing.T) {
		simulate(t, func(w *world) {
			a, b := w.join("a"), w.join("b")
			led := w.lead(a, "boss")
			r := w.await(w.ctx, b.Election("boss"))
			var seen []aegis.Term
			ctx, stop := context.WithCancel(w.ctx)
			defer stop()
			go func() {
				for term, err := range b.Election("boss").Observe(ctx) {
					if err != nil {
						return
					}
					w.mu.Lock()
					seen = append(seen, term)
					w.mu.Unlock()
				}
			}()
			w.queue(1)
			w.SilenceWatches("b")
			if err := led.Resign(w.ctx); err != nil {
				w.Fatal(err)
			}
			cli := w.Client("c")
			for range 20 {
				if _, err := cli.Put(w.ctx, "elsewhere", "x"); err != nil {
					w.Fatal(err)
				}
			}
			if err := w.Compact(w.Revision()); err != nil {
				w.Fatal(err)
			}
			w.Heal("b")
			w.within(ttl, "b leads", func() bool { return w.won(r) })
			w.within(ttl, "b observes itself", func() bool {
				w.mu.Lock()
				defer w.mu.Unlock()
				return len(seen) > 0 && seen[len(seen)-1] == r.led.Term
			})
			if got := w.keys("candidate/"); len(got) != 0 {
				w.Fatalf("candidate keys left: %q", got)
			}
		})
	})
	t.Run("SilentWatchIsNoticed", func(t *testing.T) {
		simulate(t, func(w *world) {
			a, b := w.join("a"), w.join("b")
			led := w.lead(a, "boss")
			r := w.await(w.ctx, b.Election("boss"))
			w.queue(1)
			w.SilenceWatches("b")
			if err := led.Resign(w.ctx); err != nil {
				w.Fatal(err)
			}
			w.within(2*ttl, "b leads by listing", func() bool { return w.won(r) })
		})
	})
	t.Run("KeyThatChangedHandsUnseenEndsTheTermOnRelisting", func(t *testing.T) {
		simulate(t, func(w *world) {
			a, b := w.join("a"), w.join("b")
			led := w.lead(a, "boss")
			w.shown(a, led)
			w.SilenceWatches("a")
			if err := aegis.Open(w.Client("ops"), "").Evict(w.ctx, led.Term); err != nil {
				w.Fatal(err)
			}
			rival := w.lead(b, "boss")
			if err := w.Compact(w.Revision()); err != nil { // so that a must list anew and sees the rival's key only
				w.Fatal(err)
			}
			w.Heal("a")
			w.within(ttl, "the old term ends", func() bool { return !led.Held() })
			if !rival.Held() {
				w.Fatal("the rival suffered")
			}
		})
	})
	t.Run("EventOlderThanTheTermEndsNothing", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a")
			w.SilenceWatches("a") // what happens from here on is seen late, all at once
			for range 3 {
				led := w.lead(a, "boss")
				if err := led.Resign(w.ctx); err != nil {
					w.Fatal(err)
				}
			}
			led := w.lead(a, "boss")
			w.Heal("a")
			time.Sleep(3 * ttl)
			if !led.Held() {
				w.Fatalf("lost: %v", context.Cause(led.Context()))
			}
		})
	})
	t.Run("ObserveStartsWithThePresentAndShowsVacancy", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a")
			led := w.lead(a, "boss")
			var seen []aegis.Term
			for term, err := range a.Election("boss").Observe(w.ctx) {
				if err != nil {
					w.Fatal(err)
				}
				if len(seen) == 0 && term != led.Term {
					continue // the watch has not shown the win yet
				}
				if seen = append(seen, term); len(seen) == 2 {
					break
				}
				if err := led.Resign(w.ctx); err != nil {
					w.Fatal(err)
				}
			}
			if seen[0] != led.Term || seen[1] != (aegis.Term{Election: "boss"}) {
				w.Fatalf("observed %v", seen)
			}
		})
	})
}

func TestWaiter(t *testing.T) {
	t.Run("WhoseLeaseIsRevokedReentersAndClaimsNothing", func(t *testing.T) {
		simulate(t, func(w *world) {
			a, b := w.join("a"), w.join("b")
			led := w.lead(a, "boss")
			r := w.await(w.ctx, b.Election("boss"))
			w.queue(1)
			if err := w.Revoke(w.leaseOf(b)); err != nil {
				w.Fatal(err)
			}
			// Then the leader's key goes, before b has noticed.
			if _, err := w.Client("c").Delete(w.ctx, aegis.DefaultPrefix+"election/boss"); err != nil {
				w.Fatal(err)
			}
			w.within(ttl+time.Second, "b leads", func() bool { return w.won(r) })
			w.within(ttl, "a has noticed", func() bool { return !led.Held() })
			kv := w.Dump(aegis.DefaultPrefix + "election/boss")
			if len(kv) != 1 || kv[0].Value != "b" || kv[0].Modified != r.led.Token {
				w.Fatalf("b claims %v; etcd has %v", r.led.Term, kv)
			}
			if _, alive := w.Leases()[kv[0].Lease]; !alive || kv[0].Lease == clientv3.NoLease {
				w.Fatalf("b's key has a dead lease")
			}
		})
	})
	t.Run("QueueIsOrderedByPriorityThenAge", func(t *testing.T) {
		simulate(t, func(w *world) {
			led := w.lead(w.join("a"), "boss")
			results := map[string]*result{}
			for i, p := range []int{0, 0, 5} {
				id := string(rune('b' + i))
				results[id] = w.await(w.ctx, w.join(id).Election("boss", aegis.WithPriority(p)))
				w.within(time.Second, id+" waits", func() bool { return len(w.keys("candidate/")) == i+1 })
			}
			var order []string
			for len(order) < 3 {
				if err := led.Resign(w.ctx); err != nil {
					w.Fatal(err)
				}
				w.within(time.Second, "the next leads", func() bool {
					for id, r := range results {
						if w.won(r) {
							led = r.led
							order = append(order, id)
							delete(results, id)
							return true
						}
					}
					return false
				})
			}
			if order[0] != "d" || order[1] != "b" || order[2] != "c" {
				w.Fatalf("order %v", order)
			}
		})
	})
	t.Run("DeadHeadOfTheQueueHoldsNobodyUp", func(t *testing.T) {
		simulate(t, func(w *world) {
			led := w.lead(w.join("a"), "boss")
			w.await(w.ctx, w.join("b").Election("boss"))
			w.queue(1)
			r := w.await(w.ctx, w.join("c").Election("boss"))
			w.queue(2)
			w.Cut("b", etcdsim.Both)
			if err := led.Resign(w.ctx); err != nil {
				w.Fatal(err)
			}
			w.within(100*time.Millisecond, "c leads", func() bool { return w.won(r) })
		})
	})
	t.Run("WhoseKeyIsDeletedReenters", func(t *testing.T) {
		simulate(t, func(w *world) {
			w.lead(w.join("a"), "boss")
			w.await(w.ctx, w.join("b").Election("boss"))
			for range 3 {
				w.queue(1)
				if _, err := w.Client("ops").Delete(w.ctx, aegis.DefaultPrefix+w.keys("candidate/")[0]); err != nil {
					w.Fatal(err)
				}
			}
			w.queue(1)
		})
	})
	t.Run("WithAStaleViewDoesNotTryAgainAndAgain", func(t *testing.T) {
		simulate(t, func(w *world) {
			a, b := w.join("a"), w.join("b")
			w.SilenceWatches("b") // it goes on showing a vacant election
			w.lead(a, "boss")
			w.await(w.ctx, b.Election("boss"))
			time.Sleep(ttl / 4)
			if n := w.Calls("b")["Txn"]; n > 5 { // joining is two, trying once, queuing
				w.Fatalf("%d transactions", n)
			}
		})
	})
	t.Run("CandidateKeyThatIsWrittenLateIsSwept", func(t *testing.T) {
		simulate(t, func(w *world) {
			w.lead(w.join("a"), "boss")
			b := w.join("b")
			w.Intercept("b", once(func(c etcdsim.Call) bool {
				txn, ok := c.Request.(*pb.TxnRequest)
				return ok && len(txn.Success) == 1 && strings.Contains(string(txn.Success[0].GetRequestPut().GetKey()), "candidate/")
			}, etcdsim.Verdict{DelayRequest: 300 * time.Millisecond}))
			ctx, cancel := context.WithTimeout(w.ctx, 100*time.Millisecond)
			defer cancel()
			_, err := b.Election("boss").Await(ctx)
			w.mustIs(err, context.DeadlineExceeded)
			w.within(time.Second, "the late key", func() bool { return len(w.keys("candidate/")) == 1 })
			w.within(100*time.Millisecond, "it is swept", func() bool { return len(w.keys("candidate/")) == 0 })
		})
	})
	t.Run("CancelledAwaitLeavesNothing", func(t *testing.T) {
		simulate(t, func(w *world) {
			w.lead(w.join("a"), "boss")
			b := w.join("b")
			ctx, cancel := context.WithCancel(w.ctx)
			r := w.await(ctx, b.Election("boss"))
			w.queue(1)
			cancel()
			w.within(100*time.Millisecond, "Await returns", func() bool { return w.over(r) })
			w.mustIs(r.err, context.Canceled)
			if got := w.keys("candidate/"); len(got) != 0 {
				w.Fatalf("keys left: %q", got)
			}
		})
	})
}
