package aegis_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"aegis"
	"aegis/internal/etcdsim"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

func TestResign(t *testing.T) {
	t.Run("WithACancelledContextIsAnErrorFirstAndDoneSecond", func(t *testing.T) {
		simulate(t, func(w *world) {
			led := w.lead(w.join("a"), "boss")
			dead, cancel := context.WithCancel(w.ctx)
			cancel()
			w.mustIs(led.Resign(dead), context.Canceled)
			if led.Held() || led.Context().Err() == nil {
				w.Fatal("the term goes on")
			}
			for range 2 {
				if err := led.Resign(w.ctx); err != nil {
					w.Fatal(err)
				}
				if got := w.keys("election/"); len(got) != 0 {
					w.Fatalf("keys left: %q", got)
				}
			}
		})
	})
	t.Run("ThatIsLateLeavesTheRivalsKeyAlone", func(t *testing.T) {
		simulate(t, func(w *world) {
			led := w.lead(w.join("a"), "boss")
			r := w.await(w.ctx, w.join("b").Election("boss"))
			w.Cut("a", etcdsim.Both)
			w.within(2*ttl, "b leads", func() bool { return w.won(r) })
			w.Heal("a")
			if err := led.Resign(w.ctx); err != nil {
				w.Fatal(err)
			}
			time.Sleep(ttl)
			if !r.led.Held() || w.Dump(aegis.DefaultPrefix + "election/boss")[0].Modified != r.led.Token {
				w.Fatal("the rival's key is gone")
			}
		})
	})
	t.Run("FailedIsMadeGoodByTheSweep", func(t *testing.T) {
		simulate(t, func(w *world) {
			led := w.lead(w.join("a"), "boss")
			w.Intercept("a", once(func(c etcdsim.Call) bool { return c.Method == "Txn" }, etcdsim.Verdict{DropRequest: true}))
			w.mustIs(led.Resign(w.ctx), context.DeadlineExceeded)
			w.within(ttl, "the key is gone", func() bool { return len(w.keys("election/")) == 0 })
		})
	})
	t.Run("IsOneTransaction", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a")
			before := w.Calls("a")
			led := w.lead(a, "boss")
			if got := w.Calls("a")["Txn"] - before["Txn"]; got != 1 {
				w.Fatalf("a campaign is %d transactions", got)
			}
			if err := led.Resign(w.ctx); err != nil {
				w.Fatal(err)
			}
			after := w.Calls("a")
			if got := after["Txn"] - before["Txn"]; got != 2 {
				w.Fatalf("a campaign and a resignation are %d transactions", got)
			}
			led = w.lead(a, "boss")
			w.shown(a, led)
			w.SilenceWatches("a") // it will not show that the key is gone
			before = w.Calls("a")
			_ = led.Resign(w.ctx)
			w.lead(a, "boss")
			time.Sleep(ttl / 10)
			if got := w.Calls("a")["Txn"] - before["Txn"]; got != 2 {
				w.Fatalf("behind a lagging watch they are %d transactions", got)
			}
			for method, n := range after {
				if method != "Txn" && method != "LeaseKeepAlive" && method != "WatchProgress" && n != before[method] {
					w.Fatalf("besides, %d %s", n-before[method], method)
				}
			}
		})
	})
}

