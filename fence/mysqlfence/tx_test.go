package mysqlfence_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"aegis/fence"
	"aegis/fence/mysqlfence"
)

// TestNothingEndsTheTransactionInsideFn: the server refuses whatever would end it, and what fn has written before and
// writes after commits or not as one.
func TestNothingEndsTheTransactionInsideFn(t *testing.T) {
	g := guard(t)
	advance(t, g, 7)
	for _, procedure := range []string{
		"CREATE PROCEDURE commits() BEGIN INSERT INTO loot (item) VALUES ('by the procedure'); COMMIT; END",
		"CREATE PROCEDURE rolls_back() BEGIN ROLLBACK; INSERT INTO loot (item) VALUES ('by the procedure'); END",
	} {
		if _, err := g.DB().Exec(procedure); err != nil {
			t.Fatal(err)
		}
	}
	ctx := bounded(t)
	for _, statement := range []string{
		"COMMIT", "ROLLBACK", "COMMIT AND CHAIN", "START TRANSACTION", "BEGIN", "SET autocommit = 0; SET autocommit = 1",
		"CREATE TABLE more (id INT)", "ALTER TABLE loot ADD COLUMN n INT", "DROP TABLE loot", "TRUNCATE TABLE loot", "RENAME TABLE loot TO l",
		"LOCK TABLES loot WRITE", "CALL commits()", "CALL rolls_back()", "XA START 'another'", "XA COMMIT 'another'", "COMMIT; INSERT INTO loot (item) VALUES ('behind')",
	} {
		t.Run(statement, func(t *testing.T) {
			var refusal error
			failed := errors.New("enough")
			err := g.Do(ctx, term(7), func(tx *mysqlfence.Tx) error {
				if _, err := tx.ExecContext(ctx, insert, "before"); err != nil {
					return err
				}
				_, refusal = tx.ExecContext(ctx, statement)
				if _, err := tx.ExecContext(ctx, insert, "after"); err != nil {
					return err
				}
				return failed
			})
			if !errors.Is(err, failed) {
				t.Errorf("Do returned %v, must be fn's error", err)
			}
			if refusal == nil {
				t.Error("the server has not refused it")
			}
			if got := items(t, g); len(got) > 0 {
				t.Errorf("%q was written although fn failed", got)
			}
			if _, err := g.Exec(ctx, term(7), "INSERT INTO loot (item) VALUES ('x'); "+statement); err == nil {
				t.Error("Exec has done it")
			}
			if got := items(t, g); len(got) > 0 {
				t.Errorf("%q was written although Exec failed", got)
			}
		})
	}
	if err := g.Do(ctx, term(7), func(tx *mysqlfence.Tx) error {
		_, err := tx.ExecContext(ctx, "CREATE TABLE more (id INT)")
		if err == nil || !strings.Contains(err.Error(), "commit it implicitly") {
			t.Errorf("the error does not explain itself: %v", err)
		}
		_, err = tx.ExecContext(ctx, insert, "together")
		return err
	}); err != nil || !slices.Equal(items(t, g), []string{"together"}) {
		t.Errorf("a refused statement must leave the transaction whole: %v, %q", err, items(t, g))
	}
}

// TestDeadlockVictimWritesNothingUnguarded: two transactions deadlock; the server rolls one back inside fn, which does
// not look at errors. Nothing of it may be written but by a whole repetition, and nobody sees the deadlock.
func TestDeadlockVictimWritesNothingUnguarded(t *testing.T) {
	g := guard(t)
	advance(t, g, 7)
	ctx := bounded(t)
	if _, err := g.DB().Exec("INSERT INTO kv VALUES ('a', 0), ('b', 0)"); err != nil {
		t.Fatal(err)
	}
	for _, swallow := range []bool{true, false} {
		var runs, deadlocks int
		var mu sync.Mutex
		var met sync.WaitGroup
		met.Add(2)
		var done sync.WaitGroup
		for i, order := range [][2]string{{"a", "b"}, {"b", "a"}} {
			done.Go(func() {
				first := true
				err := g.Do(ctx, term(7), func(tx *mysqlfence.Tx) error {
					mu.Lock()
					runs++
					mu.Unlock()
					update := func(k string) error {
						_, err := tx.ExecContext(ctx, "UPDATE kv SET v = v + 1 WHERE k = ?", k)
						return err
					}
					err := update(order[0])
					if first {
						first = false
						met.Done()
						met.Wait()
					}
					if err := update(order[1]); err != nil {
						mu.Lock()
						deadlocks++
						mu.Unlock()
						if !swallow {
							return err
						}
					}
					if _, err := tx.ExecContext(ctx, "INSERT INTO loot (item) VALUES (?)", fmt.Sprint(swallow, i)); err != nil && !swallow {
						return err
					}
					_, _ = tx.ExecContext(ctx, "COMMIT")
					return err
				})
				if err != nil {
					t.Errorf("swallow=%v: writer %d sees %v", swallow, i, err)
				}
			})
		}
		done.Wait()
		if deadlocks == 0 || runs < 3 {
			t.Fatalf("there was no deadlock to be survived: %d runs", runs)
		}
	}
	if got := list(t, g.DB(), "SELECT CAST(v AS CHAR) FROM kv ORDER BY k"); !slices.Equal(got, []string{"4", "4"}) {
		t.Errorf("the counters are %q after 4 transactions", got)
	}
	if got := items(t, g); len(got) != 4 {
		t.Errorf("the items are %q after 4 transactions", got)
	}
}

