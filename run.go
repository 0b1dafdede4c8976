package aegis

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"aegis/fence"
)

var (
	errReturned = errors.New("its work returned")
	errPanicked = errors.New("its work panicked")
)

// Run is the main path: it waits for its turn, calls fn for the term that it won, and does so again term after term.
// It blocks until fn returns while its term is held, ctx ends, or an error that no repetition mends.
//
// The context given to fn says stop: it ends with the term or with ctx. [Leadership.Context] says that you may still
// write: it ends with the term alone, so the last flush of a shutdown runs under it. The order is always: the context
// ends, the function returns, the key is released.
//
//   - The term ended first, or fn returned [ErrFenced]: Run enters again, after a pause with jitter. What else fn
//     returned is logged.
//   - fn returned while its term was held: Run releases and returns fn's result, nil too.
//   - ctx ended: Run waits for fn, releases, and returns ctx's cause. [Node.Leave] does the same with [ErrLeft].
//   - fn panics: Run does not recover, and does not release: the key is left to its lease. Should the process live on,
//     the lease is not renewed again, so every term of this node ends.
//
// A function that ignores its context is never joined by a second one in this process; when it outlives its term by
// the margin, an EventOverrun says so. Errors besides: a [*NotLeaderError] when this node leads or campaigns already.
func (e *Election) Run(ctx context.Context, fn func(context.Context, *Leadership) error) error {
	ctx, done, err := e.begin(ctx)
	if err != nil {
		return err
	}
	defer done()
	n := e.node
	n.mu.Lock()
	n.slots[e.name].running = true
	n.mu.Unlock()

	for pause := rankPause; ; {
		led, err := e.await(ctx)
		if err == nil {
			began := time.Now()
			err = e.work(ctx, led, fn)
			held := led.Held()
			led.end(errReturned)
			dctx, cancel := n.detached(ctx)
			if err := led.release(dctx, led.successor()); err != nil {
				n.cfg.Logger.Warn("aegis: release", "election", e.name, "token", led.term.Token, "err", err)
			}
			cancel()
			if ctx.Err() == nil && held && !errors.Is(err, ErrFenced) {
				return err
			}
			if time.Since(began) > n.cfg.TTL {
				pause = rankPause
			}
		} else if permanent(err) {
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			n.cfg.Logger.Warn("aegis: entering again", "election", e.name, "err", err)
		}
		sleep(ctx, pause/2+rand.N(pause))
		if pause = min(2*pause, maxPause); errors.Is(err, errGuard) {
			pause = n.cfg.TTL / 2 // a store that is down is not helped by elections
		}
	}
}

// work calls fn with a context that ends with the term or with ctx.
func (e *Election) work(ctx context.Context, led *Leadership, fn func(context.Context, *Leadership) error) error {
	n := e.node
	wctx, cancel := context.WithCancelCause(led.ctx)
	defer cancel(nil)
	defer context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })()
	var mu sync.Mutex
	var overrun *time.Timer
	returned := false
	stop := context.AfterFunc(led.ctx, func() {
		mu.Lock()
		defer mu.Unlock()
		if !returned {
			overrun = time.AfterFunc(n.cfg.Margin, func() {
				n.events.emit(Event{Kind: EventOverrun, Term: led.term, Err: context.Cause(led.ctx)})
			})
		}
	})
	panicked := true
	defer func() {
		stop()
		mu.Lock()
		defer mu.Unlock()
		returned = true
		if overrun != nil {
			overrun.Stop()
		}
		if panicked {
			led.lease.end(errPanicked) // never renewed again, so that the key goes though the process may live on
		}
	}()
	err := fn(wctx, led)
	panicked = false
	return err
}

// errGuard marks errors of guards that did not take a term.
var errGuard = errors.New("a guard did not take the term")

// advanceGuards has every guard take the term. A guard that cannot be reached is tried again for up to TTL, while the
// term lasts; one that refuses is not.
func (e *Election) advanceGuards(ctx context.Context, led *Leadership) error {
	n := e.node
	gctx, cancel := context.WithTimeout(ctx, n.cfg.TTL)
	defer cancel()
	defer context.AfterFunc(led.ctx, cancel)()
	panicked := true
	defer func() {
		if panicked {
			led.lease.end(errPanicked)
		}
	}()
	err := e.advanceEach(gctx, led)
	panicked = false
	switch {
	case err == nil:
		return nil
	case led.loss() != nil:
		return led.loss() // no fault of the guard's
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	err = fmt.Errorf("%w: %w", errGuard, e.explain(ctx, led, err))
	n.events.emit(Event{Kind: EventGuardUnreachable, Term: led.term, Err: err})
	return err
}

func (e *Election) advanceEach(ctx context.Context, led *Leadership) error {
	for _, g := range e.guards {
		for pause := rankPause; ; pause = min(2*pause, maxPause) {
			err := g.Advance(ctx, led.term)
			if err == nil {
				break
			}
			if refusal(err) {
				return err
			}
			if sleep(ctx, pause); ctx.Err() != nil {
				return err
			}
		}
	}
	return nil
}

func refusal(err error) bool {
	return errors.Is(err, ErrFenced) || errors.Is(err, ErrTokenWentBack) || errors.Is(err, ErrForeignCluster)
}

// explain tells an old leader's late advance from a restored etcd: if a guard has taken a greater token while etcd says
// that ours is in office, then that token comes from a history that etcd has forgotten.
func (e *Election) explain(ctx context.Context, led *Leadership, err error) error {
	var fenced *FencedError
	if !errors.As(err, &fenced) || fenced.Newest <= led.term.Token {
		return err
	}
	n := e.node
	rctx, cancel := n.detached(ctx)
	defer cancel()
	if now, rerr := n.readState(rctx, e.name); rerr == nil && now.leader.mod == led.mod {
		return &fence.TokenWentBackError{Name: e.name, Token: led.term.Token, Newest: fenced.Newest}
	}
	return err
}
