package mysqlfence

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"aegis/fence"

	"github.com/go-sql-driver/mysql"
)

// The server's error numbers that mean something here.
const (
	errLockWaitTimeout = 1205
	errDeadlock        = 1213
	errRecordChanged   = 1020 // MariaDB's innodb_snapshot_isolation: an update would be lost
	errOutOfRange      = 1690 // how a guarded statement's comparison fails
	errDuplicate       = 1062
	errXAUnknown       = 1397
	errXAState         = 1399 // the statement would end the transaction, or it was rolled back already
	errXAOutside       = 1400
	errXARolledBack    = 1402
	errXATimeout       = 1613
	errXADeadlock      = 1614
)

func number(err error) uint16 {
	var e *mysql.MySQLError
	if errors.As(err, &e) {
		return e.Number
	}
	return 0
}

// session is one transaction on one connection. It is an XA transaction with a name of its own, committed in one
// phase: inside one the server itself refuses whatever would end it or commit implicitly, refuses every statement
// after it was rolled back (a deadlock's victim), and commits only what has this name. A plain transaction does none
// of these three: after DDL or a deadlock its next statements would run, and commit, alone.
type session struct {
	g    *Guard
	conn *sql.Conn
	xid  string // as a literal
	id   uint64 // of the connection, 0 while not known
}

func (g *Guard) session(ctx context.Context) (*session, error) {
	conn, err := g.db.Conn(ctx)
	if err != nil {
		return nil, g.explain(ctx, "connect", err)
	}
	return &session{g: g, conn: conn, xid: "'" + g.xids + "-" + strconv.FormatUint(g.serial.Add(1), 10) + "'"}, nil
}

// begin starts the transaction and locks and reads the term's record.
func (s *session) begin(ctx context.Context, name string) (fence.Record, error) {
	start := "XA START " + s.xid
	if s.g.multi {
		return s.lock(ctx, start+"; "+s.g.lockQuery(name))
	}
	if _, err := s.conn.ExecContext(ctx, start); err != nil {
		return fence.Record{}, err
	}
	return s.lock(ctx, s.g.lockQuery(name))
}

// lockQuery reads a record under a lock that advances wait for, and that is held to the end of the transaction. A
// locking read sees what is committed last at every isolation level, not the transaction's snapshot.
func (g *Guard) lockQuery(name string) string {
	return "SELECT token, nonce, cluster, CONNECTION_ID() FROM " + g.tables + "aegis_fence WHERE name = " + literal(name) + " LOCK IN SHARE MODE"
}

func (s *session) lock(ctx context.Context, query string) (fence.Record, error) {
	var rec fence.Record
	err := s.conn.QueryRowContext(ctx, query).Scan(&rec.Token, &rec.Nonce, &rec.Cluster, &s.id)
	if errors.Is(err, sql.ErrNoRows) {
		return fence.Record{}, nil
	}
	return rec, err
}

// errAgain: the transaction was undone by the server for the sake of others, and may be repeated as a whole.
var errAgain = errors.New("the transaction was rolled back by a deadlock")

// commit ends the transaction. It returns nil if it is committed, fence.ErrUnknown if that is not known, and other
// errors if nothing of it was written.
func (s *session) commit(ctx context.Context) error {
	end, commit := "XA END "+s.xid, "XA COMMIT "+s.xid+" ONE PHASE"
	var err error
	if s.g.multi {
		_, err = s.conn.ExecContext(ctx, end+"; "+commit)
	} else if _, err = s.conn.ExecContext(ctx, end); err != nil {
		return s.undone(ctx, err) // COMMIT was not sent
	} else {
		_, err = s.conn.ExecContext(ctx, commit)
	}
	return s.outcome(ctx, err)
}

// outcome says what has become of a transaction whose commit was sent, maybe, and returned err.
func (s *session) outcome(ctx context.Context, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, driver.ErrBadConn), errors.Is(err, sql.ErrConnDone):
		return s.undone(ctx, fmt.Errorf("%w: the connection was lost: %w", ErrEnded, err)) // by the driver's word, nothing was sent
	case number(err) == 0:
		return s.unknown(ctx, err)
	}
	// The server has answered, so it can be asked: what can be rolled back is not committed.
	err = s.refused(err)
	if s.rollback() {
		return err
	}
	return s.unknown(ctx, err)
}

// refused translates what the server said to a statement of the transaction.
func (s *session) refused(err error) error {
	rolledBack := "ROLLBACK ONLY" // MariaDB's and MySQL's name of the state, in every language
	switch n := number(err); {
	case n == errDeadlock, n == errXADeadlock, n == errRecordChanged, n == errXAState && strings.Contains(err.Error(), rolledBack):
		return fmt.Errorf("mysqlfence: %w: %w", errAgain, err)
	case n == errXARolledBack, n == errXATimeout:
		return fmt.Errorf("mysqlfence: %w: %w", ErrEnded, err)
	case n == errXAState:
		return fmt.Errorf("mysqlfence: a guarded transaction takes no statement that would end it or commit it implicitly "+
			"(COMMIT, ROLLBACK, START TRANSACTION, DDL, LOCK TABLES): %w", err)
	}
	return err
}

// undone rolls the transaction back, or leaves that to the server by dropping the connection, and returns err.
func (s *session) undone(ctx context.Context, err error) error {
	if !s.rollback() {
		s.drop(ctx)
	}
	return err
}

func (s *session) unknown(ctx context.Context, err error) error {
	s.drop(ctx)
	if ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", context.Cause(ctx), err)
	}
	return fmt.Errorf("mysqlfence: commit: %w: %w", fence.ErrUnknown, err)
}

// rollback reports whether the server has said that the transaction is undone. It lasts 2 s at most.
func (s *session) rollback() bool {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	end, rollback := "XA END "+s.xid, "XA ROLLBACK "+s.xid
	if s.g.multi {
		if _, err := s.conn.ExecContext(ctx, end+"; "+rollback); err == nil {
			return true
		} else if number(err) == 0 {
			return false
		}
	} else {
		_, _ = s.conn.ExecContext(ctx, end) // has ended already, maybe
	}
	_, err := s.conn.ExecContext(ctx, rollback)
	switch number(err) {
	case errXARolledBack, errXATimeout, errXADeadlock:
		return true
	}
	return err == nil
}

// drop closes the connection, whereupon the server rolls back. A session that works or waits at that moment finds out
// only when it is done, so where this process has cut it off, it is killed: its lock would keep advances waiting.
func (s *session) drop(ctx context.Context) {
	_ = s.conn.Raw(func(any) error { return driver.ErrBadConn })
	if ctx.Err() != nil && s.id != 0 {
		go s.g.kill(s.id, 5*time.Second)
	}
}

// kill ends a session of this guard whose connection is closed. It lasts as long as bound at most.
func (g *Guard) kill(id uint64, bound time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	_, _ = g.db.ExecContext(ctx, "KILL "+strconv.FormatUint(id, 10)) // gone by itself: just as well
}

func (s *session) close() { _ = s.conn.Close() }

// unsent reports whether err means that the connection was dead from the start: a pool does not know.
func unsent(err error) bool { return errors.Is(err, driver.ErrBadConn) }
