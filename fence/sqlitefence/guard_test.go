package sqlitefence_test

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"aegis/fence"
	"aegis/fence/sqlitefence"

	"github.com/ncruces/go-sqlite3"
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

func TestDBRefusesWrites(t *testing.T) {
	g, _ := open(t)
	if _, err := g.DB().ExecContext(bounded(t), "INSERT INTO loot (item) VALUES ('around the fence')"); !errors.Is(err, sqlite3.READONLY) {
		t.Fatalf("got %v, want that this connection is read-only", err)
	}
	if _, err := g.DB().ExecContext(bounded(t), "PRAGMA query_only=off; INSERT INTO loot (item) VALUES ('around the fence')"); err == nil {
		t.Fatal("the fence has a hole")
	}
	wantLoot(t, g)
}

func TestNewestAndNames(t *testing.T) {
	g, _ := open(t)
	ctx := bounded(t)
	if rec, err := g.Newest(ctx, "boss/1"); rec != (fence.Record{}) || err != nil {
		t.Fatal(rec, err)
	}
	a, b := term(7), term(8)
	a.Election, b.Election = "b", "a"
	a.Nonce, a.Cluster = 1<<64-1, 1<<63
	if err := g.Advance(ctx, a, b); err != nil {
		t.Fatal(err)
	}
	if rec, err := g.Newest(ctx, "b"); rec != (fence.Record{Token: 7, Nonce: 1<<64 - 1, Cluster: 1 << 63}) || err != nil {
		t.Fatal(rec, err)
	}
	if names, err := g.Names(ctx); err != nil || !slices.Equal(names, []string{"a", "b"}) {
		t.Fatal(names, err)
	}
}

// Both kinds of waiting end with the context, whose error is the caller's, not SQLite's: for the turn within the
// process, and for the lock that another guard on the file (as in another process) holds.
func TestWaitingEndsWithTheContext(t *testing.T) {
	g, path := open(t)
	other := reopen(t, path)
	advance(t, g, 7)
	if err := g.Do(bounded(t), term(7), func(*sqlitefence.Tx) error {
		for name, waiting := range map[string]*sqlitefence.Guard{"same process": g, "another": other} {
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
			defer cancel()
			for op, err := range map[string]error{
				"Advance": waiting.Advance(ctx, term(8)),
				"Do":      waiting.Do(ctx, term(7), func(*sqlitefence.Tx) error { t.Error("fn ran"); return nil }),
			} {
				if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, sqlite3.BUSY) {
					t.Errorf("%s, %s: %v", name, op, err)
				}
			}
			if n, err := waiting.Newest(context.Background(), "boss/1"); n.Token != 7 || err != nil {
				t.Errorf("%s: reading must not wait for writers: %v, %v", name, n, err)
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

func TestOneStatementThatFailsIsTheStoresOwnError(t *testing.T) {
	g, _ := open(t)
	advance(t, g, 7)
	_, err := g.Exec(bounded(t), term(7), "INSERT INTO nowhere VALUES (1)")
	if err == nil || errors.Is(err, fence.ErrFenced) || errors.Is(err, fence.ErrUnknown) {
		t.Fatal(err)
	}
	res, err := g.Exec(bounded(t), term(7), "INSERT INTO loot (item) VALUES (?)", "x")
	if err != nil {
		t.Fatal(err)
	}
	if n, err := res.RowsAffected(); n != 1 || err != nil {
		t.Fatal(n, err)
	}
}
