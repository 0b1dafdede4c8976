package pgfence

import (
	"context"
	"fmt"

	"aegis/fence"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Tx is the guarded transaction that [Guard.Do] passes to fn. Its methods are those of [pgx.Tx] under the same names, so
// that it fits where code asks for an interface of them (as sqlc's DBTX does); committing and undoing are Do's.
// Statements that would end the transaction (COMMIT, END, ABORT, ROLLBACK other than TO a savepoint, PREPARE TRANSACTION)
// are refused before they are sent, wherever they stand in the text. It must not be used after fn has returned, nor by
// several goroutines at once.
type Tx struct {
	conn *pgx.Conn
	g    *Guard
	over bool
}

// Exec executes a statement, or several if there are no args.
func (t *Tx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if err := t.may(sql); err != nil {
		return pgconn.CommandTag{}, err
	}
	return t.conn.Exec(ctx, sql, args...)
}

// Query executes a query that returns rows, which must be closed before fn returns.
func (t *Tx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if err := t.may(sql); err != nil {
		return nil, err
	}
	return t.conn.Query(ctx, sql, args...)
}

// QueryRow executes a query that returns at most one row; its error is the row's.
func (t *Tx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if err := t.may(sql); err != nil {
		return errRow{err}
	}
	return t.conn.QueryRow(ctx, sql, args...)
}

// SendBatch sends several statements in one round trip. The results must be closed before fn returns.
func (t *Tx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	for _, q := range b.QueuedQueries {
		if err := t.may(q.SQL); err != nil {
			return errBatch{err}
		}
	}
	return t.conn.SendBatch(ctx, b)
}

// CopyFrom copies rows into a table by COPY.
func (t *Tx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, rows pgx.CopyFromSource) (int64, error) {
	if err := t.may(""); err != nil {
		return 0, err
	}
	return t.conn.CopyFrom(ctx, table, columns, rows)
}

// Savepoint runs fn and undoes what it wrote if it returns an error, which Savepoint returns: the transaction can go on.
func (t *Tx) Savepoint(ctx context.Context, fn func() error) error {
	if _, err := t.Exec(ctx, "savepoint aegis"); err != nil {
		return err
	}
	if err := fn(); err != nil {
		if _, e := t.Exec(ctx, "rollback to savepoint aegis; release savepoint aegis"); e != nil {
			return fmt.Errorf("%w (and the savepoint could not be undone: %w)", err, e)
		}
		return err
	}
	_, err := t.Exec(ctx, "release savepoint aegis")
	return err
}

// Admit admits one more term to the transaction, for a write that concerns two elections. fn must return its error.
// Elections that are admitted together are best admitted in one order everywhere: what meets an advance crosswise waits
// for the server's deadlock_timeout, and may be run again.
func (t *Tx) Admit(ctx context.Context, term fence.Term) error {
	if err := t.live(); err != nil {
		return err
	}
	if err := valid(term); err != nil {
		return err
	}
	if t.g.cfg.Report != nil {
		var refusal *string
		if err := t.conn.QueryRow(ctx, reportSQL, term.Election, term.Token, int64(term.Nonce), int64(term.Cluster)).Scan(&refusal); err != nil {
			return err
		}
		return t.g.cfg.Report.Verdict(reported(term, refusal))
	}
	_, err := t.conn.Exec(ctx, admitSQL, term.Election, term.Token, int64(term.Nonce), int64(term.Cluster))
	return explain(ctx, "admit", err)
}

func (t *Tx) may(sql string) error {
	if err := t.live(); err != nil {
		return err
	}
	if word := transactionControl(sql); word != "" {
		return controlError(word)
	}
	return nil
}

// live tells a transaction that can still commit from one that cannot.
func (t *Tx) live() error {
	if t.over {
		return fmt.Errorf("pgfence: the transaction was used after fn had returned")
	}
	c := t.conn.PgConn()
	switch {
	case t.conn.IsClosed():
		return fmt.Errorf("%w (the connection was closed)", ErrEnded)
	case !c.IsBusy() && c.TxStatus() == 'I':
		return fmt.Errorf("%w (no transaction is open)", ErrEnded)
	}
	return nil
}

type errRow struct{ err error }

func (r errRow) Scan(...any) error { return r.err }

type errBatch struct{ err error }

func (b errBatch) Exec() (pgconn.CommandTag, error) { return pgconn.CommandTag{}, b.err }
func (b errBatch) Query() (pgx.Rows, error)         { return nil, b.err }
func (b errBatch) QueryRow() pgx.Row                { return errRow(b) }
func (b errBatch) Close() error                     { return b.err }
func (b errBatch) Tx() pgx.Tx                       { return nil }
