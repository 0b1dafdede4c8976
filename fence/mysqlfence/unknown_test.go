package mysqlfence_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"aegis/fence"
	"aegis/fence/mysqlfence"
)

const insert = "INSERT INTO loot (item) VALUES (?)"

func TestRoundTrips(t *testing.T) {
	name := database(t)
	p := newProxy(t)
	g := p.guard(t, name)
	advance(t, g, 7)
	count := func(what string, want int64, fn func() error) {
		t.Helper()
		before := p.commands.Load()
		if err := fn(); err != nil {
			t.Fatal(err)
		}
		if got := p.commands.Load() - before; got != want {
			t.Errorf("%s took %d round trips, must be %d", what, got, want)
		}
	}
	count("Exec", 1, func() error {
		_, err := g.Exec(bounded(t), term(7), insert, "sword")
		return err
	})
	count("a plain transaction of two statements", 4, func() error {
		tx, err := g.DB().Begin()
		if err != nil {
			return err
		}
		_, err1 := tx.Exec(insert, "shield")
		_, err2 := tx.Exec(insert, "ring")
		return errors.Join(err1, err2, tx.Commit())
	})
	count("Do with two statements", 4, func() error {
		return g.Do(bounded(t), term(7), func(tx *mysqlfence.Tx) error {
			_, err1 := tx.ExecContext(bounded(t), insert, "bow")
			_, err2 := tx.ExecContext(bounded(t), insert, "arrow")
			return errors.Join(err1, err2)
		})
	})
}

func TestLostReplyIsUnknown(t *testing.T) {
	name := database(t)
	p := newProxy(t)
	g := p.guard(t, name)
	direct := open(t, server.DSN(name), mysqlfence.Config{})
	advance(t, g, 7)
	for _, f := range []fate{cut, loseReply} {
		item := fmt.Sprint("item ", f)
		written := func() int { return len(list(t, direct.DB(), "SELECT item FROM loot WHERE item = '"+item+"'")) }
		expect := func(what string, err error) {
			t.Helper()
			if !errors.Is(err, fence.ErrUnknown) {
				t.Errorf("%s whose commit got no reply returned %v, must be ErrUnknown", what, err)
			}
			if want := map[fate]int{cut: 0, loseReply: 1}[f]; written() != want {
				t.Errorf("%s: the proxy's fate %d must leave %d rows, has left %d", what, f, want, written())
			}
			if _, err := direct.DB().Exec("DELETE FROM loot"); err != nil {
				t.Fatal(err)
			}
		}
		came := p.once("XA COMMIT", f)
		expect("Do", g.Do(bounded(t), term(7), func(tx *mysqlfence.Tx) error {
			_, err := tx.ExecContext(bounded(t), insert, item)
			return err
		}))
		if !came() {
			t.Fatal("no commit has passed the proxy")
		}
		p.once("XA COMMIT", f)
		_, err := g.Exec(bounded(t), term(7), insert, item)
		expect("Exec", err)
		came = p.once("XA COMMIT", f)
		if err := g.Advance(bounded(t), term(fence.Token(10+f))); err != nil || !came() {
			t.Errorf("Advance, which repeats itself, returned %v", err)
		}
		p.onCommand(nil)
		if err := g.Advance(bounded(t), term(7)); !errors.Is(err, fence.ErrFenced) {
			t.Errorf("the Advance whose reply was lost was not done: %v", err)
		}
		if _, err := direct.DB().Exec("UPDATE aegis_fence SET token = 7, nonce = 0"); err != nil { // start over
			t.Fatal(err)
		}
	}
}

// TestKilledInsideFnIsEnded: a session that is killed in the middle leaves nothing, whether fn minds or not.
func TestKilledInsideFnIsEnded(t *testing.T) {
	g := guard(t)
	advance(t, g, 7)
	for _, swallow := range []bool{false, true} {
		err := g.Do(bounded(t), term(7), func(tx *mysqlfence.Tx) error {
			ctx := bounded(t)
			var id uint64
			if err := tx.QueryRowContext(ctx, "SELECT CONNECTION_ID()").Scan(&id); err != nil {
				return err
			}
			if _, err := tx.ExecContext(ctx, insert, "stale"); err != nil {
				return err
			}
			if _, err := g.DB().ExecContext(ctx, "KILL "+strconv.FormatUint(id, 10)); err != nil {
				return err
			}
			_, err := tx.ExecContext(ctx, insert, "after")
			for range 3 {
				_, _ = tx.ExecContext(ctx, insert, "after it")
			}
			if swallow {
				return nil
			}
			return err
		})
		if err == nil {
			t.Errorf("swallow=%v: a transaction whose session was killed must not succeed", swallow)
		}
		if swallow && !errors.Is(err, mysqlfence.ErrEnded) {
			t.Errorf("a lost connection that fn swallows is %v, must be ErrEnded", err)
		}
		if got := items(t, g); len(got) > 0 {
			t.Errorf("swallow=%v: %q was written", swallow, got)
		}
	}
}

