package mysqlfence

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"aegis/fence"

	"github.com/go-sql-driver/mysql"
)

// Advance makes the guard take the terms' tokens, all of them or none, in a transaction of its own: see [fence.Guard].
// It waits for the running transactions of the old terms, as Config.Advance says and until ctx ends at the latest, and
// goes before those that come later; who blocked it takes up to 3 s more to find out. Errors: those of [fence.Record.Advance], a [*BlockedError], [fence.ErrUnknown],
// ctx's, or the server's.
func (g *Guard) Advance(ctx context.Context, terms ...fence.Term) error {
	return g.AdvanceWith(ctx, g.cfg.Advance, terms...)
}

// AdvanceWith is [Guard.Advance] with options of its own.
func (g *Guard) AdvanceWith(ctx context.Context, opts AdvanceOptions, terms ...fence.Term) error {
	if err := opts.validate(); err != nil {
		return err
	}
	for _, t := range terms {
		if err := g.valid("advance", t); err != nil {
			return err
		}
	}
	if len(terms) == 0 {
		return nil
	}
	terms = slices.Clone(terms) // locks are taken in one order, whoever comes
	slices.SortStableFunc(terms, func(a, b fence.Term) int { return strings.Compare(a.Election, b.Election) })
	lost := 0
	for {
		err := g.again(ctx, func() error { return g.advance(ctx, opts, terms) })
		if lost++; !errors.Is(err, fence.ErrUnknown) || ctx.Err() != nil || lost > mostUnsent {
			return err
		}
		// The same again makes certain.
	}
}

func (g *Guard) advance(ctx context.Context, opts AdvanceOptions, terms []fence.Term) error {
	s, err := g.session(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	if _, err := s.conn.ExecContext(ctx, "XA START "+s.xid); err != nil {
		return s.undone(ctx, g.explain(ctx, "advance", err))
	}
	var patience uint64
	if err := s.conn.QueryRowContext(ctx, "SELECT CONNECTION_ID(), @@innodb_lock_wait_timeout").Scan(&s.id, &patience); err != nil {
		return s.undone(ctx, g.explain(ctx, "advance", err))
	}
	// The server's patience is not the caller's: who asks again has lost his place in line. The pool gets its own setting back.
	if _, err := s.conn.ExecContext(ctx, "SET SESSION innodb_lock_wait_timeout = 1000000"); err != nil {
		return s.undone(ctx, g.explain(ctx, "advance", err))
	}
	defer func() {
		if _, err := s.conn.ExecContext(ctx, "SET SESSION innodb_lock_wait_timeout = "+strconv.FormatUint(patience, 10)); err != nil {
			s.drop(context.Background())
		}
	}()
	for _, t := range terms {
		if err := g.take(ctx, opts, s, t); err != nil {
			return s.undone(ctx, err)
		}
	}
	return s.commit(ctx)
}

// take locks one record exclusively, compares and sets it.
func (g *Guard) take(ctx context.Context, opts AdvanceOptions, s *session, t fence.Term) error {
	// A locking read of a record that does not exist locks the gap, which two may do, and then neither could insert. So
	// insert first; token 0 stands for no record, and is undone if the term is refused.
	lock := "INSERT INTO " + g.tables + "aegis_fence (name, token, nonce, cluster, node, at) VALUES (" + literal(t.Election) +
		", 0, 0, 0, '', UTC_TIMESTAMP(6)) ON DUPLICATE KEY UPDATE token = token"
	if err := g.patiently(ctx, opts, s, t, lock); err != nil {
		return err
	}
	old, err := s.lock(ctx, g.lockQuery(t.Election))
	if err != nil {
		return g.explain(ctx, "advance "+strconv.Quote(t.Election), err)
	}
	rec, err := old.Advance(t)
	if err := g.cfg.Report.Verdict(err); err != nil {
		return err
	}
	if rec == old {
		return nil
	}
	set := fmt.Sprintf("UPDATE %saegis_fence SET token = %d, nonce = %d, cluster = %d, node = %s, at = UTC_TIMESTAMP(6) WHERE name = %s",
		g.tables, rec.Token, rec.Nonce, rec.Cluster, literal(string(t.Node)), literal(t.Election))
	if _, err := s.conn.ExecContext(ctx, set); err != nil {
		return g.explain(ctx, "advance "+strconv.Quote(t.Election), err)
	}
	return nil
}

// patiently executes the statement that waits for the old term's transactions, and names them if they do not end.
func (g *Guard) patiently(ctx context.Context, opts AdvanceOptions, s *session, t fence.Term, lock string) error {
	wait, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	start := time.Now()
	done := make(chan error, 1)
	go func() {
		_, err := s.conn.ExecContext(wait, lock)
		done <- err
	}()
	var overdue <-chan time.Time
	if opts.Wait > 0 {
		timer := time.NewTimer(opts.Wait)
		defer timer.Stop()
		overdue = timer.C
	}
	blocked := &BlockedError{Name: t.Election}
	var cause error
	select {
	case err := <-done:
		return g.explain(ctx, "advance "+strconv.Quote(t.Election), err)
	case <-ctx.Done():
		cause = context.Cause(ctx)
	case <-overdue:
		cause = errWait
	}
	blocked.Waited, blocked.cause = time.Since(start), cause
	look, stop := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	blocked.Sessions, blocked.unseen = g.blockers(look, s.id)
	stop()
	if opts.EndBlockers && ctx.Err() == nil {
		killed, err := g.end(ctx, s.id, done)
		if killed {
			return g.explain(ctx, "advance "+strconv.Quote(t.Election), err)
		}
		blocked.unended = err
	}
	// The session would wait on in the server, and keep writers waiting: it does not see that its connection is closed.
	cancel()
	select {
	case <-done:
	case <-time.After(time.Second):
	}
	s.drop(context.Background()) // first, to make room in the pool
	g.kill(s.id, time.Second)
	return blocked
}

// end kills sessions that block, in up to three rounds since others may be in line behind them, and waits for done.
func (g *Guard) end(ctx context.Context, id uint64, done <-chan error) (over bool, err error) {
	for range 3 {
		sessions, err := g.blockers(ctx, id)
		if err != nil {
			return false, err
		}
		for _, b := range sessions {
			if _, err := g.db.ExecContext(ctx, "KILL "+strconv.FormatUint(b.ID, 10)); err != nil && number(err) != errNoSuchThread {
				return false, err
			}
		}
		select {
		case err := <-done:
			return true, err
		case <-ctx.Done():
			return false, context.Cause(ctx)
		case <-time.After(time.Second):
		}
	}
	return false, errors.New("they were killed, and have not ended")
}

const errNoSuchThread = 1094

var errWait = errors.New("AdvanceOptions.Wait is over")

// Session is a session of the server whose transaction keeps an advance waiting.
type Session struct {
	ID      uint64    // as in SHOW PROCESSLIST and KILL
	Account string    // user@host
	Since   time.Time // when the transaction began, by the server's clock
	Doing   string    // its present statement, "" if it is idle inside its transaction
}

// BlockedError is an advance that gave up waiting for transactions of the old term. errors.Is finds the context's
// cause, where that ended the wait.
type BlockedError struct {
	Name     string
	Waited   time.Duration
	Sessions []Session // that blocked at the end; empty where the account may not see them

	cause, unseen, unended error
}

func (e *BlockedError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "mysqlfence: advance %q: still waiting after %v for the old term's transactions", e.Name, e.Waited.Round(time.Millisecond))
	for i, s := range e.Sessions {
		if i == 5 {
			fmt.Fprintf(&b, " and %d more", len(e.Sessions)-i)
			break
		}
		doing := s.Doing
		if doing == "" {
			doing = "idle"
		}
		fmt.Fprintf(&b, "; session %d of %s since %s (%.60s): KILL %d would end it", s.ID, s.Account, s.Since.Format("15:04:05"), doing, s.ID)
	}
	switch {
	case e.unseen != nil:
		fmt.Fprintf(&b, "; which ones, the server tells accounts with the privilege PROCESS: %v", e.unseen)
	case len(e.Sessions) == 0:
		b.WriteString("; none is seen blocking any more: a prepared XA transaction, maybe (XA RECOVER lists them)")
	}
	if e.unended != nil {
		fmt.Fprintf(&b, "; ending them failed: %v", e.unended)
	}
	fmt.Fprintf(&b, ": %v", e.cause)
	return b.String()
}

