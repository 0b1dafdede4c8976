package pgfence_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"aegis/fence"
	"aegis/fence/pgfence"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// At REPEATABLE READ and above the snapshot can be older than the advance that a late admit waited for: the advisory
// lock alone would let the old token pass.
func TestAdmitWithASnapshotOlderThanTheAdvanceIsFenced(t *testing.T) {
	for _, level := range levels {
		t.Run(string(level), func(t *testing.T) {
			g, pool := open(t, pgfence.Config{})
			advance(t, g, 7)
			ctx := bounded(t)
			tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
			if err != nil {
				t.Fatal(err)
			}
			defer tx.Rollback(ctx)
			if _, err := tx.Exec(ctx, "SELECT count(*) FROM loot"); err != nil { // takes the snapshot
				t.Fatal(err)
			}
			advance(t, g, 8)
			wantFenced(t, g.Admit(ctx, tx, term(7)), 7, 8)
		})
	}
}

// An admitted transaction stalls, an advance begins, and the transaction ends in either way: what the new leader reads
// first is what stays.
func TestAdmittedTransactionEndsBeforeTheAdvance(t *testing.T) {
	for _, level := range levels {
		for _, commits := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, commits: %v", level, commits), func(t *testing.T) {
				g, pool := open(t, pgfence.Config{})
				advance(t, g, 7)
				ctx := bounded(t)
				tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
				if err != nil {
					t.Fatal(err)
				}
				defer tx.Rollback(ctx)
				if err := g.Admit(ctx, tx, term(7)); err != nil {
					t.Fatal(err)
				}
				seen := make(chan string, 1)
				go func() {
					if err := g.Advance(ctx, term(8)); err != nil {
						t.Error(err)
					}
					var n string
					if err := pool.QueryRow(ctx, "SELECT count(*)::text FROM loot").Scan(&n); err != nil {
						t.Error(err)
					}
					seen <- n
				}()
				untilWaiting(t, pool, 1)
				if _, err := tx.Exec(ctx, "INSERT INTO loot (item) VALUES ('by 7')"); err != nil {
					t.Fatal(err)
				}
				want := "0"
				if commits {
					want, err = "1", tx.Commit(ctx)
				} else {
					err = tx.Rollback(ctx)
				}
				if err != nil {
					t.Fatal(err)
				}
				if got := <-seen; got != want {
					t.Errorf("the new leader reads %s rows, want %s", got, want)
				}
				wantFenced(t, g.Do(ctx, term(7), insert("late")), 7, 8)
			})
		}
	}
}

// Old-term writers with 20 ms transactions do not hold an advance off for longer than ten of the longest of them, and
// see no deadlock.
func TestAdvanceGetsInUnderUnbrokenLoad(t *testing.T) {
	for _, writers := range []int{16, 64} {
		t.Run(fmt.Sprint(writers), func(t *testing.T) {
			name := database(t)
			ctx, cancel := context.WithCancel(bounded(t))
			defer cancel()
			g := guardOn(t, connect(t, pg.URL(name, "postgres")), pgfence.Config{})
			advance(t, g, 7)
			load := guardOn(t, connect(t, pg.URL(name, "postgres")+"?pool_max_conns="+fmt.Sprint(writers), func(c *pgPoolConfig) { c.MaxConns = int32(writers) }), pgfence.Config{})
			var mu sync.Mutex
			var longest time.Duration
			var warm, all sync.WaitGroup
			warm.Add(writers)
			for i := range writers {
				all.Go(func() {
					for n := 0; ; n++ {
						var begun time.Time
						err := load.Do(ctx, term(7), func(tx *pgfence.Tx) error {
							begun = time.Now()
							_, err := tx.Exec(ctx, "INSERT INTO loot (item) VALUES ($1)", fmt.Sprint(i, n))
							time.Sleep(20 * time.Millisecond) // is load, waits for nothing
							return err
						})
						if n == 2 {
							warm.Done()
						}
						if ctx.Err() != nil {
							return
						}
						if err != nil {
							wantFenced(t, err, 7, 8)
							return
						}
						mu.Lock()
						longest = max(longest, time.Since(begun))
						mu.Unlock()
					}
				})
			}
			warm.Wait()
			start := time.Now()
			if err := g.Advance(ctx, term(8)); err != nil {
				t.Error(err)
				cancel() // or the load would go on
			}
			took := time.Since(start)
			all.Wait()
			t.Logf("advance took %v, the longest transaction %v", took, longest)
			if took > 10*longest {
				t.Errorf("Advance took %v, more than ten times the longest transaction's %v", took, longest)
			}
		})
	}
}

