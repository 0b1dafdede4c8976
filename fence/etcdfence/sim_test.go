package etcdfence_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"aegis"
	"aegis/fence/etcdfence"
	"aegis/internal/etcdsim"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const ttl = 2 * time.Second

// world is a simulated cluster in virtual time.
type world struct {
	*testing.T
	*etcdsim.Cluster
	ctx   context.Context
	nodes map[string]*aegis.Node
}

func simulate(t *testing.T, f func(w *world), opts ...etcdsim.Option) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Hour)
		defer cancel()
		w := &world{T: t, Cluster: etcdsim.New(opts...), ctx: ctx, nodes: map[string]*aegis.Node{}}
		defer w.Close()
		defer func() {
			for id, n := range w.nodes {
				w.Intercept(id, nil)
				_ = n.Leave(ctx)
			}
		}()
		f(w)
	})
}

// lead makes the machine called id lead the election, whoever leads it now, who is not told.
func (w *world) lead(id, name string) *aegis.Leadership {
	w.Helper()
	n := w.nodes[id]
	if n == nil {
		var err error
		if n, err = aegis.Join(w.ctx, w.Client(id), aegis.Config{ID: aegis.NodeID(id), TTL: ttl, Logger: slog.New(slog.DiscardHandler)}); err != nil {
			w.Fatal(err)
		}
		w.nodes[id] = n
	}
	w.evict(name)
	for began := time.Now(); ; time.Sleep(time.Millisecond) { // virtual: until its watch has told it that it is out, or it has a new lease
		led, err := n.Election(name).Campaign(w.ctx)
		if err == nil {
			return led
		}
		if time.Since(began) > time.Minute {
			w.Fatal(err)
		}
	}
}

// evict takes the leader key away as an operator may.
func (w *world) evict(name string) {
	w.Helper()
	ops := aegis.Open(w.Client("ops"), "")
	term, err := ops.Leader(w.ctx, name)
	if errors.Is(err, aegis.ErrNoLeader) {
		return
	}
	if err = errors.Join(err, ops.Evict(w.ctx, term)); err != nil {
		w.Fatal(err)
	}
}

// settle puts "loot/<key>" and returns what Once does.
func settle(ctx context.Context, led *aegis.Leadership, key, result string) (string, bool, error) {
	got, first, err := etcdfence.Once(ctx, led, "", key, func() ([]clientv3.Op, []byte, error) {
		return []clientv3.Op{clientv3.OpPut("loot/"+key, result)}, []byte(result), nil
	})
	return string(got), first, err
}

// mustOnce demands a result, and that the loot was handed out once.
func (w *world) mustOnce(led *aegis.Leadership, key, result, want string, wantFirst bool) {
	w.Helper()
	got, first, err := settle(w.ctx, led, key, result)
	if err != nil || got != want || first != wantFirst {
		w.Fatalf("%q, first=%v, %v; want %q, first=%v", got, first, err, want, wantFirst)
	}
	w.mustHave(key, want)
}

func (w *world) mustHave(key, want string) {
	w.Helper()
	kvs := w.Dump("loot/" + key)
	if want == "" && len(kvs) == 0 {
		return
	}
	if len(kvs) != 1 || kvs[0].Value != want || kvs[0].Version != 1 {
		w.Fatalf("the loot is %+v; want %q, written once", kvs, want)
	}
}

func (w *world) mustIs(err, target error) {
	w.Helper()
	if !errors.Is(err, target) {
		w.Fatalf("error is %v; want %v", err, target)
	}
}

// nth has the verdict fall on the machine's nth transaction from now on, counted from 1.
func (w *world) nth(id string, n int, v etcdsim.Verdict) {
	w.Intercept(id, func(c etcdsim.Call) etcdsim.Verdict {
		if c.Method == "Txn" {
			if n--; n == 0 {
				return v
			}
		}
		return etcdsim.Verdict{}
	})
}