func TestTransfer(t *testing.T) {
	// three joins leader a and waiters b (older) and c.
	three := func(w *world) (led *aegis.Leadership, b, c *result) {
		led = w.lead(w.join("a"), "boss")
		b = w.await(w.ctx, w.join("b").Election("boss"))
		w.queue(1)
		c = w.await(w.ctx, w.join("c").Election("boss"))
		w.queue(2)
		return led, b, c
	}
	t.Run("GoesToTheNamedOneAndNotToTheNext", func(t *testing.T) {
		simulate(t, func(w *world) {
			led, b, c := three(w)
			before := w.Revision()
			for range 2 {
				if err := led.Transfer(w.ctx, "c"); err != nil {
					w.Fatal(err)
				}
			}
			w.within(20*time.Millisecond, "c leads", func() bool { return w.won(c) })
			if w.over(b) || led.Held() || !c.led.Held() {
				w.Fatal("b's wait is over, or a holds, or c does not")
			}
			if w.Revision() != before+1 || c.led.Token != before+1 {
				w.Fatalf("%d transactions; c's token is %d", w.Revision()-before, c.led.Token)
			}
			if len(w.keys("candidate/")) != 1 {
				w.Fatalf("candidates: %q", w.keys("candidate/"))
			}
			if term, err := w.nodes[0].Election("boss").Leader(w.ctx); err != nil || term != c.led.Term {
				w.Fatalf("leader %v, %v; want %v", term, err, c.led.Term)
			}
		})
	})
	t.Run("ToSomebodyWhoDoesNotWaitIsAnErrorAndTheTermGoesOn", func(t *testing.T) {
		simulate(t, func(w *world) {
			led, _, _ := three(w)
			for _, id := range []aegis.NodeID{"a", "nobody", ""} {
				if err := led.Transfer(w.ctx, id); err == nil {
					w.Fatalf("transferred to %q", id)
				}
			}
			if !led.Held() {
				w.Fatal("the term is over")
			}
		})
	})
	t.Run("ToASuccessorWhoseLeaseDiesAtThatMoment", func(t *testing.T) {
		for name, verdict := range map[string]func(w *world) etcdsim.Verdict{
			"Before": func(w *world) etcdsim.Verdict {
				_ = w.Revoke(w.leaseOf(w.nodes[2]))
				return etcdsim.Verdict{}
			},
			"After": func(w *world) etcdsim.Verdict {
				lease := w.leaseOf(w.nodes[2])
				return etcdsim.Verdict{Applied: func() { _ = w.Revoke(lease) }}
			},
			"CutOff": func(w *world) etcdsim.Verdict {
				w.Cut("c", etcdsim.Both)
				return etcdsim.Verdict{}
			},
		} {
			t.Run(name, func(t *testing.T) {
				simulate(t, func(w *world) {
					led, b, c := three(w)
					w.Intercept("a", func(call etcdsim.Call) etcdsim.Verdict {
						if txn, ok := call.Request.(*pb.TxnRequest); ok && strings.Contains(string(txn.Success[0].GetRequestPut().GetValue()), "c") {
							w.Intercept("a", nil)
							return verdict(w)
						}
						return etcdsim.Verdict{}
					})
					err := led.Transfer(w.ctx, "c")
					w.Logf("transfer: %v", err)
					w.within(ttl+time.Second, "somebody leads", func() bool {
						for _, r := range []*result{b, c} {
							if w.won(r) && r.led.Held() {
								return true
							}
						}
						return false
					})
					w.mu.Lock()
					defer w.mu.Unlock()
					if c.done && c.err == nil && c.led.Held() {
						if kv := w.Dump(aegis.DefaultPrefix + "election/boss"); len(kv) != 1 || kv[0].Modified != c.led.Token {
							w.Fatalf("c holds %v; etcd has %v", c.led.Term, kv)
						}
					}
				})
			})
		}
	})
	t.Run("ExecutedTwiceIsOneTransfer", func(t *testing.T) {
		simulate(t, func(w *world) {
			led, _, c := three(w)
			w.Intercept("a", once(func(c etcdsim.Call) bool { return c.Method == "Txn" }, etcdsim.Verdict{Twice: true}))
			if err := led.Transfer(w.ctx, "c"); err != nil {
				w.Fatal(err)
			}
			w.within(20*time.Millisecond, "c leads", func() bool { return w.won(c) && c.led.Held() })
		})
	})
	// Behind a silent watch a believes in what is no longer so, and only the transaction's comparisons can tell.
	for name, c := range map[string]struct {
		change  func(w *world, led *aegis.Leadership, cancelB context.CancelFunc)
		vacated bool // the election is vacant afterwards
	}{
		"ToACandidateThatIsGoneIsRefused": {func(w *world, _ *aegis.Leadership, cancelB context.CancelFunc) {
			cancelB()
			w.within(time.Second, "b has withdrawn", func() bool { return len(w.keys("candidate/")) == 0 })
		}, true},
		"OfATermThatIsOverLeavesTheRivalAlone": {func(w *world, led *aegis.Leadership, _ context.CancelFunc) {
			if err := aegis.Open(w.Client("ops"), "").Evict(w.ctx, led.Term); err != nil {
				w.Fatal(err)
			}
			w.within(time.Second, "b leads", func() bool {
				kv := w.Dump(aegis.DefaultPrefix + "election/boss")
				return len(kv) == 1 && kv[0].Value == "b"
			})
		}, false},
		"UnderAReplacedOffsetIsRefused": {func(w *world, _ *aegis.Leadership, _ context.CancelFunc) {
			if _, err := aegis.Open(w.Client("ops"), "").RaiseToken(w.ctx, 0); err != nil {
				w.Fatal(err)
			}
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			simulate(t, func(w *world) {
				a, b := w.join("a"), w.join("b")
				led := w.lead(a, "boss")
				ctx, cancel := context.WithCancel(w.ctx)
				defer cancel()
				r := w.await(ctx, b.Election("boss"))
				w.within(time.Second, "b waits", func() bool {
					c, err := a.Election("boss").Candidates(w.ctx)
					return err == nil && len(c) == 1
				})
				w.SilenceWatches("a")
				c.change(w, led, cancel)
				if !led.Held() {
					w.Fatal("a has noticed; the comparisons are not tried")
				}
				before := w.Revision()
				if err := led.Transfer(w.ctx, "b"); err == nil {
					w.Fatal("transferred")
				}
				if c.vacated {
					time.Sleep(ttl)
					if kv := w.Dump(aegis.DefaultPrefix + "election/"); len(kv) != 0 || w.Revision() != before+1 {
						w.Fatalf("etcd has %v after %d transactions", kv, w.Revision()-before)
					}
					return
				}
				w.within(time.Second, "b leads", func() bool { return w.won(r) })
				time.Sleep(ttl)
				if kv := w.Dump(aegis.DefaultPrefix + "election/boss"); len(kv) != 1 || !r.led.Held() {
					w.Fatalf("b's key is gone: %v", kv)
				}
				if r.led.Token <= led.Token {
					w.Fatalf("token %d after %d", r.led.Token, led.Token)
				}
			})
		})
	}
	t.Run("OfATermThatIsOverToOneWhoStillWaitsIsRefused", func(t *testing.T) {
		simulate(t, func(w *world) {
			led, _, _ := three(w)
			w.SilenceWatches("a")
			w.SilenceWatches("b")
			w.SilenceWatches("c")
			if err := aegis.Open(w.Client("ops"), "").Evict(w.ctx, led.Term); err != nil {
				w.Fatal(err)
			}
			rival := w.lead(w.join("d"), "boss")
			if err := led.Transfer(w.ctx, "b"); err == nil {
				w.Fatal("transferred")
			}
			if kv := w.Dump(aegis.DefaultPrefix + "election/boss"); len(kv) != 1 || kv[0].Modified != rival.Token {
				w.Fatalf("the rival's key is gone: %v", kv)
			}
		})
	})
	t.Run("ToAWaiterThatHasJustGivenUpIsGivenBack", func(t *testing.T) {
		simulate(t, func(w *world) {
			led := w.lead(w.join("a"), "boss")
			b := w.join("b")
			ctx, cancel := context.WithCancel(w.ctx)
			r := w.await(ctx, b.Election("boss"))
			w.queue(1)
			w.Intercept("b", func(etcdsim.Call) etcdsim.Verdict { // b withdraws while the transfer is on its way
				return etcdsim.Verdict{DelayRequest: 10 * time.Millisecond}
			})
			cancel()
			if err := led.Transfer(w.ctx, "b"); err != nil {
				w.Fatal(err)
			}
			w.within(100*time.Millisecond, "Await returns", func() bool { return w.over(r) })
			w.within(time.Second, "the key is given back", func() bool { return len(w.keys("election/")) == 0 })
		})
	})
}

