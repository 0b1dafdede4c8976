package sqlitefence_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"aegis/fence"
	"aegis/fence/sqlitefence"

	"github.com/ncruces/go-sqlite3"
)

// Each of these ends the transaction inside fn in its own way. What fn wrote before, and what it tries to write after,
// must not be in the table, whether fn notices the end or not.
func TestWhateverEndsTheTransactionInsideFnWritesNothing(t *testing.T) {
	for name, end := range map[string]string{
		"OR ROLLBACK":                 "INSERT OR ROLLBACK INTO loot (item) VALUES ('taken')",
		"COMMIT":                      "COMMIT",
		"END":                         "END TRANSACTION",
		"ROLLBACK":                    "ROLLBACK",
		"ROLLBACK and BEGIN again":    "ROLLBACK; BEGIN IMMEDIATE",
		"ROLLBACK and SAVEPOINT":      "ROLLBACK; SAVEPOINT a",
		"ROLLBACK and BEGIN DEFERRED": "ROLLBACK; BEGIN",
		"ROLLBACK and more":           "ROLLBACK; INSERT INTO loot (item) VALUES ('more')",
		"ROLLBACK TO and COMMIT":      "SAVEPOINT a; ROLLBACK TO a; RELEASE a; COMMIT",
		"RAISE in a trigger":          "INSERT INTO loot (item) VALUES ('cursed')",
	} {
		t.Run(name, func(t *testing.T) {
			g, _ := open(t)
			advance(t, g, 7)
			ctx := bounded(t)
			if _, err := g.Exec(ctx, term(7), `INSERT INTO loot (item) VALUES ('taken');
				CREATE TRIGGER curse BEFORE INSERT ON loot WHEN new.item = 'cursed' BEGIN SELECT RAISE(ROLLBACK, 'cursed'); END`); err != nil {
				t.Fatal(err)
			}
			err := g.Do(ctx, term(7), func(tx *sqlitefence.Tx) error {
				if _, err := tx.ExecContext(ctx, "INSERT INTO loot (item) VALUES ('before')"); err != nil {
					return err
				}
				later, err := tx.PrepareContext(ctx, "INSERT INTO loot (item) VALUES ('prepared')")
				if err != nil {
					return err
				}
				_, err = tx.ExecContext(ctx, end)
				t.Log("end:", err)
				_, err = tx.ExecContext(ctx, "INSERT INTO loot (item) VALUES ('after')")
				wantIs(t, err, sqlitefence.ErrEnded)
				wantIs(t, tx.Admit(ctx, term(7)), sqlitefence.ErrEnded)
				_, err = later.ExecContext(ctx)
				t.Log("prepared before the end:", err)
				var id int
				err = tx.QueryRowContext(ctx, "INSERT INTO loot (item) VALUES ('returning') RETURNING id").Scan(&id)
				t.Log("as a query:", err)
				return nil // fn swallows everything
			})
			wantIs(t, err, sqlitefence.ErrEnded)
			wantLoot(t, g, "taken")
			if _, _, err := g.Once(ctx, term(7), "k", func(tx *sqlitefence.Tx) ([]byte, error) {
				_, err := tx.ExecContext(ctx, end)
				return nil, errors.Join(err, tx.Admit(ctx, term(7)))
			}); !errors.Is(err, sqlitefence.ErrEnded) {
				t.Fatal("Once:", err)
			}
			if _, err := g.Exec(ctx, term(7), "INSERT INTO loot (item) VALUES ('next')"); err != nil {
				t.Fatal("the guard is of no use any more:", err)
			}
			wantLoot(t, g, "taken", "next")
		})
	}
}

