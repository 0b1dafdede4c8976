// Package gate is what httpfence and grpcfence have in common: the state machine that admits handlers by their term,
// and the form in which a term and a refusal travel.
//
// Per election name the gate keeps one [fence.Record] and who works under it:
//
//	Enter(7) ─▶ record = 7? ─ yes ─▶ the handler of 7 runs, the name is held shared ─▶ End
//	                                        │ context ends, cause *FencedError{7, 8}
//	Advance(8): record 7 → 8 ───────────────┘ waits until no handler of 7 runs ─▶ returns
//	Enter(7) ─▶ 7 < 8: refused, from the moment at which the record changed
//	Enter(8) ─▶ waits like Advance for the handlers of 7, then runs
//
// Three invariants, all kept under one mutex:
//
//   - A handler begins, and a paused one goes on, only while the record admits its term and nothing of an older term
//     runs under that name.
//   - Advance returns nil only when nothing of an older term runs. The record changes before the wait, so no load
//     of old-term handlers can keep an advance waiting for longer than those that run at that moment.
//   - The record of a name only grows while the name is kept, and a name is not dropped while anybody uses it.
package gate

import (
	"context"
	"fmt"
	"sync"
	"time"

	"aegis/fence"
)

// Durable is a guard that forgets nothing, behind the gate.
type Durable interface {
	fence.Guard
	// Newest returns what the guard has taken for the name; the zero Record if nothing.
	Newest(ctx context.Context, name string) (fence.Record, error)
}

// Config is documented in httpfence and grpcfence, whose users fill it in.
type Config struct {
	Durable  Durable
	Learn    bool
	Known    func(election string) bool
	MaxNames int
	Drain    time.Duration
	Report   *fence.Report
}

func (c Config) validate(pkg string) (Config, error) {
	if c.MaxNames < 0 {
		return c, fmt.Errorf("%s: Config.MaxNames is %d, below 0", pkg, c.MaxNames)
	}
	if c.Drain < 0 {
		return c, fmt.Errorf("%s: Config.Drain is %v, below 0", pkg, c.Drain)
	}
	if c.MaxNames == 0 {
		c.MaxNames = 10_000
	}
	if c.Drain == 0 {
		c.Drain = 5 * time.Second
	}
	return c, nil
}

// Gate admits handlers. It is safe for concurrent use.
type Gate struct {
	cfg Config

	mu    sync.Mutex
	names map[string]*entry
	floor fence.Token // names without a record take no token below it
}

// entry is one name. All of it is guarded by Gate.mu.
type entry struct {
	name    string
	rec     fence.Record
	pins    int                // calls that are about to change rec
	holds   map[*Hold]struct{} // handlers that have not ended, of all terms
	reign   uint64             // grows whenever rec's token does
	current int                // what runs of the present reign
	older   int                // what still runs of older ones
	drained chan struct{}      // closed when older falls to 0; nil while nobody waits
}

// New returns a gate. pkg is the package that the user of cfg knows.
func New(pkg string, cfg Config) (*Gate, error) {
	cfg, err := cfg.validate(pkg)
	if err != nil {
		return nil, err
	}
	return &Gate{cfg: cfg, names: map[string]*entry{}}, nil
}

// Drain is Config.Drain with its default.
func (g *Gate) Drain() time.Duration { return g.cfg.Drain }

// Reports says whether the gate only reports.
func (g *Gate) Reports() bool { return g.cfg.Report != nil }

// Verdict is [fence.Report.Verdict] of the gate's report.
func (g *Gate) Verdict(err error) error { return g.cfg.Report.Verdict(err) }

// Advance takes the terms, all or none, ends the contexts of handlers of older terms, and waits for these at most
// until ctx ends or Config.Drain is over. After a [*BlockedError] the tokens are taken nevertheless.
func (g *Gate) Advance(ctx context.Context, terms ...fence.Term) error {
	return g.Verdict(g.advance(ctx, terms))
}

func (g *Gate) advance(ctx context.Context, terms []fence.Term) error {
	if err := context.Cause(ctx); err != nil {
		return err
	}
	for _, t := range terms {
		if err := g.acquainted(t); err != nil {
			return err
		}
	}
	ctx, cancel := g.bounded(ctx)
	defer cancel()

	g.mu.Lock()
	defer g.mu.Unlock()
	entries := make([]*entry, 0, len(terms))
	for _, t := range terms {
		e, err := g.pin(t.Election)
		if err != nil {
			return err
		}
		defer g.unpin(e)
		entries = append(entries, e)
	}
	if g.cfg.Durable != nil {
		if err := g.advanceDurable(ctx, terms, entries); err != nil {
			return err
		}
	} else {
		next, err := g.next(terms)
		if err != nil {
			return err
		}
		for name, rec := range next {
			g.take(g.names[name], rec)
		}
	}
	for _, e := range entries {
		if err := g.drain(ctx, e); err != nil {
			return err
		}
	}
	return nil
}

// advanceDurable has the guard behind take the terms, and memory what that guard knows by then, cluster and nonce
// included. It alone decides: memory may know less. Called with g.mu held, which is free meanwhile.
func (g *Gate) advanceDurable(ctx context.Context, terms []fence.Term, entries []*entry) error {
	err := g.outside(func() error { return g.cfg.Durable.Advance(ctx, terms...) })
	if err != nil {
		return fmt.Errorf("the guard behind this service: %w", err)
	}
	greatest := map[string]fence.Token{}
	for i, e := range entries {
		greatest[e.name] = max(greatest[e.name], terms[i].Token)
		if err := g.refresh(ctx, e); err != nil {
			return err
		}
	}
	for _, e := range entries {
		if token := greatest[e.name]; e.rec.Token > token { // somebody else was faster
			return &fence.FencedError{Name: e.name, Token: token, Newest: e.rec.Token}
		}
	}
	return nil
}

