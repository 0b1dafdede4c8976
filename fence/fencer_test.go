package fence_test

import (
	"errors"
	"math"
	"sync"
	"sync/atomic"
	"testing"

	"aegis/fence"
)

func TestCheckPassesEachTokenOnce(t *testing.T) {
	var f fence.Fencer
	if f.LastSeen() != 0 {
		t.Error("the zero value has seen", f.LastSeen())
	}
	for _, step := range []struct {
		token, newest fence.Token
		passes        bool
	}{{5, 5, true}, {5, 5, false}, {4, 5, false}, {6, 6, true}, {5, 6, false}, {fence.MaxToken, fence.MaxToken, true}} {
		refusal(t, f.Check(step.token), step.token, step.newest, step.passes)
		if f.LastSeen() != step.newest {
			t.Fatalf("after Check(%d) LastSeen is %d, want %d", step.token, f.LastSeen(), step.newest)
		}
	}
}

func TestAdmitPassesATermsManyWrites(t *testing.T) {
	var f fence.Fencer
	for _, step := range []struct {
		token, newest fence.Token
		passes        bool
	}{{5, 5, true}, {5, 5, true}, {4, 5, false}, {6, 6, true}, {6, 6, true}, {5, 6, false}} {
		refusal(t, f.Admit(step.token), step.token, step.newest, step.passes)
		if f.LastSeen() != step.newest {
			t.Fatalf("after Admit(%d) LastSeen is %d, want %d", step.token, f.LastSeen(), step.newest)
		}
	}
	refusal(t, f.Check(6), 6, 6, false) // both rules share the newest
}

func TestFencerRefusesInvalidTokens(t *testing.T) {
	for _, token := range []fence.Token{0, -1, math.MinInt64, 1 << 53, math.MaxInt64} {
		var f fence.Fencer
		for range 2 {
			wantKinds(t, f.Check(token), fence.ErrFenced, fence.ErrInvalidToken)
			wantKinds(t, f.Admit(token), fence.ErrFenced, fence.ErrInvalidToken)
			if f.LastSeen() != 0 {
				t.Fatalf("token %d was seen as %d", token, f.LastSeen())
			}
			_ = f.Admit(1) // once more with a token seen
			if f.LastSeen() != 1 {
				t.Fatal(f.LastSeen())
			}
			f = fence.Fencer{}
		}
	}
}

func refusal(t *testing.T, err error, token, newest fence.Token, passes bool) {
	t.Helper()
	if passes {
		wantKinds(t, err)
		return
	}
	wantKinds(t, err, fence.ErrFenced)
	var fenced *fence.FencedError
	if !errors.As(err, &fenced) || fenced.Token != token || fenced.Newest != newest {
		t.Fatalf("got %#v, want token %d and newest %d", err, token, newest)
	}
}

// Each goroutine checks the next token, so the others do too: every token passes once, and the newest never goes back.
func TestFencerUnderConcurrency(t *testing.T) {
	const goroutines, tries = 4, 300_000
	var f fence.Fencer
	var passed atomic.Int64
	var wg sync.WaitGroup
	for range goroutines {
		wg.Go(func() {
			for range tries {
				next := f.LastSeen() + 1
				if f.Check(next) == nil {
					passed.Add(1)
				}
				if seen := f.LastSeen(); seen < next {
					t.Errorf("LastSeen is %d after Check(%d)", seen, next)
					return
				}
			}
		})
	}
	wg.Wait()
	if f.LastSeen() != passed.Load() {
		t.Errorf("%d checks passed for %d tokens", passed.Load(), f.LastSeen())
	}
}

func TestAdmitAllocatesNothing(t *testing.T) {
	var f fence.Fencer
	token := fence.Token(1)
	if n := testing.AllocsPerRun(100, func() {
		token++
		if f.Check(token) != nil || f.Admit(token) != nil || f.Admit(token) != nil {
			t.Fatal("refused")
		}
	}); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
}

// The aim is 15 ns: little enough for every tick and every packet.
func BenchmarkFencerAdmit(b *testing.B) {
	var f fence.Fencer
	b.ReportAllocs()
	for b.Loop() {
		if f.Admit(7) != nil {
			b.Fatal("refused")
		}
	}
}

func BenchmarkFencerAdmitParallel(b *testing.B) {
	var f fence.Fencer
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if f.Admit(7) != nil {
				b.Error("refused")
			}
		}
	})
}

func BenchmarkFencerCheck(b *testing.B) {
	var f fence.Fencer
	token := fence.Token(0)
	b.ReportAllocs()
	for b.Loop() {
		token++
		if f.Check(token) != nil {
			b.Fatal("refused")
		}
	}
}

func BenchmarkFencerRefusal(b *testing.B) {
	var f fence.Fencer
	_ = f.Admit(8)
	b.ReportAllocs()
	for b.Loop() {
		if f.Admit(7) == nil {
			b.Fatal("admitted")
		}
	}
}
