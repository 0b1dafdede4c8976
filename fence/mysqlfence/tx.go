package mysqlfence

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"sync"

	"aegis/fence"
)

// Tx is the guarded transaction that [Guard.Do] passes to fn. Its methods are those of [sql.Tx] under the same names,
// so that it fits where code asks for an interface of them (as sqlc's DBTX does); committing and undoing are Do's.
// Savepoints may be used. Rows and statements that fn leaves open are closed; a row must be scanned, as everywhere in
// database/sql. It must not be used by several goroutines at once, nor after fn has returned.
//
// The server refuses statements that would end the transaction or commit it implicitly: COMMIT, DDL, LOCK TABLES.
type Tx struct {
	s *session

	mu    sync.Mutex
	over  bool
	rows  *sql.Rows // the last ones: a connection has but one set open
	stmts []*sql.Stmt
}

// ExecContext executes a statement, or several if there are no args and the connection allows it.
func (t *Tx) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	if err := t.live(); err != nil {
		return nil, err
	}
	res, err := t.s.conn.ExecContext(ctx, query, args...)
	if err != nil {
		return nil, t.s.refused(err)
	}
	return res, nil
}

// QueryContext executes a query that returns rows.
func (t *Tx) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	if err := t.live(); err != nil {
		return nil, err
	}
	rows, err := t.s.conn.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, t.s.refused(err)
	}
	t.mu.Lock()
	t.rows = rows
	t.mu.Unlock()
	return rows, nil
}

// QueryRowContext executes a query that returns at most one row; its error is the row's.
func (t *Tx) QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row {
	if t.live() != nil {
		over, cancel := context.WithCancel(ctx)
		cancel()
		ctx = over
	}
	return t.s.conn.QueryRowContext(ctx, query, args...)
}

// PrepareContext prepares a statement for use within fn.
func (t *Tx) PrepareContext(ctx context.Context, query string) (*sql.Stmt, error) {
	if err := t.live(); err != nil {
		return nil, err
	}
	stmt, err := t.s.conn.PrepareContext(ctx, query)
	if err != nil {
		return nil, t.s.refused(err)
	}
	t.mu.Lock()
	t.stmts = append(t.stmts, stmt)
	t.mu.Unlock()
	return stmt, nil
}

// Admit admits one more term to the transaction, for a write that concerns two elections: it commits only if fn
// returns nil, so fn must return Admit's error, which is one of [fence.Record.Admit] or the server's. Terms admitted
// in the order of their names' bytes never meet an advance of both in a deadlock, which would only run fn again.
func (t *Tx) Admit(ctx context.Context, term fence.Term) error {
	if err := t.live(); err != nil {
		return err
	}
	if err := t.s.g.valid("admit", term); err != nil {
		return err
	}
	rec, err := t.s.lock(ctx, t.s.g.lockQuery(term.Election))
	if err != nil {
		return t.s.refused(t.s.g.explain(ctx, "admit "+strconv.Quote(term.Election), err))
	}
	return t.s.g.cfg.Report.Verdict(rec.Admit(term))
}

var errOver = errors.New("the guarded transaction is over: its Tx was used after fn had returned")

func (t *Tx) live() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over {
		return fmt.Errorf("mysqlfence: %w", errOver)
	}
	return nil
}

// finish leaves the connection free for the end of the transaction.
func (t *Tx) finish() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.over = true
	if t.rows != nil {
		_ = t.rows.Close()
	}
	for _, stmt := range t.stmts {
		_ = stmt.Close()
	}
}

// Queryer is what Admit needs of [*sql.Tx] and [*sql.Conn].
type Queryer interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// Admit admits t to a transaction of the caller's own, and keeps advances waiting until it ends. It must be the
// transaction's first statement: an earlier one can hold a lock against an admitted transaction, and a snapshot from
// before the admission. It blocks while an advance is under way, for the server's innodb_lock_wait_timeout at most.
// After an error of it the transaction must be rolled back.
//
// [Guard.Do] is safer. This package cannot see the end of a transaction that is not its own: after DDL, a deadlock or
// a COMMIT in its middle the statements that follow run in transactions of their own, which nobody has admitted. The
// caller must stop at the first error and execute no DDL.
//
// Outside a transaction, where the lock would end with the statement, it is refused. So it is in an XA transaction:
// MariaDB gives the lock back at XA PREPARE, and an advance would pass before XA COMMIT. Other errors are those of
// [fence.Record.Admit] and the server's.
func (g *Guard) Admit(ctx context.Context, tx Queryer, t fence.Term) error {
	if err := g.valid("admit", t); err != nil {
		return err
	}
	if err := g.examine(ctx); err != nil {
		return err
	}
	if err := g.plain(ctx, tx, t); err != nil {
		return err
	}
	rec, err := g.locked(ctx, tx, t.Election)
	if number(err) == errRecordChanged || number(err) == errDeadlock {
		if now, lost := g.Newest(ctx, t.Election); lost == nil { // a stale writer learns that it is one
			if refusal := now.Admit(t); refusal != nil {
				return fmt.Errorf("%w (%w)", refusal, err)
			}
		}
	}
	if err != nil {
		return g.explain(ctx, "admit "+strconv.Quote(t.Election), err)
	}
	return g.cfg.Report.Verdict(rec.Admit(t))
}

func (g *Guard) locked(ctx context.Context, tx Queryer, name string) (rec fence.Record, err error) {
	rows, err := tx.QueryContext(ctx, g.lockQuery(name))
	if err != nil {
		return rec, err
	}
	defer rows.Close()
	if rows.Next() {
		var id uint64
		err = rows.Scan(&rec.Token, &rec.Nonce, &rec.Cluster, &id)
	}
	return rec, errors.Join(err, rows.Err())
}

// plain finds out that tx is in a transaction, and in no XA transaction: the server refuses to start one in the other.
func (g *Guard) plain(ctx context.Context, tx Queryer, t fence.Term) error {
	xid := fmt.Sprintf("'%s-%d'", g.xids, g.serial.Add(1))
	_, err := tx.ExecContext(ctx, "XA START "+xid)
	switch n := number(err); {
	case err == nil:
		_, err1 := tx.ExecContext(ctx, "XA END "+xid)
		_, err2 := tx.ExecContext(ctx, "XA ROLLBACK "+xid)
		return errors.Join(fmt.Errorf("mysqlfence: admit %q: there is no transaction; the lock would end with the statement, and the write follow unguarded: "+
			"begin one first, or use Do", t.Election), err1, err2)
	case n == errXAState:
		return fmt.Errorf("mysqlfence: admit %q: an XA transaction is not admitted: MariaDB gives the fence's lock back at XA PREPARE; use a plain one", t.Election)
	case n == errXAOutside:
		return nil
	}
	return g.explain(ctx, "admit "+strconv.Quote(t.Election), err)
}
