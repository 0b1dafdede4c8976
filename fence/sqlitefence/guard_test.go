package sqlitefence_test

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"aegis/fence"
	"aegis/fence/sqlitefence"
)

func term(token fence.Token) fence.Term {
	return fence.Term{Election: "boss/1", Node: "n", Token: token, Nonce: uint64(token) | 1<<63, Cluster: 1<<64 - 1}
}

// open returns a guard on a new file with a table loot, and the file.
func open(t testing.TB) (*sqlitefence.Guard, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "test.db")
	g := reopen(t, path)
	if err := g.Setup(bounded(t), "CREATE TABLE loot (id INTEGER PRIMARY KEY, item TEXT UNIQUE)"); err != nil {
		t.Fatal(err)
	}
	return g, path
}

func reopen(t testing.TB, path string) *sqlitefence.Guard {
	t.Helper()
	g, err := sqlitefence.Open(path, sqlitefence.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { g.Close() })
	return g
}

func bounded(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func advance(t testing.TB, g *sqlitefence.Guard, token fence.Token) {
	t.Helper()
	if err := g.Advance(bounded(t), term(token)); err != nil {
		t.Fatal(err)
	}
}

// loot returns the items in the table, in order.
func loot(t testing.TB, g *sqlitefence.Guard) (items []string) {
	t.Helper()
	rows, err := g.DB().QueryContext(bounded(t), "SELECT item FROM loot ORDER BY id")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var item string
		if err := rows.Scan(&item); err != nil {
			t.Fatal(err)
		}
		items = append(items, item)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return items
}

func wantLoot(t testing.TB, g *sqlitefence.Guard, want ...string) {
	t.Helper()
	got := loot(t, g)
	if len(got) != len(want) {
		t.Fatalf("loot is %q, want %q", got, want)
	}
	for i := range got {
		if got[i] != want[i] {
			t.Fatalf("loot is %q, want %q", got, want)
		}
	}
}

func wantIs(t testing.TB, err, target error) {
	t.Helper()
	if !errors.Is(err, target) {
		t.Fatalf("got error %v, want one that is %v", err, target)
	}
}

// Each of these ends the transaction inside fn in its own way. What fn wrote before, and what it tries to write after,
// must not be in the table, whether fn notices the end or not.
func TestWhateverEndsTheTransactionInsideFnWritesNothing(t *testing.T) {
	for name, end := range map[string]string{
		"OR ROLLBACK":              "INSERT OR ROLLBACK INTO loot (item) VALUES ('taken')",
		"COMMIT":                   "COMMIT",
		"END":                      "END TRANSACTION",
		"ROLLBACK":                 "ROLLBACK",
		"ROLLBACK and BEGIN again": "ROLLBACK; BEGIN IMMEDIATE",
		"ROLLBACK and SAVEPOINT":   "ROLLBACK; SAVEPOINT a",
		"RAISE in a trigger":       "INSERT INTO loot (item) VALUES ('cursed')",
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
				_, err = later.ExecContext(ctx)
				t.Log("prepared:", err)
				var id int
				err = tx.QueryRowContext(ctx, "INSERT INTO loot (item) VALUES ('returning') RETURNING id").Scan(&id)
				t.Log("returning:", err)
				return nil // fn swallows everything
			})
			wantIs(t, err, sqlitefence.ErrEnded)
			wantLoot(t, g, "taken")
			if _, err := g.Exec(ctx, term(7), "INSERT INTO loot (item) VALUES ('next')"); err != nil {
				t.Fatal("the guard is of no use any more:", err)
			}
			wantLoot(t, g, "taken", "next")
		})
	}
}

func TestBasics(t *testing.T) {
	g, path := open(t)
	ctx := bounded(t)
	_, err := g.Exec(ctx, term(7), "INSERT INTO loot (item) VALUES ('a')")
	wantIs(t, err, fence.ErrFenced)
	advance(t, g, 7)
	if _, err := g.Exec(ctx, term(7), "INSERT INTO loot (item) VALUES (?)", "a"); err != nil {
		t.Fatal(err)
	}
	advance(t, g, 8)
	_, err = g.Exec(ctx, term(7), "INSERT INTO loot (item) VALUES ('b')")
	wantIs(t, err, fence.ErrFenced)
	t.Log(err)
	wantLoot(t, g, "a")
	res, first, err := g.Once(ctx, term(8), "k", func(tx *sqlitefence.Tx) ([]byte, error) {
		_, err := tx.ExecContext(ctx, "INSERT INTO loot (item) VALUES ('once')")
		return []byte("r"), err
	})
	t.Log(string(res), first, err)
	g2 := reopen(t, path)
	res, first, err = g2.Once(ctx, term(8), "k", nil)
	t.Log(string(res), first, err)
	rec, err := g2.Newest(ctx, "boss/1")
	t.Logf("%+v %v", rec, err)
	names, err := g2.Names(ctx)
	t.Log(names, err)
}
