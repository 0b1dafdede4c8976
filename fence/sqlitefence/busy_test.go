package sqlitefence_test

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"aegis/fence/sqlitefence"
)

// Nobody sees SQLITE_BUSY before its deadline, whatever was set on the connection: another guard on the file holds
// SQLite's lock for longer than the timeout that somebody thought right.
func TestBusyIsNotShownWhateverWasSet(t *testing.T) {
	const impatient = "PRAGMA busy_timeout=1"
	for name, c := range map[string]struct {
		init, query string
		set         func(*testing.T, *sqlitefence.Guard)
	}{
		"by Init":  {init: impatient},
		"by a URI": {query: "?_pragma=busy_timeout(1)"},
		"by Setup": {set: func(t *testing.T, g *sqlitefence.Guard) {
			if err := g.Setup(bounded(t), impatient); err != nil {
				t.Fatal(err)
			}
		}},
		"by fn": {set: func(t *testing.T, g *sqlitefence.Guard) {
			if _, err := g.Exec(bounded(t), term(7), impatient); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			other, path := open(t)
			advance(t, other, 7)
			g, err := sqlitefence.Open("file:"+path+c.query, sqlitefence.Config{Init: c.init})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { g.Close() })
			if c.set != nil {
				c.set(t, g)
			}
			for _, write := range []func() error{
				func() error {
					_, err := g.Exec(bounded(t), term(7), "INSERT INTO loot (item) VALUES ('late')")
					return err
				},
				func() error { return g.Advance(bounded(t), term(8)) },
			} {
				held, done := make(chan struct{}), make(chan error, 1)
				go func() {
					done <- other.Do(bounded(t), term(7), func(*sqlitefence.Tx) error {
						close(held)
						time.Sleep(100 * time.Millisecond) // how long the lock is held
						return nil
					})
				}()
				<-held
				if err := write(); err != nil {
					t.Error(err)
				}
				if err := <-done; err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// A deferred transaction would have to take the lock in its middle, which fails at once if another has written since.
func TestATransactionIsImmediateWhateverTheURISays(t *testing.T) {
	other, path := open(t)
	advance(t, other, 7)
	for _, lock := range []string{"deferred", "concurrent", "immediate", "exclusive"} {
		g := reopen(t, "file:"+path+"?_txlock="+lock)
		ctx, wrote := bounded(t), make(chan error, 1)
		if err := g.Do(bounded(t), term(7), func(tx *sqlitefence.Tx) error {
			go func() {
				_, err := other.Exec(ctx, term(7), "INSERT INTO loot (item) VALUES (?)", "not "+lock)
				wrote <- err
				close(wrote)
			}()
			select {
			case err := <-wrote:
				t.Errorf("%s: another wrote while the transaction ran: %v", lock, err)
			case <-time.After(20 * time.Millisecond):
			}
			_, err := tx.ExecContext(bounded(t), "INSERT INTO loot (item) VALUES (?)", lock)
			return err
		}); err != nil {
			t.Fatalf("%s: %v", lock, err)
		}
		if err := <-wrote; err != nil {
			t.Error(err)
		}
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	}
}

// Settings that outlive the transaction in which fn made them.
func TestALaterWriteIsNotHinderedByAnEarlierFnsPragma(t *testing.T) {
	g, path := open(t)
	advance(t, g, 7)
	if _, err := g.Exec(bounded(t), term(7), "PRAGMA query_only=on"); err != nil {
		t.Fatal(err)
	}
	advance(t, g, 8)
	if _, err := g.Exec(bounded(t), term(8), "INSERT INTO loot (item) VALUES ('x')"); err != nil {
		t.Fatal(err)
	}
	wantLoot(t, g, "x")
	advance(t, reopen(t, path), 9)
}

func TestInitCannotTakeTheFileForItself(t *testing.T) {
	path := filepath.Join(t.TempDir(), "test.db")
	g, err := sqlitefence.Open(path, sqlitefence.Config{Init: "PRAGMA locking_mode=EXCLUSIVE"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { g.Close() })
	advance(t, g, 7)
	advance(t, reopen(t, path), 8)
	if h, err := sqlitefence.Open(filepath.Join(t.TempDir(), "test.db"), sqlitefence.Config{Init: "PRAGMA journal_mode=DELETE"}); err == nil {
		h.Close()
		t.Error("a guard without WAL was opened")
	} else if !strings.Contains(err.Error(), "Config.Init") {
		t.Error(err)
	}
}