func TestOnce(t *testing.T) {
	t.Run("ARepeatByThisTermOrALaterOneReturnsTheFirstResult", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.lead("a", "boss")
			w.mustOnce(a, "kill", "sword", "sword", true)
			w.mustOnce(a, "kill", "shield", "sword", false)
			b := w.lead("b", "boss")
			w.mustOnce(b, "kill", "shield", "sword", false)
			w.mustOnce(b, "another", "shield", "shield", true)
			_, _, err := settle(w.ctx, a, "third", "stale")
			w.mustIs(err, aegis.ErrFenced)
			_, _, err = settle(w.ctx, a, "kill", "stale") // does not learn the result either
			w.mustIs(err, aegis.ErrFenced)
			w.mustHave("third", "")
		})
	})
	t.Run("ALostReplyIsUnknownAndTheRepeatMakesCertain", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.lead("a", "boss")
			w.nth("a", 2, etcdsim.Verdict{DropReply: true})
			_, first, err := settle(w.ctx, a, "kill", "sword")
			w.mustIs(err, aegis.ErrUnknown)
			if first {
				w.Fatal("first, and unknown")
			}
			w.mustHave("kill", "sword")
			w.mustOnce(a, "kill", "shield", "sword", false)
			w.mustOnce(w.lead("b", "boss"), "kill", "shield", "sword", false)
		})
	})
	t.Run("ALostRequestIsUnknownAndTheRepeatDoesIt", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.lead("a", "boss")
			w.nth("a", 2, etcdsim.Verdict{DropRequest: true})
			_, _, err := settle(w.ctx, a, "kill", "sword")
			w.mustIs(err, aegis.ErrUnknown)
			w.mustHave("kill", "")
			w.mustOnce(a, "kill", "shield", "shield", true)
		})
	})
	t.Run("ARequestThatArrivesAfterItsRepeatDoesNothing", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.lead("a", "boss")
			w.nth("a", 2, etcdsim.Verdict{DelayRequest: ttl})
			_, _, err := settle(w.ctx, a, "kill", "sword")
			w.mustIs(err, aegis.ErrUnknown)
			w.mustOnce(a, "kill", "shield", "shield", true)
			time.Sleep(2 * ttl) // virtual: the first one is there
			w.mustOnce(a, "kill", "", "shield", false)
		})
	})
	t.Run("ExecutedTwiceIsStillFirst", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.lead("a", "boss")
			w.nth("a", 2, etcdsim.Verdict{Twice: true})
			w.mustOnce(a, "kill", "sword", "sword", true)
			w.nth("a", 1, etcdsim.Verdict{Twice: true})
			w.mustOnce(a, "kill", "shield", "sword", false)
		})
	})
	t.Run("CanceledAfterExecutionAndSentAgainIsStillFirst", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.lead("a", "boss")
			w.nth("a", 2, etcdsim.Verdict{FailAfter: status.Error(codes.Canceled, "by a proxy")})
			w.mustOnce(a, "kill", "sword", "sword", true)
		}, etcdsim.WithResend())
	})
	t.Run("CanceledAfterExecutionAndNotSentAgainIsUnknown", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.lead("a", "boss")
			w.nth("a", 2, etcdsim.Verdict{FailAfter: status.Error(codes.Canceled, "by a proxy")})
			_, _, err := settle(w.ctx, a, "kill", "sword")
			w.mustIs(err, aegis.ErrUnknown)
			w.mustOnce(a, "kill", "shield", "sword", false)
		})
	})
	t.Run("ATakeoverBetweenTheLookAndTheCommitRefusesIt", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.lead("a", "boss")
			var b *aegis.Leadership
			_, _, err := etcdfence.Once(w.ctx, a, "", "kill", func() ([]clientv3.Op, []byte, error) {
				w.SilenceWatches("a") // it does not hear of it
				b = w.lead("b", "boss")
				return []clientv3.Op{clientv3.OpPut("loot/kill", "stale")}, nil, nil
			})
			var fenced *aegis.FencedError
			if !errors.As(err, &fenced) || fenced.Token != a.Token || fenced.Newest != b.Token {
				w.Fatal(err)
			}
			w.mustHave("kill", "")
			w.mustOnce(b, "kill", "sword", "sword", true)
		})
	})
	t.Run("ATakeoverBetweenTheExecutionAndItsSecondIsUnknown", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.lead("a", "boss")
			w.nth("a", 2, etcdsim.Verdict{FailAfter: status.Error(codes.Canceled, "by a proxy"), Applied: func() {
				for _, kv := range w.Dump(aegis.DefaultPrefix + "election/boss") {
					_ = w.Revoke(kv.Lease)
				}
			}})
			_, _, err := settle(w.ctx, a, "kill", "sword")
			w.mustIs(err, aegis.ErrUnknown)
			w.mustOnce(w.lead("b", "boss"), "kill", "shield", "sword", false)
		}, etcdsim.WithResend())
	})
	t.Run("BuildsErrorLeavesNothing", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.lead("a", "boss")
			failed := errors.New("no loot today")
			_, first, err := etcdfence.Once(w.ctx, a, "", "kill", func() ([]clientv3.Op, []byte, error) { return nil, nil, failed })
			w.mustIs(err, failed)
			if first || len(w.Dump(etcdfence.DefaultPrefix)) != 0 {
				w.Fatal("it left something")
			}
			for _, bad := range [][2]string{{"", ""}, {"/aegis/once/", "kill"}} {
				if _, _, err := etcdfence.Once(w.ctx, a, bad[0], bad[1], nil); err == nil {
					w.Fatalf("%q", bad)
				}
			}
			w.mustOnce(a, "kill", "sword", "sword", true)
		})
	})
	t.Run("KeysBelongToTheirElection", func(t *testing.T) {
		simulate(t, func(w *world) {
			for i, name := range []string{"a", "a/b", "a%2Fb"} {
				led := w.lead("a", name)
				for _, key := range []string{"c", "b/c"} {
					_, first, err := etcdfence.Once(w.ctx, led, "", key, func() ([]clientv3.Op, []byte, error) { return nil, nil, nil })
					if !first || err != nil {
						w.Fatalf("%d: %q, %q: %v, %v", i, name, key, first, err)
					}
				}
			}
		})
	})
	t.Run("ARecordOfANewerVersionIsRefused", func(t *testing.T) {
		simulate(t, func(w *world) {
			a := w.lead("a", "boss")
			for _, value := range []string{`{"v":2}`, "sword"} {
				if _, err := a.Commit(w.ctx, clientv3.OpPut(etcdfence.DefaultPrefix+"boss/kill", value)); err != nil {
					w.Fatal(err)
				}
				if _, _, err := settle(w.ctx, a, "kill", "sword"); err == nil {
					w.Fatal("read a record that it cannot know")
				}
			}
			w.mustHave("kill", "")
		})
	})
}

