package sqlitefence_test

import (
	"errors"
	"path/filepath"
	"sync/atomic"
	"testing"

	"aegis/fence"
	"aegis/fence/sqlitefence"

	"github.com/ncruces/go-sqlite3"
	"github.com/ncruces/go-sqlite3/util/vfsutil"
	"github.com/ncruces/go-sqlite3/vfs"
)

// faulty is the system's VFS whose WAL cannot be synced, or not be written, while told so.
type faulty struct{ vfs.VFS }

var failSync, failWrite atomic.Bool

func init() { vfs.Register("faulty", faulty{vfs.Find("")}) }

func (f faulty) OpenFilename(name *vfs.Filename, flags vfs.OpenFlag) (vfs.File, vfs.OpenFlag, error) {
	file, flags, err := vfsutil.WrapOpenFilename(f.VFS, name, flags)
	if err != nil {
		return nil, flags, err
	}
	return &faultyFile{file, flags&vfs.OPEN_WAL != 0}, flags, nil
}

type faultyFile struct {
	vfs.File
	wal bool
}

func (f *faultyFile) SharedMemory() vfs.SharedMemory { return vfsutil.WrapSharedMemory(f.File) }

func (f *faultyFile) Sync(flags vfs.SyncFlag) error {
	if f.wal && failSync.Load() {
		return sqlite3.IOERR_FSYNC
	}
	return f.File.Sync(flags)
}

func (f *faultyFile) WriteAt(p []byte, off int64) (int, error) {
	if f.wal && failWrite.Load() {
		return 0, sqlite3.FULL
	}
	return f.File.WriteAt(p, off)
}

// After ErrUnknown the write is there or not: SQLite gives it up if the process goes on, and finds it whole in the WAL
// if it starts anew. Repeating a Once makes certain either way.
func TestACommitThatTheDiskFailedIsUnknown(t *testing.T) {
	for name, restart := range map[string]bool{"and the process goes on": false, "and the process starts anew": true} {
		t.Run(name, func(t *testing.T) {
			path := "file:" + filepath.Join(t.TempDir(), "test.db") + "?vfs=faulty"
			g := reopen(t, path)
			ctx := bounded(t)
			if err := g.Setup(ctx, "CREATE TABLE loot (id INTEGER PRIMARY KEY, item TEXT)"); err != nil {
				t.Fatal(err)
			}
			advance(t, g, 7)
			once := func() ([]byte, bool, error) {
				return g.Once(ctx, term(7), "kill", func(tx *sqlitefence.Tx) ([]byte, error) {
					_, err := tx.ExecContext(ctx, "INSERT INTO loot (item) VALUES ('sword')")
					return []byte("sword"), err
				})
			}

			failSync.Store(true)
			wantIs(t, g.Advance(ctx, term(8)), fence.ErrUnknown)
			_, err := g.Exec(ctx, term(7), "DELETE FROM loot")
			wantIs(t, err, fence.ErrUnknown)
			_, _, err = once()
			wantIs(t, err, fence.ErrUnknown)
			if restart {
				g.Close() // cannot tidy up on this disk
				failSync.Store(false)
				g = reopen(t, path)
			}
			failSync.Store(false)

			result, first, err := once()
			if string(result) != "sword" || first == restart || err != nil {
				t.Errorf("%q, first=%v, %v", result, first, err)
			}
			wantLoot(t, g, "sword")
			advance(t, g, 8)
		})
	}
}

func TestACommitOnAFullDiskIsKnownToHaveDoneNothing(t *testing.T) {
	g := reopen(t, "file:"+filepath.Join(t.TempDir(), "test.db")+"?vfs=faulty")
	ctx := bounded(t)
	if err := g.Setup(ctx, "CREATE TABLE loot (id INTEGER PRIMARY KEY, item TEXT)"); err != nil {
		t.Fatal(err)
	}
	advance(t, g, 7)
	failWrite.Store(true)
	_, err := g.Exec(ctx, term(7), "INSERT INTO loot (item) VALUES ('lost')")
	failWrite.Store(false)
	if !errors.Is(err, sqlite3.FULL) || errors.Is(err, fence.ErrUnknown) {
		t.Error(err)
	}
	if _, err := g.Exec(ctx, term(7), "INSERT INTO loot (item) VALUES ('sword')"); err != nil {
		t.Error(err)
	}
	wantLoot(t, g, "sword")
}
