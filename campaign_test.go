package aegis_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"aegis"
	"aegis/internal/etcdsim"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// winning recognises the transaction that wins an election.
func winning(c etcdsim.Call) bool {
	txn, ok := c.Request.(*pb.TxnRequest)
	return ok && len(txn.Success) > 0 && txn.Success[0].GetRequestPut() != nil &&
		strings.HasPrefix(string(txn.Success[0].GetRequestPut().Key), aegis.DefaultPrefix+"election/")
}

// once applies the verdict to the first call that matches.
func once(match func(etcdsim.Call) bool, v etcdsim.Verdict) func(etcdsim.Call) etcdsim.Verdict {
	var mu sync.Mutex
	done := false
	return func(c etcdsim.Call) etcdsim.Verdict {
		mu.Lock()
		defer mu.Unlock()
		if done || !match(c) {
			return etcdsim.Verdict{}
		}
		done = true
		return v
	}
}

// consistent waits until the node is well and then checks that etcd's leader key is the one that the node leads by.
func (w *world) consistent(n *aegis.Node, name string) {
	w.Helper()
	time.Sleep(4 * ttl) // whatever is still under way has been executed
	w.within(4*ttl, "no key that nobody leads by", func() bool {
		kv := w.Dump(aegis.DefaultPrefix + "election/" + name)
		led, ok := n.Election(name).Current()
		if !ok {
			return len(kv) == 0 && len(w.keys("candidate/")) == 0
		}
		return len(kv) == 1 && kv[0].Modified == led.Token && len(w.keys("candidate/")) == 0
	})
	for range 200 { // and it stays so
		time.Sleep(10 * time.Millisecond)
		led, ok := n.Election(name).Current()
		if kv := w.Dump(aegis.DefaultPrefix + "election/" + name); ok != (len(kv) == 1) || ok && kv[0].Modified != led.Token {
			w.Fatalf("etcd has %v, the node leads %v", kv, led)
		}
	}
}

