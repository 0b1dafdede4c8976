package sqlitefence

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"time"

	"aegis/fence"

	"github.com/ncruces/go-sqlite3"
)

// schemaVersion grows when the tables change; prepare brings older files up to it and refuses newer ones.
const schemaVersion = 1

// Columns nonce and cluster are the bits of a uint64 in SQLite's int64. Columns node and at are for people.
const schema = `
CREATE TABLE IF NOT EXISTS aegis_meta (
	key   TEXT PRIMARY KEY,
	value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS aegis_fence (
	name    TEXT PRIMARY KEY,
	token   INTEGER NOT NULL CHECK (token BETWEEN 1 AND 9007199254740991),
	nonce   INTEGER NOT NULL,
	cluster INTEGER NOT NULL,
	node    TEXT NOT NULL,
	at      TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS aegis_once (
	name   TEXT NOT NULL,
	key    TEXT NOT NULL,
	token  INTEGER NOT NULL,
	result BLOB,
	at     TEXT NOT NULL,
	PRIMARY KEY (name, key)
) STRICT, WITHOUT ROWID;
INSERT OR IGNORE INTO aegis_meta VALUES ('schema', 1);`

// prepare makes the file at path ready for the guard's connections, and returns the path that these shall use.
func prepare(ctx context.Context, path string) (string, error) {
	if !strings.HasPrefix(path, "file:") {
		if path == "" || path == ":memory:" {
			return "", fmt.Errorf("sqlitefence: open %q: a fence in memory forgets; name a file", path)
		}
		abs, err := filepath.Abs(path) // later connections must find the same file after a chdir
		if err != nil {
			return "", fmt.Errorf("sqlitefence: open %s: %w", path, err)
		}
		path = abs
	}
	c, err := sqlite3.OpenContext(ctx, path)
	if err != nil {
		return "", explain(path, err)
	}
	defer c.Close()
	c.SetInterrupt(ctx)
	if err := c.BusyHandler(poll); err != nil {
		return "", explain(path, err)
	}
	err = install(c)
	for errors.Is(err, sqlite3.BUSY) && ctx.Err() == nil && poll(ctx, 0) {
		err = install(c) // switching to WAL does not ask the busy handler
	}
	if err != nil && ctx.Err() != nil {
		return "", fmt.Errorf("sqlitefence: open %s: other processes kept it locked: %w", path, ctx.Err())
	}
	if err != nil {
		return "", explain(path, err)
	}
	return path, nil
}

func install(c *sqlite3.Conn) error {
	tables, err := scalar(c, "SELECT group_concat(name, ', ' ORDER BY name DESC) FROM sqlite_schema WHERE name IN ('aegis_meta', 'aegis_fence', 'aegis_once')")
	if err != nil {
		return err
	}
	if strings.Contains(tables, "aegis_meta") {
		version, err := scalar(c, "SELECT max(value) FROM aegis_meta WHERE key = 'schema'")
		if err != nil {
			return err
		}
		if version != fmt.Sprint(schemaVersion) {
			return fmt.Errorf("its aegis tables are of version %s, this program knows version %d; use a newer aegis", version, schemaVersion)
		}
	} else if tables != "" {
		return fmt.Errorf("it has tables of the guard's names that are not the guard's: %s; rename them", tables)
	}
	mode, err := scalar(c, "PRAGMA journal_mode=WAL")
	if err != nil {
		return err
	}
	if mode != "wal" {
		return fmt.Errorf("it cannot be put into WAL mode (journal_mode stays %q); use a file on a local disk", mode)
	}
	if tables != "" {
		return nil
	}
	tx, err := c.BeginImmediate()
	if err != nil {
		return err
	}
	err = c.Exec(schema)
	tx.End(&err)
	return err
}

