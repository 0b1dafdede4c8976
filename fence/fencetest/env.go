package fencetest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"aegis/fence"
)

// env is one run of one case: the guard, the journal of steps, and the one invariant that is checked at every write,
// whatever the case is about: no write commits under a token below one that the guard had already taken.
type env struct {
	Subject
	ctx context.Context
	c   testCase

	mu       sync.Mutex
	steps    []string
	failures []*Failure
	taken    map[string]fence.Token // by name: the newest token whose Advance has returned
}

type stop struct{} // is panicked with to leave a case that cannot go on

func (e *env) step(format string, args ...any) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.steps = append(e.steps, fmt.Sprintf(format, args...))
}

// fail records a broken rule; the case goes on. It may be called from any goroutine.
func (e *env) fail(format string, args ...any) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.failures = append(e.failures, &Failure{
		Case: e.c.name, Rule: e.c.rule, Got: fmt.Sprintf(format, args...), Steps: append([]string(nil), e.steps...),
	})
}

// fatal is fail for the goroutine of the case, which ends here.
func (e *env) fatal(format string, args ...any) {
	e.fail(format, args...)
	panic(stop{})
}

// advance is Advance with a step in the journal.
func (e *env) advance(terms ...fence.Term) error { return e.advanceBy(e.ctx, e.Guard, "", terms...) }

func (e *env) advanceBy(ctx context.Context, g fence.Guard, who string, terms ...fence.Term) error {
	var what []string
	for _, t := range terms {
		what = append(what, show(t))
	}
	list := strings.Join(what, ", ")
	e.step("%sAdvance(%s) begins", who, list)
	err := g.Advance(ctx, terms...)
	e.mu.Lock()
	if err == nil {
		for _, t := range terms {
			e.taken[t.Election] = max(e.taken[t.Election], t.Token)
		}
	}
	e.mu.Unlock()
	e.step("%sAdvance(%s) returned: %s", who, list, result(err))
	return err
}

// write is Write with steps in the journal and the check of the invariant.
func (e *env) write(t fence.Term, key, value string, between func()) error {
	return e.writeBy(e.ctx, e.Subject, "", t, key, value, between)
}

func (e *env) writeBy(ctx context.Context, s Subject, who string, t fence.Term, key, value string, between func()) error {
	var taken fence.Token
	calls := 0
	err := s.Write(ctx, t, key, value, func() {
		calls++
		e.step("%sWrite(%s, %s=%q) is between check and commit", who, show(t), key, value)
		if between != nil {
			between()
		}
		e.mu.Lock()
		taken = e.taken[t.Election]
		e.mu.Unlock()
	})
	e.step("%sWrite(%s, %s=%q) returned: %s", who, show(t), key, value, result(err))
	if err == nil && calls != 1 {
		e.fail("the subject's Write called between %d times in a write that succeeded, must be 1", calls)
	}
	if err == nil && taken > t.Token {
		e.fail("SPLIT BRAIN: a write under token %d of %q committed although Advance to %d had returned before", t.Token, t.Election, taken)
	}
	return err
}

// read returns the committed value at key.
func (e *env) read(key string) string {
	value, err := e.Read(e.ctx, key)
	if err != nil {
		e.fatal("Read(%s): %v", key, err)
	}
	return value
}

// mustAdvance, mustWrite and holds are steps that have to succeed.
func (e *env) mustAdvance(terms ...fence.Term) {
	if err := e.advance(terms...); err != nil {
		e.fatal("this Advance must succeed, got: %v", err)
	}
}

func (e *env) mustWrite(t fence.Term, key, value string) {
	if err := e.write(t, key, value, nil); err != nil {
		e.fatal("this Write must succeed, got: %v", err)
	}
	e.holds(key, value)
}

func (e *env) holds(key, value string) {
	if got := e.read(key); got != value {
		e.fail("the value at %s is %q, must be %q", key, got, value)
	}
}

// mustRefuse demands that a write under t is refused with an error that is target, and changes nothing.
func (e *env) mustRefuse(t fence.Term, target error) {
	before := e.read("refused")
	err := e.write(t, "refused", fmt.Sprintf("%s under %d", t.Election, t.Token), nil)
	e.mustBe(err, target)
	if after := e.read("refused"); after != before {
		e.fail("the refused Write changed the value from %q to %q", before, after)
	}
}

func (e *env) mustBe(err, target error) {
	if err == nil {
		e.fail("this must be refused with %q, but was done", target)
	} else if !errors.Is(err, target) {
		e.fail("this must be refused with %q, got: %v", target, err)
	}
}

// mustFence demands a FencedError with both numbers for a write under t, newest being 0 if there is no record.
func (e *env) mustFence(t fence.Term, newest fence.Token) {
	before := e.read("refused")
	e.numbers(e.write(t, "refused", fmt.Sprintf("%s under %d", t.Election, t.Token), nil), t.Token, newest)
	if after := e.read("refused"); after != before {
		e.fail("the refused Write changed the value from %q to %q", before, after)
	}
}

func (e *env) numbers(err error, token, newest fence.Token) {
	e.mustBe(err, fence.ErrFenced)
	var fenced *fence.FencedError
	if err == nil || !errors.Is(err, fence.ErrFenced) {
		return
	}
	if !errors.As(err, &fenced) {
		e.fail("the refusal must be a *FencedError{Token: %d, Newest: %d}, got: %v", token, newest, err)
	} else if fenced.Token != token || fenced.Newest != newest {
		e.fail("the refusal must name token %d and newest %d, it names %d and %d", token, newest, fenced.Token, fenced.Newest)
	}
}

func show(t fence.Term) string {
	name := t.Election
	if len(name) > 40 {
		name = name[:40] + "…"
	}
	return fmt.Sprintf("%q %d nonce %x cluster %x", name, t.Token, t.Nonce, t.Cluster)
}

func result(err error) string {
	if err == nil {
		return "done"
	}
	return err.Error()
}
