package redisfence_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"aegis/fence"
	"aegis/fence/redisfence"
	"aegis/internal/lab"

	"github.com/redis/go-redis/v9"
)

func TestALostReplyIsUnknownAndNothingIsSentTwice(t *testing.T) {
	g, c := open(t)
	ctx := bounded(t)
	advance(t, g, 7)
	p := newProxy(t, server.Addr)
	far := client(t, p.addr(), func(o *redis.Options) { o.MaxRetries = 3 }) // which is the default: sends again what failed
	g = newGuard(t, far, redisfence.Config{})
	n := g.Key("boss", "n")
	mustExec(t, g, 7, "SET", n, "0")
	incr := func(b *redisfence.Batch) ([]byte, error) { return []byte("sword"), b.Add("INCR", n) }
	script := redisfence.NewScript("return redis.call('INCR', KEYS[1])")
	if _, err := g.Script(ctx, term(7), script, []string{n}); err != nil {
		t.Fatal(err)
	}
	_, _, err := g.Once(ctx, term(7), "warm", func(*redisfence.Batch) ([]byte, error) { return nil, nil })
	if _, err2 := g.Do(ctx, term(7), func(b *redisfence.Batch) error { return b.Add("GET", n) }); err != nil || err2 != nil {
		t.Fatal(err, err2)
	}

	// A new connection says hello first; a reply that is lost must be the script's.
	connected := func() {
		for far.Ping(ctx).Err() != nil && ctx.Err() == nil {
		}
	}
	done := 1
	for what, write := range map[string]func() error{
		"Exec": func() error { return second(g.Exec(ctx, term(7), "INCR", n)) },
		"Do": func() error {
			return second(g.Do(ctx, term(7), func(b *redisfence.Batch) error { return second(incr(b)) }))
		},
		"Script": func() error { return second(g.Script(ctx, term(7), script, []string{n})) },
		"Once": func() error {
			_, _, err := g.Once(ctx, term(7), "kill", func(b *redisfence.Batch) ([]byte, error) {
				p.arm(-1, 0) // the next reply
				return incr(b)
			})
			return err
		},
	} {
		t.Run(what, func(t *testing.T) {
			connected()
			if what != "Once" {
				p.arm(-1, 0)
			}
			err := write()
			wantIs(t, err, fence.ErrUnknown)
			wantSays(t, err, "boss")
			done++
			wantValue(t, c, n, fmt.Sprint(done))
		})
	}
	result, first, err := g.Once(ctx, term(7), "kill", incr)
	if string(result) != "sword" || first || err != nil {
		t.Errorf("the repeat: %q, %v, %v", result, first, err)
	}
	wantValue(t, c, n, fmt.Sprint(done))

	t.Run("Advance", func(t *testing.T) {
		lost := false
		for down := 0; !lost; down += 4 { // somewhere in the second reply
			connected()
			p.arm(-1, down)
			err := g.Advance(ctx, term(8))
			if rec, rerr := newGuard(t, c, redisfence.Config{}).Newest(ctx, "boss"); rerr != nil {
				t.Fatal(rerr)
			} else if lost = rec.Token == 8; lost {
				wantIs(t, err, fence.ErrUnknown)
			}
		}
		p.arm(-1, -1)
		advance(t, g, 8)
	})
}

