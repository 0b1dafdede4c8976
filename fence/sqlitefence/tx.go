package sqlitefence

import (
	"context"
	"database/sql"
	"fmt"
	"sync/atomic"

	"aegis/fence"
)

// gate stands before every commit of the writing connection. SQLite calls its two methods on whatever goroutine
// executes a statement there. One gate serves one connection at a time, whose transactions follow one another.
type gate struct {
	asked atomic.Bool // the guard itself is about to commit, once
	ended atomic.Bool // the transaction that was admitted exists no more
}

func (g *gate) reset() { g.ended.Store(false) }

// mayCommit is the commit hook: false turns the commit into a rollback.
//
// asked alone would not do: after ROLLBACK; BEGIN inside fn the guard would commit a transaction that it has not
// admitted. ended alone would not do either: a COMMIT inside fn would let the statements behind it run unguarded.
func (g *gate) mayCommit() bool { return !g.ended.Load() && g.asked.CompareAndSwap(true, false) }

// rolledBack is the rollback hook. SQLite calls it for each whole transaction that is undone, whoever wanted it.
func (g *gate) rolledBack() { g.ended.Store(true) }

// Tx is the guarded transaction that [Guard.Do] passes to fn. Its methods are those of [sql.Tx] under the same names,
// so that it fits where code asks for an interface of them (as sqlc's DBTX does); committing and undoing are Do's.
// Rows that fn leaves open are closed by the commit. It must not be used after fn has returned.
//
// Once the transaction was ended inside fn, its methods return [ErrEnded], and SQLite refuses whatever else is tried.
type Tx struct {
	tx *sql.Tx
	g  *Guard
}

// ExecContext executes a statement, or several if there are no args.
func (t *Tx) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	if err := t.live(); err != nil {
		return nil, err
	}
	return t.tx.ExecContext(ctx, query, args...)
}

// QueryContext executes a query that returns rows.
func (t *Tx) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	if err := t.live(); err != nil {
		return nil, err
	}
	return t.tx.QueryContext(ctx, query, args...)
}

// QueryRowContext executes a query that returns at most one row; its error is the row's.
func (t *Tx) QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row {
	return t.tx.QueryRowContext(ctx, query, args...)
}

// PrepareContext prepares a statement for use within fn.
func (t *Tx) PrepareContext(ctx context.Context, query string) (*sql.Stmt, error) {
	if err := t.live(); err != nil {
		return nil, err
	}
	return t.tx.PrepareContext(ctx, query)
}

// Admit admits one more term to the transaction, for a write that concerns two elections: it commits only if fn
// returns nil, so fn must return Admit's error, which is one of [fence.Record.Admit] or SQLite's.
func (t *Tx) Admit(ctx context.Context, term fence.Term) error {
	if err := t.live(); err != nil {
		return err
	}
	return t.g.admit(ctx, t.tx, term)
}

func (t *Tx) live() error {
	if t.g.gate.ended.Load() {
		return fmt.Errorf("sqlitefence: %w", ErrEnded)
	}
	return nil
}
