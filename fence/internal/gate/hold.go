package gate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"aegis/fence"
)

// Hold is a handler that was admitted. While it runs, the name is held shared; between Pause and Resume it is not.
// Its methods are safe for concurrent use.
type Hold struct {
	g     *Gate
	e     *entry // nil where a report let a refused term in
	term  fence.Term
	what  func() string
	since time.Time

	ctx    context.Context
	cancel context.CancelCauseFunc

	// Guarded by Gate.mu:
	reign   uint64
	running int
}

// Enter admits a handler of term t, described by what for the errors that name it. It waits for handlers of older
// terms, at most until ctx ends or Config.Drain is over. Errors: those of [fence.Record.Admit], [*TermError],
// [*BlockedError], [*FullError], or the durable guard's.
func (g *Gate) Enter(ctx context.Context, t fence.Term, what func() string) (*Hold, error) {
	g.mu.Lock()
	if e := g.names[t.Election]; e != nil && e.older == 0 && e.rec.Admit(t) == nil { // the common case
		h := g.begin(ctx, e, t, what)
		g.mu.Unlock()
		return h, nil
	}
	g.mu.Unlock()
	h, err := g.enter(ctx, t, what)
	if err = g.Verdict(err); err != nil {
		return nil, err
	}
	if h == nil {
		h = &Hold{g: g, term: t, ctx: WithTerm(ctx, t), cancel: func(error) {}}
	}
	return h, nil
}

func (g *Gate) enter(ctx context.Context, t fence.Term, what func() string) (*Hold, error) {
	if err := g.acquainted(t); err != nil {
		return nil, err
	}
	wait, cancel := g.bounded(ctx)
	defer cancel()

	g.mu.Lock()
	defer g.mu.Unlock()
	if g.names[t.Election] == nil && g.cfg.Durable == nil && !g.cfg.Learn {
		if err := (fence.Record{}).Admit(t); err != nil { // always: a request creates no record
			return nil, err
		}
	}
	e, err := g.pin(t.Election)
	if err != nil {
		return nil, err
	}
	defer g.unpin(e)
	err = e.rec.Admit(t)
	if errors.Is(err, fence.ErrFenced) && fence.ValidToken(t.Token) == nil && t.Token > e.rec.Token {
		err = g.catchUp(wait, e, t, err)
	}
	if err == nil {
		err = g.drain(wait, e)
	}
	if err == nil {
		err = e.rec.Admit(t) // again: while this one waited, a newer term may have come
	}
	if err != nil {
		return nil, err
	}
	return g.begin(ctx, e, t, what), nil
}

// catchUp is for a term newer than memory knows, which memory refuses with err: the durable guard may know it, or the
// gate may be one that learns from requests. Called with g.mu held, which is free while the durable guard is asked.
func (g *Gate) catchUp(ctx context.Context, e *entry, t fence.Term, err error) error {
	if g.cfg.Learn && g.cfg.Durable != nil {
		if err := g.advanceDurable(ctx, []fence.Term{t}, []*entry{e}); err != nil {
			return err
		}
		return e.rec.Admit(t)
	}
	if g.cfg.Durable != nil {
		if err := g.refresh(ctx, e); err != nil {
			return err
		}
		return e.rec.Admit(t)
	}
	if !g.cfg.Learn {
		return err
	}
	rec, err := g.successor(e.rec, t)
	if err == nil {
		g.take(e, rec)
	}
	return err
}

// begin registers a handler. Called with g.mu held, after the record has admitted t.
func (g *Gate) begin(ctx context.Context, e *entry, t fence.Term, what func() string) *Hold {
	h := &Hold{g: g, e: e, term: t, what: what, since: time.Now(), reign: e.reign, running: 1}
	h.ctx, h.cancel = context.WithCancelCause(WithTerm(ctx, t))
	e.holds[h] = struct{}{}
	e.current++
	return h
}

// Context carries the term, and ends when a newer one is taken, with a [*fence.FencedError] as the cause, or with End.
func (h *Hold) Context() context.Context { return h.ctx }

