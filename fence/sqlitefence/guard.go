package sqlitefence

import (
	"context"
	"database/sql"
	sqldriver "database/sql/driver"
	"errors"
	"fmt"
	"time"

	"aegis/fence"

	"github.com/ncruces/go-sqlite3"
	"github.com/ncruces/go-sqlite3/driver"
)

// ErrEnded: something inside fn ended the guarded transaction (a COMMIT or ROLLBACK statement, an OR ROLLBACK clause,
// a failing disk, the context of a single statement). Nothing of the transaction was written, and nothing after it.
var ErrEnded = errors.New("the guarded transaction was ended inside fn; nothing was written")

// Config tunes a Guard. The zero value is ready.
type Config struct {
	// OpenTimeout bounds how long Open waits for other processes that lock the file. Defaults to 10 s.
	OpenTimeout time.Duration

	// Readers bounds the connections of the pool that [Guard.DB] returns. Defaults to 4.
	Readers int

	// Init is SQL that every new connection executes first, such as "PRAGMA foreign_keys=on". Defaults to none. What
	// the guard rests on (waiting for locks, synchronous=FULL) is set afterwards; Init cannot leave WAL mode.
	Init string

	_ struct{}
}

func (c Config) validate() (Config, error) {
	if c.OpenTimeout < 0 {
		return c, fmt.Errorf("sqlitefence: Config.OpenTimeout is %v, below 0", c.OpenTimeout)
	}
	if c.Readers < 0 {
		return c, fmt.Errorf("sqlitefence: Config.Readers is %d, below 0", c.Readers)
	}
	if c.OpenTimeout == 0 {
		c.OpenTimeout = 10 * time.Second
	}
	if c.Readers == 0 {
		c.Readers = 4
	}
	return c, nil
}

// Guard is a [fence.Guard] on one SQLite file. It is safe for concurrent use, by any number of processes on the file.
// Its writing methods take turns, within a process in the order of their calls; each waits for its turn and for
// SQLite's lock until its context ends, and only then returns an error of it. They must not be called inside fn.
type Guard struct {
	path string
	turn chan struct{} // full while somebody writes; Go serves waiting senders in order
	w    *sql.DB       // the one writing connection, behind gate
	r    *sql.DB       // for reading alone
	gate gate
	seek *sql.Stmt // on w: the record of a name

	// Guarded by turn:
	stale   bool      // fn had the writing connection outside its transaction, whatever it did there
	busy    time.Time // when this process began to write without a pause
	resting time.Time // when its last transaction ended
}

var _ fence.Guard = (*Guard)(nil)

// Open opens or creates the database file at path, a file name or a "file:" URI, puts it into WAL mode and creates
// the guard's tables aegis_meta, aegis_fence and aegis_once. It blocks for Config.OpenTimeout at most.
//
// It refuses, naming path and remedy: what is not an SQLite database, a file or a directory that it may not write,
// memory (it forgets), and tables of a newer version of this package. A file that it refuses is left as it was.
func Open(path string, cfg Config) (*Guard, error) {
	cfg, err := cfg.validate()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), cfg.OpenTimeout)
	defer cancel()
	path, err = prepare(ctx, path)
	if err != nil {
		return nil, err
	}
	g := &Guard{path: path, turn: make(chan struct{}, 1)}
	g.w, err = driver.Open(path, func(c *sqlite3.Conn) error {
		c.CommitHook(g.gate.mayCommit)
		c.RollbackHook(g.gate.rolledBack)
		return connect(c, cfg.Init, "PRAGMA synchronous=FULL")
	})
	if err != nil {
		return nil, explain(path, err)
	}
	g.w.SetMaxOpenConns(1) // SQLite has one writer at a time; more connections would only poll for the lock
	g.r, err = driver.Open(path, func(c *sqlite3.Conn) error {
		c.CommitHook(func() bool { return false }) // also where somebody switches query_only off
		return connect(c, cfg.Init, "PRAGMA query_only=on")
	})
	if err != nil {
		g.w.Close()
		return nil, explain(path, err)
	}
	g.r.SetMaxOpenConns(cfg.Readers)
	g.r.SetMaxIdleConns(cfg.Readers)
	g.seek, err = g.w.PrepareContext(ctx, seekRecord)
	if err := errors.Join(err, g.r.PingContext(ctx)); err != nil {
		g.Close()
		return nil, explain(path, err)
	}
	return g, nil
}