func TestOperators(t *testing.T) {
	t.Run("RequestIsTakenByTheTermThatItSaw", func(t *testing.T) {
		simulate(t, func(w *world) {
			a, b := w.join("a"), w.join("b")
			led := w.lead(a, "boss")
			r := w.await(w.ctx, b.Election("boss"))
			w.queue(1)
			ops := aegis.Open(w.Client("ops"), "")
			if err := ops.Request(w.ctx, led.Term, "b"); err != nil {
				w.Fatal(err)
			}
			w.within(time.Second, "b leads", func() bool { return w.won(r) })
			if led.Held() {
				w.Fatal("two leaders")
			}
			w.mustIs(ops.Request(w.ctx, led.Term, "b"), aegis.ErrFenced)
			w.within(time.Second, "the request is gone", func() bool { return len(w.keys("request/")) == 0 })
			time.Sleep(ttl)
			if !r.led.Held() {
				w.Fatal("the successor took its predecessor's request")
			}
		})
	})
	t.Run("RequestToAnEarlierTermIsRemovedAndNotTaken", func(t *testing.T) {
		simulate(t, func(w *world) {
			led := w.lead(w.join("a"), "boss")
			if _, err := w.Client("ops").Put(w.ctx, aegis.DefaultPrefix+"request/boss", `{"v":1,"op":"resign","term":1}`); err != nil {
				w.Fatal(err)
			}
			w.within(time.Second, "the request is gone", func() bool { return len(w.keys("request/")) == 0 })
			if !led.Held() {
				w.Fatal("it was taken")
			}
		})
	})
	t.Run("EvictionMeetsOnlyTheTermThatItNames", func(t *testing.T) {
		// The term ends and another begins between the operator's look and the deletion.
		simulate(t, func(w *world) {
			a := w.join("a")
			led := w.lead(a, "boss")
			var next *aegis.Leadership
			w.Intercept("ops", func(c etcdsim.Call) etcdsim.Verdict {
				if txn, ok := c.Request.(*pb.TxnRequest); ok && len(txn.Compare) > 0 {
					_ = led.Resign(w.ctx)
					next = w.lead(a, "boss")
				}
				return etcdsim.Verdict{}
			})
			w.mustIs(aegis.Open(w.Client("ops"), "").Evict(w.ctx, led.Term), aegis.ErrNoLeader)
			if time.Sleep(ttl); !next.Held() {
				w.Fatal("the next term was evicted")
			}
		})
	})
	t.Run("EvictionIsNoticedByTheOwnKeyWatch", func(t *testing.T) {
		simulate(t, func(w *world) {
			led := w.lead(w.join("a"), "boss")
			ops := aegis.Open(w.Client("ops"), "")
			stale := led.Term
			stale.Token--
			w.mustIs(ops.Evict(w.ctx, stale), aegis.ErrFenced)
			if err := ops.Evict(w.ctx, led.Term); err != nil {
				w.Fatal(err)
			}
			w.within(50*time.Millisecond, "the term ends", func() bool { return !led.Held() && led.Context().Err() != nil })
			w.mustIs(ops.Evict(w.ctx, led.Term), aegis.ErrNoLeader)
			_, err := led.Commit(w.ctx, clientv3.OpPut("x", "y"))
			w.mustIs(err, aegis.ErrFenced)
		})
	})
	t.Run("ElectionsShowLeaderQueueAndLastEnd", func(t *testing.T) {
		simulate(t, func(w *world) {
			a, b := w.join("a"), w.join("b")
			led := w.lead(a, "boss")
			_ = led.Resign(w.ctx)
			led = w.lead(a, "boss") // at once: a's watch may not have shown yet how the last term ended
			w.await(w.ctx, b.Election("boss"))
			w.queue(1)
			ops := aegis.Open(w.Client("ops"), "")
			infos, err := ops.Elections(w.ctx)
			if err != nil {
				w.Fatal(err)
			}
			i := infos[0]
			if len(infos) != 1 || i.Term != led.Term || len(i.Candidates) != 1 || i.Candidates[0].Node != "b" || len(i.Faults) != 0 ||
				!strings.HasSuffix(i.LastEnd, ": resigned") || i.LeaseLeft <= 0 || i.PID == 0 {
				w.Fatalf("%+v", infos)
			}
			// A key without a lease is named as a fault and left alone.
			if _, err := w.Client("ops").Put(w.ctx, aegis.DefaultPrefix+"election/ghost", "nobody"); err != nil {
				w.Fatal(err)
			}
			infos, err = ops.Elections(w.ctx)
			if err != nil || len(infos) != 2 || len(infos[1].Faults) != 1 || !strings.Contains(infos[1].Faults[0], "has no lease") {
				w.Fatalf("%+v, %v", infos, err)
			}
			if _, err := b.Election("ghost").Campaign(w.ctx); !errors.Is(err, aegis.ErrNotLeader) {
				w.Fatalf("campaign against a key without a lease: %v", err)
			}
		})
	})
	t.Run("PruneRemovesRecordsOfVacantElectionsOnly", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a")
			w.lead(a, "kept")
			_ = w.lead(a, "gone").Resign(w.ctx)
			removed, err := aegis.Open(w.Client("ops"), "").Prune(w.ctx)
			if err != nil || fmt.Sprint(removed) != "[gone]" {
				w.Fatalf("%v, %v", removed, err)
			}
			if got := w.Dump(aegis.DefaultPrefix + "term/"); len(got) != 1 {
				w.Fatalf("records: %v", got)
			}
		})
	})
	t.Run("MembersAreTheListedNodes", func(t *testing.T) {
		simulate(t, func(w *world) {
			w.join("a", func(c *aegis.Config) { c.Meta = map[string]string{"zone": "x"} })
			w.join("b", func(c *aegis.Config) { c.Unlisted = true })
			members, err := aegis.Open(w.Client("ops"), "").Members(w.ctx)
			if err != nil || len(members) != 1 || members[0].ID != "a" || members[0].Meta["zone"] != "x" || members[0].PID == 0 {
				w.Fatalf("%+v, %v", members, err)
			}
		})
	})
}