func (e *BlockedError) Unwrap() []error {
	errs := []error{e.cause}
	for _, err := range []error{e.unseen, e.unended} {
		if err != nil {
			errs = append(errs, err)
		}
	}
	return errs
}

// blockers returns the sessions whose locks the session id waits for, other advances left out.
func (g *Guard) blockers(ctx context.Context, id uint64) ([]Session, error) {
	// MariaDB's, and what MySQL 8 has in its place.
	waits := "information_schema.INNODB_LOCK_WAITS w JOIN information_schema.INNODB_TRX r ON r.trx_id = w.requesting_trx_id" +
		" JOIN information_schema.INNODB_TRX b ON b.trx_id = w.blocking_trx_id"
	list := func(waits string) ([]Session, error) {
		rows, err := g.db.QueryContext(ctx, `SELECT DISTINCT b.trx_mysql_thread_id, COALESCE(CONCAT(p.USER, '@', p.HOST), ''),
			TIMESTAMPDIFF(MICROSECOND, b.trx_started, NOW(6)), COALESCE(p.INFO, '')
			FROM `+waits+` LEFT JOIN information_schema.PROCESSLIST p ON p.ID = b.trx_mysql_thread_id
			WHERE b.trx_mysql_thread_id <> 0 AND COALESCE(b.trx_query, '') NOT LIKE 'INSERT INTO %aegis_fence (name%' AND r.trx_mysql_thread_id = `+strconv.FormatUint(id, 10)+" ORDER BY 3 DESC")
		if err != nil {
			return nil, err
		}
		defer rows.Close()
		var all []Session
		for rows.Next() {
			var s Session
			var age sql.NullInt64
			if err := rows.Scan(&s.ID, &s.Account, &age, &s.Doing); err != nil {
				return nil, err
			}
			s.Since = time.Now().Add(-time.Duration(age.Int64) * time.Microsecond)
			all = append(all, s)
		}
		return all, rows.Err()
	}
	all, err := list(waits)
	if e := (*mysql.MySQLError)(nil); errors.As(err, &e) && (e.Number == 1109 || e.Number == 1146) {
		all, err = list("performance_schema.data_lock_waits w JOIN information_schema.INNODB_TRX r ON r.trx_id = w.REQUESTING_ENGINE_TRANSACTION_ID" +
			" JOIN information_schema.INNODB_TRX b ON b.trx_id = w.BLOCKING_ENGINE_TRANSACTION_ID")
	}
	return all, err
}
