package sqlitefence_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"aegis/fence/sqlitefence"

	"github.com/ncruces/go-sqlite3"
)

func TestOpenRefusesWhatItCannotGuard(t *testing.T) {
	garbage := []byte(strings.Repeat("this is a diary, not a database\n", 200))
	for name, c := range map[string]struct {
		make func(dir string) (path string)
		says string
	}{
		"a file of another kind": {func(dir string) string { return write(t, dir, garbage) }, "it is not an SQLite database; move it away or choose another path"},
		"a directory":            {func(dir string) string { return dir }, "it is a directory; name a file in it"},
		"no directory":           {func(dir string) string { return filepath.Join(dir, "no", "file.db") }, "its directory does not exist; create it first"},
		"memory":                 {func(string) string { return ":memory:" }, "a fence in memory forgets; name a file"},
		"nothing":                {func(string) string { return "" }, "a fence in memory forgets; name a file"},
		"memory by URI":          {func(string) string { return "file:x?mode=memory" }, "cannot be put into WAL mode"},
		"a newer version": {func(dir string) string {
			path := filepath.Join(dir, "file.db")
			exec(t, path, "CREATE TABLE aegis_meta (key TEXT, value INTEGER); INSERT INTO aegis_meta VALUES ('schema', 2)")
			return path
		}, "its aegis tables are of version 2, this program knows version 1; use a newer aegis"},
		"a table in the way": {func(dir string) string {
			path := filepath.Join(dir, "file.db")
			exec(t, path, "CREATE TABLE aegis_meta (mine TEXT)")
			return path
		}, "no such column"},
		"other tables in the way": {func(dir string) string {
			path := filepath.Join(dir, "file.db")
			exec(t, path, "CREATE TABLE aegis_fence (mine TEXT); CREATE TABLE aegis_once (mine TEXT)")
			return path
		}, "it has tables of the guard's names that are not the guard's: aegis_once, aegis_fence; rename them"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := c.make(dir)
			before := contents(t, dir)
			g, err := sqlitefence.Open(path, sqlitefence.Config{})
			if err == nil {
				g.Close()
				t.Fatal("opened")
			}
			t.Log(err)
			if !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), path) {
				t.Errorf("got error %q, want one that names %q and says %q", err, path, c.says)
			}
			if after := contents(t, dir); after != before {
				t.Errorf("the refused file was changed:\nbefore %q\nafter  %q", before, after)
			}
		})
	}
}

func TestOpenValidatesConfig(t *testing.T) {
	for _, cfg := range []sqlitefence.Config{{OpenTimeout: -1}, {Readers: -1}} {
		if _, err := sqlitefence.Open(filepath.Join(t.TempDir(), "test.db"), cfg); err == nil || !strings.Contains(err.Error(), "Config.") {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
	if _, err := sqlitefence.Open(filepath.Join(t.TempDir(), "test.db"), sqlitefence.Config{Init: "nonsense"}); err == nil {
		t.Error("Init's error was swallowed")
	}
}

func TestOpenTakesAnExistingDatabase(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a file?#%20.db")
	exec(t, path, "CREATE TABLE loot (id INTEGER PRIMARY KEY, item TEXT); INSERT INTO loot (item) VALUES ('old'); PRAGMA user_version=42")
	g := reopen(t, path)
	wantLoot(t, g, "old")
	advance(t, g, 7)
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	if version := exec(t, path, "PRAGMA user_version"); version != "42" {
		t.Error("user_version is the user's, now it is", version)
	}
	if rec, err := reopen(t, path).Newest(bounded(t), "boss/1"); rec.Token != 7 || err != nil {
		t.Error(rec, err)
	}
}

func TestARelativePathIsThatOfTheTimeOfOpen(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	g := reopen(t, "test.db")
	advance(t, g, 7)
	t.Chdir(t.TempDir())
	_, err := g.Exec(bounded(t), term(7), "ROLLBACK") // the next write connects anew
	wantIs(t, err, sqlitefence.ErrEnded)
	advance(t, g, 8)
	if rec, err := reopen(t, filepath.Join(dir, "test.db")).Newest(bounded(t), "boss/1"); rec.Token != 8 || err != nil {
		t.Error(rec, err)
	}
}

func TestManyOpenOneNewFileAtOnce(t *testing.T) {
	for range 20 {
		openAtOnce(t, filepath.Join(t.TempDir(), "test.db"))
	}
}

func openAtOnce(t *testing.T, path string) {
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			g, err := sqlitefence.Open(path, sqlitefence.Config{})
			if err != nil {
				t.Error(err)
				return
			}
			if err := g.Advance(bounded(t), term(7)); err != nil {
				t.Error(err)
			}
			if err := g.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

func TestOpenIsBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "test.db")
	c, err := sqlite3.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Exec("CREATE TABLE mine (x); BEGIN EXCLUSIVE"); err != nil {
		t.Fatal(err)
	}
	g, err := sqlitefence.Open(path, sqlitefence.Config{OpenTimeout: 50e6})
	if err == nil {
		g.Close()
		t.Fatal("opened")
	}
	if !strings.Contains(err.Error(), "other processes kept it locked") || errors.Is(err, sqlite3.BUSY) {
		t.Error(err)
	}
}

func write(t *testing.T, dir string, content []byte) string {
	t.Helper()
	path := filepath.Join(dir, "file.db")
	if err := os.WriteFile(path, content, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// contents returns all files of dir with what is in them.
func contents(t *testing.T, dir string) string {
	t.Helper()
	var all bytes.Buffer
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		content, err := os.ReadFile(filepath.Join(dir, entry.Name()))
		if err != nil {
			t.Fatal(err)
		}
		all.WriteString(entry.Name() + "\n")
		all.Write(content)
	}
	return all.String()
}

// exec executes a script on a plain connection and returns the first column of its first row.
func exec(t *testing.T, path, script string) (value string) {
	t.Helper()
	c, err := sqlite3.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for script != "" {
		var stmt *sqlite3.Stmt
		if stmt, script, err = c.Prepare(script); err != nil {
			t.Fatal(err)
		}
		if stmt.Step() {
			value = stmt.ColumnText(0)
		}
		if err := stmt.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return value
}
