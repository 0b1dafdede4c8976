package pgfence

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"aegis/fence"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Admit admits a transaction that the caller owns to write under t until it ends; what it writes and t's token are then
// one: both commit or none. Call it right after BEGIN, outside of savepoints: ROLLBACK TO a savepoint before it undoes
// it. One round trip; it waits behind an advance that waits, until ctx ends.
//
// Errors: those of [fence.Record.Admit], in Config.Report's hands if there is one; a serialization failure, after which
// the caller starts the transaction anew, unless it is due to a newer token, which is [fence.ErrFenced]; the server's.
// After an error the transaction can only be rolled back.
func (g *Guard) Admit(ctx context.Context, tx pgx.Tx, t fence.Term) error {
	if err := valid(t); err != nil {
		return err
	}
	if g.cfg.Report != nil {
		var refusal *string
		if err := tx.QueryRow(ctx, "select aegis.report($1, $2, $3, $4)", t.Election, t.Token, int64(t.Nonce), int64(t.Cluster)).Scan(&refusal); err != nil {
			return g.stale(ctx, t, explain(ctx, "admit", err))
		}
		return g.cfg.Report.Verdict(reported(t, refusal))
	}
	_, err := tx.Exec(ctx, admitSQL, t.Election, t.Token, int64(t.Nonce), int64(t.Cluster))
	return g.stale(ctx, t, explain(ctx, "admit", err))
}

const (
	admitSQL  = "select aegis.admit($1, $2, $3, $4)"
	reportSQL = "select aegis.report($1, $2, $3, $4)"
)

// stale tells a serialization failure of a term that is over from others.
func (g *Guard) stale(ctx context.Context, t fence.Term, err error) error {
	if !isState(err, serializationFailure) {
		return err
	}
	// The caller's transaction holds a connection: this one must not wait for another for ever.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	r, e := g.Newest(ctx, t.Election)
	if e != nil {
		return err
	}
	if refusal := r.Admit(t); refusal != nil {
		return fmt.Errorf("%w (%v)", refusal, err)
	}
	return err
}

// Do runs fn in a transaction that commits only if t's token is the newest that the guard has taken. It blocks until fn
// has returned and the commit is done, or ctx has ended. What fn writes through tx is committed when fn returns nil,
// and undone when it returns an error or panics. fn runs again, in a new transaction, after a serialization failure or a
// deadlock that it returns, as long as ctx lasts: it must have no other effects. It must not outlive Do, nor use tx from
// several goroutines. Do costs as many round trips as BEGIN, fn and COMMIT alone.
//
// Errors, beside fn's own and ctx's: [fence.ErrFenced] with both tokens, [fence.ErrTokenWentBack] or
// [fence.ErrForeignCluster], before fn runs; [ErrEnded]; the server's own: in all these cases nothing was written. Only
// [fence.ErrUnknown] leaves that open: the reply to the commit was lost.
func (g *Guard) Do(ctx context.Context, t fence.Term, fn func(tx *Tx) error) error {
	return g.again(ctx, t, func() error { return g.do(ctx, t, fn) })
}

// again calls attempt until its error is final.
func (g *Guard) again(ctx context.Context, t fence.Term, attempt func() error) error {
	if err := valid(t); err != nil {
		return err
	}
	for n := 0; ; n++ {
		err := attempt()
		if !retriable(err) {
			return err
		}
		if !pause(ctx, n) {
			return fmt.Errorf("pgfence: no attempt of %d got through: %w: %w", n+1, context.Cause(ctx), err)
		}
	}
}

