package mysqlfence_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"aegis/fence"
	"aegis/fence/mysqlfence"
)

// TestAdvanceGetsInUnderUnbrokenLoad: writers of the old term keep the fence's row share-locked without a gap, in
// transactions of 20 ms. An advance gets in within ten times the longest of them; nobody sees anything but ErrFenced.
func TestAdvanceGetsInUnderUnbrokenLoad(t *testing.T) {
	for _, writers := range []int{16, 64} {
		t.Run(fmt.Sprint(writers), func(t *testing.T) {
			g := guard(t)
			g.DB().SetMaxIdleConns(writers + 4)
			advance(t, g, 7)
			ctx := bounded(t)
			var longest atomic.Int64
			var running atomic.Int32
			var load sync.WaitGroup
			for i := range writers {
				load.Go(func() {
					for n := 0; ; n++ {
						var began time.Time
						err := g.Do(ctx, term(7), func(tx *mysqlfence.Tx) error {
							began = time.Now()
							if n == 0 {
								running.Add(1)
							}
							_, err := tx.ExecContext(ctx, "INSERT INTO kv VALUES (?, ?) ON DUPLICATE KEY UPDATE v = VALUES(v)", fmt.Sprint(i), n)
							time.Sleep(20 * time.Millisecond) // is the load, waits for nothing
							return err
						})
						if errors.Is(err, fence.ErrFenced) {
							return
						}
						if err != nil {
							t.Errorf("writer %d: %v", i, err)
							return
						}
						for took := int64(time.Since(began)); ; {
							if old := longest.Load(); took <= old || longest.CompareAndSwap(old, took) {
								break
							}
						}
					}
				})
			}
			waitUntil(t, func() bool { return int(running.Load()) == writers })
			start := time.Now()
			if err := g.Advance(ctx, term(8)); err != nil {
				t.Error(err)
			}
			took := time.Since(start)
			load.Wait()
			t.Logf("the advance took %v, the longest transaction %v", took, time.Duration(longest.Load()))
			if took > 10*time.Duration(longest.Load()) {
				t.Errorf("the advance took %v, over ten times the longest transaction, %v", took, time.Duration(longest.Load()))
			}
		})
	}
}

// TestNobodySeesADeadlock: transactions that admit two terms in one order, advances of both in the other, settlements
// and refusals of names that are not there, all at once.
func TestNobodySeesADeadlock(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed) // the schedule is the server's: a replay is another race
	g := guard(t)
	g.DB().SetMaxIdleConns(20)
	ctx := bounded(t)
	var token atomic.Int64
	token.Store(7)
	named := func(name string, n fence.Token) fence.Term { return fence.Term{Election: name, Token: n} }
	if err := g.Advance(ctx, named("a", 7), named("b", 7)); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	var admitted atomic.Int64
	check := func(err error) {
		if err != nil && !errors.Is(err, fence.ErrFenced) {
			t.Errorf("seen: %v", err)
		}
	}
	for i := range 8 {
		rng := rand.New(rand.NewPCG(seed, uint64(i)))
		all.Go(func() {
			for n := range 40 {
				now := token.Load()
				switch rng.IntN(6) {
				case 0:
					now = token.Add(1)
					check(g.Advance(ctx, named("b", now), named("a", now)))
				case 1:
					check(g.Advance(ctx, named(fmt.Sprint("new ", n), now)))
				case 2:
					_, err := g.Exec(ctx, named("nobody", now), insert, "never")
					check(err)
				case 3:
					_, _, err := g.Once(ctx, named("a", now), fmt.Sprint(n%4), func(tx *mysqlfence.Tx) ([]byte, error) {
						_, err := tx.ExecContext(ctx, upsert, "once", n)
						return nil, err
					})
					check(err)
				default:
					err := g.Do(ctx, named("b", now), func(tx *mysqlfence.Tx) error {
						if _, err := tx.ExecContext(ctx, upsert, fmt.Sprint("k", n%2), n); err != nil {
							return err
						}
						if err := tx.Admit(ctx, named("a", now)); err != nil {
							return err
						}
						_, err := tx.ExecContext(ctx, upsert, fmt.Sprint("k", 1-n%2), n)
						return err
					})
					check(err)
					if err == nil {
						admitted.Add(1)
					}
				}
			}
		})
	}
	all.Wait()
	if admitted.Load() == 0 {
		t.Error("nothing was admitted at all")
	}
	t.Logf("%d admitted, newest %d", admitted.Load(), token.Load())
}

// openTransaction is what a stopped leader leaves: a transaction of token 7 that was admitted and has written.
func openTransaction(t *testing.T, g *mysqlfence.Guard) (session uint64, end func() error) {
	t.Helper()
	ctx := bounded(t)
	admitted, resume, done := make(chan uint64, 1), make(chan struct{}), make(chan error, 1)
	go func() {
		done <- g.Do(ctx, term(7), func(tx *mysqlfence.Tx) error {
			var id uint64
			if err := tx.QueryRowContext(ctx, "SELECT CONNECTION_ID()").Scan(&id); err != nil {
				return err
			}
			_, err := tx.ExecContext(ctx, insert, "by 7")
			admitted <- id
			<-resume
			return err
		})
	}()
	select {
	case session = <-admitted:
	case err := <-done:
		t.Fatal(err)
	}
	return session, sync.OnceValue(func() error { close(resume); return <-done })
}

