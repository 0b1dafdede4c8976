package fencetest

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"aegis/fence"
)

// Nonces and clusters with the highest bit set, and odd: stores with signed or floating numbers must not lose a bit.
const (
	cluster = 0xffff_ffff_ffff_fffd
	foreign = 0xffff_ffff_ffff_fffb
	nonce   = 0x8000_0000_0000_0001
)

func boss(token fence.Token) fence.Term { return named("boss/1", token) }

func named(name string, token fence.Token) fence.Term {
	return fence.Term{Election: name, Node: "scene-01", Token: token, Nonce: nonce + uint64(token)<<8, Cluster: cluster}
}

var cases = []testCase{
	{"StaleWriteNeverCommits", "once a guard has taken token 8, no write under 7 commits, wherever its check stood", 0, staleWrite},
	{"StaleWriteNeverCommitsAgainstPeers", "once a guard has taken token 8, no write under 7 commits, whichever client it comes from", peer, staleWriteOfPeer},
	{"CheckSeesWhatTheLockWaitedFor", "a write that waited for an advance must be compared with what that advance took", 0, snapshotBeforeLock},
	{"SmallerTokenIsRefused", "a smaller token is refused with both numbers, by Write and by Advance", 0, func(e *env) {
		e.mustAdvance(boss(7))
		e.mustAdvance(boss(8))
		e.mustFence(boss(7), 8)
		e.mustFence(boss(1), 8)
		e.numbers(e.advance(boss(7)), 7, 8)
		e.mustFence(boss(7), 8)
		e.mustWrite(boss(8), "k", "by 8")
	}},
	{"EqualTokenIsAdmittedManyTimes", "a term writes as often as it likes", 0, func(e *env) {
		e.mustAdvance(boss(7))
		for i := range 20 {
			e.mustWrite(boss(7), "k", fmt.Sprint(i))
		}
	}},
	{"GreaterTokenMustAdvanceFirst", "a token greater than the newest is refused until it is advanced, and does not raise the newest", 0, func(e *env) {
		e.mustAdvance(boss(7))
		e.mustFence(boss(8), 7)
		e.mustWrite(boss(7), "k", "by 7")
		e.mustFence(boss(fence.MaxToken), 7)
		e.mustAdvance(boss(8))
		e.mustWrite(boss(8), "k", "by 8")
	}},
	{"NoRecordMustAdvanceFirst", "without a record every token is refused, and the refused write creates none", 0, func(e *env) {
		e.mustFence(boss(9), 0)
		e.mustAdvance(boss(7))
		e.mustWrite(boss(7), "k", "by 7")
	}},
	{"TokenGivenOutTwiceIsTold", "an equal token of another attempt is ErrTokenWentBack, by Write and by Advance; a nonce of 0 is equal to all", 0, func(e *env) {
		e.mustAdvance(boss(7))
		twin := boss(7)
		twin.Nonce ^= 1 << 63
		e.mustRefuse(twin, fence.ErrTokenWentBack)
		e.mustBe(e.advance(twin), fence.ErrTokenWentBack)
		e.mustWrite(boss(7), "k", "by the first")
		unknown := boss(7)
		unknown.Nonce = 0
		e.mustWrite(unknown, "k", "by nobody")
		e.mustAdvance(unknown)
		e.mustRefuse(twin, fence.ErrTokenWentBack) // the unknown nonce has not replaced the known one
	}},
	{"ForeignClusterIsRefused", "a token of another etcd cluster is ErrForeignCluster whatever its size; a cluster of 0 is equal to all", 0, func(e *env) {
		e.mustAdvance(boss(7))
		for _, token := range []fence.Token{6, 7, 8} {
			stranger := boss(token)
			stranger.Cluster = foreign
			e.mustRefuse(stranger, fence.ErrForeignCluster)
			e.mustBe(e.advance(stranger), fence.ErrForeignCluster)
		}
		e.mustWrite(boss(7), "k", "by 7")
		unknown := boss(8)
		unknown.Cluster = 0
		e.mustAdvance(unknown)
		e.mustWrite(unknown, "k", "by nobody's")
		stranger := boss(9)
		stranger.Cluster = foreign
		e.mustBe(e.advance(stranger), fence.ErrForeignCluster) // the unknown cluster has not replaced the known one
		stranger.Election = "guild/1"
		e.mustAdvance(stranger)
	}},
	{"InvalidTokensAreRefused", "tokens outside 1 … 2^53−1 are ErrInvalidToken, by Write and by Advance; the ends of the range are valid", 0, func(e *env) {
		for _, token := range []fence.Token{0, -1, math.MinInt64, fence.MaxToken + 1, math.MaxInt64} {
			e.mustRefuse(boss(token), fence.ErrInvalidToken)
			e.mustBe(e.advance(boss(token)), fence.ErrInvalidToken)
			e.mustFence(boss(5), 0)
		}
		e.mustAdvance(boss(1))
		e.mustWrite(boss(1), "k", "first")
		e.mustAdvance(boss(fence.MaxToken))
		e.mustWrite(boss(fence.MaxToken), "k", "last")
		e.mustFence(boss(fence.MaxToken-1), fence.MaxToken) // one apart: a float would not see it
	}},
	{"NamesAreIndependent", "each name has a token of its own; names differ if a byte does", 0, names},
	{"AdvanceIsIdempotent", "the same term may be advanced again at any time, and no term at all is no error", 0, func(e *env) {
		e.mustAdvance()
		for range 3 {
			e.mustAdvance(boss(7))
		}
		e.mustWrite(boss(7), "k", "by 7")
		e.mustAdvance(boss(7))
		e.mustWrite(boss(7), "k", "again by 7")
		e.mustAdvance(boss(7), boss(8), boss(8))
		e.mustWrite(boss(8), "k", "by 8")
	}},
	{"AdvanceIsAllOrNone", "of several terms all are taken, or none", together, func(e *env) {
		e.mustAdvance(named("a", 6), named("b", 6), named("c", 6))
		e.numbers(e.advance(named("a", 7), named("b", 5), named("c", 7)), 5, 6)
		for _, name := range []string{"a", "b", "c"} {
			e.mustWrite(named(name, 6), "k", "still by 6 of "+name)
		}
		e.mustBe(e.advance(named("a", 7), named("d", 0)), fence.ErrInvalidToken)
		e.mustWrite(named("a", 6), "k", "still by 6")
		e.mustAdvance(named("a", 7), named("b", 7), named("c", 7))
		for _, name := range []string{"a", "b", "c"} {
			e.mustFence(named(name, 6), 7)
		}
	}},
	{"FenceSurvivesReopening", "a durable guard forgets neither token nor nonce nor cluster nor data", reopen, func(e *env) {
		e.mustAdvance(boss(7))
		e.mustAdvance(boss(8))
		e.mustWrite(boss(8), "k", "by 8")
		e.reopen()
		e.holds("k", "by 8")
		e.mustFence(boss(7), 8)
		e.numbers(e.advance(boss(7)), 7, 8)
		twin, stranger := boss(8), boss(8)
		twin.Nonce ^= 1 << 63
		stranger.Cluster = foreign
		e.mustRefuse(twin, fence.ErrTokenWentBack)
		e.mustRefuse(stranger, fence.ErrForeignCluster)
		e.mustWrite(boss(8), "k", "again by 8")
	}},
	{"WritersOfOneTermAllSucceed", "concurrent writes of one term wait for one another at most; none fails", 0, concurrentWriters},
	{"AdvanceGetsInUnderLoad", "an unbroken load of old-term writers does not keep an advance waiting", 0, advanceUnderLoad},
	{"AdvanceGetsInUnderLoadOfPeers", "an unbroken load of old-term writers in other clients does not keep an advance waiting", peer, advanceUnderLoadOfPeers},
	{"AdvanceIsBoundedByItsContext", "Advance returns when its context ends, even while a write holds the lock", 0, boundedAdvance},
	{"RandomHistoryFollowsTheModel", "each step of a random history has the outcome that fence.Record says", 0, randomHistory},
	{"ConcurrentHistoryHasNoStaleWrite", "whatever runs at once, nothing commits under a token below one that was taken", 0, concurrentHistory},
}