func TestStatementsThatEndTheTransactionAreRefused(t *testing.T) {
	g, pool := open(t, pgfence.Config{})
	advance(t, g, 7)
	ctx := bounded(t)
	for _, sql := range []string{
		"COMMIT", "commit;", " end", "/* a /* b */ */ Commit", "-- x\nCOMMIT", "ROLLBACK", "abort", "ROLLBACK WORK", "rollback and chain", "BEGIN",
		"SELECT 1; COMMIT; INSERT INTO loot (item) VALUES ('unguarded')", "SELECT 'it''s;'; COMMIT", `SELECT E'\';'; COMMIT`, `SELECT 1 AS "a;"; end`,
		"SELECT $$;$$; COMMIT", "SELECT $a$;$$;$a$; COMMIT", "SELECT 1 --;\n; COMMIT", "SELECT 1; ; COMMIT AND CHAIN", "(SELECT 1); COMMIT",
		"PREPARE TRANSACTION 'x'", "ROLLBACK PREPARED 'x'", "COMMIT PREPARED 'x'", "SELECT 'e\\'; COMMIT", "START TRANSACTION",
	} {
		err := g.Do(ctx, term(7), func(tx *pgfence.Tx) error {
			if _, err := tx.Exec(ctx, sql); err == nil {
				t.Errorf("%q was sent", sql)
			}
			if err := tx.QueryRow(ctx, sql).Scan(); err == nil || !strings.Contains(err.Error(), "refused") {
				t.Errorf("%q was sent: %v", sql, err)
			}
			_, err := tx.Query(ctx, sql)
			return err
		})
		wantText(t, err, "refused")
		_, err = g.Exec(ctx, term(7), sql)
		wantText(t, err, "refused")
	}
	wantLoot(t, pool)
	for _, sql := range []string{
		"SAVEPOINT a; ROLLBACK TO a", "SAVEPOINT a; ROLLBACK WORK TO SAVEPOINT a; RELEASE a", "PREPARE p AS SELECT 1; DEALLOCATE p", "SELECT 'COMMIT'; SELECT ';COMMIT'",
		"SELECT 1 AS commit", "/* COMMIT; */ SELECT 1", "CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT 1; END; DROP FUNCTION f()",
		"DO $$ BEGIN PERFORM 1; END $$", `SELECT 1 AS "x;COMMIT"`, "SELECT E'\\';COMMIT'", "SELECT $x$;COMMIT$x$", "SELECT 1;", "",
	} {
		if err := g.Do(ctx, term(7), func(tx *pgfence.Tx) error {
			_, err := tx.Exec(ctx, sql)
			return err
		}); err != nil {
			t.Errorf("%q: %v", sql, err)
		}
	}
}

func TestWhatEndsTheTransactionInsideFnLeavesNothingBehind(t *testing.T) {
	g, pool := open(t, pgfence.Config{})
	advance(t, g, 7)
	ctx := bounded(t)
	for name, c := range map[string]struct {
		fn   func(tx *pgfence.Tx) error
		want error
	}{
		"an overlooked failure": {func(tx *pgfence.Tx) error {
			_, err := tx.Exec(ctx, "SELECT 1/0")
			if err == nil {
				t.Error("1/0 is known")
			}
			if insert("after the failure")(tx) == nil {
				t.Error("written after the failure")
			}
			return nil
		}, pgfence.ErrEnded},
		"a statement's own context": {func(tx *pgfence.Tx) error {
			short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
			defer cancel()
			_, _ = tx.Exec(short, "SELECT pg_sleep(10)")
			wantIs(t, insert("after the end")(tx), pgfence.ErrEnded)
			return nil
		}, pgfence.ErrEnded},
		"the session's end": {func(tx *pgfence.Tx) error {
			_, _ = tx.Exec(ctx, "SELECT pg_terminate_backend(pg_backend_pid())")
			wantIs(t, insert("after the end")(tx), pgfence.ErrEnded)
			return nil
		}, pgfence.ErrEnded},
		"a forgotten admission": {func(tx *pgfence.Tx) error {
			_, err := tx.Exec(ctx, "SELECT set_config('aegis.terms', '', true)")
			return err
		}, pgfence.ErrEnded},
	} {
		t.Run(name, func(t *testing.T) {
			err := g.Do(ctx, term(7), func(tx *pgfence.Tx) error {
				if err := insert("before the end")(tx); err != nil {
					return err
				}
				return c.fn(tx)
			})
			wantIs(t, err, c.want)
			wantLoot(t, pool)
		})
	}
	if err := g.Do(ctx, term(7), func(tx *pgfence.Tx) error {
		_, err := tx.Query(ctx, "SELECT generate_series(1, 100000)") // and left open
		return err
	}); err == nil || !strings.Contains(err.Error(), "left rows") {
		t.Error(err)
	}
	var kept *pgfence.Tx
	if err := g.Do(ctx, term(7), func(tx *pgfence.Tx) error { kept = tx; return nil }); err != nil {
		t.Error(err)
	}
	if insert("late")(kept) == nil {
		t.Error("a transaction could be used after fn")
	}
	func() {
		defer func() { _ = recover() }()
		_ = g.Do(ctx, term(7), func(tx *pgfence.Tx) error { _ = insert("panic")(tx); panic("now") })
	}()
	wantLoot(t, pool)
	advance(t, g, 8) // no lock was left behind
}

