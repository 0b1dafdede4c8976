package grpcfence

import (
	"context"
	"strings"
	"time"

	"aegis/fence"
	"aegis/fence/internal/gate"
)

// Durable is a guard in a store, such as *sqlitefence.Guard, that remembers tokens over restarts.
type Durable interface {
	fence.Guard
	// Newest returns what the guard has taken for the name; the zero Record if nothing.
	Newest(ctx context.Context, name string) (fence.Record, error)
}

// Config tunes a Guard. The zero value is ready.
type Config struct {
	// Durable takes each token before this process does, and is asked about terms that are newer than this process
	// knows. Defaults to none: tokens are forgotten with the process.
	Durable Durable

	// Learn has the first request under a newer token advance the guard, instead of refusing it with "advance first".
	// For services whose clients cannot advance; see httpfence for what it gives away.
	Learn bool

	// Known says which elections the service guards; terms of others are refused with INVALID_ARGUMENT and leave no
	// trace. It is called for each name that is not in memory and must be safe for concurrent use. Defaults to all.
	// With Learn, set it.
	Known func(election string) bool

	// MaxNames bounds the names kept in memory. Defaults to 10,000. When it is reached, a name that nobody uses is
	// dropped if Durable remembers it; otherwise further names are refused with RESOURCE_EXHAUSTED, since forgetting
	// one would let its old tokens in: see [Guard.Forget]. Without Learn, requests create no names, only advances do.
	MaxNames int

	// Drain bounds how long an advance, or the first request of a new term, waits for handlers of older terms whose
	// contexts have ended. Defaults to 5 s. After half of it, a stream whose client takes nothing is cut.
	Drain time.Duration

	// Report admits, counts and tells what would have been refused, requests without a term among them, and ends
	// no handler's context. Defaults to none: refusals are enforced.
	Report *fence.Report

	// Unguarded says which methods ("/game.Boss/Status") need no term. Defaults to those of grpc.health and
	// grpc.reflection. The service of [Guard.Register] never needs one.
	Unguarded func(fullMethod string) bool

	_ struct{}
}

// Guard is a [fence.Guard] on the memory of this process. It is safe for concurrent use.
type Guard struct {
	gate      *gate.Gate
	unguarded func(fullMethod string) bool
}

var _ fence.Guard = (*Guard)(nil)

// New returns a guard. Errors: Config's, naming field and bound.
func New(cfg Config) (*Guard, error) {
	g, err := gate.New("grpcfence", gate.Config{
		Durable: cfg.Durable, Learn: cfg.Learn, Known: cfg.Known, MaxNames: cfg.MaxNames, Drain: cfg.Drain, Report: cfg.Report,
	})
	if err != nil {
		return nil, err
	}
	if cfg.Unguarded == nil {
		cfg.Unguarded = func(method string) bool {
			return strings.HasPrefix(method, "/grpc.health.") || strings.HasPrefix(method, "/grpc.reflection.")
		}
	}
	return &Guard{gate: g, unguarded: cfg.Unguarded}, nil
}

// Advance makes the guard take the terms' tokens, all of them or none: see [fence.Guard]. From then on handlers of
// older terms are refused; those that run have their contexts ended, with the [*fence.FencedError] as cause, and are
// waited for until ctx ends or Config.Drain is over. If they still run then, the error names them; the tokens are
// taken, and the call may be repeated.
//
// Further errors: those of [fence.Record.Advance], Config.Durable's, a name that is not Known, or too many names.
// Clients elsewhere call [Remote.Advance].
func (g *Guard) Advance(ctx context.Context, terms ...fence.Term) error {
	return explain(g.gate.Advance(ctx, terms...))
}

// Do runs fn as if it were a handler of term t: admitted, with the name held shared until it returns, under a context
// that carries the term and ends when a newer one is taken. It is for work of this process that no request started.
// It waits for work of older terms like [Guard.Advance]. Errors: the refusals of [fence.Record.Admit], before fn
// runs; those of Advance; fn's own.
func (g *Guard) Do(ctx context.Context, t fence.Term, fn func(ctx context.Context) error) error {
	hold, err := g.gate.Enter(ctx, t, func() string { return "Do" })
	if err != nil {
		return explain(err)
	}
	defer hold.End()
	return fn(hold.Context())
}

// Newest returns what the guard has taken for the name, asking Config.Durable if there is one; the zero Record if it
// has taken nothing.
func (g *Guard) Newest(ctx context.Context, name string) (fence.Record, error) {
	rec, err := g.gate.Newest(ctx, name)
	return rec, explain(err)
}

// Forget drops from memory the names that nobody uses and whose token is below before, and returns how many these
// were. What was dropped cannot come back: tokens of a cluster grow over all names, so from then on a name without a
// record takes no token below before. It is for guards without Durable whose names come and go, and whose tokens are
// from one cluster.
func (g *Guard) Forget(before fence.Token) int { return g.gate.Forget(before) }

// WithTerm returns ctx with the term under which calls are made: the client's interceptors put it into them.
func WithTerm(ctx context.Context, t fence.Term) context.Context { return gate.WithTerm(ctx, t) }

// TermFromContext returns the term that WithTerm put into ctx or, in a handler behind the server's interceptors, the
// term of the call, for the guard of the handler's own store. It is shared with httpfence. ok is false where there is
// none.
func TermFromContext(ctx context.Context) (t fence.Term, ok bool) { return gate.TermFrom(ctx) }
