// Package fencetest is the conformance suite for guards: what every [fence.Guard] must do, whatever store or service
// it protects. Like testing/slogtest it is meant for the authors of guards:
//
//	func TestConformance(t *testing.T) {
//		fencetest.Test(t, func(t *testing.T) fencetest.Subject {
//			g := open(t) // an empty store of its own
//			return fencetest.Subject{Guard: g, Write: …, Read: …, Reopen: …}
//		})
//	}
//
// A failure names the rule that the guard broke and prints the steps in the order in which they were taken. Random
// histories print their seed; AEGIS_FENCETEST_SEED=… replays one.
//
// The suite finds broken guards, it does not prove the absence of faults: interleavings inside one call of the guard
// are out of its reach, save through the one hook in Write. It is itself proven by guards broken on purpose, each of
// which it must catch.
package fencetest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"aegis/fence"
)

var (
	// patience is how long a hook waits for a rival that a good guard keeps waiting until the hook returns. It makes
	// no good guard fail; a broken one on a slower store can slip through.
	patience = 200 * time.Millisecond

	// bound is how long anything may take that must happen at all.
	bound = 10 * time.Second
)

// Subject is a guard under test, together with a piece of guarded data: strings at keys.
type Subject struct {
	fence.Guard

	// Write stores value at key, guarded by term, and returns the guard's error as it is. It calls between, unless
	// nil, exactly once, after the guard has admitted the term and before the write commits. A guard that admits and
	// commits in one step inside its store calls it just before that step. A refused write need not call it.
	Write func(ctx context.Context, term fence.Term, key, value string, between func()) error

	// Read returns what was committed at key, "" if nothing was.
	Read func(ctx context.Context, key string) (value string, err error)

	// Once is the guard's Once, needed by TestOnce alone. fn stores through put, in the guarded transaction.
	Once func(ctx context.Context, term fence.Term, key string,
		fn func(put func(key, value string) error) (result []byte, err error)) (result []byte, first bool, err error)

	// Reopen, if the guard is durable, restarts it as roughly as possible and returns it anew; the old one is not
	// used afterwards.
	Reopen func() (Subject, error)

	// Peer, if several clients can share the store, returns a guard on the same store that shares no lock, queue or
	// cache in memory with this one.
	Peer func() (Subject, error)

	// Singly says that the store cannot take several terms as one (a cluster of many slots): no case asks for it.
	Singly bool
}

// Failure is one broken rule.
type Failure struct {
	Case  string   // its name, as in go test -run
	Rule  string   // what a guard must do
	Got   string   // what this one did
	Steps []string // taken before, in order
}

func (f *Failure) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "broken rule: %s\n  %s\n  steps:\n", f.Rule, f.Got)
	for i, step := range f.Steps {
		fmt.Fprintf(&b, "  %3d  %s\n", i+1, step)
	}
	return b.String()
}

// Test runs the suite, each case on a new guard from newGuard, which must have taken no token yet.
func Test(t *testing.T, newGuard func(t *testing.T) Subject) { run(t, cases, newGuard) }

// TestOnce runs the cases of Subject.Once.
func TestOnce(t *testing.T, newGuard func(t *testing.T) Subject) { run(t, onceCases, newGuard) }

func run(t *testing.T, cases []testCase, newGuard func(t *testing.T) Subject) {
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s := newGuard(t)
			if c.lacks(s) {
				t.Skipf("the subject lacks what this rule is about: %s", c.rule)
			}
			for _, f := range c.check(s) {
				t.Error(f)
			}
		})
	}
}

// Check runs the suite, and that of Once if the guard has it, without a [testing.T] and returns the broken rules: for
// a guard that was broken on purpose, to see that its tests would tell. The cases run at once, each on a new guard.
func Check(newGuard func() Subject) (broken []*Failure) {
	all := slices.Concat(cases, onceCases)
	failures := make([][]*Failure, len(all))
	var wg sync.WaitGroup
	for i, c := range all {
		if s := newGuard(); !c.lacks(s) {
			wg.Go(func() { failures[i] = c.check(s) })
		}
	}
	wg.Wait()
	return slices.Concat(failures...)
}

// testCase is one rule and the steps that find out whether it is kept.
type testCase struct {
	name string
	rule string
	need ability
	run  func(e *env)
}

type ability int

const (
	reopen ability = 1 << iota
	peer
	together
	once
)

func (c testCase) lacks(s Subject) bool {
	return c.need&reopen != 0 && s.Reopen == nil ||
		c.need&peer != 0 && s.Peer == nil ||
		c.need&together != 0 && s.Singly ||
		c.need&once != 0 && s.Once == nil
}

func (c testCase) check(s Subject) []*Failure {
	ctx, cancel := context.WithTimeout(context.Background(), 6*bound)
	defer cancel()
	e := &env{Subject: s, ctx: ctx, c: c, taken: map[string]fence.Token{}}
	func() {
		defer func() {
			if r := recover(); r != nil && r != (stop{}) {
				panic(r)
			}
		}()
		c.run(e)
	}()
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.failures
}
