package pgfence

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"aegis/fence"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Blocker is a transaction that was admitted before an advance and has not ended: of a session, or a prepared one.
type Blocker struct {
	PID         int    // of the session's backend, 0 for a prepared transaction
	GID         string // of a prepared transaction
	Role        string
	Application string
	Client      string    // its address, "" for a unix socket
	State       string    // active, idle in transaction, …, prepared
	Since       time.Time // when its transaction began, by the server's clock; zero where the role may not see it
	Query       string    // its last or present one, where the role may see it
}

func (b Blocker) String() string {
	if b.PID == 0 {
		return fmt.Sprintf("prepared transaction %q (role %s, since %s)", b.GID, b.Role, b.Since.Format(time.RFC3339))
	}
	query := b.Query
	if len(query) > 120 {
		query = query[:120] + "…"
	}
	where := ""
	if b.Application != "" {
		where += ", application " + b.Application
	}
	if b.Client != "" {
		where += ", from " + b.Client
	}
	return fmt.Sprintf("session %d (role %s%s, %s, its transaction since %s, query: %s)", b.PID, b.Role, where, b.State, b.Since.Format(time.RFC3339), query)
}

// BlockedError: an advance waited, and took nothing. It is a context.DeadlineExceeded to [errors.Is].
type BlockedError struct {
	Name     string        // of an election that was to be advanced
	Wait     time.Duration // how long the advance waited for its locks
	Blockers []Blocker     // oldest first; empty where they had just ended or could not be asked for

	unasked error // why nobody could be asked who they are
}

func (e *BlockedError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "pgfence: advance %q waited %v for transactions that were admitted before", e.Name, e.Wait.Round(time.Millisecond))
	if e.unasked != nil {
		fmt.Fprintf(&b, "; who they are could not be asked: %v (SELECT * FROM aegis.blockers(%s) tells)", e.unasked, literal(e.Name))
		return b.String()
	}
	if len(e.Blockers) == 0 {
		b.WriteString("; none of them is left: try again (or see pg_locks for who locks table aegis.fence)")
		return b.String()
	}
	for i, blocker := range e.Blockers {
		sep := ", "
		if i == 0 {
			sep = ": "
		}
		b.WriteString(sep + blocker.String())
	}
	first := e.Blockers[0]
	end := fmt.Sprintf("SELECT pg_terminate_backend(%d)", first.PID)
	if first.PID == 0 {
		end = "ROLLBACK PREPARED " + literal(first.GID)
	}
	fmt.Fprintf(&b, "; end it by %s, or let AdvanceOptions.EndBlockers do so", end)
	return b.String()
}

// Is reports that the wait's bound was reached.
func (e *BlockedError) Is(target error) bool { return target == context.DeadlineExceeded }

// blocked finds out, on the connection of an advance that gave up, who held it off.
func blocked(ctx context.Context, conn *pgxpool.Conn, wait time.Duration, terms []fence.Term) error {
	e := &BlockedError{Name: terms[0].Election, Wait: wait}
	for _, t := range terms {
		rows, err := conn.Query(ctx, "select coalesce(pid, 0), coalesce(gid, ''), coalesce(role, ''), coalesce(application, ''), coalesce(client, ''), "+
			"coalesce(state, ''), coalesce(since, '0001-01-01 00:00:00Z'), coalesce(query, '') from aegis.blockers($1)", t.Election)
		var blockers []Blocker
		if err == nil {
			blockers, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Blocker])
		}
		if err != nil {
			e.unasked = err
			return e
		}
		if len(blockers) > 0 {
			e.Name, e.Blockers = t.Election, blockers
			return e
		}
	}
	return e
}

// end ends those who hold an advance off, if they still do.
func (g *Guard) end(ctx context.Context, e *BlockedError) error {
	for _, b := range e.Blockers {
		var err error
		if b.PID == 0 {
			_, err = g.pool.Exec(ctx, "rollback prepared "+literal(b.GID))
			if isState(err, "42704") {
				err = nil // it has ended
			}
		} else {
			_, err = g.pool.Exec(ctx, "select pg_terminate_backend(pid) from aegis.blockers($1) where pid = $2", e.Name, b.PID)
		}
		if err != nil {
			return errors.Join(e, explain(ctx, "end the blocker", err))
		}
		g.cfg.Logger.Warn("pgfence: ended a transaction that held an advance off", "election", e.Name, "blocker", b.String())
	}
	return nil
}
