package aegis

import (
	"sync"
	"sync/atomic"
	"time"

	"aegis/internal/clock"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// lease is this node's view of one etcd lease: how long it may be trusted. Leaderships are held only while it is.
//
// The invariant: trust ends before the server can let the lease run out. The server counts from the instant at which
// it handled the grant or renewal, which lies after the instant at which we sent it; so
//
//	trust ends = start of the attempt that was answered + the TTL in the answer − margin
//
// where the margin covers what the two clocks' rates may differ by and what this process needs to stop. (Counting
// from the reply, as etcd's own client does, adds the reply's delay to the trust. The idea of the send time is from
// C. Gray and D. Cheriton, "Leases" (SOSP 1989); river's elector does the same.)
//
// Trust that has ended never comes back: a late reply changes nothing.
type lease struct {
	id     clientv3.LeaseID
	clk    clock.Clock
	margin time.Duration
	alarm  clock.Alarm
	onEnd  func(*lease, error) // called once, by whoever finds the end, without locks

	trust atomic.Pointer[trust]
	ended atomic.Bool
	done  chan struct{} // closed when ended
	told  chan struct{} // closed when onEnd has returned
	quiet chan struct{} // closed when its goroutine is gone
	mu    sync.Mutex    // serializes renewals and the end

	cause       error // set before done is closed
	incarnation int64 // ModRevision of the node key under this lease; 0 when unlisted
}

// trust is one grant of confidence: it lasts for a time from a mark.
type trust struct {
	from  clock.Mark
	lasts time.Duration
}

func newLease(id clientv3.LeaseID, clk clock.Clock, start clock.Mark, ttl, margin time.Duration, onEnd func(*lease, error)) *lease {
	l := &lease{id: id, clk: clk, margin: margin, alarm: clk.NewAlarm(), onEnd: onEnd, done: make(chan struct{}), told: make(chan struct{}), quiet: make(chan struct{})}
	l.trust.Store(&trust{from: start, lasts: ttl - margin})
	l.alarm.Set(l.left())
	go l.watchTrust()
	return l
}

// trusted reports whether the lease can still be relied on. Once it has said no, it says no for ever.
func (l *lease) trusted() bool {
	if l.ended.Load() {
		return false
	}
	t := l.trust.Load()
	if t.from.Elapsed(l.clk) < t.lasts {
		return true
	}
	return l.check()
}

// check is trusted's slow path: it looks again under the lock, lest a renewal came in between, and ends the lease.
func (l *lease) check() bool {
	l.mu.Lock()
	if l.ended.Load() {
		l.mu.Unlock()
		return false
	}
	if l.left() > 0 {
		l.mu.Unlock()
		return true
	}
	l.finish(errTrustEnded)
	return false
}

// left returns how long trust lasts from now on; not positive when it is over.
func (l *lease) left() time.Duration {
	t := l.trust.Load()
	return t.lasts - t.from.Elapsed(l.clk)
}

// renewed takes the answer to the attempt that started at the mark. It returns false, and changes nothing, when trust
// has ended before the answer was in.
func (l *lease) renewed(start clock.Mark, ttl time.Duration) bool {
	l.mu.Lock()
	if l.ended.Load() {
		l.mu.Unlock()
		return false
	}
	if l.left() <= 0 {
		l.finish(errTrustEnded)
		return false
	}
	l.trust.Store(&trust{from: start, lasts: ttl - l.margin})
	left := l.left()
	l.mu.Unlock()
	l.alarm.Set(left)
	return true
}

// end ends trust at once, for a reason of the caller's. It is idempotent.
func (l *lease) end(reason error) {
	l.mu.Lock()
	if l.ended.Load() {
		l.mu.Unlock()
		return
	}
	l.finish(reason)
}

// finish is called with l.mu held and ended unset; it unlocks.
func (l *lease) finish(reason error) {
	l.cause = reason
	l.ended.Store(true)
	close(l.done)
	l.mu.Unlock()
	l.onEnd(l, reason)
	close(l.told)
}

// watchTrust ends the lease when its time is up, so that contexts end without anybody calling Held.
func (l *lease) watchTrust() {
	defer close(l.quiet)
	defer l.alarm.Stop()
	for {
		select {
		case <-l.done:
			return
		case <-l.alarm.C():
			if left := l.left(); left > 0 {
				l.alarm.Set(left)
			} else {
				l.check()
			}
		}
	}
}
