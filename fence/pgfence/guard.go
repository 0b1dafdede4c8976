package pgfence

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"aegis/fence"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Config tunes a Guard. The zero value is ready.
type Config struct {
	// Isolation of the transactions of Do, Once and Exec. Defaults to the session's default_transaction_isolation. The
	// guard is right at every level.
	Isolation pgx.TxIsoLevel

	// Advance is how [Guard.Advance] waits for older transactions.
	Advance AdvanceOptions

	// Report, unless nil, has the guard admit and tell instead of refuse. A protected table refuses all the same.
	Report *fence.Report

	// Logger gets a warning for each session that AdvanceOptions.EndBlockers ended. Defaults to slog.Default.
	Logger *slog.Logger

	_ struct{}
}

// AdvanceOptions bound an advance's wait for the transactions that were admitted before it.
type AdvanceOptions struct {
	// Wait is how long to wait before [BlockedError] names who holds the advance off. Defaults to 10 s, at least 1 ms;
	// the context's end comes first where it is nearer.
	Wait time.Duration

	// EndBlockers ends, after Wait, the sessions (pg_terminate_backend) and prepared transactions (ROLLBACK PREPARED)
	// that hold the advance off, where the role may: those of its own role, all with pg_signal_backend. What they have
	// not committed, they cannot commit any more. Then it waits once more. Defaults to false.
	EndBlockers bool

	_ struct{}
}

func (o AdvanceOptions) validate() (AdvanceOptions, error) {
	if o.Wait == 0 {
		o.Wait = 10 * time.Second
	}
	if o.Wait < time.Millisecond {
		return o, fmt.Errorf("pgfence: AdvanceOptions.Wait is %v, below 1ms", o.Wait)
	}
	return o, nil
}

// Guard is a [fence.Guard] on one PostgreSQL database. It is safe for concurrent use and keeps nothing in memory.
type Guard struct {
	pool *pgxpool.Pool
	cfg  Config
}

var _ fence.Guard = (*Guard)(nil)