// explain adds to err where it happened and what to do about it.
func explain(path string, err error) error {
	hint := ""
	file, _, _ := strings.Cut(strings.TrimPrefix(path, "file:"), "?")
	info, statErr := os.Stat(file)
	_, dirErr := os.Stat(filepath.Dir(file))
	switch {
	case statErr == nil && info.IsDir():
		hint = ": it is a directory; name a file in it"
	case errors.Is(dirErr, fs.ErrNotExist):
		hint = ": its directory does not exist; create it first"
	case errors.Is(err, sqlite3.NOTADB), errors.Is(err, sqlite3.CORRUPT):
		hint = ": it is not an SQLite database; move it away or choose another path"
	case errors.Is(err, sqlite3.CANTOPEN), errors.Is(err, sqlite3.READONLY), errors.Is(err, sqlite3.PERM):
		hint = ": this process must be able to write the file and, for SQLite's -wal and -shm files, its directory"
	}
	return fmt.Errorf("sqlitefence: open %s%s: %w", path, hint, err)
}

// connect readies a connection: it executes init, the user's, then script, and waits for locks as long as its context
// lives.
func connect(c *sqlite3.Conn, init, script string) error {
	if err := c.BusyHandler(poll); err != nil {
		return err
	}
	if err := c.Exec(init); err != nil {
		return fmt.Errorf("Config.Init: %w", err)
	}
	// What init may have changed: PRAGMA busy_timeout replaces the handler, an exclusive mode locks out everybody else.
	if err := c.BusyHandler(poll); err != nil {
		return err
	}
	if err := c.Exec("PRAGMA locking_mode=NORMAL;" + script); err != nil {
		return err
	}
	mode, err := scalar(c, "PRAGMA journal_mode")
	if err == nil && mode != "wal" {
		err = fmt.Errorf("Config.Init sets journal_mode=%s; the guard needs WAL", mode)
	}
	return err
}

// poll is the busy handler, with the context of the call: SQLite has no lock to sleep on.
func poll(ctx context.Context, _ int) (retry bool) {
	return sleep(ctx, time.Duration(100+rand.IntN(200))*time.Microsecond)
}

// sleep reports whether ctx outlived it.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

func scalar(c *sqlite3.Conn, query string) (string, error) {
	stmt, _, err := c.Prepare(query)
	if err != nil {
		return "", err
	}
	defer stmt.Close()
	if !stmt.Step() {
		return "", stmt.Err()
	}
	return stmt.ColumnText(0), nil
}

const seekRecord = "SELECT token, nonce, cluster FROM aegis_fence WHERE name = ?"

func (g *Guard) record(ctx context.Context, tx *sql.Tx, name string) (fence.Record, error) {
	return scanRecord(name, tx.StmtContext(ctx, g.seek).QueryRowContext(ctx, name))
}

func scanRecord(name string, row *sql.Row) (fence.Record, error) {
	var token, nonce, cluster int64
	switch err := row.Scan(&token, &nonce, &cluster); {
	case errors.Is(err, sql.ErrNoRows):
		return fence.Record{}, nil
	case err != nil:
		return fence.Record{}, fmt.Errorf("sqlitefence: read the fence of %q: %w", name, err)
	}
	return fence.Record{Token: token, Nonce: uint64(nonce), Cluster: uint64(cluster)}, nil
}

func (g *Guard) admit(ctx context.Context, tx *sql.Tx, t fence.Term) error {
	rec, err := g.record(ctx, tx, t.Election)
	if err != nil {
		return err
	}
	return rec.Admit(t)
}

func setRecord(ctx context.Context, tx *sql.Tx, t fence.Term, r fence.Record) error {
	const upsert = `INSERT INTO aegis_fence VALUES (?1, ?2, ?3, ?4, ?5, ?6) ON CONFLICT (name) DO UPDATE
		SET token = ?2, nonce = ?3, cluster = ?4, node = ?5, at = ?6`
	_, err := tx.ExecContext(ctx, upsert, t.Election, r.Token, int64(r.Nonce), int64(r.Cluster), string(t.Node), now())
	return err
}