// TestRepetitionIsAdmittedAnew: a deadlock's victim is admitted anew before fn runs again.
func TestRepetitionIsAdmittedAnew(t *testing.T) {
	g := guard(t)
	advance(t, g, 7)
	ctx := bounded(t)
	runs := 0
	err := g.Do(ctx, term(7), func(tx *mysqlfence.Tx) error {
		if runs++; runs > 1 {
			t.Error("fn ran under a token that is over")
			return nil
		}
		_, err := tx.ExecContext(ctx, "SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213") // what a deadlock looks like to fn
		go g.Advance(ctx, term(8))
		waitUntil(t, func() bool {
			return len(list(t, g.DB(), "SELECT id FROM information_schema.PROCESSLIST WHERE INFO LIKE 'INSERT INTO aegis_fence%' AND DB = DATABASE()")) > 0
		})
		return err
	})
	if !errors.Is(err, fence.ErrFenced) {
		t.Errorf("a stale transaction that met a deadlock is %v, must be ErrFenced", err)
	}
}

// waitUntil waits for cond, 20 s at most.
func waitUntil(t testing.TB, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(20 * time.Second); !cond(); <-tick.C {
		if time.Now().After(deadline) {
			t.Error("what the test waits for does not come")
			return
		}
	}
}

// advanceStarts begins an Advance and returns when the server has it waiting, or when it has returned.
func advanceStarts(t testing.TB, g *mysqlfence.Guard, terms ...fence.Term) <-chan error {
	t.Helper()
	done := make(chan error, 1)
	ctx := bounded(t)
	go func() { done <- g.Advance(ctx, terms...) }()
	waitUntil(t, func() bool {
		time.Sleep(120 * time.Millisecond) // InnoDB looks anew only when nobody has asked for 100 ms
		return len(done) > 0 || len(list(t, g.DB(), "SELECT trx_id FROM information_schema.INNODB_TRX WHERE trx_state = 'LOCK WAIT'"+
			" AND trx_query LIKE 'INSERT INTO aegis_fence%'")) > 0
	})
	return done
}