// New returns a guard that uses pool, which stays the caller's. It does no I/O: the first use tells what is wrong with
// the server, or that the schema is not installed.
func New(pool *pgxpool.Pool, cfg Config) (*Guard, error) {
	if pool == nil {
		return nil, fmt.Errorf("pgfence: New: the pool is nil")
	}
	switch cfg.Isolation {
	case "", pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable:
	default:
		return nil, fmt.Errorf("pgfence: Config.Isolation is %q, must be %q, %q or %q", cfg.Isolation, pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable)
	}
	var err error
	if cfg.Advance, err = cfg.Advance.validate(); err != nil {
		return nil, err
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	return &Guard{pool: pool, cfg: cfg}, nil
}

// Advance makes the guard take the terms' tokens, all of them or none, in a transaction of its own: see [fence.Guard].
// It waits for the transactions that were admitted before it, as long as Config.Advance says.
//
// Errors: those of [fence.Record.Advance], [*BlockedError], [fence.ErrUnknown], ctx's, or the server's.
func (g *Guard) Advance(ctx context.Context, terms ...fence.Term) error {
	return g.AdvanceWith(ctx, g.cfg.Advance, terms...)
}

// AdvanceWith is Advance with options of its own.
func (g *Guard) AdvanceWith(ctx context.Context, opts AdvanceOptions, terms ...fence.Term) error {
	opts, err := opts.validate()
	if err != nil {
		return err
	}
	if len(terms) == 0 {
		return nil
	}
	for _, t := range terms {
		if err := valid(t); err != nil {
			return err
		}
	}
	terms = slices.Clone(terms) // in one order everywhere: two advances of the same names do not deadlock
	slices.SortStableFunc(terms, func(a, b fence.Term) int { return strings.Compare(a.Election, b.Election) })
	ended := false
	for attempt := 0; ; attempt++ {
		err := g.advance(ctx, opts.Wait, terms)
		blocked, isBlocked := errors.AsType[*BlockedError](err)
		switch {
		case isBlocked && (!opts.EndBlockers || ended):
			return blocked
		case isBlocked:
			ended = true
			if err := g.end(ctx, blocked); err != nil {
				return err
			}
		case retriable(err) && ctx.Err() == nil && pause(ctx, attempt):
		default:
			return g.cfg.Report.Verdict(explain(ctx, "advance", err))
		}
	}
}

func (g *Guard) advance(ctx context.Context, wait time.Duration, terms []fence.Term) error {
	if deadline, ok := ctx.Deadline(); ok { // leave a part of the time to find out who blocks
		wait = max(time.Millisecond, min(wait, time.Until(deadline)*3/4))
	}
	var script strings.Builder
	fmt.Fprintf(&script, "begin isolation level read committed; set local lock_timeout = %d", max(1, wait.Milliseconds()))
	for _, t := range terms {
		fmt.Fprintf(&script, "; select aegis.advance(%s, %d, %d, %d, %s)", literal(t.Election), t.Token, int64(t.Nonce), int64(t.Cluster), literal(string(t.Node)))
	}
	conn, err := g.acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	if err := simple(ctx, conn, script.String()); err != nil {
		rollback(ctx, conn)
		if isState(err, lockNotAvailable) {
			return blocked(ctx, conn, wait, terms)
		}
		return err
	}
	return commit(ctx, conn, &pgx.Batch{})
}

// Newest returns what the guard has taken for the name; the zero Record if it has taken nothing.
func (g *Guard) Newest(ctx context.Context, name string) (fence.Record, error) {
	var token, nonce, cluster int64
	rows, err := g.pool.Query(ctx, "select token, nonce, cluster from aegis.newest($1)", name)
	if err == nil {
		_, err = pgx.ForEachRow(rows, []any{&token, &nonce, &cluster}, func() error { return nil })
	}
	if err != nil {
		return fence.Record{}, explain(ctx, "newest", err)
	}
	return fence.Record{Token: token, Nonce: uint64(nonce), Cluster: uint64(cluster)}, nil
}

// Name is what the guard has taken for one name, when, and from which node.
type Name struct {
	Name string
	fence.Record
	Node fence.NodeID
	At   time.Time // by the server's clock
}

// Names returns all names for which the guard has taken a token, sorted by their bytes.
func (g *Guard) Names(ctx context.Context) ([]Name, error) {
	rows, err := g.pool.Query(ctx, "select name, token, nonce, cluster, node, at from aegis.names()")
	if err != nil {
		return nil, explain(ctx, "names", err)
	}
	names, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (n Name, err error) {
		var nonce, cluster int64
		err = row.Scan(&n.Name, &n.Token, &nonce, &cluster, &n.Node, &n.At)
		n.Nonce, n.Cluster = uint64(nonce), uint64(cluster)
		return n, err
	})
	return names, explain(ctx, "names", err)
}

// Forget removes the records of [Guard.Once] that are older than before and returns how many there were: a repeat of
// such a key would run again, so before lies further back than anybody would repeat anything. For the schema's owner.
func (g *Guard) Forget(ctx context.Context, before time.Time) (int64, error) {
	var n int64
	err := g.pool.QueryRow(ctx, "select aegis.forget($1)", before).Scan(&n)
	return n, explain(ctx, "forget", err)
}

// ForgetName removes the record of a name that no term uses any more, and reports whether there was one. No old token
// gets in by that: a name without a record takes only tokens above all that were ever forgotten of their cluster. So a
// term that was elected before, and has not advanced the guard yet, is refused and must be elected anew. For the
// schema's owner. Names whose tokens are of no known cluster (0) are refused: nothing else would remember them.
func (g *Guard) ForgetName(ctx context.Context, name string) (bool, error) {
	var found bool
	err := g.pool.QueryRow(ctx, "select aegis.forget_name($1)", name).Scan(&found)
	return found, explain(ctx, "forget name", err)
}

// Reset is the way down that operators have: the name is as if it had never been advanced, and whatever token comes
// first is taken, a stale one too. Stop all writers of the name before. For the schema's owner.
func (g *Guard) Reset(ctx context.Context, name string) (found bool, err error) {
	err = g.pool.QueryRow(ctx, "select aegis.reset($1)", name).Scan(&found)
	return found, explain(ctx, "reset", err)
}