func TestRestore(t *testing.T) {
	for name, opts := range map[string][]etcdsim.RestoreOption{"SameClusterID": nil, "OtherClusterID": {etcdsim.AsCluster(42)},
		"OtherClusterIDAndGreaterRevision": {etcdsim.AsCluster(42), etcdsim.BumpRevision(1000)}} {
		t.Run(name, func(t *testing.T) {
			simulate(t, func(w *world) {
				a, b := w.join("a"), w.join("b")
				cli := w.Client("x")
				snap := w.Snapshot()
				led := w.lead(a, "boss")
				var greatest aegis.Token
				for range 10 { // tokens that the snapshot does not know
					if err := led.Resign(w.ctx); err != nil {
						w.Fatal(err)
					}
					led = w.lead(a, "boss")
					greatest = led.Token
				}
				r := w.await(w.ctx, b.Election("boss"))
				time.Sleep(ttl) // so that both have seen the revisions
				w.Restore(snap, opts...)
				w.within(ttl, "the leader stops", func() bool { return led.Context().Err() != nil })
				w.within(2*ttl, "both halt", func() bool { return w.saw("a", aegis.EventHalted) && w.saw("b", aegis.EventHalted) })
				for range 100 {
					time.Sleep(ttl / 10)
					if w.over(r) || len(w.keys("election/")) > 0 {
						w.Fatalf("somebody campaigned: %q, %v", w.keys("election/"), r.err)
					}
					if _, err := a.Election("boss").Campaign(w.ctx); !errors.Is(err, aegis.ErrNotReady) {
						w.Fatalf("campaign: %v", err)
					}
				}
				// An offset that brings new tokens above nothing does not do.
				if _, err := cli.Put(w.ctx, aegis.DefaultPrefix+"meta/token-offset", "1"); err != nil {
					w.Fatal(err)
				}
				if time.Sleep(ttl); a.Health().State != "halted" {
					w.Fatal("an offset of 1 was enough")
				}
				if h := a.Health(); h.State != "halted" || !strings.Contains(h.Waiting, "token raise") {
					w.Fatalf("health: %+v", h)
				}
				if _, err := aegis.Open(cli, "").RaiseToken(w.ctx, 0); err != nil {
					w.Fatal(err)
				}
				w.within(2*ttl, "b leads", func() bool { return w.won(r) })
				if r.led.Token <= greatest {
					w.Fatalf("token %d; %d was given out before", r.led.Token, greatest)
				}
				w.within(2*ttl, "a is back", func() bool { return a.Health().Ready() })
			})
		})
	}
	t.Run("RaisingEndsEveryTermInOffice", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a")
			led := w.lead(a, "boss")
			ops := aegis.Open(w.Client("ops"), "")
			offset, err := ops.RaiseToken(w.ctx, 1_000_000)
			if err != nil || offset < 1_000_000+1<<30 {
				w.Fatalf("offset %d, %v", offset, err)
			}
			w.within(50*time.Millisecond, "the term ends", func() bool { return !led.Held() })
			w.within(ttl, "its key is released", func() bool { return len(w.keys("election/")) == 0 })
			next := w.lead(a, "boss")
			if next.Token <= 1_000_000+1<<30 {
				w.Fatalf("token %d", next.Token)
			}
			if term, err := a.Election("boss").Leader(w.ctx); err != nil || term != next.Term {
				w.Fatalf("leader %v, %v; want %v", term, err, next.Term)
			}
			lower, err := ops.RaiseToken(w.ctx, 0)
			if err != nil || lower <= offset {
				w.Fatalf("offset %d after %d, %v", lower, offset, err)
			}
		})
	})
	t.Run("NewNodeRefusesAnotherClustersKeys", func(t *testing.T) {
		simulate(t, func(w *world) {
			w.join("a")
			w.Restore(w.Snapshot(), etcdsim.AsCluster(42))
			_, err := w.tryJoin("b")
			w.mustIs(err, aegis.ErrTokenWentBack)
		})
	})
}