// Fenced returns the refusal by which a newer term ended this handler's context, nil if none did.
func (h *Hold) Fenced() *fence.FencedError {
	var fenced *fence.FencedError
	errors.As(context.Cause(h.ctx), &fenced)
	return fenced
}

// Idle says that the handler holds nothing: it waits for its client, or has returned.
func (h *Hold) Idle() bool {
	h.g.mu.Lock()
	defer h.g.mu.Unlock()
	return h.running == 0
}

// Pause lets the name go while the handler does nothing but wait for its client.
func (h *Hold) Pause() {
	if h.e == nil {
		return
	}
	h.g.mu.Lock()
	defer h.g.mu.Unlock()
	h.leave(1)
}

var errEnded = errors.New("the handler has returned")

// Resume takes the name again, or returns the refusal if a newer term has it, or an error after End.
func (h *Hold) Resume() error {
	if h.e == nil {
		return nil
	}
	h.g.mu.Lock()
	if _, begun := h.e.holds[h]; !begun { // a goroutine that the handler left behind: nobody would end it
		h.g.mu.Unlock()
		return errEnded
	}
	err := h.e.rec.Admit(h.term) // nil: it is of this reign, and nothing older runs, since it was admitted to it
	if err == nil || h.g.Reports() {
		h.running++
		if h.reign == h.e.reign {
			h.e.current++
		}
	}
	h.g.mu.Unlock()
	return h.g.Verdict(err)
}

// End says that the handler has returned. It may be called again.
func (h *Hold) End() {
	if h.e != nil {
		h.g.mu.Lock()
		h.leave(h.running)
		delete(h.e.holds, h)
		h.g.mu.Unlock()
	}
	h.cancel(nil)
}

// leave says that n pieces of h's work run no more. Called with g.mu held.
func (h *Hold) leave(n int) {
	n = min(n, h.running)
	h.running -= n
	switch e := h.e; {
	case h.reign == e.reign:
		e.current -= n
	case !h.g.Reports():
		if e.older -= n; e.older == 0 && e.drained != nil {
			close(e.drained)
			e.drained = nil
		}
	}
}

// BlockedError says which handlers of older terms still run although their contexts have ended.
type BlockedError struct {
	Name   string
	Newest fence.Token   // it is taken: nothing older is admitted any more
	Waited time.Duration // for them, by this call
	Work   []string      // what blocks, the longest first
	Cause  error         // why the call did not wait longer
}

func (e *BlockedError) Error() string {
	const most = 5
	work, more := e.Work, ""
	if len(work) > most {
		work, more = work[:most], fmt.Sprintf(" and %d more", len(work)-most)
	}
	return fmt.Sprintf("%q: token %d is taken and nothing older is admitted, but after %v these handlers of older terms still run, "+
		"although their contexts have ended: %s%s; let them watch their context, or end the process, then advance again: %v",
		e.Name, e.Newest, e.Waited.Round(time.Millisecond), strings.Join(work, ", "), more, e.Cause)
}

func (e *BlockedError) Unwrap() error { return e.Cause }

func (e *entry) blocked(waited time.Duration, cause error) error {
	var old []*Hold
	for h := range e.holds {
		if h.reign != e.reign && h.running > 0 {
			old = append(old, h)
		}
	}
	slices.SortFunc(old, func(a, b *Hold) int { return a.since.Compare(b.since) })
	b := &BlockedError{Name: e.name, Newest: e.rec.Token, Waited: waited, Cause: cause}
	for _, h := range old {
		b.Work = append(b.Work, fmt.Sprintf("%s (token %d, node %s, for %v)",
			h.what(), h.term.Token, h.term.Node, time.Since(h.since).Round(time.Millisecond)))
	}
	return b
}

// FullError says that the gate keeps as many names as it may.
type FullError struct {
	Name string
	Max  int
}

func (e *FullError) Error() string {
	return fmt.Sprintf("%q is not taken: the guard keeps %d names already, as many as Config.MaxNames allows, and forgets none by itself; "+
		"raise it, name the elections by Config.Known, drop old ones with Forget, or put a durable guard behind", e.Name, e.Max)
}