func (e *env) reopen() {
	s, err := e.Reopen()
	e.step("reopened: %s", result(err))
	if err != nil {
		e.fatal("Reopen: %v", err)
	}
	e.Subject = s
}

// each runs fn n times at once and waits.
func each(n int, fn func(i int)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { fn(i) })
	}
	wg.Wait()
}

// waitFor reports whether done was closed within d.
func waitFor(done <-chan struct{}, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-done:
		return true
	case <-timer.C:
		return false
	}
}

// staleWrite lets an advance begin at each point of a write: before it, between its check and its commit, after it.
// In the middle there are two good outcomes: the advance waits for the write, or the write is refused.
func staleWrite(e *env) { interleave(e, e.Subject) }

func staleWriteOfPeer(e *env) {
	p, err := e.Peer()
	if err != nil {
		e.fatal("Peer: %v", err)
	}
	interleave(e, p)
}

func interleave(e *env, rival Subject) {
	advance := func(t fence.Term) <-chan struct{} {
		done := make(chan struct{})
		go func() {
			defer close(done)
			if err := e.advanceBy(e.ctx, rival.Guard, "rival: ", t); err != nil {
				e.fail("the rival's Advance must succeed, got: %v", err)
			}
		}()
		return done
	}

	before, during, after := named("before", 8), named("during", 8), named("after", 8)
	old := func(t fence.Term) fence.Term { return named(t.Election, 7) }
	e.mustAdvance(old(before))
	e.mustAdvance(old(during))
	e.mustAdvance(old(after))

	<-advance(before)
	e.mustFence(old(before), 8)

	var done <-chan struct{}
	err := e.write(old(during), "during", "by 7", func() {
		done = advance(during)
		waitFor(done, patience)
	})
	if done == nil {
		e.fatal("a write under the newest token was refused before its commit: %v", err)
	}
	if !waitFor(done, bound) {
		e.fatal("the rival's Advance has not returned %v after the write", bound)
	}
	seen := e.read("during") // the new leader's first read
	if err == nil && seen != "by 7" || err != nil && seen != "" {
		e.fail("the write under 7 returned %q, but the new leader reads %q", result(err), seen)
	}
	e.mustFence(old(during), 8)
	e.holds("during", seen)

	e.mustWrite(old(after), "after", "by 7")
	<-advance(after)
	e.mustFence(old(after), 8)
	e.holds("after", "by 7")
}

