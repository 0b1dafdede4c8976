// Package clock tells how much time has passed, on two clocks.
//
// Go's monotonic clock stands still while a machine sleeps; the lease on the server does not. So elapsed time is
// measured on the monotonic clock and, where the wall clock disagrees with it, on the boot clock too, which counts
// sleep; the larger counts. No absolute wall time decides anything: a wall clock that is set does no harm.
//
// Which clock is used travels with the etcd client's context ([With], [From]), so that a simulated cluster brings
// its own clock and no configuration of users' shows any of it.
package clock

import (
	"context"
	"sync"
	"time"
)

// Reading is one look at the wall and the monotonic clock, in nanoseconds since arbitrary origins.
type Reading struct{ Wall, Mono int64 }

// Clock is the source of readings. Implementations are safe for concurrent use.
type Clock interface {
	// Now reads both clocks at one instant, cheaply.
	Now() Reading
	// Boot reads the clock that counts sleep; it may cost a system call. ok is false where there is none.
	Boot() (d time.Duration, ok bool)
	// NewAlarm returns an unset alarm that also wakes up after a sleep.
	NewAlarm() Alarm
}

// Alarm is a timer on both clocks: it may ring early or without cause, never late, so its owner looks at the time
// and sets it again. Set may be called from any goroutine; Stop releases it, and C is never closed.
type Alarm interface {
	Set(d time.Duration)
	C() <-chan struct{}
	Stop()
}

// Disagreement is how far wall and monotonic progress may part before the boot clock is asked.
const Disagreement = 50 * time.Millisecond

// Mark is an instant from which elapsed time is measured.
type Mark struct {
	at   Reading
	boot time.Duration
	ok   bool // the boot clock works
}

// Start marks the present instant.
func Start(c Clock) Mark {
	// The boot clock is read first: an interruption between the two reads makes elapsed times longer, never shorter.
	boot, ok := c.Boot()
	return Mark{at: c.Now(), boot: boot, ok: ok}
}

// Elapsed returns the time since m by the larger of the clocks. It asks the boot clock only where wall and monotonic
// progress differ by more than [Disagreement].
func (m Mark) Elapsed(c Clock) time.Duration {
	now := c.Now()
	mono := time.Duration(now.Mono - m.at.Mono)
	wall := time.Duration(now.Wall - m.at.Wall)
	if d := wall - mono; d <= Disagreement && d >= -Disagreement {
		return mono
	}
	if !m.ok {
		return max(mono, wall) // no boot clock: believe whichever says that more has passed
	}
	boot, _ := c.Boot()
	return max(mono, boot-m.boot)
}

type key struct{}

// With returns a context that carries c.
func With(ctx context.Context, c Clock) context.Context { return context.WithValue(ctx, key{}, c) }

// From returns the clock that ctx carries, or the machine's.
func From(ctx context.Context) Clock {
	if c, ok := ctx.Value(key{}).(Clock); ok {
		return c
	}
	return Machine
}

// Machine is the machine's own clock.
var Machine Clock = machine{}

type machine struct{}

var origin = time.Now()

func (machine) Now() Reading {
	t := time.Now()
	return Reading{Wall: t.UnixNano(), Mono: int64(t.Sub(origin))}
}

// Fake is a clock for tests: Go's own clock (virtual inside testing/synctest) plus what the test adds to it.
// Its boot clock counts the bubble's time and every [Fake.Sleep]. The zero value is ready.
type Fake struct {
	mu     sync.Mutex
	wall   time.Duration
	boot   time.Duration
	alarms map[*fakeAlarm]struct{}
}

// Now implements [Clock].
func (f *Fake) Now() Reading {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := machine{}.Now()
	r.Wall += int64(f.wall)
	return r
}

// Boot implements [Clock].
func (f *Fake) Boot() (time.Duration, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return time.Since(origin) + f.boot, true
}

// SetWall moves the wall clock alone by d, as an operator or a time server does.
func (f *Fake) SetWall(d time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.wall += d
}

// Sleep has the machine sleep for d: wall and boot clock go on, the monotonic clock does not. Alarms ring on waking.
func (f *Fake) Sleep(d time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.wall += d
	f.boot += d
	for a := range f.alarms {
		ring(a.c)
	}
}

// NewAlarm implements [Clock].
func (f *Fake) NewAlarm() Alarm {
	a := &fakeAlarm{f: f, c: make(chan struct{}, 1)}
	a.timer = time.AfterFunc(time.Hour, func() { ring(a.c) })
	a.timer.Stop()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.alarms == nil {
		f.alarms = map[*fakeAlarm]struct{}{}
	}
	f.alarms[a] = struct{}{}
	return a
}

type fakeAlarm struct {
	f     *Fake
	c     chan struct{}
	timer *time.Timer
}

func (a *fakeAlarm) Set(d time.Duration) { a.timer.Reset(max(d, 0)) }
func (a *fakeAlarm) C() <-chan struct{}  { return a.c }
func (a *fakeAlarm) Stop() {
	a.timer.Stop()
	a.f.mu.Lock()
	defer a.f.mu.Unlock()
	delete(a.f.alarms, a)
}

func ring(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