func (g *Guard) do(ctx context.Context, t fence.Term, fn func(tx *Tx) error) error {
	conn, err := g.acquire(ctx)
	if err != nil {
		return explain(ctx, "do", err)
	}
	defer conn.Release() // closes the connection if it is still in a transaction
	begin := "begin"
	if g.cfg.Isolation != "" {
		begin += " isolation level " + string(g.cfg.Isolation)
	}
	refusal, err := g.begin(ctx, conn, begin, t)
	if err != nil {
		rollback(ctx, conn)
		return explain(ctx, "admit", err)
	}
	admitted := refusal == nil
	if err := g.cfg.Report.Verdict(reported(t, refusal)); err != nil {
		rollback(ctx, conn)
		return err
	}

	tx := &Tx{conn: conn.Conn(), g: g}
	done := false
	defer func() {
		tx.over = true
		if !done { // a panic
			rollback(ctx, conn)
		}
	}()
	err = fn(tx)
	done = true
	switch {
	case err != nil:
		rollback(ctx, conn)
		if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
			return fmt.Errorf("pgfence: the transaction was undone: %w: %w", context.Cause(ctx), err)
		}
		return explain(ctx, "", err)
	case ctx.Err() != nil:
		rollback(ctx, conn)
		return fmt.Errorf("pgfence: the transaction was undone: %w", context.Cause(ctx))
	}
	if err := tx.live(); err != nil {
		rollback(ctx, conn)
		return err
	}
	if conn.Conn().PgConn().IsBusy() {
		_ = conn.Conn().Close(context.WithoutCancel(ctx))
		return errors.New("pgfence: fn left rows or results open; nothing was written: close them before it returns")
	}
	last := &pgx.Batch{}
	if admitted {
		last.Queue("select aegis.confirm($1, $2)", t.Election, t.Token)
	}
	return explain(ctx, "commit", commit(ctx, conn, last))
}

// begin begins a transaction and admits it, in one round trip. The refusal is aegis.report's.
func (g *Guard) begin(ctx context.Context, conn *pgxpool.Conn, begin string, t fence.Term) (refusal *string, err error) {
	batch := &pgx.Batch{}
	batch.Queue(begin)
	if g.cfg.Report == nil {
		batch.Queue(admitSQL, t.Election, t.Token, int64(t.Nonce), int64(t.Cluster))
	} else {
		batch.Queue(reportSQL, t.Election, t.Token, int64(t.Nonce), int64(t.Cluster)).QueryRow(func(row pgx.Row) error { return row.Scan(&refusal) })
	}
	err = conn.SendBatch(ctx, batch).Close()
	return refusal, err
}

// Exec executes one guarded statement: the check and the write go to the server together, in one transaction and, once
// pgx has prepared the statement on the connection, in one round trip. A serialization failure or a deadlock is tried
// again as long as ctx lasts. Errors are those of Do.
func (g *Guard) Exec(ctx context.Context, t fence.Term, sql string, args ...any) (tag pgconn.CommandTag, err error) {
	if word := transactionControl(sql); word != "" {
		return tag, controlError(word)
	}
	err = g.again(ctx, t, func() (err error) {
		tag, err = g.exec(ctx, t, sql, args)
		return err
	})
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	return tag, nil
}

func (g *Guard) exec(ctx context.Context, t fence.Term, sql string, args []any) (tag pgconn.CommandTag, err error) {
	conn, err := g.acquire(ctx)
	if err != nil {
		return tag, explain(ctx, "exec", err)
	}
	defer conn.Release()
	var refusal *string
	batch := &pgx.Batch{}
	explicit := g.cfg.Isolation != ""
	if explicit {
		batch.Queue("begin isolation level " + string(g.cfg.Isolation) + "")
	}
	check := admitSQL
	if g.cfg.Report != nil {
		check = reportSQL
	}
	batch.Queue(check, t.Election, t.Token, int64(t.Nonce), int64(t.Cluster))
	batch.Queue(sql, args...)
	if explicit {
		batch.Queue("commit")
	}
	results := conn.Conn().SendBatch(ctx, batch)
	committing := false
	err = func() error {
		if explicit {
			if _, err := results.Exec(); err != nil {
				return err
			}
		}
		if g.cfg.Report == nil {
			if _, err := results.Exec(); err != nil {
				return err
			}
		} else if err := results.QueryRow().Scan(&refusal); err != nil {
			return err
		}
		var err error
		if tag, err = results.Exec(); err != nil {
			return err
		}
		committing = true
		if explicit {
			if _, err := results.Exec(); err != nil {
				return err
			}
		}
		return results.Close()
	}()
	if err != nil {
		_ = results.Close()
		pgerr, refused := errors.AsType[*pgconn.PgError](err)
		alive := !conn.Conn().IsClosed()
		rollback(ctx, conn)
		switch {
		case refused && !(committing && fatal(pgerr)), alive, pgconn.SafeToRetry(err):
			return tag, explain(ctx, "exec", err) // a server's no, or nothing was sent
		}
		return tag, unknown(ctx, err)
	}
	if g.cfg.Report != nil {
		_ = g.cfg.Report.Verdict(reported(t, refusal)) // written already
	}
	return tag, nil
}

