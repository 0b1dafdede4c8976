package fencetest

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync/atomic"

	"aegis/fence"
)

// seeds yields the seeds of n random histories, or the one to be replayed.
func (e *env) seeds(n int) []uint64 {
	if s := os.Getenv("AEGIS_FENCETEST_SEED"); s != "" {
		seed, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			e.fatal("AEGIS_FENCETEST_SEED=%s: %v", s, err)
		}
		return []uint64{seed}
	}
	all := make([]uint64, n)
	for i := range all {
		all[i] = rand.Uint64()
	}
	return all
}

func (e *env) replay(seed uint64) string {
	return fmt.Sprintf("\n  replay: AEGIS_FENCETEST_SEED=%d go test -run '/%s$' in the guard's package", seed, e.c.name)
}

// randomHistory runs advances, writes and restarts one after the other and compares each outcome with the model,
// which is a fence.Record for each name and the last value for each key.
func randomHistory(e *env) {
	for i, seed := range e.seeds(10) {
		rng := rand.New(rand.NewPCG(seed, 0))
		e.step("random history, seed %d", seed)
		model := map[string]fence.Record{}
		key, value := fmt.Sprint("random", i), ""
		elections := []string{fmt.Sprint("x", i, "-", seed), fmt.Sprint("y", i, "-", seed)}
		random := func() fence.Term {
			name := elections[rng.IntN(len(elections))]
			t := fence.Term{Election: name, Node: "n", Token: model[name].Token + rng.Int64N(4) - 1}
			t.Nonce = []uint64{0, uint64(t.Token), uint64(t.Token), uint64(t.Token), nonce}[rng.IntN(5)]
			t.Cluster = []uint64{0, cluster, cluster, cluster, cluster, cluster, foreign}[rng.IntN(7)]
			return t
		}
		for n := range 40 {
			switch op := rng.IntN(20); {
			case op == 0 && e.Reopen != nil:
				e.reopen()
			case op < 8:
				terms := []fence.Term{random()}
				if !e.Singly && rng.IntN(3) == 0 {
					terms = append(terms, random())
				}
				next := maps.Clone(model)
				var want []error // each term that is refused is a reason to refuse all
				for _, t := range terms {
					r, err := next[t.Election].Advance(t)
					if err != nil {
						want = append(want, err)
					}
					next[t.Election] = r
				}
				if len(want) == 0 {
					model = next
				}
				e.same(e.advance(terms...), seed, want...)
			default:
				t := random()
				var want []error
				v := fmt.Sprint(seed, "-", n)
				if err := model[t.Election].Admit(t); err != nil {
					want = append(want, err)
				} else {
					value = v
				}
				e.same(e.write(t, key, v, nil), seed, want...)
				e.holds(key, value)
			}
		}
	}
}

// same demands nil if nothing is wanted, else an error that no caller can tell from one of those wanted.
func (e *env) same(got error, seed uint64, want ...error) {
	if got == nil && len(want) == 0 || slices.ContainsFunc(want, func(w error) bool { return alike(got, w) }) {
		return
	}
	e.fatal("got: %s; the model says: %s%s", result(got), result(errors.Join(want...)), e.replay(seed))
}

func alike(got, want error) bool {
	for _, kind := range []error{fence.ErrFenced, fence.ErrTokenWentBack, fence.ErrForeignCluster, fence.ErrInvalidToken} {
		if errors.Is(got, kind) != errors.Is(want, kind) {
			return false
		}
	}
	var g, w *fence.FencedError
	return !errors.As(want, &w) || errors.As(got, &g) && g.Token == w.Token && g.Newest == w.Newest
}

// concurrentHistory lets writers follow the newest token they know, some of them late, while others advance it. The
// invariant of env.write is checked throughout; at the end the last taken token alone may write.
func concurrentHistory(e *env) {
	seed := e.seeds(1)[0]
	e.step("concurrent history, seed %d", seed)
	e.mustAdvance(boss(1))
	var newest atomic.Int64
	newest.Store(1)
	each(6, func(i int) {
		rng := rand.New(rand.NewPCG(seed, uint64(i)))
		for n := range 25 {
			if i < 2 && n%3 == 0 {
				token := newest.Add(1)
				if err := e.advance(boss(token)); err != nil && !errors.Is(err, fence.ErrFenced) {
					e.fail("Advance failed: %v%s", err, e.replay(seed))
				}
				continue
			}
			token := max(1, newest.Load()-rng.Int64N(2))
			err := e.write(boss(token), fmt.Sprint("k", i), fmt.Sprint(n), func() {
				for range rng.IntN(3) {
					newest.Load() // a moment
				}
			})
			if err != nil && !errors.Is(err, fence.ErrFenced) {
				e.fail("Write failed: %v%s", err, e.replay(seed))
			}
		}
	})
	last := newest.Load()
	e.mustAdvance(boss(last + 1))
	e.mustFence(boss(last), last+1)
	e.mustWrite(boss(last+1), "k", "at last")
}
