package fencetest

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"aegis/fence"
)

var onceCases = []testCase{
	{"OnceRunsOnce", "a repeat, by the same term or a later one, does nothing and returns the first result", once, func(e *env) {
		e.mustAdvance(boss(7))
		e.mustOnce(boss(7), "kill", "sword", true)
		e.mustOnce(boss(7), "kill", "sword", false)
		e.mustAdvance(boss(8))
		e.mustOnce(boss(8), "kill", "sword", false)
		e.mustOnce(boss(8), "another kill", "shield", true)
		e.holds("loot", "shield")
	}},
	{"OnceIsGuarded", "a repeat by an old term is refused too, before it learns the result", once, func(e *env) {
		e.onceFenced(boss(7), "kill", 0)
		e.mustAdvance(boss(7))
		e.mustOnce(boss(7), "kill", "sword", true)
		e.mustAdvance(boss(8))
		e.onceFenced(boss(7), "kill", 8)
		e.onceFenced(boss(7), "another kill", 8)
		e.onceFenced(boss(9), "another kill", 8)
		e.mustOnce(boss(8), "another kill", "shield", true)
		e.holds("loot", "shield")
	}},
	{"OnceThatFailsLeavesNothing", "an error of fn undoes its writes and the record of the key, and is returned", once, func(e *env) {
		e.mustAdvance(boss(7))
		failed := errors.New("no loot today")
		_, first, err := e.Once(e.ctx, boss(7), "kill", func(put func(key, value string) error) ([]byte, error) {
			return []byte("never"), errors.Join(put("loot", "never"), failed)
		})
		e.step("Once whose fn fails returned first=%v: %s", first, result(err))
		if first || !errors.Is(err, failed) {
			e.fail("fn's error must be returned with first = false, got first=%v: %s", first, result(err))
		}
		e.holds("loot", "")
		e.mustOnce(boss(7), "kill", "sword", true)
		e.holds("loot", "sword")
	}},
	{"OnceKeysBelongToTheirElection", "the same key of another election is another key", once, func(e *env) {
		e.mustAdvance(boss(7), named("boss/2", 7))
		e.mustOnce(boss(7), "kill", "sword", true)
		e.mustOnce(named("boss/2", 7), "kill", "shield", true)
		e.mustOnce(boss(7), "kill", "sword", false)
	}},
	{"OnceReturnsTheBytes", "results come back byte by byte, whatever they are", once, func(e *env) {
		e.mustAdvance(boss(7))
		every := make([]byte, 256)
		for i := range every {
			every[i] = byte(i)
		}
		for key, want := range map[string][]byte{"nil": nil, "empty": {}, "every": every, "long": bytes.Repeat(every, 256), "键/'\"%": every} {
			for _, first := range []bool{true, false} {
				got, isFirst, err := e.Once(e.ctx, boss(7), key, func(func(key, value string) error) ([]byte, error) { return want, nil })
				e.step("Once(%s) returned %d bytes, first=%v: %s", key, len(got), isFirst, result(err))
				if err != nil || isFirst != first || !bytes.Equal(got, want) {
					e.fail("Once(%s) must return the %d bytes given, first=%v", key, len(want), first)
				}
			}
		}
	}},
	{"OnceHasOneWinner", "of concurrent calls one runs fn, and all return its result", once, func(e *env) {
		e.mustAdvance(boss(7))
		var runs, firsts atomic.Int32
		results := make([]string, 8)
		var begun sync.WaitGroup
		begun.Add(len(results))
		all := make(chan struct{})
		go func() { begun.Wait(); close(all) }()
		each(len(results), func(i int) {
			begun.Done()
			got, first, err := e.Once(e.ctx, boss(7), "kill", func(put func(key, value string) error) ([]byte, error) {
				runs.Add(1)
				waitFor(all, patience)
				waitFor(nil, patience/10) // and they get somewhere
				return []byte(fmt.Sprint("call ", i)), put("loot", fmt.Sprint("call ", i))
			})
			e.step("call %d returned %q, first=%v: %s", i, got, first, result(err))
			if err != nil {
				e.fail("call %d must succeed, got: %v", i, err)
			}
			if first {
				firsts.Add(1)
			}
			results[i] = string(got)
		})
		if firsts.Load() != 1 {
			e.fail("%d calls were first, must be 1 (fn ran %d times)", firsts.Load(), runs.Load())
		}
		for _, got := range results {
			e.holds("loot", got)
		}
	}},
	{"OnceSurvivesReopening", "a restart forgets neither key nor result", once | reopen, func(e *env) {
		e.mustAdvance(boss(7))
		e.mustOnce(boss(7), "kill", "sword", true)
		e.reopen()
		e.mustOnce(boss(7), "kill", "sword", false)
		e.holds("loot", "sword")
	}},
}

// mustOnce calls Once with an fn that stores item and returns it.
func (e *env) mustOnce(t fence.Term, key, item string, first bool) {
	ran := false
	want := item
	if !first {
		item = "a repeat must not run"
	}
	got, isFirst, err := e.Once(e.ctx, t, key, func(put func(key, value string) error) ([]byte, error) {
		ran = true
		return []byte(item), put("loot", item)
	})
	e.step("Once(%s, %s) returned %q, first=%v: %s", show(t), key, got, isFirst, result(err))
	switch {
	case err != nil:
		e.fatal("this Once must succeed, got: %v", err)
	case ran != first || isFirst != first:
		e.fail("fn ran: %v, first: %v; both must be %v", ran, isFirst, first)
	case string(got) != want:
		e.fail("the result is %q, must be %q", got, want)
	}
}

func (e *env) onceFenced(t fence.Term, key string, newest fence.Token) {
	before := e.read("loot")
	got, first, err := e.Once(e.ctx, t, key, func(put func(key, value string) error) ([]byte, error) {
		return []byte("stale"), put("loot", "stale")
	})
	e.step("Once(%s, %s) returned %q, first=%v: %s", show(t), key, got, first, result(err))
	e.numbers(err, t.Token, newest)
	if len(got) != 0 || first {
		e.fail("a refused Once must return no result, got %q, first=%v", got, first)
	}
	e.holds("loot", before)
}