// Once runs fn as Do does, but once for each key of the term's election, however many terms, retries and crashes it
// takes: the key is recorded before fn runs and fn's result after, in the transaction of fn's writes. A repeat, under
// this term or a later one, does nothing and returns the first result with first = false. So after [fence.ErrUnknown],
// or after a crash, the same call again makes certain: it is what hands loot out once. Of concurrent calls one runs fn,
// and the others wait for it.
//
// fn's error undoes everything, the key too. Errors are those of Do, and one for an empty key. A key stays recorded until
// [Guard.Forget].
func (g *Guard) Once(ctx context.Context, t fence.Term, key string, fn func(tx *Tx) ([]byte, error)) (result []byte, first bool, err error) {
	if key == "" {
		return nil, false, fmt.Errorf("pgfence: once %q: the key is empty", t.Election)
	}
	err = g.Do(ctx, t, func(tx *Tx) error {
		begin, end := "select first, result from aegis.once_begin($1, $2, $3, $4, $5)", "select aegis.once_end($1, $2, $3, $4)"
		err := tx.conn.QueryRow(ctx, begin, t.Election, t.Token, key, int64(t.Nonce), int64(t.Cluster)).Scan(&first, &result)
		if err != nil || !first {
			return err
		}
		if result, err = fn(tx); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, end, t.Election, t.Token, key, result)
		return err
	})
	if err != nil {
		return nil, false, err
	}
	return result, first, nil
}

func (g *Guard) acquire(ctx context.Context) (*pgxpool.Conn, error) {
	conn, err := g.pool.Acquire(ctx)
	if err != nil {
		return nil, &acquireError{err}
	}
	return conn, nil
}

// simple executes a script of several statements in one round trip.
func simple(ctx context.Context, conn *pgxpool.Conn, script string) error {
	_, err := conn.Conn().PgConn().Exec(ctx, script).ReadAll()
	return err
}

// rollback leaves the connection clean, or closed; it outlives ctx by 5 s at most.
func rollback(ctx context.Context, conn *pgxpool.Conn) {
	c := conn.Conn()
	if c.IsClosed() || c.PgConn().TxStatus() == 'I' && !c.PgConn().IsBusy() {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if c.PgConn().IsBusy() || simple(ctx, conn, "rollback") != nil {
		_ = c.Close(ctx)
	}
}

// commit sends the last words of a transaction, COMMIT behind them, and says what became of it.
func commit(ctx context.Context, conn *pgxpool.Conn, last *pgx.Batch) error {
	tag := ""
	last.Queue("commit").Exec(func(t pgconn.CommandTag) error { tag = t.String(); return nil })
	err := conn.SendBatch(ctx, last).Close()
	if err == nil {
		if tag != "COMMIT" {
			return fmt.Errorf("%w (COMMIT was answered by %s)", ErrEnded, tag)
		}
		return nil
	}
	pgerr, refused := errors.AsType[*pgconn.PgError](err)
	alive := !conn.Conn().IsClosed()
	rollback(ctx, conn)
	if refused && !fatal(pgerr) || alive || pgconn.SafeToRetry(err) {
		return err
	}
	return unknown(ctx, err)
}

func unknown(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return fmt.Errorf("pgfence: %w: %w: %w", fence.ErrUnknown, cause, err)
	}
	return fmt.Errorf("pgfence: %w: %w", fence.ErrUnknown, err)
}

// pause waits a moment before another attempt, and reports whether ctx outlived it.
func pause(ctx context.Context, attempt int) bool {
	timer := time.NewTimer(time.Duration(rand.Int64N(int64(time.Millisecond) << min(attempt, 7))))
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}
