package gate

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"aegis/fence"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func boss(token fence.Token) fence.Term { return of("boss", token) }

func of(name string, token fence.Token) fence.Term {
	return fence.Term{Election: name, Node: "scene-01", Token: token, Nonce: uint64(token) * 11, Cluster: 1}
}

func newGate(t *testing.T, cfg Config) *Gate {
	t.Helper()
	g, err := New("gate", cfg)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func enter(t *testing.T, g *Gate, term fence.Term) *Hold {
	t.Helper()
	h, err := g.Enter(t.Context(), term, func() string { return fmt.Sprintf("POST /loot of %d", term.Token) })
	if err != nil {
		t.Fatalf("Enter(%v): %v", term, err)
	}
	return h
}

func advance(t *testing.T, g *Gate, terms ...fence.Term) {
	t.Helper()
	if err := g.Advance(t.Context(), terms...); err != nil {
		t.Fatalf("Advance(%v): %v", terms, err)
	}
}

func refused(t *testing.T, err error, token, newest fence.Token) {
	t.Helper()
	var fenced *fence.FencedError
	if !errors.As(err, &fenced) || fenced.Token != token || fenced.Newest != newest || fenced.Name == "" {
		t.Fatalf("got %v, want token %d refused by %d", err, token, newest)
	}
}

func attempt(t *testing.T, g *Gate, term fence.Term) error {
	t.Helper()
	h, err := g.Enter(t.Context(), term, func() string { return "attempt" })
	if err == nil {
		h.End()
	}
	return err
}

// begin runs fn until it returns or all wait, and returns where its result will be.
func begin(fn func() error) <-chan error {
	done := make(chan error, 1)
	go func() { done <- fn() }()
	synctest.Wait()
	return done
}

func waits(t *testing.T, what string, done <-chan error) {
	t.Helper()
	select {
	case err := <-done:
		t.Fatalf("%s must wait, it returned: %v", what, err)
	default:
	}
}

func TestGate(t *testing.T) {
	for name, claim := range map[string]func(t *testing.T){
		"HandlersOfOneTermRunSideBySide": func(t *testing.T) {
			g := newGate(t, Config{})
			advance(t, g, boss(7))
			a, b := enter(t, g, boss(7)), enter(t, g, boss(7))
			advance(t, g, boss(7)) // again, which disturbs nobody
			if a.Context().Err() != nil || b.Context().Err() != nil {
				t.Error("the same term once more ended a handler's context")
			}
			a.End()
			b.End()
		},
		"AdvanceEndsOlderContextsAndWaits": func(t *testing.T) {
			g := newGate(t, Config{})
			advance(t, g, boss(7), of("guild", 7))
			old, another := enter(t, g, boss(7)), enter(t, g, of("guild", 7))
			done := begin(func() error { return g.Advance(t.Context(), boss(8)) })
			waits(t, "Advance", done)
			refused(t, context.Cause(old.Context()), 7, 8)
			refused(t, attempt(t, g, boss(7)), 7, 8) // at once, without waiting
			if another.Context().Err() != nil {
				t.Error("the advance of one name ended a handler of another")
			}
			old.End()
			old.End()
			if err := <-done; err != nil {
				t.Error(err)
			}
			another.End()
		},
		"HandlerThatIgnoresItsContextIsNamed": func(t *testing.T) {
			g := newGate(t, Config{Drain: 3 * time.Second})
			advance(t, g, boss(7))
			stubborn := enter(t, g, boss(7))
			for _, call := range []func() error{
				func() error { return g.Advance(t.Context(), boss(8)) },
				func() error { return attempt(t, g, boss(8)) }, // nor may a newer handler run beside it
			} {
				start := time.Now()
				err := call()
				var blocked *BlockedError
				if !errors.As(err, &blocked) || blocked.Newest != 8 || !strings.Contains(err.Error(), "POST /loot of 7 (token 7, node scene-01, for ") {
					t.Errorf("got %v", err)
				}
				if !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != 3*time.Second {
					t.Errorf("after %v: %v", time.Since(start), err)
				}
			}
			refused(t, attempt(t, g, boss(7)), 7, 8) // taken nevertheless
			stubborn.End()
			advance(t, g, boss(8))
			enter(t, g, boss(8)).End()
		},
		"TheCallersContextBoundsTheWaitToo": func(t *testing.T) {
			g := newGate(t, Config{})
			advance(t, g, boss(7))
			stubborn := enter(t, g, boss(7))
			defer stubborn.End()
			impatient := errors.New("no time")
			ctx, cancel := context.WithCancelCause(t.Context())
			done := begin(func() error { return g.Advance(ctx, boss(8)) })
			cancel(impatient)
			if err := <-done; !errors.Is(err, impatient) || !strings.Contains(err.Error(), "POST /loot of 7") {
				t.Errorf("got %v", err)
			}
			if err := g.Advance(ctx, boss(9)); !errors.Is(err, impatient) {
				t.Errorf("got %v", err)
			}
			refused(t, attempt(t, g, boss(9)), 9, 8) // a context that is over takes nothing
		},
		"NewTermsHandlerWaitsForOldOnes": func(t *testing.T) {
			g := newGate(t, Config{Learn: true})
			advance(t, g, boss(7))
			old := enter(t, g, boss(7))
			done := begin(func() error { return attempt(t, g, boss(8)) })
			waits(t, "a handler of 8", done)
			second := begin(func() error { return attempt(t, g, boss(8)) }) // finds the record at 8 already
			waits(t, "a second handler of 8", second)
			old.End()
			if err := errors.Join(<-done, <-second); err != nil {
				t.Error(err)
			}
		},
		"HandlerThatWaitedIsComparedAgain": func(t *testing.T) {
			g := newGate(t, Config{Learn: true})
			advance(t, g, boss(7))
			old := enter(t, g, boss(7))
			eight := begin(func() error { return attempt(t, g, boss(8)) })
			nine := begin(func() error { return g.Advance(t.Context(), boss(9)) })
			waits(t, "a handler of 8", eight)
			old.End()
			if err := <-nine; err != nil {
				t.Error(err)
			}
			refused(t, <-eight, 8, 9)
		},
		"PausedHandlerKeepsNobodyWaiting": func(t *testing.T) {
			g := newGate(t, Config{})
			advance(t, g, boss(7))
			old := enter(t, g, boss(7))
			old.Pause()
			advance(t, g, boss(8))
			refused(t, context.Cause(old.Context()), 7, 8)
			refused(t, old.Resume(), 7, 8)
			advance(t, g, boss(9)) // a refused Resume holds nothing
			old.Pause()
			old.End()
			advance(t, g, boss(10))
			fresh := enter(t, g, boss(10))
			fresh.Pause()
			if err := fresh.Resume(); err != nil {
				t.Error(err)
			}
			done := begin(func() error { return g.Advance(t.Context(), boss(11)) })
			waits(t, "Advance after Resume", done)
			fresh.Pause()
			if err := <-done; err != nil {
				t.Error(err)
			}
			fresh.End()
		},
		"RequestsLearnOnlyWhereToldSo": func(t *testing.T) {
			for _, learn := range []bool{false, true} {
				g := newGate(t, Config{Learn: learn})
				if learn {
					enter(t, g, boss(7)).End()
					enter(t, g, boss(8)).End()
					refused(t, attempt(t, g, boss(7)), 7, 8)
					continue
				}
				refused(t, attempt(t, g, boss(7)), 7, 0)
				advance(t, g, boss(7))
				refused(t, attempt(t, g, boss(8)), 8, 7)
				enter(t, g, boss(7)).End()
			}
		},
		"ContextCarriesTheTerm": func(t *testing.T) {
			g := newGate(t, Config{})
			advance(t, g, boss(7))
			h := enter(t, g, boss(7))
			defer h.End()
			if term, ok := TermFrom(h.Context()); !ok || term != boss(7) {
				t.Errorf("got %v, %v", term, ok)
			}
			if _, ok := TermFrom(t.Context()); ok {
				t.Error("a bare context has a term")
			}
		},
		"EndIsNoTakeover": func(t *testing.T) {
			g := newGate(t, Config{})
			advance(t, g, boss(7))
			h := enter(t, g, boss(7))
			h.End()
			if h.Context().Err() == nil || h.Fenced() != nil {
				t.Errorf("after End: %v, %v", h.Context().Err(), h.Fenced())
			}
			if h.Resume() == nil {
				t.Error("a goroutine that the handler left behind holds the name")
			}
			advance(t, g, boss(8))
		},
		"ConfigIsChecked": func(t *testing.T) {
			for want, cfg := range map[string]Config{"MaxNames is -1": {MaxNames: -1}, "Drain is -1s": {Drain: -time.Second}} {
				if _, err := New("gate", cfg); err == nil || !strings.Contains(err.Error(), "gate: Config."+want) {
					t.Errorf("got %v, want %s", err, want)
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) { synctest.Test(t, claim) })
	}
}

func TestNamesAreBounded(t *testing.T) {
	t.Run("RequestsLeaveNoTrace", func(t *testing.T) {
		for _, cfg := range []Config{{}, {Durable: newMemory()}, {Learn: true, Known: func(name string) bool { return name == "boss" }}} {
			g := newGate(t, cfg)
			for i := range 100 {
				if attempt(t, g, of(fmt.Sprint("made up ", i), 7)) == nil {
					t.Fatal("admitted")
				}
			}
			if n := g.Names(); n != 0 {
				t.Errorf("%d names are kept", n)
			}
		}
	})
	t.Run("UnknownElectionsAreTold", func(t *testing.T) {
		g := newGate(t, Config{Known: func(name string) bool { return name == "boss" }})
		var term *TermError
		if err := g.Advance(t.Context(), of("guild", 7)); !errors.As(err, &term) || !strings.Contains(err.Error(), `no election "guild"`) {
			t.Errorf("got %v", err)
		}
		advance(t, g, boss(7))
	})
	t.Run("MemoryAloneForgetsNone", func(t *testing.T) {
		g := newGate(t, Config{MaxNames: 2})
		advance(t, g, of("a", 7), of("b", 7))
		var full *FullError
		if err := g.Advance(t.Context(), of("c", 7)); !errors.As(err, &full) {
			t.Errorf("got %v", err)
		}
		refused(t, g.Advance(t.Context(), of("a", 6)), 6, 7)
		advance(t, g, of("b", 8))
	})
	t.Run("DurableGuardRemembersWhatIsDropped", func(t *testing.T) {
		g := newGate(t, Config{MaxNames: 2, Durable: newMemory()})
		advance(t, g, of("a", 7))
		used := enter(t, g, of("a", 7))
		defer used.End()
		for i := range 10 {
			advance(t, g, of(fmt.Sprint("b", i), 8))
		}
		if g.Names() > 2 {
			t.Errorf("%d names are kept", g.Names())
		}
		if used.Context().Err() != nil {
			t.Error("a name in use was dropped")
		}
		refused(t, attempt(t, g, of("b0", 7)), 7, 8)
		enter(t, g, of("b0", 8)).End()
		done := make(chan error, 1)
		go func() { done <- g.Advance(t.Context(), of("a", 9)) }()
		<-used.Context().Done()
		used.End()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Run("WhatIsForgottenDoesNotComeBack", func(t *testing.T) {
		g := newGate(t, Config{})
		advance(t, g, of("a", 7), of("b", 9), of("c", 20))
		used := enter(t, g, of("b", 9))
		if n := g.Forget(10); n != 1 || g.Names() != 2 {
			t.Errorf("%d forgotten, %d left", n, g.Names())
		}
		used.End()
		refused(t, attempt(t, g, of("a", 7)), 7, 0)
		refused(t, g.Advance(t.Context(), of("a", 7)), 7, 10)
		refused(t, g.Advance(t.Context(), of("never seen", 9)), 9, 10)
		enter(t, g, of("b", 9)).End() // was in use
		if g.Forget(5); g.floor != 10 {
			t.Errorf("the floor sank to %d", g.floor)
		}
		advance(t, g, of("a", 10))
	})
}

// memory is a durable guard of a test: slow, failing or late on demand.
type memory struct {
	mu      sync.Mutex
	records map[string]fence.Record
	fails   error
	refuses error  // what Advance alone returns
	newest  func() // before an answer of Newest, whose value was read already
	taken   func() // before Advance returns
}

func newMemory() *memory { return &memory{records: map[string]fence.Record{}} }

func (m *memory) Advance(ctx context.Context, terms ...fence.Term) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := errors.Join(m.fails, m.refuses); err != nil {
		return err
	}
	for _, t := range terms {
		rec, err := m.records[t.Election].Advance(t)
		if err != nil {
			return err
		}
		m.records[t.Election] = rec
	}
	if m.taken != nil {
		m.taken()
	}
	return nil
}

func (m *memory) Newest(ctx context.Context, name string) (fence.Record, error) {
	m.mu.Lock()
	rec, err, late := m.records[name], m.fails, m.newest
	m.newest = nil
	m.mu.Unlock()
	if late != nil {
		late()
	}
	return rec, err
}

func TestReportLetsIn(t *testing.T) {
	var mu sync.Mutex
	var told []error
	report := &fence.Report{Tell: func(err error) { mu.Lock(); told = append(told, err); mu.Unlock() }}
	g := newGate(t, Config{Report: report})
	advance(t, g, boss(7))
	running, paused := enter(t, g, boss(7)), enter(t, g, boss(7))
	paused.Pause()
	advance(t, g, boss(8)) // waits for nobody
	if running.Context().Err() != nil {
		t.Error("a report ended a context")
	}
	if err := paused.Resume(); err != nil {
		t.Error(err)
	}
	stale := enter(t, g, boss(7))
	if term, ok := TermFrom(stale.Context()); !ok || term != boss(7) {
		t.Errorf("got %v, %v", term, ok)
	}
	stale.Pause()
	if err := stale.Resume(); err != nil {
		t.Error(err)
	}
	advance(t, g, boss(6)) // refused, and let through without being taken
	if rec, _ := g.Newest(t.Context(), "boss"); rec.Token != 8 {
		t.Errorf("the record is %v", rec)
	}
	for _, h := range []*Hold{running, paused, stale} {
		h.End()
	}
	advance(t, g, boss(9))
	if err := attempt(t, g, of("boss", 0)); !errors.Is(err, fence.ErrInvalidToken) {
		t.Errorf("got %v", err)
	}
	eventually(t, "4 refusals told", func() bool { // that of the running handler comes on a goroutine of its own
		mu.Lock()
		defer mu.Unlock()
		return len(told) == 4
	})
	if report.Count() != 4 { // the handler that ran on, the resumed one, the stale one, the advance to 6
		t.Errorf("%d counted: %v", report.Count(), told)
	}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(10 * time.Second); !ok(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatal("waited in vain for ", what)
		}
	}
}