func TestIdentity(t *testing.T) {
	t.Run("SecondProcessWaitsOutADeadOne", func(t *testing.T) {
		simulate(t, func(w *world) {
			w.join("a")
			w.Cut("a", etcdsim.Both) // dead
			again := func(c *aegis.Config) { c.ID = "a" }
			began := time.Now()
			if _, err := w.tryJoin("a2", again); err != nil {
				w.Fatal(err)
			}
			if took := time.Since(began); took > ttl+2*time.Second {
				w.Fatalf("took %v", took)
			}
		})
	})
	t.Run("SecondProcessNamesALivingOne", func(t *testing.T) {
		for _, life := range []time.Duration{2 * time.Second, 10 * time.Second} {
			simulate(t, func(w *world) {
				first := w.join("a", func(c *aegis.Config) { c.TTL = life })
				began := time.Now()
				_, err := w.tryJoin("a2", func(c *aegis.Config) { c.ID = "a" })
				w.mustIs(err, aegis.ErrNodeIDTaken)
				if took := time.Since(began); took > 2*life+5*time.Second {
					w.Fatalf("took %v", took)
				}
				if !strings.Contains(err.Error(), "pid ") || !strings.Contains(err.Error(), "host ") {
					w.Fatalf("%v names no host and pid", err)
				}
				if !first.Health().Ready() {
					w.Fatalf("the living one suffered: %+v", first.Health())
				}
				if got := w.keys("node/"); len(got) != 1 {
					w.Fatalf("node keys: %q", got)
				}
			})
		}
	})
	t.Run("OneChangeOfEtcdsLeaderIsNotTakenForLife", func(t *testing.T) {
		simulate(t, func(w *world) {
			w.join("a")
			w.Cut("a", etcdsim.Both)
			go func() { time.Sleep(ttl - 100*time.Millisecond); w.LeaderChange() }()
			if _, err := w.tryJoin("a2", func(c *aegis.Config) { c.ID = "a" }); err != nil {
				w.Fatal(err)
			}
		})
	})
	t.Run("ChangedNodeKeyEndsTheTerms", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a")
			led := w.lead(a, "boss")
			if _, err := w.Client("ops").Delete(w.ctx, aegis.DefaultPrefix+"node/a"); err != nil {
				w.Fatal(err)
			}
			w.within(ttl, "the term ends", func() bool { return !led.Held() })
			w.within(ttl, "a is back", func() bool { return a.Health().Ready() && len(w.keys("node/")) == 1 })
		})
	})
}