// Close closes the guard's connections. Writes that run are finished first.
func (g *Guard) Close() error {
	g.turn <- struct{}{}
	defer func() { <-g.turn }()
	return errors.Join(g.w.Close(), g.r.Close())
}

// DB returns a pool of connections for plain reads of what was committed, the user's tables among it. Its connections
// refuse writes. Closing it is the guard's.
func (g *Guard) DB() *sql.DB { return g.r }

// Setup executes SQL that no term guards, in one transaction: the creation of the user's own tables before there is
// any term, written so that it may run in every process ("CREATE TABLE IF NOT EXISTS"). What depends on a term
// belongs in Do.
func (g *Guard) Setup(ctx context.Context, script string) error {
	return g.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, script)
		return err
	})
}

// Advance makes the guard take the terms' tokens, all of them or none, in a transaction of its own: see
// [fence.Guard]. Errors: those of [fence.Record.Advance], [fence.ErrUnknown], ctx's, or SQLite's.
func (g *Guard) Advance(ctx context.Context, terms ...fence.Term) error {
	return g.write(ctx, func(tx *sql.Tx) error {
		for _, t := range terms {
			old, err := g.record(ctx, tx, t.Election)
			if err != nil {
				return err
			}
			rec, err := old.Advance(t)
			if err != nil {
				return err
			}
			if rec == old {
				continue
			}
			if err := setRecord(ctx, tx, t, rec); err != nil {
				return err
			}
		}
		return nil
	})
}

// Do runs fn in a transaction that commits only if t's token is the newest that the guard has taken. It blocks until
// fn has returned and the transaction is on disk, or ctx has ended. fn runs at most once; what it writes through tx is
// committed when it returns nil, and undone when it returns an error or panics. fn must not outlive Do and must not
// call the guard's writing methods, which wait for the lock that Do holds.
//
// Errors, beside fn's own and ctx's: [fence.ErrFenced] with both tokens, [fence.ErrTokenWentBack] or
// [fence.ErrForeignCluster], before fn runs; [ErrEnded]; SQLite's own: in all these cases nothing was written. Only
// [fence.ErrUnknown] leaves that open: the disk failed during the commit.
func (g *Guard) Do(ctx context.Context, t fence.Term, fn func(tx *Tx) error) error {
	return g.write(ctx, func(tx *sql.Tx) error {
		if err := g.admit(ctx, tx, t); err != nil {
			return err
		}
		return fn(&Tx{tx: tx, g: g})
	})
}

// Exec executes one guarded statement, or several without arguments: Do with an fn of one line.
func (g *Guard) Exec(ctx context.Context, t fence.Term, query string, args ...any) (res sql.Result, err error) {
	err = g.Do(ctx, t, func(tx *Tx) error {
		res, err = tx.ExecContext(ctx, query, args...)
		return err
	})
	if err != nil {
		return nil, err
	}
	return res, nil
}

// Newest returns what the guard has taken for the name; the zero Record if it has taken nothing.
func (g *Guard) Newest(ctx context.Context, name string) (fence.Record, error) {
	return scanRecord(name, g.r.QueryRowContext(ctx, seekRecord, name))
}

// Names returns the names for which the guard has taken a token, sorted by their bytes.
func (g *Guard) Names(ctx context.Context) ([]string, error) {
	rows, err := g.r.QueryContext(ctx, "SELECT name FROM aegis_fence ORDER BY name")
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var names []string
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			return nil, err
		}
		names = append(names, name)
	}
	return names, rows.Err()
}

