package mysqlfence

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"aegis/fence"

	"github.com/go-sql-driver/mysql"
)

// ErrEnded: the guarded transaction ended inside fn (its connection was lost, the server rolled it back). Nothing of
// it was written, and nothing after it.
var ErrEnded = errors.New("the guarded transaction ended before its commit; nothing was written")

const (
	mostAgain  = 20 // repetitions after deadlocks, each by itself nearly sure to succeed
	mostUnsent = 3  // dead connections that are taken from the pool in a row
)

// Do runs fn in a transaction that commits only if t's token is the newest that the guard has taken. It blocks until
// fn has returned and the transaction is committed, or ctx has ended (and up to 2 s longer to undo it). What fn writes through tx is committed when it
// returns nil, and undone when it returns an error or panics. fn runs again after a deadlock, so it must have no effect
// but its writes; it must not outlive Do.
//
// Transactions of one term run side by side. The isolation level is the connection's; a snapshot that fn reads is not
// older than the admission.
//
// Errors, beside fn's own and ctx's: [fence.ErrFenced] with both tokens, [fence.ErrTokenWentBack] or
// [fence.ErrForeignCluster], before fn runs; [ErrEnded]; the server's own: in all these cases nothing was written. Only
// [fence.ErrUnknown] leaves that open: the reply to the commit was lost.
func (g *Guard) Do(ctx context.Context, t fence.Term, fn func(tx *Tx) error) error {
	if err := g.valid("admit", t); err != nil {
		return err
	}
	return g.again(ctx, func() error { return g.do(ctx, t, fn) })
}

// Exec executes one guarded statement, or several without arguments, and returns the last one's result. It takes one
// round trip where the connections allow it, as those of [Open] do. Errors are those of [Guard.Do], with which it
// shares its transaction; a connection that is lost at any moment of the one round trip is [fence.ErrUnknown].
func (g *Guard) Exec(ctx context.Context, t fence.Term, query string, args ...any) (res sql.Result, err error) {
	if err := g.valid("admit", t); err != nil {
		return nil, err
	}
	err = g.again(ctx, func() error {
		if g.fast && g.cfg.Report == nil {
			res, err = g.exec(ctx, t, query, args)
			if !errors.Is(err, driver.ErrSkip) {
				return err
			}
		}
		return g.do(ctx, t, func(tx *Tx) error {
			res, err = tx.ExecContext(ctx, query, args...)
			return err
		})
	})
	if err != nil {
		return nil, err
	}
	return res, nil
}

func (g *Guard) valid(what string, t fence.Term) error {
	if err := fence.ValidToken(t.Token); err != nil {
		return fmt.Errorf("mysqlfence: %s %q: %w", what, t.Election, err)
	}
	if t.Election == "" || len(t.Election) > 255 {
		return fmt.Errorf("mysqlfence: %s: a name has 1 to 255 bytes, %.20q… has %d", what, t.Election, len(t.Election))
	}
	return nil
}

// again examines the server and runs the transaction try, once more whenever others have undone it.
func (g *Guard) again(ctx context.Context, try func() error) error {
	if err := g.examine(ctx); err != nil {
		return err
	}
	dead := 0
	for n := 1; ; n++ {
		err := try()
		switch {
		case err == nil:
			return nil
		case unsent(err) && !errors.Is(err, ErrEnded):
			if dead++; dead > mostUnsent {
				return g.explain(ctx, "connect", err)
			}
			continue
		case !errors.Is(err, errAgain) && number(err) != errDeadlock || errors.Is(err, fence.ErrUnknown):
			return err
		case n > mostAgain:
			return fmt.Errorf("mysqlfence: given up after %d deadlocks in a row: %w", n, err)
		}
		pause := time.Duration(rand.Int64N(int64(min(n, 10)) * int64(time.Millisecond)))
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return fmt.Errorf("mysqlfence: the transaction was undone: %w: %w", context.Cause(ctx), err)
		}
	}
}