// The two ways in which plain SQL loses its admission: both are found by aegis.confirm.
func TestConfirmTellsAnAdmissionThatWasRolledBack(t *testing.T) {
	g, pool := open(t, pgfence.Config{})
	advance(t, g, 7)
	ctx := bounded(t)
	for name, sql := range map[string]string{
		"a savepoint around it": "BEGIN; SAVEPOINT a; SELECT aegis.admit('boss', 7); ROLLBACK TO a; INSERT INTO loot (item) VALUES ('x'); SELECT aegis.confirm('boss', 7); COMMIT",
		"an EXCEPTION block": `BEGIN; DO $$ BEGIN PERFORM aegis.admit('boss', 6); EXCEPTION WHEN OTHERS THEN NULL; END $$;
			INSERT INTO loot (item) VALUES ('x'); SELECT aegis.confirm('boss', 6); COMMIT`,
		"another transaction": "BEGIN; SELECT aegis.admit('boss', 7); COMMIT; BEGIN; INSERT INTO loot (item) VALUES ('x'); SELECT aegis.confirm('boss', 7); COMMIT",
		"another term":        "BEGIN; SELECT aegis.admit('boss', 7); INSERT INTO loot (item) VALUES ('x'); SELECT aegis.confirm('boss', 8); COMMIT",
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := pool.Acquire(ctx)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Release()
			_, err = conn.Exec(ctx, sql)
			pgerr, ok := errors.AsType[*pgconn.PgError](err)
			if !ok || pgerr.Code != pgfence.StateEnded {
				t.Error(err)
			}
			_, _ = conn.Exec(ctx, "ROLLBACK")
			wantLoot(t, pool)
		})
	}
}

func TestSavepointsInsideDo(t *testing.T) {
	g, pool := open(t, pgfence.Config{})
	advance(t, g, 7)
	ctx := bounded(t)
	failed := errors.New("no")
	if err := g.Do(ctx, term(7), func(tx *pgfence.Tx) error {
		if err := insert("sword")(tx); err != nil {
			return err
		}
		wantIs(t, tx.Savepoint(ctx, func() error { return errors.Join(insert("undone")(tx), failed) }), failed)
		if err := tx.Savepoint(ctx, func() error { _, err := tx.Exec(ctx, "SELECT 1/0"); return err }); err == nil {
			t.Error("1/0")
		}
		return tx.Savepoint(ctx, func() error { return insert("shield")(tx) })
	}); err != nil {
		t.Fatal(err)
	}
	wantLoot(t, pool, "sword", "shield")
}

func TestDoRunsAgainAfterADeadlockAndASerializationFailure(t *testing.T) {
	t.Run("deadlock", func(t *testing.T) {
		g, pool := open(t, pgfence.Config{})
		advance(t, g, 7)
		ctx := bounded(t)
		exec(t, pool, "INSERT INTO kv VALUES ('0', ''), ('1', '')")
		var meet sync.WaitGroup
		meet.Add(2)
		runs := make([]int, 2)
		each(2, func(i int) {
			err := g.Do(ctx, term(7), func(tx *pgfence.Tx) error {
				runs[i]++
				update := func(k int) error {
					_, err := tx.Exec(ctx, "UPDATE kv SET value = value || $2 WHERE key = $1", fmt.Sprint(k), fmt.Sprint(i))
					return err
				}
				if err := update(i); err != nil {
					return err
				}
				if runs[i] == 1 {
					meet.Done()
					meet.Wait()
				}
				return update(1 - i)
			})
			if err != nil {
				t.Error(err)
			}
		})
		if runs[0]+runs[1] != 3 {
			t.Errorf("fn ran %v times", runs)
		}
		if got := value(t, pool, "select sum(length(value)) from kv"); got != "4" {
			t.Errorf("%s updates, want 4", got)
		}
	})
	for _, level := range levels[1:] {
		t.Run(string(level), func(t *testing.T) {
			g, pool := open(t, pgfence.Config{Isolation: level})
			advance(t, g, 7)
			ctx := bounded(t)
			exec(t, pool, "INSERT INTO kv VALUES ('n', '0')")
			each(4, func(int) {
				for range 10 {
					if _, err := g.Exec(ctx, term(7), "UPDATE kv SET value = (value::int + 1)::text WHERE key = 'n'"); err != nil {
						t.Error(err)
					}
				}
			})
			if got := value(t, pool, "select value from kv"); got != "40" {
				t.Errorf("counted %s, want 40", got)
			}
		})
	}
}

func TestTwoElectionsInOneTransaction(t *testing.T) {
	g, pool := open(t, pgfence.Config{})
	ctx := bounded(t)
	guild := fence.Term{Election: "guild", Token: 3}
	if err := g.Advance(ctx, term(7), guild); err != nil {
		t.Fatal(err)
	}
	both := func(tx *pgfence.Tx) error {
		if err := tx.Admit(ctx, guild); err != nil {
			return err
		}
		return insert("for both")(tx)
	}
	if err := g.Do(ctx, term(7), both); err != nil {
		t.Error(err)
	}
	if err := g.Advance(ctx, fence.Term{Election: "guild", Token: 4}); err != nil {
		t.Fatal(err)
	}
	wantIs(t, g.Do(ctx, term(7), both), fence.ErrFenced)
	wantLoot(t, pool, "for both")
}