func TestSavepointsInsideFnAreFnsOwn(t *testing.T) {
	g, _ := open(t)
	advance(t, g, 7)
	ctx := bounded(t)
	if err := g.Do(ctx, term(7), func(tx *sqlitefence.Tx) error {
		_, err := tx.ExecContext(ctx, `
			SAVEPOINT a; INSERT INTO loot (item) VALUES ('undone'); ROLLBACK TO a; RELEASE a;
			SAVEPOINT b; INSERT INTO loot (item) VALUES ('kept'); RELEASE b`)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	wantLoot(t, g, "kept")
	if _, _, err := g.Once(ctx, term(7), "k", func(tx *sqlitefence.Tx) ([]byte, error) {
		_, err := tx.ExecContext(ctx, "SAVEPOINT a; INSERT INTO loot (item) VALUES ('undone'); ROLLBACK TO a; RELEASE a")
		return []byte("r"), err
	}); err != nil {
		t.Fatal(err)
	}
	result, first, err := g.Once(ctx, term(7), "k", nil)
	if string(result) != "r" || first || err != nil {
		t.Fatalf("the rolled-back savepoint took the key along: %q, %v, %v", result, first, err)
	}
	wantLoot(t, g, "kept")
}

// What fn executes outside the transaction may change the connection for good, which inside it would be refused.
func TestTheConnectionIsMadeAnewAfterFnHadItUnguarded(t *testing.T) {
	g, _ := open(t)
	advance(t, g, 7)
	ctx := bounded(t)
	err := g.Do(ctx, term(7), func(tx *sqlitefence.Tx) error {
		_, err := tx.ExecContext(ctx, "ROLLBACK; PRAGMA synchronous=OFF")
		return err
	})
	wantIs(t, err, sqlitefence.ErrEnded)
	if err := g.Do(ctx, term(7), func(tx *sqlitefence.Tx) error {
		var mode string
		var synchronous int
		if err := tx.QueryRowContext(ctx, "SELECT * FROM pragma_journal_mode, pragma_synchronous").Scan(&mode, &synchronous); err != nil {
			return err
		}
		if mode != "wal" || synchronous != 2 {
			t.Errorf("journal_mode=%s synchronous=%d, want wal and 2 (FULL)", mode, synchronous)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

func TestFnsErrorAndPanicUndo(t *testing.T) {
	g, _ := open(t)
	advance(t, g, 7)
	ctx := bounded(t)
	failed := errors.New("failed")
	insert := func(tx *sqlitefence.Tx) {
		if _, err := tx.ExecContext(ctx, "INSERT INTO loot (item) VALUES ('x')"); err != nil {
			t.Fatal(err)
		}
	}
	err := g.Do(ctx, term(7), func(tx *sqlitefence.Tx) error { insert(tx); return failed })
	wantIs(t, err, failed)
	func() {
		defer func() {
			if recover() != failed {
				t.Error("the panic was swallowed")
			}
		}()
		_ = g.Do(ctx, term(7), func(tx *sqlitefence.Tx) error { insert(tx); panic(failed) })
	}()
	wantLoot(t, g)
	if err := g.Do(ctx, term(7), func(tx *sqlitefence.Tx) error { insert(tx); return nil }); err != nil {
		t.Fatal(err)
	}
	wantLoot(t, g, "x")
}

func TestRowsLeftOpenDoNotHinderTheCommit(t *testing.T) {
	g, _ := open(t)
	advance(t, g, 7)
	ctx := bounded(t)
	if err := g.Do(ctx, term(7), func(tx *sqlitefence.Tx) error {
		rows, err := tx.QueryContext(ctx, "INSERT INTO loot (item) VALUES ('a'), ('b') RETURNING id")
		if err != nil || !rows.Next() {
			t.Fatal(err)
		}
		return nil // rows stay open
	}); err != nil {
		t.Fatal(err)
	}
	wantLoot(t, g, "a", "b")
}

func TestATxThatOutlivesDoIsOfNoUse(t *testing.T) {
	g, _ := open(t)
	advance(t, g, 7)
	ctx := bounded(t)
	var kept *sqlitefence.Tx
	if err := g.Do(ctx, term(7), func(tx *sqlitefence.Tx) error { kept = tx; return nil }); err != nil {
		t.Fatal(err)
	}
	_, err := kept.ExecContext(ctx, "INSERT INTO loot (item) VALUES ('late')")
	wantIs(t, err, sql.ErrTxDone)
	wantLoot(t, g)
}

func TestAdmitAddsASecondElectionToATransaction(t *testing.T) {
	g, _ := open(t)
	ctx := bounded(t)
	guild := fence.Term{Election: "guild/1", Token: 3}
	if err := g.Advance(ctx, term(7), guild); err != nil {
		t.Fatal(err)
	}
	write := func(second fence.Term) error {
		return g.Do(ctx, term(7), func(tx *sqlitefence.Tx) error {
			if _, err := tx.ExecContext(ctx, "INSERT INTO loot (item) VALUES (?)", fmt.Sprint("by ", second.Token)); err != nil {
				return err
			}
			return tx.Admit(ctx, second)
		})
	}
	if err := write(guild); err != nil {
		t.Fatal(err)
	}
	guild.Token = 2
	wantIs(t, write(guild), fence.ErrFenced)
	wantLoot(t, g, "by 3")
}

func TestAContextThatEndsInsideFnUndoes(t *testing.T) {
	g, _ := open(t)
	advance(t, g, 7)
	for name, after := range map[string]func(context.Context, *sqlitefence.Tx) error{
		"and fn returns nil": func(context.Context, *sqlitefence.Tx) error { return nil },
		"during a statement": func(ctx context.Context, tx *sqlitefence.Tx) error {
			_, err := tx.ExecContext(ctx, "INSERT INTO loot (item) VALUES ('late')")
			return err
		},
		"and fn goes on without it": func(_ context.Context, tx *sqlitefence.Tx) error {
			_, _ = tx.ExecContext(context.Background(), "INSERT INTO loot (item) VALUES ('late')")
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			cause := errors.New("the term is over")
			ctx, cancel := context.WithCancelCause(bounded(t))
			err := g.Do(ctx, term(7), func(tx *sqlitefence.Tx) error {
				if _, err := tx.ExecContext(ctx, "INSERT INTO loot (item) VALUES ('x')"); err != nil {
					return err
				}
				cancel(cause)
				return after(ctx, tx)
			})
			wantIs(t, err, cause)
			wantLoot(t, g)
		})
	}
}

// database/sql undoes a transaction whose context ended on a goroutine of its own, maybe when the next one has begun.
func TestACancelledWriteDoesNotDisturbTheNext(t *testing.T) {
	g, _ := open(t)
	advance(t, g, 7)
	for i := range 300 {
		ctx, cancel := context.WithCancel(bounded(t))
		err := g.Do(ctx, term(7), func(tx *sqlitefence.Tx) error {
			_, err := tx.ExecContext(ctx, "INSERT INTO loot (item) VALUES ('cancelled')")
			cancel()
			return err
		})
		wantIs(t, err, context.Canceled)
		if _, err := g.Exec(bounded(t), term(7), "INSERT INTO loot (item) VALUES (?)", fmt.Sprint(i)); err != nil {
			t.Fatal(i, err)
		}
	}
	if n := len(loot(t, g)); n != 300 {
		t.Errorf("%d rows, want 300", n)
	}
}

// A single statement's context ends: SQLite undoes the whole transaction then, and what follows must not commit.
func TestAStatementsContextThatEndsUndoesAll(t *testing.T) {
	g, _ := open(t)
	advance(t, g, 7)
	ctx := bounded(t)
	err := g.Do(ctx, term(7), func(tx *sqlitefence.Tx) error {
		short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
		defer cancel()
		_, err := tx.ExecContext(short, `WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) INSERT INTO loot (item) SELECT i FROM n`)
		if err == nil {
			t.Fatal("an endless statement ended")
		}
		_, err = tx.ExecContext(ctx, "INSERT INTO loot (item) VALUES ('after')")
		t.Log("after:", err)
		return nil
	})
	wantIs(t, err, sqlitefence.ErrEnded)
	wantLoot(t, g)
}

func TestADeferredConstraintFailsTheCommitWithNothingDone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "test.db")
	g, err := sqlitefence.Open(path, sqlitefence.Config{Init: "PRAGMA foreign_keys=on"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { g.Close() })
	ctx := bounded(t)
	if err := g.Setup(ctx, `CREATE TABLE loot (id INTEGER PRIMARY KEY, item TEXT UNIQUE);
		CREATE TABLE owner (item TEXT REFERENCES loot (item) DEFERRABLE INITIALLY DEFERRED)`); err != nil {
		t.Fatal(err)
	}
	advance(t, g, 7)
	_, err = g.Exec(ctx, term(7), "INSERT INTO loot (item) VALUES ('x'); INSERT INTO owner VALUES ('nobody')")
	if !errors.Is(err, sqlite3.CONSTRAINT_FOREIGNKEY) || errors.Is(err, fence.ErrUnknown) {
		t.Fatal(err)
	}
	wantLoot(t, g)
}