// TestSavepointKeepsTheAdmission: InnoDB keeps row locks that were taken behind a savepoint which is rolled back.
func TestSavepointKeepsTheAdmission(t *testing.T) {
	g := guard(t)
	advance(t, g, 7)
	ctx := bounded(t)
	second := term(7)
	second.Election = "guild"
	if err := g.Advance(ctx, second); err != nil {
		t.Fatal(err)
	}
	next := second
	next.Token = 8
	var rival <-chan error
	if err := g.Do(ctx, term(7), func(tx *mysqlfence.Tx) error {
		if _, err := tx.ExecContext(ctx, "SAVEPOINT s"); err != nil {
			return err
		}
		if err := tx.Admit(ctx, second); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, "ROLLBACK TO SAVEPOINT s"); err != nil {
			return err
		}
		rival = advanceStarts(t, g, next)
		if len(rival) > 0 {
			t.Errorf("an advance went past an admission behind a rolled-back savepoint: %v", <-rival)
		}
		_, err := tx.ExecContext(ctx, insert, "sword")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if err := <-rival; err != nil {
		t.Fatal(err)
	}
	if err := g.Do(ctx, term(7), func(tx *mysqlfence.Tx) error { return tx.Admit(ctx, second) }); !errors.Is(err, fence.ErrFenced) {
		t.Errorf("Tx.Admit of a term that is over returned %v", err)
	}
}

func TestWhatFnLeavesBehind(t *testing.T) {
	g := guard(t)
	g.DB().SetMaxOpenConns(2)
	advance(t, g, 7)
	ctx := bounded(t)
	var leaked *mysqlfence.Tx
	if err := g.Do(ctx, term(7), func(tx *mysqlfence.Tx) error {
		leaked = tx
		stmt, err := tx.PrepareContext(ctx, insert)
		if err != nil {
			return err
		}
		if _, err := stmt.ExecContext(ctx, "sword"); err != nil {
			return err
		}
		_, err = tx.QueryContext(ctx, "SELECT 1 UNION SELECT 2 UNION SELECT 3") // not closed
		return err
	}); err != nil {
		t.Fatalf("open rows and statements: %v", err)
	}
	if _, err := leaked.ExecContext(ctx, insert, "late"); err == nil {
		t.Error("a Tx that outlives fn still works")
	}
	if err := leaked.QueryRowContext(ctx, "SELECT 1").Scan(new(int)); err == nil {
		t.Error("a Tx that outlives fn still queries")
	}
	if err := leaked.Admit(ctx, term(7)); err == nil {
		t.Error("a Tx that outlives fn still admits")
	}
	func() {
		defer func() { _ = recover() }()
		_ = g.Do(ctx, term(7), func(tx *mysqlfence.Tx) error {
			_, _ = tx.ExecContext(ctx, insert, "of a panic")
			panic("in fn")
		})
	}()
	short, cancel := context.WithCancel(ctx)
	err := g.Do(short, term(7), func(tx *mysqlfence.Tx) error {
		_, err := tx.ExecContext(ctx, insert, "of a cancelled one")
		cancel()
		return err
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("a Do whose context ends inside fn returned %v", err)
	}
	if got := items(t, g); !slices.Equal(got, []string{"sword"}) {
		t.Errorf("the items are %q", got)
	}
	if n := g.DB().Stats().InUse; n != 0 {
		t.Errorf("%d connections are still in use", n)
	}
}

// TestAdmitNeedsAPlainTransaction: where the lock would not be held to the commit, there is no admission.
func TestAdmitNeedsAPlainTransaction(t *testing.T) {
	g := guard(t)
	advance(t, g, 7)
	ctx := bounded(t)
	conn, err := g.DB().Conn(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	exec := func(statement string) {
		t.Helper()
		if _, err := conn.ExecContext(ctx, statement); err != nil {
			t.Fatal(err)
		}
	}
	if err := g.Admit(ctx, conn, term(7)); err == nil || !strings.Contains(err.Error(), "there is no transaction") {
		t.Errorf("Admit outside a transaction returned %v", err)
	}
	exec("XA START 'theirs'")
	if err := g.Admit(ctx, conn, term(7)); err == nil || !strings.Contains(err.Error(), "XA PREPARE") {
		t.Errorf("Admit inside an XA transaction returned %v", err)
	}
	exec("XA END 'theirs'")
	exec("XA ROLLBACK 'theirs'")
	exec("START TRANSACTION")
	if err := g.Admit(ctx, conn, term(7)); err != nil {
		t.Errorf("Admit in a transaction returned %v", err)
	}
	exec("INSERT INTO loot (item) VALUES ('sword')")
	exec("COMMIT")
	if got := items(t, g); len(got) != 1 {
		t.Errorf("the items are %q", got)
	}
}

// TestExecHoldsItsLockToTheCommit: an advance that comes while the one statement runs waits for its commit.
func TestExecHoldsItsLockToTheCommit(t *testing.T) {
	t.Run("REPEATABLE-READ", func(t *testing.T) { execHolds(t, "REPEATABLE-READ") }) // locks here what any statement but SELECT reads
	t.Run("READ-COMMITTED", func(t *testing.T) { execHolds(t, "READ-COMMITTED") })
}

func execHolds(t *testing.T, level string) {
	g, err := openWith(database(t), params{isolationVariable(t): level})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	advance(t, g, 7)
	ctx := bounded(t)
	done := make(chan error, 1)
	go func() {
		_, err := g.Exec(ctx, term(7), "INSERT INTO loot (item) SELECT IF(SLEEP(0.7) = 0, 'slow', '')")
		done <- err
	}()
	waitUntil(t, func() bool {
		return len(list(t, g.DB(), "SELECT ID FROM information_schema.PROCESSLIST WHERE INFO LIKE 'INSERT INTO loot%' AND DB = DATABASE()")) > 0
	})
	advance(t, g, 8)
	if got := items(t, g); !slices.Equal(got, []string{"slow"}) {
		t.Errorf("the new leader reads %q, and the old one's write comes later", got)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestSnapshotIsNotOlderThanTheAdmission: what fn reads includes all that was committed before it was admitted.
func TestSnapshotIsNotOlderThanTheAdmission(t *testing.T) {
	g := guard(t)
	advance(t, g, 7)
	ctx := bounded(t)
	_, end := openTransaction(t, g)
	defer end()
	rival := advanceStarts(t, g, term(8))
	late := make(chan error, 1)
	count := -1
	go func() { // admitted only when the open transaction and the advance are over
		late <- g.Do(ctx, term(8), func(tx *mysqlfence.Tx) error {
			return tx.QueryRowContext(ctx, "SELECT COUNT(*) FROM loot").Scan(&count)
		})
	}()
	waitUntil(t, func() bool {
		return len(late) > 0 || len(list(t, g.DB(), "SELECT ID FROM information_schema.PROCESSLIST WHERE INFO LIKE 'SELECT token, nonce%' AND DB = DATABASE()")) > 0
	})
	if err := end(); err != nil {
		t.Error(err)
	}
	if err := errors.Join(<-rival, <-late); err != nil || count != 1 {
		t.Errorf("the new leader counts %d items, %v; must see the old term's last write", count, err)
	}
}