// TestOnceSettlesOnceWhateverIsLost: settlements by tokens that grow, each retried until it is certain, over a
// connection that is lost at random commands, before or after the server has executed them.
func TestOnceSettlesOnceWhateverIsLost(t *testing.T) {
	const settlements = 1000
	seed := rand.Uint64()
	if s := os.Getenv("AEGIS_MYSQLFENCE_SEED"); s != "" {
		seed, _ = strconv.ParseUint(s, 10, 64)
	}
	t.Logf("replay: AEGIS_MYSQLFENCE_SEED=%d go test -run '^%s$' ./fence/mysqlfence", seed, t.Name())
	rng := rand.New(rand.NewPCG(seed, 0))
	name := database(t)
	p := newProxy(t)
	g := p.guard(t, name)
	g.DB().SetMaxOpenConns(1)
	direct := open(t, server.DSN(name), mysqlfence.Config{})
	token := fence.Token(7)
	advance(t, direct, token)
	advance(t, g, token) // examines the server before the faults begin
	if _, err := direct.DB().Exec("CREATE TABLE bag (item VARCHAR(100), n INT)"); err != nil {
		t.Fatal(err)
	}
	unknown, killed := 0, int64(0)
	for i := range settlements {
		item := fmt.Sprintf("item %03d", i)
		want := []byte(fmt.Sprintf("%s by %d", item, token))
		f, last := []fate{cut, loseReply}[rng.IntN(2)], rng.Int64N(9)+1 // the command that it befalls
		var seen atomic.Int64
		p.onCommand(func(string) fate {
			if seen.Add(1) == last {
				return f
			}
			return pass
		})
		settle := func() ([]byte, bool, error) {
			return g.Once(bounded(t), term(token), item, func(tx *mysqlfence.Tx) ([]byte, error) {
				_, err1 := tx.ExecContext(context.Background(), "INSERT INTO bag VALUES (?, 1)", item)
				_, err2 := tx.ExecContext(context.Background(), "INSERT INTO bag VALUES (?, 2)", item)
				return []byte(fmt.Sprintf("%s by %d", item, token)), errors.Join(err1, err2)
			})
		}
		result, _, err := settle()
		for tries := 0; err != nil; tries++ {
			if errors.Is(err, fence.ErrUnknown) {
				unknown++
			}
			if tries > 5 {
				t.Fatalf("settlement %d: %v", i, err)
			}
			if rng.IntN(4) == 0 && errors.Is(err, fence.ErrUnknown) { // the leader has died, the next one repeats
				token++
				advance(t, direct, token)
			}
			result, _, err = settle()
		}
		p.onCommand(nil)
		if seen.Load() >= last {
			killed++
		}
		repeat, first, err := settle()
		if err != nil || first || !slices.Equal(repeat, result) {
			t.Fatalf("the repeat of settlement %d returned %q, first=%v, %v; must be %q", i, repeat, first, err, result)
		}
		if !slices.Equal(result, want) && !strings.HasPrefix(string(result), item+" by ") {
			t.Fatalf("settlement %d returned %q", i, result)
		}
	}
	t.Logf("%d connections lost, %d of them with an unknown outcome, tokens up to %d", killed, unknown, token)
	if got := list(t, direct.DB(), "SELECT COUNT(*) FROM bag"); got[0] != fmt.Sprint(2*settlements) {
		t.Errorf("%s rows after %d settlements of two", got[0], settlements)
	}
	if got := list(t, direct.DB(), "SELECT item FROM bag GROUP BY item HAVING SUM(n) <> 3 OR COUNT(*) <> 2"); len(got) > 0 {
		t.Errorf("not settled exactly once: %q", got)
	}
	if unknown == 0 || killed < settlements/3 {
		t.Errorf("the faults were not met: %d killed, %d unknown", killed, unknown)
	}
}