// snapshotBeforeLock holds the lock with one write, lets an advance queue behind it and then a second write, which
// must not be compared with what it could see when it began to wait.
func snapshotBeforeLock(e *env) {
	e.mustAdvance(boss(7))
	advanced, second := make(chan struct{}), make(chan struct{})
	called := false
	err := e.write(boss(7), "first", "by 7", func() {
		called = true
		go func() {
			defer close(advanced)
			if err := e.advance(boss(8)); err != nil {
				e.fail("this Advance must succeed, got: %v", err)
			}
		}()
		waitFor(advanced, patience/2) // now it queues
		go func() {
			defer close(second)
			e.write(boss(7), "second", "by 7", func() { waitFor(advanced, patience) })
		}()
		waitFor(second, patience/2)
	})
	if !called {
		e.fatal("a write under the newest token was refused before its commit: %v", err)
	}
	if !waitFor(advanced, bound) || !waitFor(second, bound) {
		e.fatal("Advance and the second write have not returned %v after the first write", bound)
	}
	e.mustFence(boss(7), 8)
}

func names(e *env) {
	all := []string{
		"a", "A", "a ", " a", "a/b", "a/b/", "a.b", "a:b", "a%", "a_", "a*", "a\\", `a"b`, "a'b", "a`b", "a;b", "a,b", "a=b", "a\u200bb", "ab",
		"é", "e\u0301", "É", "ß", "ss", "世界首领/北境", "世界首领", "🐉", "{a}", "$1", "?", "null", "0", strings.Repeat("x", 255), strings.Repeat("x", 254) + "y", strings.Repeat("龙", 85),
	}
	token := func(i int) fence.Token { return fence.Token(100 + i) }
	for i := len(all) - 1; i >= 0; i-- { // downwards, so that a name shared by two would refuse the second
		if err := e.advance(named(all[i], token(i))); err != nil {
			e.fail("Advance of %q must succeed, got: %v", all[i], err)
		}
	}
	for i, name := range all {
		if err := e.write(named(name, token(i)), "k", name, nil); err != nil {
			e.fail("Write of %q must succeed, got: %v", name, err)
		}
		e.holds("k", name)
	}
	e.mustAdvance(named("a", 1000))
	for i, name := range all[1:] {
		if err := e.write(named(name, token(i+1)), "k", name, nil); err != nil {
			e.fail("Write of %q must not be fenced by the advance of \"a\", got: %v", name, err)
		}
	}
	e.mustFence(named("a", 100), 1000)
}

