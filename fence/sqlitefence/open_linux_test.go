package sqlitefence_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"aegis/fence/sqlitefence"
)

// Permissions bind nobody but root, and tests often run as root: this thread's file accesses become nobody's.
func TestOpenRefusesWhatItMayNotWrite(t *testing.T) {
	for name, c := range map[string]struct {
		dirMode, fileMode fs.FileMode // file mode 0: no file
		script            string
	}{
		"directory":                      {0o555, 0, ""},
		"directory with a writable file": {0o555, 0o666, "CREATE TABLE mine (x)"},
		"file":                           {0o777, 0o444, "CREATE TABLE mine (x)"},
		"file with the guard's tables": {0o777, 0o444, "PRAGMA journal_mode=WAL; " +
			"CREATE TABLE aegis_meta (key TEXT, value INTEGER); INSERT INTO aegis_meta VALUES ('schema', 1)"},
	} {
		t.Run(name, func(t *testing.T) {
			dir, err := os.MkdirTemp("", "aegis") // t.TempDir's parents are the user's alone
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { os.Chmod(dir, 0o777); os.RemoveAll(dir) })
			path := filepath.Join(dir, "file.db")
			if c.fileMode != 0 {
				exec(t, path, c.script)
				if err := os.Chmod(path, c.fileMode); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.Chmod(dir, c.dirMode); err != nil {
				t.Fatal(err)
			}
			before := contents(t, dir)
			done := make(chan error)
			go func() {
				runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
				if err := syscall.Setfsuid(65534); err != nil {
					t.Error(err)
				}
				g, err := sqlitefence.Open(path, sqlitefence.Config{})
				if err == nil {
					g.Close()
				}
				done <- err
			}()
			err = <-done
			t.Log(err)
			const says = "this process must be able to write the file and, for SQLite's -wal and -shm files, its directory"
			if err == nil || !strings.Contains(err.Error(), says) || !strings.Contains(err.Error(), path) {
				t.Errorf("got error %v, want one that names %q and says %q", err, path, says)
			}
			if after := contents(t, dir); after != before {
				t.Errorf("the refused file was changed:\nbefore %q\nafter  %q", before, after)
			}
		})
	}
}
