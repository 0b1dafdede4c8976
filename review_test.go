package aegis_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"aegis"
	"aegis/internal/etcdsim"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Interleavings that an adversarial reading of the code found, each of which broke something once.
func TestFoundByReading(t *testing.T) {
	t.Run("CurrentEndsTheTermOfAMachineThatSlept", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a")
			w.lead(a, "boss")
			w.Clock("a").Sleep(time.Minute)
			if _, ok := a.Election("boss").Current(); ok {
				w.Fatal("current after a minute's sleep")
			}
			w.within(2*ttl, "a is back", func() bool { return a.Health().Ready() })
		})
	})
	t.Run("RestoreIsNoticedByOneWhoKnowsTheRevisionFromTheWatchAlone", func(t *testing.T) {
		simulate(t, func(w *world) {
			a, b := w.join("a"), w.join("b")
			led := w.lead(a, "boss")
			r := w.await(w.ctx, b.Election("boss"))
			w.queue(1)
			snap := w.Snapshot()
			for range 20 {
				if _, err := w.Client("x").Put(w.ctx, "elsewhere", "x"); err != nil {
					w.Fatal(err)
				}
			}
			if err := led.Transfer(w.ctx, "b"); err != nil {
				w.Fatal(err)
			}
			w.within(time.Second, "b leads", func() bool { return w.won(r) })
			w.Restore(snap)
			w.within(ttl, "b stops", func() bool { return !r.led.Held() })
		})
	})
	t.Run("RestoreBehindARaisedOffsetDoesNotForgetTheOffset", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a")
			snap := w.Snapshot()
			ops := aegis.Open(w.Client("ops"), "")
			if _, err := ops.RaiseToken(w.ctx, 1000); err != nil {
				w.Fatal(err)
			}
			time.Sleep(ttl)
			led := w.lead(a, "boss")
			for range 20 {
				if _, err := w.Client("x").Put(w.ctx, "elsewhere", "x"); err != nil {
					w.Fatal(err)
				}
			}
			time.Sleep(ttl)
			w.Restore(snap)
			w.LeaderChange() // so that the view lists before the lease is renewed
			w.within(2*ttl, "a halts", func() bool { return w.saw("a", aegis.EventHalted) })
			for {
				if _, err := ops.RaiseToken(w.ctx, 0); err != nil {
					w.Fatal(err)
				}
				time.Sleep(ttl)
				if a.Health().Ready() {
					break
				}
			}
			if next := w.lead(a, "boss"); next.Token <= led.Token {
				w.Fatalf("token %d after %d", next.Token, led.Token)
			}
		})
	})
	t.Run("NoSpaceIsNotTakenForNothingDone", func(t *testing.T) {
		simulate(t, func(w *world) {
			led := w.lead(w.join("a"), "boss")
			w.Intercept("a", once(func(c etcdsim.Call) bool { return c.Method == "Txn" }, etcdsim.Verdict{FailAfter: rpctypes.ErrGRPCNoSpace}))
			_, err := led.Commit(w.ctx, clientv3.OpPut("loot", "1"))
			w.mustIs(err, aegis.ErrUnknown)
		})
	})
	t.Run("CommitThatWasSentAgainAfterTheTermIsUnknownNotRefused", func(t *testing.T) {
		for name, second := range map[string]error{"TermOver": nil, "SecondTimeAnError": rpctypes.ErrGRPCPermissionDenied} {
			t.Run(name, func(t *testing.T) {
				simulate(t, func(w *world) {
					led := w.lead(w.join("a"), "boss")
					lease := w.Dump(aegis.DefaultPrefix + "election/boss")[0].Lease
					n := 0
					w.Intercept("a", func(c etcdsim.Call) (v etcdsim.Verdict) {
						if c.Method != "Txn" {
							return v
						}
						switch n++; {
						case n == 1:
							v.FailAfter = status.Error(codes.Canceled, "proxy")
							v.Applied = func() {
								if second == nil {
									_ = w.Revoke(lease)
								}
							}
						case n == 2 && second != nil:
							v.FailBefore = second
						}
						return v
					})
					_, err := led.Commit(w.ctx, clientv3.OpPut("loot", "1"))
					if kv := w.Dump("loot"); len(kv) != 1 {
						w.Fatal("not done; the case is not tried")
					}
					w.mustIs(err, aegis.ErrUnknown)
					if errors.Is(err, aegis.ErrFenced) {
						w.Fatalf("%v", err)
					}
				}, etcdsim.WithResend())
			})
		}
	})
	t.Run("PanicOfAGuardLeavesTheKeyToTheLease", func(t *testing.T) {
		simulate(t, func(w *world) {
			a, b := w.join("a"), w.join("b")
			func() {
				defer func() { _ = recover() }()
				_, _ = a.Election("boss", aegis.WithGuards(guardFunc(func(context.Context, ...aegis.Term) error { panic("guard") }))).Campaign(w.ctx)
			}()
			r := w.await(w.ctx, b.Election("boss"))
			w.within(2*ttl, "b leads", func() bool { return w.won(r) })
			w.within(2*ttl, "a is back", func() bool { return a.Health().Ready() })
		})
	})
	t.Run("WatchComesBackAfterARefusalThatWasMended", func(t *testing.T) {
		simulate(t, func(w *world) {
			a, b := w.join("a"), w.join("b")
			led := w.lead(a, "boss")
			w.Intercept("a", once(func(c etcdsim.Call) bool {
				txn, ok := c.Request.(*pb.TxnRequest)
				return ok && len(txn.Success) > 3 // a list
			}, etcdsim.Verdict{FailBefore: rpctypes.ErrGRPCPermissionDenied}))
			w.BreakWatches("a")
			w.SilenceWatches("a") // the client would mend a broken stream by itself; silence makes the view list anew
			time.Sleep(2 * ttl)
			w.Heal("a")
			if err := aegis.Open(w.Client("ops"), "").Evict(w.ctx, led.Term); err != nil {
				w.Fatal(err)
			}
			w.within(2*time.Second, "a notices", func() bool { return !led.Held() })
			w.lead(b, "boss")
		})
	})
	t.Run("ComesBackWithinASecondWhateverTheTTL", func(t *testing.T) {
		for _, long := range []time.Duration{2 * time.Second, 10 * time.Second, time.Minute} {
			change := func(c *aegis.Config) { c.TTL = long }
			simulate(t, func(w *world) { // etcd away, the election vacant
				a := w.join("a", change)
				w.Stop()
				time.Sleep(3 * long)
				w.Start()
				r := w.await(w.ctx, a.Election("boss"))
				took := w.within(time.Second, "a leads", func() bool { return w.won(r) })
				w.Logf("TTL %v: etcd back for %v", long, took)
			})
			simulate(t, func(w *world) { // the same for a waiter, whose leader is dead
				a, b := w.join("a", change), w.join("b", change)
				w.lead(a, "boss")
				r := w.await(w.ctx, b.Election("boss"))
				w.queue(1)
				lease := w.leaseOf(a)
				w.Cut("a", etcdsim.Both)
				w.Stop()
				time.Sleep(3 * long)
				w.Start()
				if err := w.Revoke(lease); err != nil {
					w.Fatal(err)
				}
				took := w.within(time.Second, "b leads", func() bool { return w.won(r) })
				w.Logf("TTL %v: a waiter that etcd was away from for %v", long, took)
			})
			simulate(t, func(w *world) { // a silent watch
				a, b := w.join("a", change), w.join("b", change)
				led := w.lead(a, "boss")
				r := w.await(w.ctx, b.Election("boss"))
				w.queue(1)
				time.Sleep(2 * long)
				w.SilenceWatches("b")
				_ = led.Resign(w.ctx)
				took := w.within(1200*time.Millisecond, "b leads", func() bool { return w.won(r) })
				w.Logf("TTL %v: watch silent for %v", long, took)
			})
			simulate(t, func(w *world) { // terms that are over as soon as they began
				a := w.join("a", change)
				w.run(w.ctx, a.Election("boss"), untilDone)
				for range 10 {
					took := w.within(time.Second, "a leads", func() bool { _, ok := a.Election("boss").Current(); return ok })
					if err := aegis.Open(w.Client("ops"), "").Evict(w.ctx, mustLeader(w, a)); err != nil {
						w.Fatal(err)
					}
					time.Sleep(20 * time.Millisecond)
					_ = took
				}
			})
		}
	})
	t.Run("RequestDuringTheGuardsIsTakenAndTheElectionGoesOn", func(t *testing.T) {
		simulate(t, func(w *world) {
			a, b := w.join("a"), w.join("b")
			slow := guardFunc(func(context.Context, ...aegis.Term) error { time.Sleep(100 * time.Millisecond); return nil })
			var worked atomic.Int32
			w.run(w.ctx, a.Election("boss", aegis.WithGuards(slow)), func(ctx context.Context, l *aegis.Leadership) error {
				worked.Add(1)
				return untilDone(ctx, l)
			})
			w.within(time.Second, "a has won", func() bool { return len(w.keys("election/")) == 1 })
			r := w.await(w.ctx, b.Election("boss"))
			w.within(50*time.Millisecond, "b waits", func() bool { return len(w.keys("candidate/")) == 1 })
			if err := aegis.Open(w.Client("ops"), "").Request(w.ctx, mustLeader(w, a), "b"); err != nil {
				w.Fatal(err)
			}
			w.within(time.Second, "b leads", func() bool { return w.won(r) })
			if worked.Load() != 0 {
				w.Fatal("a worked")
			}
		})
	})
	t.Run("NodeKeyWithoutALeaseIsNamed", func(t *testing.T) {
		simulate(t, func(w *world) {
			if _, err := w.Client("ops").Put(w.ctx, aegis.DefaultPrefix+"node/a", "{}"); err != nil {
				w.Fatal(err)
			}
			_, err := w.tryJoin("a")
			w.mustIs(err, aegis.ErrNodeIDTaken)
			if !strings.Contains(err.Error(), "has no lease") || w.Calls("a")["LeaseGrant"] > 2 {
				w.Fatalf("%v after %d grants", err, w.Calls("a")["LeaseGrant"])
			}
		})
	})
	t.Run("LoggerMayAskTheNode", func(t *testing.T) {
		simulate(t, func(w *world) {
			var node atomic.Pointer[aegis.Node]
			a := w.join("a", func(c *aegis.Config) { c.Logger = slog.New(asking{&node}) })
			node.Store(a)
			w.lead(a, "boss")
			_ = w.Revoke(w.leaseOf(a))
			w.within(2*ttl, "a is back", func() bool { return a.Health().Ready() && w.saw("a", aegis.EventLeaseLost) })
		})
	})
	t.Run("TransferWhileTheEnqueuingsAnswerIsOnItsWayArrives", func(t *testing.T) {
		simulate(t, func(w *world) {
			a, b := w.join("a"), w.join("b")
			led := w.lead(a, "boss")
			w.Intercept("b", once(func(c etcdsim.Call) bool {
				txn, ok := c.Request.(*pb.TxnRequest)
				return ok && len(txn.Success) == 1 && strings.Contains(string(txn.Success[0].GetRequestPut().GetKey()), "candidate/")
			}, etcdsim.Verdict{DelayReply: 200 * time.Millisecond}))
			r := w.await(w.ctx, b.Election("boss"))
			w.queue(1)
			if err := led.Transfer(w.ctx, "b"); err != nil {
				w.Fatal(err)
			}
			w.within(time.Second, "b leads", func() bool { return w.won(r) })
			if r.led.Token != led.Token+2 {
				w.Fatalf("token %d after %d: the transfer was destroyed, and b won by itself", r.led.Token, led.Token)
			}
		})
	})
	t.Run("LargestMarginOnASlowLinkStaysJoined", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a", func(c *aegis.Config) { c.Margin = 980 * time.Millisecond })
			time.Sleep(20 * time.Second)
			if w.saw("a", aegis.EventLeaseLost) {
				w.Fatalf("lost its lease: %+v", a.Health())
			}
		}, etcdsim.WithLatency(100*time.Millisecond, 100*time.Millisecond))
	})
	t.Run("TransferOfATermThatIsOverSaysSo", func(t *testing.T) {
		simulate(t, func(w *world) {
			led := w.lead(w.join("a"), "boss")
			_ = led.Resign(w.ctx)
			w.mustIs(led.Transfer(w.ctx, "b"), aegis.ErrLost)
		})
	})
	t.Run("TransferWhoseReplyIsLostIsDone", func(t *testing.T) {
		simulate(t, func(w *world) {
			a, b := w.join("a"), w.join("b")
			led := w.lead(a, "boss")
			r := w.await(w.ctx, b.Election("boss"))
			w.queue(1)
			w.Intercept("a", once(func(c etcdsim.Call) bool { return c.Method == "Txn" }, etcdsim.Verdict{DropReply: true}))
			if err := led.Transfer(w.ctx, "b"); err != nil {
				w.Fatal(err)
			}
			w.within(time.Second, "b leads", func() bool { return w.won(r) })
		})
	})
	t.Run("RequestToSomebodyWhoDoesNotWaitIsRefused", func(t *testing.T) {
		simulate(t, func(w *world) {
			led := w.lead(w.join("a"), "boss")
			if err := aegis.Open(w.Client("ops"), "").Request(w.ctx, led.Term, "typo"); err == nil || !strings.Contains(err.Error(), "not among") {
				w.Fatalf("%v", err)
			}
			// Nor when the successor goes between the request and the leader's look at it.
			request := fmt.Sprintf(`{"v":1,"op":"transfer","to":"gone","term":%d}`, led.Token)
			if _, err := w.Client("ops").Put(w.ctx, aegis.DefaultPrefix+"request/boss", request); err != nil {
				w.Fatal(err)
			}
			time.Sleep(ttl)
			if !led.Held() {
				w.Fatal("the term is over")
			}
		})
	})
	t.Run("ResignKeepsFieldsThatItDoesNotKnow", func(t *testing.T) {
		simulate(t, func(w *world) {
			led := w.lead(w.join("a"), "boss")
			key := aegis.DefaultPrefix + "term/boss"
			value := w.Dump(key)[0].Value
			election := w.Dump(aegis.DefaultPrefix + "election/boss")[0]
			_ = election
			ops := aegis.Open(w.Client("ops"), "")
			if _, err := w.Client("ops").Put(w.ctx, key, strings.Replace(value, "{", `{"later":{"x":1},`, 1)); err != nil {
				w.Fatal(err)
			}
			term, err := ops.Leader(w.ctx, "boss")
			if err != nil {
				w.Fatal(err)
			}
			if err := ops.Evict(w.ctx, term); err != nil {
				w.Fatal(err)
			}
			if got := w.Dump(key)[0].Value; !strings.Contains(got, `"later":{"x":1}`) || !strings.Contains(got, "evicted") {
				w.Fatalf("record is %s", got)
			}
			_ = led
		})
	})
}

// asking is a log handler that asks the node how it is.
type asking struct{ node *atomic.Pointer[aegis.Node] }

func (asking) Enabled(context.Context, slog.Level) bool { return true }
func (h asking) WithAttrs([]slog.Attr) slog.Handler     { return h }
func (h asking) WithGroup(string) slog.Handler          { return h }
func (h asking) Handle(context.Context, slog.Record) error {
	if n := h.node.Load(); n != nil {
		n.Health()
	}
	return nil
}
