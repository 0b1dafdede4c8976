package gate

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"aegis/fence"
)

// Handlers of several terms work, pause and end at random while others advance. Whoever works must never see that an
// advance beyond its term has returned, nor that a handler of a newer term has begun.
func TestNothingOlderRunsOnceAnAdvanceHasReturned(t *testing.T) {
	seed := rand.Uint64()
	if s := os.Getenv("AEGIS_GATE_SEED"); s != "" {
		seed, _ = strconv.ParseUint(s, 10, 64)
	}
	t.Logf("seed %d; replay: AEGIS_GATE_SEED=%d go test -run %s ./fence/internal/gate", seed, seed, t.Name())
	g := newGate(t, Config{Drain: 10 * time.Second})
	advance(t, g, boss(1))
	var issued, newest atomic.Int64 // tokens given out; the newest whose advance has returned or whose handler has begun
	issued.Store(1)
	raise := func(token int64) {
		for {
			if n := newest.Load(); n >= token || newest.CompareAndSwap(n, token) {
				return
			}
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var wg sync.WaitGroup
	for i := range 8 {
		rng := rand.New(rand.NewPCG(seed, uint64(i)))
		wg.Go(func() {
			for range 3000 {
				if rng.IntN(20) == 0 {
					token := issued.Add(1)
					if err := g.Advance(ctx, boss(token)); err == nil {
						raise(token)
					} else if !errors.Is(err, fence.ErrFenced) {
						t.Error(err)
					}
					continue
				}
				token := max(1, issued.Load()-rng.Int64N(2))
				h, err := g.Enter(ctx, boss(token), func() string { return "handler" })
				if err != nil {
					if !errors.Is(err, fence.ErrFenced) {
						t.Error(err)
					}
					continue
				}
				raise(token)
				for range rng.IntN(4) {
					if rng.IntN(2) == 0 {
						runtime.Gosched()
					}
					if n := newest.Load(); n > token {
						t.Errorf("work under %d although %d is in office", token, n)
					}
					if rng.IntN(3) == 0 {
						if h.Pause(); rng.IntN(2) == 0 {
							runtime.Gosched()
						}
						if h.Resume() != nil {
							break
						}
					}
				}
				h.End()
			}
		})
	}
	wg.Wait()
	g.mu.Lock()
	defer g.mu.Unlock()
	if e := g.names["boss"]; len(e.holds) != 0 || e.current != 0 || e.older != 0 || e.pins != 0 {
		t.Errorf("left behind: %d holds, %d current, %d older, %d pins", len(e.holds), e.current, e.older, e.pins)
	}
}