// refresh has memory take what the guard behind knows. Called with g.mu held, which is free meanwhile.
func (g *Gate) refresh(ctx context.Context, e *entry) error {
	var rec fence.Record
	err := g.outside(func() (err error) {
		rec, err = g.cfg.Durable.Newest(ctx, e.name)
		return err
	})
	if err != nil {
		return fmt.Errorf("the guard behind this service: %w", err)
	}
	if rec.Token >= e.rec.Token { // a late answer does not lower what is known by now
		g.take(e, rec)
	}
	return nil
}

// outside runs foreign code, which may block or panic, without the mutex.
func (g *Gate) outside(fn func() error) error {
	g.mu.Unlock()
	defer g.mu.Lock()
	return fn()
}

// next returns the records after all terms were taken, or why one of them is refused. Called with g.mu held.
func (g *Gate) next(terms []fence.Term) (map[string]fence.Record, error) {
	next := make(map[string]fence.Record, len(terms))
	for _, t := range terms {
		old, seen := next[t.Election]
		if !seen {
			old = g.names[t.Election].rec
		}
		rec, err := g.successor(old, t)
		if err != nil {
			return nil, err
		}
		next[t.Election] = rec
	}
	return next, nil
}

func (g *Gate) successor(old fence.Record, t fence.Term) (fence.Record, error) {
	rec, err := old.Advance(t)
	if err == nil && old.Token == 0 && t.Token < g.floor {
		err = &fence.FencedError{Name: t.Election, Token: t.Token, Newest: g.floor}
	}
	return rec, err
}

// take makes rec the record of the name and tells everybody who works under an older one. Called with g.mu held.
func (g *Gate) take(e *entry, rec fence.Record) {
	same := rec.Token == e.rec.Token
	if e.rec = rec; same {
		return
	}
	e.reign++
	if !g.Reports() {
		e.older += e.current
	}
	e.current = 0
	for h := range e.holds {
		refusal := &fence.FencedError{Name: e.name, Token: h.term.Token, Newest: rec.Token}
		if !g.Reports() {
			h.cancel(refusal)
		} else if h.running > 0 {
			go g.Verdict(refusal) // counted; Tell is foreign code, and the mutex is held
		}
	}
}

// drain waits until nothing of an older term runs. Called with g.mu held, which is free while it waits.
func (g *Gate) drain(ctx context.Context, e *entry) error {
	start := time.Now()
	for e.older > 0 {
		if ctx.Err() != nil {
			return e.blocked(time.Since(start), context.Cause(ctx))
		}
		if e.drained == nil {
			e.drained = make(chan struct{})
		}
		drained := e.drained
		g.mu.Unlock()
		select {
		case <-drained:
		case <-ctx.Done():
		}
		g.mu.Lock()
	}
	return nil
}

// bounded is ctx with Config.Drain as the longest wait.
func (g *Gate) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, g.cfg.Drain, fmt.Errorf("Config.Drain, %v, is over: %w", g.cfg.Drain, context.DeadlineExceeded))
}

// pin returns the entry of a name and keeps it from being dropped until unpin. Called with g.mu held.
func (g *Gate) pin(name string) (*entry, error) {
	e := g.names[name]
	if e == nil {
		if len(g.names) >= g.cfg.MaxNames && !g.dropOne() {
			return nil, &FullError{Name: name, Max: g.cfg.MaxNames}
		}
		e = &entry{name: name, holds: map[*Hold]struct{}{}}
		g.names[name] = e
	}
	e.pins++
	return e, nil
}

func (g *Gate) unpin(e *entry) {
	if e.pins--; e.rec.Token == 0 && e.idle() {
		delete(g.names, e.name)
	}
}

func (e *entry) idle() bool { return e.pins == 0 && len(e.holds) == 0 }

// dropOne makes room for a name where a durable guard remembers what is dropped. Called with g.mu held.
func (g *Gate) dropOne() bool {
	if g.cfg.Durable == nil {
		return false
	}
	for name, e := range g.names {
		if e.idle() {
			delete(g.names, name)
			return true
		}
	}
	return false
}

// Newest returns what the guard has taken for the name.
func (g *Gate) Newest(ctx context.Context, name string) (fence.Record, error) {
	if g.cfg.Durable != nil {
		return g.cfg.Durable.Newest(ctx, name)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if e := g.names[name]; e != nil {
		return e.rec, nil
	}
	return fence.Record{}, nil
}

// Names returns how many names the gate keeps in memory.
func (g *Gate) Names() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.names)
}

// Forget drops the names that nobody uses and whose token is below before, and returns how many these were. From then
// on a name without a record takes no token below before: what was dropped cannot come back.
func (g *Gate) Forget(before fence.Token) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.cfg.Durable == nil {
		g.floor = max(g.floor, before)
	}
	n := 0
	for name, e := range g.names {
		if e.rec.Token < before && e.idle() {
			delete(g.names, name)
			n++
		}
	}
	return n
}

// acquainted refuses terms whose name is malformed or not this service's.
func (g *Gate) acquainted(t fence.Term) error {
	if err := validName("election", t.Election, 1); err != nil {
		return err
	}
	if g.cfg.Known != nil && !g.cfg.Known(t.Election) {
		return &TermError{fmt.Sprintf("this service guards no election %q", t.Election)}
	}
	return nil
}