func TestAdvanceNamesWhoBlocksIt(t *testing.T) {
	g := guard(t)
	advance(t, g, 7)
	id, end := openTransaction(t, g)
	defer end()
	short, cancel := context.WithTimeout(bounded(t), 300*time.Millisecond)
	defer cancel()
	start := time.Now()
	err := g.Advance(short, term(8))
	took := time.Since(start)
	var blocked *mysqlfence.BlockedError
	if !errors.As(err, &blocked) || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("Advance returned %v, must be a BlockedError with the context's cause", err)
	}
	if len(blocked.Sessions) != 1 || blocked.Sessions[0].ID != id || !strings.Contains(err.Error(), "KILL "+strconv.FormatUint(id, 10)) {
		t.Errorf("the session that blocks is %d, Advance says %v", id, err)
	}
	if took > 3*time.Second {
		t.Errorf("a context of 300 ms ended after %v", took)
	}
	if err := g.AdvanceWith(bounded(t), mysqlfence.AdvanceOptions{Wait: 200 * time.Millisecond}, term(8)); !errors.As(err, &blocked) || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("AdvanceWith Wait of 200 ms returned %v", err)
	}
	t.Log(err)
	// What has given up does not stand in the way of the old term, which is still in office here.
	if _, err := g.Exec(bounded(t), term(7), insert, "also by 7"); err != nil {
		t.Errorf("after advances that gave up, Exec returned %v", err)
	}
	if err := end(); err != nil {
		t.Errorf("the open transaction returned %v", err)
	}
	advance(t, g, 8)
}

// TestGivenUpAdvanceLeavesTheLineWithoutASecondConnection: also where the pool has but one.
func TestGivenUpAdvanceLeavesTheLineWithoutASecondConnection(t *testing.T) {
	name := database(t)
	g := open(t, server.DSN(name), mysqlfence.Config{})
	advance(t, g, 7)
	_, end := openTransaction(t, g)
	defer end()
	narrow := open(t, server.DSN(name), mysqlfence.Config{})
	narrow.DB().SetMaxOpenConns(1)
	if err := narrow.AdvanceWith(bounded(t), mysqlfence.AdvanceOptions{Wait: 50 * time.Millisecond}, term(8)); err == nil {
		t.Error("the advance did not wait")
	}
	short, cancel := context.WithTimeout(bounded(t), 10*time.Second)
	defer cancel()
	if _, err := g.Exec(short, term(7), insert, "also by 7"); err != nil {
		t.Errorf("after an advance that gave up, Exec returned %v", err)
	}
}

func TestAdvanceEndsWhoBlocksIt(t *testing.T) {
	g := guard(t)
	advance(t, g, 7)
	_, end := openTransaction(t, g)
	defer end()
	if err := g.AdvanceWith(bounded(t), mysqlfence.AdvanceOptions{Wait: 100 * time.Millisecond, EndBlockers: true}, term(8)); err != nil {
		t.Fatal(err)
	}
	if err := end(); err == nil {
		t.Error("the transaction whose session was killed has committed")
	}
	if got := items(t, g); len(got) > 0 {
		t.Errorf("%q was written after the advance", got)
	}
}

// TestCutOffWriterReleasesItsLock: a Do whose context ends while its statement waits in the server, which does not see
// that nobody wants the answer any more, does not keep its lock on the fence.
func TestCutOffWriterReleasesItsLock(t *testing.T) {
	g := guard(t)
	advance(t, g, 7)
	ctx := bounded(t)
	if _, err := g.DB().ExecContext(ctx, "INSERT INTO kv VALUES ('k', 0)"); err != nil {
		t.Fatal(err)
	}
	other, err := g.DB().BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Rollback()
	if _, err := other.ExecContext(ctx, "UPDATE kv SET v = 1"); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithCancel(ctx)
	defer cancel()
	err = g.Do(short, term(7), func(tx *mysqlfence.Tx) error {
		time.AfterFunc(100*time.Millisecond, cancel)
		_, err := tx.ExecContext(short, "UPDATE kv SET v = 2")
		return err
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("Do returned %v", err)
	}
	soon, stop := context.WithTimeout(ctx, 15*time.Second)
	defer stop()
	if err := g.Advance(soon, term(8)); err != nil {
		t.Errorf("the advance waits for a transaction that nobody wants any more: %v", err)
	}
}

// TestPatienceOfTheServer: the server's own bound on waiting for locks does not end an admission or an advance.
func TestPatienceOfTheServer(t *testing.T) {
	name := database(t)
	patient := open(t, server.DSN(name), mysqlfence.Config{})
	advance(t, patient, 7)
	g, err := openWith(name, params{"innodb_lock_wait_timeout": "1"})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	_, end := openTransaction(t, patient)
	defer end()
	rival := advanceStarts(t, g, term(8))
	exec, do := make(chan error, 1), make(chan error, 1)
	ctx := bounded(t)
	go func() { _, err := g.Exec(ctx, term(7), insert, "late"); exec <- err }()
	go func() { do <- g.Do(ctx, term(7), func(tx *mysqlfence.Tx) error { return nil }) }()
	<-time.After(2500 * time.Millisecond) // the claim is about this much time
	if len(rival) > 0 || len(exec) > 0 || len(do) > 0 {
		t.Errorf("%d advances, %d Execs and %d Dos have not waited", len(rival), len(exec), len(do))
	}
	if err := end(); err != nil {
		t.Error(err)
	}
	if err := <-rival; err != nil {
		t.Error(err)
	}
	for _, c := range []chan error{exec, do} {
		if err := <-c; !errors.Is(err, fence.ErrFenced) {
			t.Errorf("a writer that waited for an advance returned %v", err)
		}
	}
}
