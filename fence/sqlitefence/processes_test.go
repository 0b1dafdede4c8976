//go:build unix

package sqlitefence_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	osexec "os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"aegis/fence"
	"aegis/fence/sqlitefence"

	"go.uber.org/goleak"
)

// TestMain makes the test binary the other processes too: a role from the environment is played instead of the tests.
func TestMain(m *testing.M) {
	if name := os.Getenv("AEGIS_TEST_ROLE"); name != "" {
		g, err := sqlitefence.Open(os.Getenv("AEGIS_TEST_PATH"), sqlitefence.Config{})
		if err == nil {
			err = roles[name](g)
		}
		if err != nil {
			fmt.Println("failed:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// Roles read orders from stdin, a line each, and answer with a line on stdout.
var roles = map[string]func(*sqlitefence.Guard) error{
	"old leader": playOldLeader, "new leader": playNewLeader, "load": playLoad, "writer": playWriter, "settler": playSettler,
}

// process is a child that plays a role.
type process struct {
	*osexec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

func start(t *testing.T, role, path string) *process {
	t.Helper()
	p := &process{Cmd: osexec.Command(os.Args[0])}
	p.Env = append(os.Environ(), "AEGIS_TEST_ROLE="+role, "AEGIS_TEST_PATH="+path)
	p.Stderr = os.Stderr
	in, err := p.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := p.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	p.in, p.out = in, bufio.NewScanner(out)
	t.Cleanup(func() { p.Process.Kill(); p.Wait() })
	return p
}

func (p *process) order(format string, args ...any) { fmt.Fprintf(p.in, format+"\n", args...) }

// answer returns the child's next line; ok is false when it has died.
func (p *process) answer() (line string, ok bool) { ok = p.out.Scan(); return p.out.Text(), ok }

// orders calls fn with each order until stdin ends, and prints its answer.
func orders(fn func(order string) string) error {
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		if _, err := fmt.Println(fn(in.Text())); err != nil {
			return err
		}
	}
	return nil
}

func outcome(err error) string {
	switch {
	case err == nil:
		return "done"
	case errors.Is(err, fence.ErrFenced):
		return "fenced"
	}
	return "error: " + err.Error()
}

func seeded(t *testing.T) *rand.Rand {
	seed := rand.Uint64()
	if s := os.Getenv("AEGIS_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("replay: AEGIS_SEED=%d go test -run '^%s$' ./fence/sqlitefence", seed, t.Name())
	return rand.New(rand.NewPCG(seed, 0))
}

func pair(i string, token fence.Token) fence.Term {
	return fence.Term{Election: "pair/" + i, Token: token, Nonce: uint64(token)}
}

// spin lets some microseconds pass, too few for a timer.
func spin(micros string) {
	n, _ := strconv.Atoi(micros)
	for start := time.Now(); time.Since(start) < time.Duration(n)*time.Microsecond; {
	}
}

func playOldLeader(g *sqlitefence.Guard) error {
	return orders(func(order string) string {
		i, delay, _ := strings.Cut(order, " ")
		spin(delay)
		_, err := g.Exec(context.Background(), pair(i, 7), "INSERT INTO log VALUES (?, 7)", i)
		return outcome(err)
	})
}

func playNewLeader(g *sqlitefence.Guard) error {
	ctx := context.Background()
	return orders(func(order string) string {
		i, delay, _ := strings.Cut(order, " ")
		spin(delay)
		if err := g.Advance(ctx, pair(i, 8)); err != nil {
			return outcome(err)
		}
		var seen int // the first read
		if err := g.DB().QueryRowContext(ctx, "SELECT count(*) FROM log WHERE pair = ?", i).Scan(&seen); err != nil {
			return outcome(err)
		}
		if _, err := g.Exec(ctx, pair(i, 8), "INSERT INTO log VALUES (?, 8)", i); err != nil {
			return outcome(err)
		}
		return fmt.Sprint("saw ", seen)
	})
}

// Two processes on one file race for each of 500 names: one writes under 7 while the other advances to 8, reads and
// writes. What the new leader's first read did not see must not be there later, and neither may see SQLite's locks.
func TestTwoProcessesRace(t *testing.T) {
	rng := seeded(t)
	g, path := open(t)
	ctx := bounded(t)
	if err := g.Setup(ctx, "CREATE TABLE log (pair TEXT, token INTEGER)"); err != nil {
		t.Fatal(err)
	}
	const pairs = 500
	var terms []fence.Term
	for i := range pairs {
		terms = append(terms, pair(fmt.Sprint(i), 7))
	}
	if err := g.Advance(ctx, terms...); err != nil {
		t.Fatal(err)
	}
	before, after := start(t, "old leader", path), start(t, "new leader", path)
	counts := map[string]int{}
	for i := range pairs {
		before.order("%d %d", i, rng.IntN(200))
		after.order("%d %d", i, rng.IntN(200))
		wrote, _ := before.answer()
		saw, _ := after.answer()
		var rows int
		if err := g.DB().QueryRowContext(ctx, "SELECT count(*) FROM log WHERE pair = ? AND token = 7", fmt.Sprint(i)).Scan(&rows); err != nil {
			t.Fatal(err)
		}
		switch got := fmt.Sprintf("7: %s, 8: %s, rows of 7: %d", wrote, saw, rows); got {
		case "7: done, 8: saw 1, rows of 7: 1", "7: fenced, 8: saw 0, rows of 7: 0":
			counts[wrote]++
		default:
			t.Errorf("pair %d: %s", i, got)
		}
	}
	t.Log(counts)
	if counts["done"] == 0 || counts["fenced"] == 0 {
		t.Error("this was no race:", counts)
	}
}

// playLoad writes with four writers without a pause until they are fenced.
func playLoad(g *sqlitefence.Guard) error {
	ctx := context.Background()
	return orders(func(string) string {
		var wg sync.WaitGroup
		var mu sync.Mutex
		var unexpected []string
		for i := range 4 {
			wg.Go(func() {
				for n := 0; ; n++ {
					err := g.Do(ctx, term(7), func(tx *sqlitefence.Tx) error {
						_, err := tx.ExecContext(ctx, "INSERT INTO loot (item) VALUES (?)", fmt.Sprint(os.Getpid(), i, n))
						time.Sleep(10 * time.Millisecond) // is load, waits for nothing
						return err
					})
					if err == nil {
						continue
					}
					if !errors.Is(err, fence.ErrFenced) {
						mu.Lock()
						unexpected = append(unexpected, err.Error())
						mu.Unlock()
					}
					return
				}
			})
		}
		wg.Wait()
		return "stopped " + strings.Join(unexpected, "; ")
	})
}

// SQLite's lock has no queue, and its waiters poll. Without Guard.rest an advance is overtaken by 15 to 40 writes.
func TestAdvanceGetsInUnderLoadOfOtherProcesses(t *testing.T) {
	g, path := open(t)
	advance(t, g, 7)
	ctx := bounded(t)
	load := []*process{start(t, "load", path), start(t, "load", path), start(t, "load", path)}
	for _, p := range load {
		p.order("go")
	}
	untilLoad := func(rows int) {
		for n := 0; n < rows; {
			if err := g.DB().QueryRowContext(ctx, "SELECT count(*) FROM loot").Scan(&n); err != nil {
				t.Fatal(err)
			}
		}
	}
	const advances = 20
	overtaken := 0
	for i := range advances { // of a name that the load does not depend on
		untilLoad(10 + len(loot(t, g)))
		before := len(loot(t, g))
		if err := g.Advance(ctx, pair("x", fence.Token(1+i))); err != nil {
			t.Fatal(err)
		}
		overtaken += len(loot(t, g)) - before
	}
	t.Logf("%d advances were overtaken by %d writes of 12 writers in 3 processes", advances, overtaken)
	if overtaken > 10*advances {
		t.Error("that is more than ten for each")
	}
	advance(t, g, 8)
	seen := len(loot(t, g))
	for _, p := range load {
		if line, _ := p.answer(); line != "stopped " {
			t.Error(line)
		}
	}
	if n := len(loot(t, g)); n != seen {
		t.Errorf("%d writes of 7 came after the new leader's first read", n-seen)
	}
}

// playWriter writes each number into two tables and advances its own term now and then, as fast as it can.
func playWriter(g *sqlitefence.Guard) error {
	ctx := context.Background()
	return orders(func(order string) string {
		first, _ := strconv.ParseInt(order, 10, 64)
		for n := first; ; n++ {
			t := term(1 + n/10)
			if n == first || n%10 == 0 {
				if err := g.Advance(ctx, t); err != nil {
					return outcome(err)
				}
			}
			if err := g.Do(ctx, t, func(tx *sqlitefence.Tx) error {
				if _, err := tx.ExecContext(ctx, "INSERT INTO a VALUES (?1, ?2)", n, t.Token); err != nil {
					return err
				}
				_, err := tx.ExecContext(ctx, "INSERT INTO b VALUES (?1, ?2)", n, t.Token)
				return err
			}); err != nil {
				return outcome(err)
			}
			fmt.Println(n)
		}
	})
}

func TestKillingAWriterLeavesFenceAndDataConsistent(t *testing.T) {
	rng := seeded(t)
	path := filepath.Join(t.TempDir(), "test.db")
	g := reopen(t, path)
	ctx := bounded(t)
	if err := g.Setup(ctx, "CREATE TABLE a (n INTEGER PRIMARY KEY, token INTEGER); CREATE TABLE b (n INTEGER PRIMARY KEY, token INTEGER)"); err != nil {
		t.Fatal(err)
	}
	next := int64(0)
	for round := range 12 {
		if round%2 == 0 { // with and without another process that has the file open
			if err := g.Close(); err != nil {
				t.Fatal(err)
			}
		} else {
			g = reopen(t, path)
		}
		p := start(t, "writer", path)
		p.order("%d", next)
		acknowledged := next - 1
		kill := time.AfterFunc(time.Hour, func() { p.Process.Kill() })
		for after := rng.IntN(30); ; after-- {
			line, ok := p.answer()
			if !ok {
				break
			}
			n, err := strconv.ParseInt(line, 10, 64)
			if err != nil {
				t.Fatal(line)
			}
			if acknowledged = n; after == 0 {
				kill.Reset(time.Duration(rng.IntN(2000)) * time.Microsecond)
			}
		}
		kill.Stop()
		p.Wait()

		check := reopen(t, path)
		var rows, unequal, most, token int64
		if err := check.DB().QueryRowContext(ctx, `SELECT (SELECT count(*) FROM a), (SELECT coalesce(max(token), 0) FROM a),
			(SELECT count(*) FROM a FULL JOIN b USING (n) WHERE a.token IS NOT b.token)`).Scan(&rows, &token, &unequal); err != nil {
			t.Fatal(err)
		}
		most = rows - 1
		rec, err := check.Newest(ctx, "boss/1")
		if err != nil {
			t.Fatal(err)
		}
		if unequal != 0 || most < acknowledged || most > acknowledged+1 || rec.Token < token || rec.Token > token+1 {
			t.Errorf("round %d: acknowledged %d, written %d, halves %d; newest written token %d, fence %d", round, acknowledged, most, unequal, token, rec.Token)
		}
		var sound string
		if err := check.DB().QueryRowContext(ctx, "PRAGMA integrity_check").Scan(&sound); err != nil || sound != "ok" {
			t.Error(sound, err)
		}
		check.Close()
		next = most + 1
	}
	t.Logf("%d writes in 12 processes that were killed", next)
}

// playSettler settles a boss kill once and is killed at the point that the order names.
func playSettler(g *sqlitefence.Guard) error {
	ctx := context.Background()
	return orders(func(order string) string {
		key, point, _ := strings.Cut(order, " ")
		die := func(at string) {
			if at == point {
				syscall.Kill(os.Getpid(), syscall.SIGKILL)
				select {}
			}
		}
		if micros, ok := strings.CutPrefix(point, "after "); ok {
			n, _ := strconv.Atoi(micros)
			time.AfterFunc(time.Duration(n)*time.Microsecond, func() { syscall.Kill(os.Getpid(), syscall.SIGKILL) })
		}
		die("before")
		result, _, err := g.Once(ctx, term(7), key, func(tx *sqlitefence.Tx) ([]byte, error) {
			die("before the write")
			item := fmt.Sprintf("%s by %d", key, os.Getpid())
			_, err := tx.ExecContext(ctx, "INSERT INTO loot (item) VALUES (?)", item)
			die("after the write")
			return []byte(item), err
		})
		die("after the commit")
		if err != nil {
			return outcome(err)
		}
		return string(result)
	})
}

func TestOnceIsOnceHoweverOftenItsProcessIsKilled(t *testing.T) {
	rng := seeded(t)
	g, path := open(t)
	advance(t, g, 7)
	const kills = 100
	points := []string{"before", "before the write", "after the write", "after the commit", ""}
	var want []string
	p := start(t, "settler", path)
	for i := range kills {
		key := fmt.Sprintf("kill-%d", i)
		point := points[rng.IntN(len(points))]
		if point == "" {
			point = fmt.Sprint("after ", rng.IntN(1500))
		}
		p.order("%s %s", key, point)
		line, ok := p.answer()
		if !ok { // it died; the next one does it again
			p.Wait()
			p = start(t, "settler", path)
			p.order("%s no more", key)
			if line, ok = p.answer(); !ok {
				t.Fatalf("%s: the second process died too", key)
			}
		}
		want = append(want, line)
	}
	wantLoot(t, g, want...)
}