// A settlement by terms 7 and 8 and twice by 8, whose connection dies at a random byte of a request or a reply: one
// change, and every repeat returns the first result.
func TestSettlementsWhoseConnectionDiesHappenOnce(t *testing.T) {
	seed := rand.Uint64()
	if s := os.Getenv("AEGIS_REDISFENCE_SEED"); s != "" {
		seed, _ = strconv.ParseUint(s, 10, 64)
	}
	defer func() {
		if t.Failed() {
			t.Logf("replay: AEGIS_REDISFENCE_SEED=%d go test -run %s aegis/fence/redisfence", seed, t.Name())
		}
	}()
	rng := rand.New(rand.NewPCG(seed, 0))
	near, c := open(t)
	advance(t, near, 1)
	p := newProxy(t, server.Addr)
	fc := client(t, p.addr())
	far := newGuard(t, fc, redisfence.Config{})
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Second)
	defer cancel()
	gold := near.Key("boss", "gold")
	settle := func(g *redisfence.Guard, token fence.Token, key, result string) (string, bool, error) {
		got, first, err := g.Once(ctx, term(token), key, func(b *redisfence.Batch) ([]byte, error) {
			return []byte(result), errors.Join(b.Add("INCR", gold), b.Add("RPUSH", near.Key("boss", key), result))
		})
		return string(got), first, err
	}
	if _, _, err := settle(far, 1, "warm", ""); err != nil {
		t.Fatal(err)
	}
	const rounds = 1000
	outcomes := map[string]int{}
	token := fence.Token(1)
	for i := range rounds {
		key := fmt.Sprint("kill-", i)
		for fc.Ping(ctx).Err() != nil && ctx.Err() == nil {
		}
		kill := rng.IntN(500) // a settlement has about 300 bytes up, and 12 down
		if rng.IntN(2) == 0 {
			p.arm(kill, -1)
		} else {
			p.arm(-1, kill%20)
		}
		result, first, err := settle(far, token, key, "first")
		p.arm(-1, -1)
		outcomes[outcome(first, err)]++
		if rng.IntN(2) == 0 {
			token++
			advance(t, near, token)
		}
		again, wasFirst, err2 := settle(near, token, key, "second")
		want := again
		if err == nil {
			want = result
		}
		if err2 != nil || again != want || wasFirst == (again == "first") {
			t.Fatalf("round %d: %q, %v, %v; the repeat: %q, %v, %v", i, result, first, err, again, wasFirst, err2)
		}
		if third, repeated, err := settle(near, token, key, "third"); third != again || repeated || err != nil {
			t.Fatalf("round %d: %q, then %q, %v, %v", i, again, third, repeated, err)
		}
		if got := c.LRange(ctx, near.Key("boss", key), 0, -1).Val(); len(got) != 1 || got[0] != again {
			t.Fatalf("round %d: the loot is %q; want %q alone", i, got, again)
		}
	}
	wantValue(t, c, gold, fmt.Sprint(rounds+1))
	if outcomes["done"] == 0 || outcomes["unknown"] == 0 || outcomes["not done"] == 0 {
		t.Errorf("too narrow a test: %v", outcomes)
	}
	t.Log(outcomes)
}

func outcome(first bool, err error) string {
	switch {
	case errors.Is(err, fence.ErrUnknown):
		return "unknown"
	case err != nil:
		return "not done"
	case first:
		return "done"
	}
	return "known"
}

// settleForever is the process of the next test. It settles one kill after the other and says so before and after.
func settleForever() {
	c := redis.NewClient(&redis.Options{Addr: os.Args[1], ContextTimeoutEnabled: true})
	g, err := redisfence.New(c, redisfence.Config{})
	if err != nil {
		panic(err)
	}
	from, _ := strconv.Atoi(os.Args[2])
	for i := from; ; i++ {
		fmt.Println("begin", i)
		_, _, err := g.Once(context.Background(), term(7), fmt.Sprint("kill-", i), func(b *redisfence.Batch) ([]byte, error) {
			return []byte("by the killed"), errors.Join(b.Add("INCR", g.Key("boss", "gold")), b.Add("RPUSH", g.Key("boss", fmt.Sprint("kill-", i)), "x"))
		})
		if err != nil {
			panic(err)
		}
		fmt.Println("done", i)
	}
}

// The process is killed while it settles without a pause, and so is the server every few times.
func TestSettlementsWhoseProcessIsKilledHappenOnce(t *testing.T) {
	g, c := open(t)
	advance(t, g, 7)
	ctx := bounded(t)
	next := 0
	for i := range 20 {
		p, err := lab.Run(lab.Command{Role: "settle", Args: []string{server.Addr, fmt.Sprint(next)}})
		if err != nil {
			t.Fatal(err)
		}
		last := next + rand.IntN(20)
		if _, err := p.Expect(ctx, fmt.Sprintf("done %d", last)); err != nil {
			t.Fatal(err)
		}
		if i%5 == 4 && !server.Given() {
			if err := errors.Join(server.Kill(), server.Start(ctx)); err != nil {
				t.Fatal(err)
			}
		}
		p.Close()
		for {
			line, err := p.Next(ctx)
			if err != nil {
				break
			}
			_, _ = fmt.Sscanf(line.Text, "begin %d", &last)
		}
		for ; next <= last; next++ {
			key := fmt.Sprint("kill-", next)
			for range 2 {
				_, _, err := g.Once(ctx, term(7), key, func(b *redisfence.Batch) ([]byte, error) {
					return []byte("by the repeat"), errors.Join(b.Add("INCR", g.Key("boss", "gold")), b.Add("RPUSH", g.Key("boss", key), "x"))
				})
				if err != nil {
					t.Fatal(err)
				}
			}
			if n := c.LLen(ctx, g.Key("boss", key)).Val(); n != 1 {
				t.Fatalf("%s was settled %d times", key, n)
			}
		}
	}
	wantValue(t, c, g.Key("boss", "gold"), fmt.Sprint(next))
}