func TestForget(t *testing.T) {
	simulate(t, func(w *world) {
		a, other := w.lead("a", "boss"), w.lead("a", "boss/2")
		for i := range 250 {
			w.mustOnce(a, fmt.Sprint(i), "x", "x", true)
		}
		time.Sleep(time.Minute) // virtual
		young := time.Now()
		w.mustOnce(a, "young", "x", "x", true)
		cli := w.Client("ops")
		if n, err := etcdfence.Forget(w.ctx, cli, "", "boss", young); n != 250 || err != nil {
			w.Fatal(n, err)
		}
		w.mustOnce(a, "young", "y", "x", false)
		if _, first, err := settle(w.ctx, a, "7", "x"); !first || err != nil {
			w.Fatal("not forgotten", err)
		}
		w.mustOnce(other, "another", "x", "x", true)
	})
}

// Random faults on every transaction of two machines that take the election from each other: each settlement is written
// once, and everybody who gets a result gets the same.
func TestOnceUnderRandomFaults(t *testing.T) {
	seeds := []uint64{rand.Uint64(), rand.Uint64(), rand.Uint64(), rand.Uint64()}
	if s := os.Getenv("AEGIS_ETCDFENCE_SEED"); s != "" {
		seed, _ := strconv.ParseUint(s, 10, 64)
		seeds = []uint64{seed}
	}
	for _, seed := range seeds {
		name := fmt.Sprint(seed)
		t.Run(name, func(t *testing.T) {
			defer func() {
				if t.Failed() {
					t.Logf("replay: AEGIS_ETCDFENCE_SEED=%d go test -run %s aegis/fence/etcdfence", seed, "TestOnceUnderRandomFaults")
				}
			}()
			var opts []etcdsim.Option
			if seed%2 == 0 {
				opts = append(opts, etcdsim.WithResend())
			}
			simulate(t, func(w *world) { w.randomSettlements(rand.New(rand.NewPCG(seed, 0))) }, opts...)
		})
	}
}

func (w *world) randomSettlements(rng *rand.Rand) {
	canceled, gone := status.Error(codes.Canceled, "by a proxy"), status.Error(codes.Unavailable, "gone")
	faults := []etcdsim.Verdict{{}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {DropReply: true}, {DropRequest: true}, {Twice: true}, {FailAfter: canceled}, {FailAfter: gone}, {FailBefore: gone},
		{DelayRequest: ttl / 2}, {DelayRequest: 3 * ttl}, {DelayReply: ttl}}
	var outcomes [4]int
	for i := range 120 {
		key := fmt.Sprintf("kill-%d", i)
		var known *string
		id := "a"
		led := w.lead(id, "boss")
		for try := range 6 {
			w.Intercept(id, func(c etcdsim.Call) etcdsim.Verdict {
				if c.Method != "Txn" {
					return etcdsim.Verdict{}
				}
				v := faults[rng.IntN(len(faults))]
				if rng.IntN(8) == 0 {
					v.Applied = func() {
						for _, kv := range w.Dump(aegis.DefaultPrefix + "election/boss") {
							_ = w.Revoke(kv.Lease)
						}
					}
				}
				return v
			})
			got, first, err := settle(w.ctx, led, key, fmt.Sprint(key, " by ", try))
			w.Intercept(id, nil)
			switch {
			case err == nil:
				if known != nil && (*known != got || first) {
					w.Fatalf("%s: %q, first=%v after %q", key, got, first, *known)
				}
				known = &got
				outcomes[0]++
			case errors.Is(err, aegis.ErrUnknown):
				outcomes[1]++
			case errors.Is(err, aegis.ErrFenced):
				outcomes[2]++
			default:
				outcomes[3]++
			}
			if rng.IntN(3) == 0 || !led.Held() {
				id = []string{"a", "b"}[rng.IntN(2)]
				led = w.lead(id, "boss")
			}
		}
		led = w.lead("c", "boss") // an undisturbed one
		got, _, err := settle(w.ctx, led, key, "at last")
		if err != nil || known != nil && got != *known {
			w.Fatalf("%s: %q, %v; known was %v", key, got, err, known)
		}
		time.Sleep(4 * ttl) // virtual: whatever was on its way has arrived
		w.mustHave(key, got)
	}
	if outcomes[0] == 0 || outcomes[1] == 0 || outcomes[2] == 0 {
		w.Errorf("too narrow a test: %v", outcomes)
	}
	w.Logf("done %d, unknown %d, fenced %d, not done %d", outcomes[0], outcomes[1], outcomes[2], outcomes[3])
}