func concurrentWriters(e *env) {
	e.mustAdvance(boss(7))
	var begun sync.WaitGroup
	begun.Add(writers)
	all := make(chan struct{})
	go func() { begun.Wait(); close(all) }()
	each(writers, func(i int) {
		begun.Done()
		for j := range 5 {
			meet := func() { // the first to be admitted waits until the others want to be
				if waitFor(all, patience); j == 0 {
					waitFor(nil, patience/20)
				}
			}
			if err := e.write(boss(7), fmt.Sprint("k", i), fmt.Sprint(j), meet); err != nil {
				e.fail("writer %d failed: %v", i, err)
			}
		}
	})
	for i := range writers {
		e.holds(fmt.Sprint("k", i), "4")
	}
}

const writers = 8

func advanceUnderLoad(e *env) { underLoad(e, slices.Repeat([]Subject{e.Subject}, writers)) }

func advanceUnderLoadOfPeers(e *env) {
	load := make([]Subject, writers)
	for i := range load {
		if i < writers/2 {
			p, err := e.Peer()
			if err != nil {
				e.fatal("Peer: %v", err)
			}
			load[i] = p
		} else {
			load[i] = load[i-writers/2]
		}
	}
	underLoad(e, load)
}

func underLoad(e *env, clients []Subject) {
	e.mustAdvance(boss(7))
	var (
		advanced = make(chan struct{})
		stopLoad = make(chan struct{})
		warm     sync.WaitGroup
		load     sync.WaitGroup
		seen     = make([]string, writers) // by the new leader, after its advance
	)
	warm.Add(writers)
	key := func(i int) string { return fmt.Sprint("load", i) }
	for i := range writers {
		load.Go(func() {
			late := 0
			for n := 0; late < 3; n++ { // a guard that refuses nothing must not hold the suite up
				err := clients[i].Write(e.ctx, boss(7), key(i), fmt.Sprint(n), func() { time.Sleep(time.Millisecond) }) // is load, waits for nothing
				if n == 0 {
					warm.Done()
				}
				select {
				case <-advanced:
					if err != nil {
						e.mustBe(err, fence.ErrFenced)
						return // stopped by the guard
					}
					late++
				case <-stopLoad:
					return
				default:
				}
			}
		})
	}
	warm.Wait()
	e.step("%d writers under token 7 write without a pause", writers)
	ctx, cancel := context.WithTimeout(e.ctx, bound)
	defer cancel()
	start := time.Now()
	err := e.advanceBy(ctx, e.Guard, "", boss(8))
	e.step("it took %v", time.Since(start).Round(time.Millisecond))
	if err != nil {
		close(stopLoad)
		load.Wait()
		e.fatal("Advance did not get in within %v: %v", time.Since(start).Round(time.Millisecond), err)
	}
	for i := range writers {
		seen[i] = e.read(key(i))
	}
	close(advanced)
	load.Wait()
	for i := range writers {
		e.holds(key(i), seen[i]) // or a write of 7 has followed the new leader's first read
	}
	e.mustWrite(boss(8), "k", "by 8")
}

func boundedAdvance(e *env) {
	e.mustAdvance(boss(7))
	var took time.Duration
	var err error
	e.write(boss(7), "k", "by 7", func() {
		ctx, cancel := context.WithTimeout(e.ctx, patience)
		defer cancel()
		done := make(chan struct{})
		start := time.Now()
		go func() {
			defer close(done)
			err = e.advanceBy(ctx, e.Guard, "", boss(8))
			took = time.Since(start)
		}()
		if !waitFor(done, bound/5) {
			e.fail("Advance with a context of %v has not returned after %v", patience, bound/5)
			return
		}
		e.step("Advance took %v: %s", took.Round(time.Millisecond), result(err))
	})
	e.mustAdvance(boss(8)) // whether the one that was cut off did its work or not
	e.mustFence(boss(7), 8)
	over, cancel := context.WithCancel(e.ctx)
	cancel()
	if err := e.advanceBy(over, e.Guard, "", boss(9)); err == nil {
		return // it did it all the same, which nobody minds
	}
	e.mustAdvance(boss(9))
	e.mustWrite(boss(9), "k", "by 9")
}