// write is the only way to a commit. It waits its turn, runs fn in an immediate transaction, and commits it if fn
// returned nil and the transaction is still the one that it began.
func (g *Guard) write(ctx context.Context, fn func(*sql.Tx) error) error {
	select {
	case g.turn <- struct{}{}:
	case <-ctx.Done():
		return g.overdue(ctx)
	}
	defer func() { <-g.turn }()

	g.rest(ctx)
	defer func() { g.resting = time.Now() }()
	tx, release, err := g.begin(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return g.overdue(ctx)
		}
		return fmt.Errorf("sqlitefence: begin: %w", err)
	}
	defer release()
	g.gate.reset()
	defer tx.Rollback() // nothing to do after a commit
	defer func() { g.stale = g.gate.ended.Load() }()

	if err := fn(tx); err != nil {
		if ctx.Err() != nil { // err is but a consequence, in the words of SQLite or database/sql
			return fmt.Errorf("sqlitefence: the transaction was undone: %w: %w", context.Cause(ctx), err)
		}
		return err
	}
	return g.commit(ctx, tx)
}

// begin begins an immediate transaction. release gives its connection back, once it has ended.
func (g *Guard) begin(ctx context.Context) (tx *sql.Tx, release func() error, err error) {
	if tx, release, err = g.tryBegin(ctx); errors.Is(err, sqlite3.READONLY) { // PRAGMA query_only by an earlier fn
		g.stale = true
		tx, release, err = g.tryBegin(ctx)
	}
	return tx, release, err
}

func (g *Guard) tryBegin(ctx context.Context) (*sql.Tx, func() error, error) {
	conn, err := g.w.Conn(ctx)
	if err != nil {
		return nil, nil, err
	}
	if g.stale { // a PRAGMA, say, that a transaction would have refused: connect anew
		_ = conn.Raw(func(any) error { return sqldriver.ErrBadConn }) // closes it
		g.stale = false
		if conn, err = g.w.Conn(ctx); err != nil {
			return nil, nil, err
		}
	}
	// PRAGMA busy_timeout, by an earlier fn or script, takes the handler away.
	err = conn.Raw(func(c any) error { return c.(driver.Conn).Raw().BusyHandler(poll) })
	if err == nil {
		// The level says BEGIN IMMEDIATE to the driver, whatever _txlock in a URI says.
		var tx *sql.Tx
		if tx, err = conn.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelSerializable}); err == nil {
			return tx, conn.Close, nil
		}
	}
	_ = conn.Close()
	return nil, nil, err
}

// rest makes SQLite's lock fair between processes. Who waits for it polls, and a process that takes it again at once,
// its writers standing in line, leaves the others no moment to find it free. So a process that has written for
// mostBusy lets go for one rest, which is a few polls long.
func (g *Guard) rest(ctx context.Context) {
	const mostBusy, rest = 50 * time.Millisecond, 500 * time.Microsecond
	now := time.Now()
	if now.Sub(g.resting) >= rest {
		g.busy = now
	} else if now.Sub(g.busy) >= mostBusy {
		sleep(ctx, rest)
		g.busy = time.Now()
	}
}

// commit leaves it to the gate whether the transaction is the admitted one, and says what became of it.
func (g *Guard) commit(ctx context.Context, tx *sql.Tx) error {
	ended := g.gate.ended.Load()
	g.gate.asked.Store(true)
	err := tx.Commit()
	g.gate.asked.Store(false)
	g.gate.ended.Store(ended) // what a failed commit undid was not fn's doing
	switch {
	case ended && ctx.Err() == nil:
		return fmt.Errorf("sqlitefence: %w", ErrEnded)
	case err == nil:
		return nil
	case errors.Is(err, sql.ErrTxDone), ctx.Err() != nil && errors.Is(err, ctx.Err()):
		// database/sql undid the transaction because ctx ended before the commit began.
		return fmt.Errorf("sqlitefence: the transaction was undone: %w", context.Cause(ctx))
	case errors.Is(err, sqlite3.CONSTRAINT), errors.Is(err, sqlite3.BUSY), errors.Is(err, sqlite3.FULL):
		// A deferred constraint, a statement still running, no room for the commit's frames: SQLite did not commit.
		return fmt.Errorf("sqlitefence: commit: %w", err)
	default:
		// A frame that was written and not synced counts as committed if the machine dies now, and not if it lives.
		return fmt.Errorf("sqlitefence: commit: %w: %w", fence.ErrUnknown, err)
	}
}

func (g *Guard) overdue(ctx context.Context) error {
	return fmt.Errorf("sqlitefence: waiting for the other writers of %s: %w", g.path, context.Cause(ctx))
}