func TestWinningTransaction(t *testing.T) {
	canceled := status.Error(codes.Canceled, "grpc: the client connection is closing")
	cases := map[string]etcdsim.Verdict{
		"ReplyLost":                 {DropReply: true},
		"RequestLost":               {DropRequest: true},
		"ExecutedTwice":             {Twice: true},
		"ReplySaysCanceled":         {FailAfter: canceled},
		"CanceledBeforeExecution":   {FailBefore: canceled},
		"CommitsAfterItsTimeout":    {DelayRequest: ttl / 2},
		"CommitsAfterTheNextRead":   {DelayRequest: ttl * 3 / 4},
		"ReplyAfterTrustEnded":      {DelayReply: 2 * ttl},
		"ExecutedAndUnavailable":    {FailAfter: status.Error(codes.Unavailable, "etcdserver: request timed out")},
		"CommitsAfterTheLeaseEnded": {DelayRequest: 3 * ttl},
	}
	for name, verdict := range cases {
		for _, resend := range []bool{false, true} {
			for _, patience := range []time.Duration{time.Hour, 100 * time.Millisecond, 1 * time.Millisecond} {
				t.Run(fmt.Sprintf("%s/resend=%v/patience=%v", name, resend, patience), func(t *testing.T) {
					opts := []etcdsim.Option{}
					if resend {
						opts = append(opts, etcdsim.WithResend())
					}
					simulate(t, func(w *world) {
						a := w.join("a")
						w.Intercept("a", once(winning, verdict))
						ctx, cancel := context.WithTimeout(w.ctx, patience)
						defer cancel()
						began := time.Now()
						led, err := a.Election("boss").Campaign(ctx)
						if err == nil && !led.Held() {
							w.Fatal("a leadership that is not held")
						}
						if err == nil && time.Since(began) > patience {
							w.Fatal("won after its caller had given up")
						}
						if err != nil && led != nil {
							w.Fatal("an error and a leadership")
						}
						w.consistent(a, "boss")
						// The same again by Await, which must win in the end.
						if led == nil {
							if _, err = a.Election("boss").Await(w.ctx); err != nil {
								w.Fatal(err)
							}
						}
						w.consistent(a, "boss")
					}, opts...)
				})
			}
		}
	}
	t.Run("ReplyLostIsStillWon", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a")
			w.Intercept("a", once(winning, etcdsim.Verdict{DropReply: true}))
			led := w.lead(a, "boss")
			if kv := w.Dump(aegis.DefaultPrefix + "election/boss"); len(kv) != 1 || kv[0].Modified != led.Token {
				w.Fatalf("%v; etcd has %v", led.Term, kv)
			}
		})
	})
	t.Run("ExecutedTwiceIsStillWon", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a")
			w.Intercept("a", once(winning, etcdsim.Verdict{Twice: true}))
			w.lead(a, "boss")
			w.consistent(a, "boss")
		})
	})
	t.Run("LateSweepLeavesTheRivalsKeyAlone", func(t *testing.T) {
		// The key of an attempt that was given up is swept, and the sweep's deletion is under way for long.
		simulate(t, func(w *world) {
			a, b := w.join("a"), w.join("b")
			ctx, cancel := context.WithTimeout(w.ctx, 10*time.Millisecond)
			defer cancel()
			var n atomic.Int32
			w.Intercept("a", func(c etcdsim.Call) (v etcdsim.Verdict) {
				txn, ok := c.Request.(*pb.TxnRequest)
				switch {
				case winning(c):
					v.DelayRequest = 50 * time.Millisecond
				case ok && len(txn.Success) == 1 && txn.Success[0].GetRequestDeleteRange() != nil:
					v.DelayRequest = 300 * time.Millisecond
					n.Add(1)
				}
				return v
			})
			if _, err := a.Election("boss").Campaign(ctx); err == nil {
				w.Fatal("won before it was committed")
			}
			w.within(time.Second, "the sweep is under way", func() bool { return n.Load() == 1 })
			if _, err := w.Client("ops").Delete(w.ctx, aegis.DefaultPrefix+"election/boss"); err != nil {
				w.Fatal(err)
			}
			led := w.lead(b, "boss")
			time.Sleep(ttl)
			if kv := w.Dump(aegis.DefaultPrefix + "election/boss"); len(kv) != 1 || !led.Held() {
				w.Fatal("the sweep deleted the rival's key")
			}
		})
	})
	t.Run("KeyOfAnEarlierAttemptIsNotAWin", func(t *testing.T) {
		// The first attempt is given up before it commits; it commits before the second, and no watch tells of it.
		simulate(t, func(w *world) {
			a := w.join("a")
			w.SilenceWatches("a")
			w.Intercept("a", once(winning, etcdsim.Verdict{DelayRequest: 100 * time.Millisecond}))
			ctx, cancel := context.WithTimeout(w.ctx, 10*time.Millisecond)
			defer cancel()
			if _, err := a.Election("boss").Campaign(ctx); err == nil {
				w.Fatal("won before it was committed")
			}
			w.within(time.Second, "the late commit", func() bool { return len(w.keys("election/")) == 1 })
			if led, err := a.Election("boss").Campaign(w.ctx); err == nil {
				w.Fatalf("the second attempt took the first one's key for its own: %v", led.Term)
			}
			w.Heal("a")
			w.consistent(a, "boss")
		})
	})
	t.Run("MachineSleepsBetweenTheWinAndItsReply", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.join("a")
			w.Intercept("a", once(winning, etcdsim.Verdict{Applied: func() { w.Clock("a").Sleep(ttl) }}))
			if led, err := a.Election("boss").Campaign(w.ctx); err == nil {
				w.Fatalf("won %v without trust; held: %v", led.Term, led.Held())
			}
			w.consistent(a, "boss")
		})
	})
}