// do is one attempt at a transaction with fn. driver.ErrBadConn means that it has not begun.
func (g *Guard) do(ctx context.Context, t fence.Term, fn func(tx *Tx) error) error {
	s, err := g.session(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	rec, err := s.begin(ctx, t.Election)
	for number(err) == errLockWaitTimeout && ctx.Err() == nil { // the server's patience is not ctx's
		rec, err = s.lock(ctx, g.lockQuery(t.Election))
	}
	if err != nil {
		return s.undone(ctx, g.explain(ctx, "admit "+strconv.Quote(t.Election), s.refused(err)))
	}
	if err := g.cfg.Report.Verdict(rec.Admit(t)); err != nil {
		return s.undone(ctx, err)
	}
	tx := &Tx{s: s}
	done := false
	defer func() {
		if !done { // fn panics, or has called runtime.Goexit
			tx.finish()
			_ = s.undone(ctx, nil)
		}
	}()
	err = fn(tx)
	done = true
	tx.finish()
	if err != nil {
		if s.undone(ctx, nil); ctx.Err() != nil { // err is but a consequence, in the words of the driver
			return fmt.Errorf("mysqlfence: the transaction was undone: %w: %w", context.Cause(ctx), err)
		}
		if unsent(err) || errors.Is(err, mysql.ErrInvalidConn) {
			return fmt.Errorf("mysqlfence: %w: %w", ErrEnded, err)
		}
		return err
	}
	if ctx.Err() != nil {
		return s.undone(ctx, fmt.Errorf("mysqlfence: the transaction was undone: %w", context.Cause(ctx)))
	}
	return s.commit(ctx)
}

// exec is one attempt at a guarded statement in one round trip. The comparison is a statement before the user's: where
// it fails, the server executes nothing that follows.
func (g *Guard) exec(ctx context.Context, t fence.Term, query string, args []any) (sql.Result, error) {
	s, err := g.session(ctx)
	if err != nil {
		return nil, err
	}
	defer s.close()
	query = strings.TrimRight(query, "; \t\r\n") // an empty statement is an error
	all := "XA START " + s.xid + "; " + g.compareQuery(t) + "; " + query + "\n; XA END " + s.xid + "; XA COMMIT " + s.xid + " ONE PHASE"
	res, err := execRaw(ctx, s.conn, all, args)
	switch n := number(err); {
	case err == nil:
		return newResult(res), nil
	case errors.Is(err, driver.ErrSkip), errors.Is(err, driver.ErrBadConn), errors.Is(err, errArgument):
		return nil, err // nothing was sent
	case errors.Is(err, mysql.ErrPktTooLarge):
		return nil, s.undone(ctx, err) // nor here
	case n == errLockWaitTimeout && ctx.Err() == nil && s.rollback():
		return nil, driver.ErrSkip // maybe it was the fence's lock: Do waits on
	case n == errOutOfRange:
		if rec, lost := s.lock(ctx, g.lockQuery(t.Election)); lost == nil {
			if refusal := rec.Admit(t); refusal != nil {
				return nil, s.undone(ctx, refusal)
			}
		}
	}
	err = s.outcome(ctx, err)
	if number(err) != 0 && !errors.Is(err, fence.ErrUnknown) && !errors.Is(err, errAgain) {
		err = g.explain(ctx, "exec", err)
	}
	return nil, err
}

// compareQuery fails with errOutOfRange unless the record, locked as by lockQuery, admits t: the rule is that of
// fence.Record.Admit. A sum that overflows is an error in every sql_mode and the cheapest one measured; SET returns no
// rows that somebody would have to read. (MariaDB locks what SET reads in any case; the clause does not rely on it.)
func (g *Guard) compareQuery(t fence.Term) string {
	equal := "token = " + strconv.FormatInt(t.Token, 10)
	if t.Nonce != 0 {
		equal += " AND nonce IN (0, " + strconv.FormatUint(t.Nonce, 10) + ")"
	}
	if t.Cluster != 0 {
		equal += " AND cluster IN (0, " + strconv.FormatUint(t.Cluster, 10) + ")"
	}
	return "SET @aegis = 9223372036854775807 + ((SELECT " + equal + " FROM " + g.tables + "aegis_fence WHERE name = " + literal(t.Election) +
		" LOCK IN SHARE MODE) IS NOT TRUE)"
}

// result is the one of the user's last statement, among those of the packet.
type result struct{ id, rows int64 }

func newResult(res driver.Result) sql.Result {
	all := res.(mysql.Result) // probe has seen it
	ids, rows := all.AllLastInsertIds(), all.AllRowsAffected()
	return result{id: ids[len(ids)-3], rows: rows[len(rows)-3]} // XA END and XA COMMIT follow
}

func (r result) LastInsertId() (int64, error) { return r.id, nil }
func (r result) RowsAffected() (int64, error) { return r.rows, nil }

// Newest returns what the guard has taken for the name; the zero Record if it has taken nothing. A writer that relies
// on it in place of Do has checked, and writes unguarded.
func (g *Guard) Newest(ctx context.Context, name string) (fence.Record, error) {
	if err := g.examine(ctx); err != nil {
		return fence.Record{}, err
	}
	var rec fence.Record
	query := "SELECT token, nonce, cluster FROM " + g.tables + "aegis_fence WHERE name = " + literal(name)
	err := g.db.QueryRowContext(ctx, query).Scan(&rec.Token, &rec.Nonce, &rec.Cluster)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return fence.Record{}, g.explain(ctx, fmt.Sprintf("read the fence of %q", name), err)
	}
	return rec, nil
}

// Names returns the names for which the guard has taken a token, sorted by their bytes.
func (g *Guard) Names(ctx context.Context) ([]string, error) {
	if err := g.examine(ctx); err != nil {
		return nil, err
	}
	rows, err := g.db.QueryContext(ctx, "SELECT name FROM "+g.tables+"aegis_fence WHERE token > 0 ORDER BY name")
	if err != nil {
		return nil, g.explain(ctx, "list the names", err)
	}
	defer rows.Close()
	var names []string
	for rows.Next() {
		var name []byte
		if err := rows.Scan(&name); err != nil {
			return nil, err
		}
		names = append(names, string(name))
	}
	return names, rows.Err()
}