func TestOneCampaignAtATime(t *testing.T) {
	simulate(t, func(w *world) {
		a := w.join("a")
		var mu sync.Mutex
		var won []*aegis.Leadership
		for range 10 {
			go func() {
				for range 50 {
					led, err := a.Election("boss").Campaign(w.ctx)
					if err != nil {
						w.mustIs(err, aegis.ErrNotLeader)
						continue
					}
					mu.Lock()
					for _, other := range won {
						if other.Held() {
							w.Errorf("two leaderships at once: %v and %v", other.Term, led.Term)
						}
					}
					won = append(won, led)
					mu.Unlock()
					time.Sleep(time.Millisecond)
					if err := led.Resign(w.ctx); err != nil {
						w.Error(err)
					}
				}
			}()
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		if len(won) < 2 {
			w.Fatalf("%d terms", len(won))
		}
		for i := 1; i < len(won); i++ {
			if won[i].Token <= won[i-1].Token {
				w.Fatalf("token %d after %d", won[i].Token, won[i-1].Token)
			}
		}
	})
}

// Every error path of Campaign and Await is tried by cutting the client at each of its calls, in either direction.
func TestErrorPathsLeaveNothingBehind(t *testing.T) {
	for _, dir := range []etcdsim.Direction{etcdsim.ToServer, etcdsim.FromServer, etcdsim.Both} {
		for call := 1; call <= 6; call++ {
			for _, how := range []string{"Campaign", "Await"} {
				t.Run(fmt.Sprintf("%s/cut=%v/call=%d", how, dir, call), func(t *testing.T) {
					simulate(t, func(w *world) {
						rival := w.join("rival")
						theirs := w.lead(rival, "boss")
						a := w.join("a")
						calls := 0
						w.Intercept("a", func(c etcdsim.Call) etcdsim.Verdict {
							if c.Method == "Txn" || c.Method == "Range" || c.Method == "DeleteRange" {
								if calls++; calls == call {
									w.Cut("a", dir)
								}
							}
							return etcdsim.Verdict{}
						})
						ctx, cancel := context.WithTimeout(w.ctx, ttl)
						defer cancel()
						go func() {
							time.Sleep(ttl / 4)
							_ = theirs.Resign(w.ctx)
						}()
						var led *aegis.Leadership
						var err error
						if how == "Campaign" {
							led, err = a.Election("boss").Campaign(ctx)
						} else {
							led, err = a.Election("boss").Await(ctx)
						}
						if err == nil && led.Held() {
							w.Logf("won")
						}
						time.Sleep(ttl)
						w.Intercept("a", nil)
						w.Heal("a")
						w.within(3*ttl, "a is well again", func() bool { return a.Health().Ready() })
						w.consistent(a, "boss")
						if err := a.Leave(w.ctx); err != nil {
							w.Fatal(err)
						}
						if err := rival.Leave(w.ctx); err != nil {
							w.Fatal(err)
						}
						w.within(2*ttl, "no key is left", func() bool { return len(w.keys("")) == 0 })
					})
				})
			}
		}
	}
}

func TestNames(t *testing.T) {
	simulate(t, func(w *world) {
		a, b := w.join("a"), w.join("b")
		good := []string{"a", "a/b", "a/b/c", "a/", "a%2Fb", "boss of the 北 gate", "公会/拍卖行", strings.Repeat("x", 255), "a b", ".", "..", "?x=1"}
		var held []*aegis.Leadership
		for _, name := range good {
			led := w.lead(a, name)
			held = append(held, led)
			r := w.await(w.ctx, b.Election(name))
			w.within(time.Second, "b waits", func() bool {
				c, err := a.Election(name).Candidates(w.ctx)
				return err == nil && len(c) == 1 && c[0].Node == "b"
			})
			if w.over(r) {
				w.Fatalf("b's wait for %q ended: %v", name, r.err)
			}
		}
		for i, led := range held { // prefixes of each other do not see each other
			if err := led.Resign(w.ctx); err != nil {
				w.Fatal(err)
			}
			w.within(100*time.Millisecond, "b leads "+good[i], func() bool {
				term, err := a.Election(good[i]).Leader(w.ctx)
				return err == nil && term.Node == "b"
			})
			for _, other := range held[i+1:] {
				if !other.Held() {
					w.Fatalf("resigning %q ended %q", good[i], other.Election)
				}
			}
		}
		for _, name := range []string{"", strings.Repeat("x", 256), "a\nb", "a\x00b", "\xff", "shard/maps", "\u0085"} {
			e := a.Election(name)
			_, err := e.Campaign(w.ctx)
			w.mustIs(err, aegis.ErrInvalidName)
			_, err = e.Await(w.ctx)
			w.mustIs(err, aegis.ErrInvalidName)
			_, err = e.Leader(w.ctx)
			w.mustIs(err, aegis.ErrInvalidName)
			w.mustIs(e.Run(w.ctx, nil), aegis.ErrInvalidName)
		}
	})
}

func TestConfigErrorsNameFieldAndBound(t *testing.T) {
	simulate(t, func(w *world) {
		for want, change := range map[string]func(*aegis.Config){
			"TTL is 500ms; it must be whole seconds from 2s to 5m0s": func(c *aegis.Config) { c.TTL = 500 * time.Millisecond },
			"TTL is 1.5s":                        func(c *aegis.Config) { c.TTL = 1500 * time.Millisecond },
			"TTL is -1s":                         func(c *aegis.Config) { c.TTL = -time.Second },
			"TTL is 10m0s":                       func(c *aegis.Config) { c.TTL = 10 * time.Minute },
			"Margin is 2s; it must be more than": func(c *aegis.Config) { c.Margin = 2 * time.Second },
			"Margin is -1ns":                     func(c *aegis.Config) { c.Margin = -1 },
			"node id contains":                   func(c *aegis.Config) { c.ID = "a\nb" },
			"node id has 256 bytes, at most 255": func(c *aegis.Config) { c.ID = aegis.NodeID(strings.Repeat("x", 256)) },
			"prefix":                             func(c *aegis.Config) { c.Prefix = "a\x00b" },
		} {
			n, err := w.tryJoin("a", change)
			if err == nil || !strings.Contains(strings.ReplaceAll(err.Error(), `"a\nb" `, ""), want) {
				w.Errorf("%v, %v; want an error that says %q", n, err, want)
			}
		}
		if got := w.keys(""); len(got) != 0 {
			w.Fatalf("keys: %q", got)
		}
	})
}
