//go:build !linux

package clock

import "time"

// Without a boot clock, elapsed time is the larger of monotonic and wall progress (see Mark.Elapsed).
func (machine) Boot() (time.Duration, bool) { return 0, false }

type plainAlarm struct {
	c     chan struct{}
	timer *time.Timer
}

func (machine) NewAlarm() Alarm {
	a := &plainAlarm{c: make(chan struct{}, 1)}
	a.timer = time.AfterFunc(time.Hour, func() { ring(a.c) })
	a.timer.Stop()
	return a
}

func (a *plainAlarm) Set(d time.Duration) { a.timer.Reset(max(d, 1)) }
func (a *plainAlarm) C() <-chan struct{}  { return a.c }
func (a *plainAlarm) Stop()               { a.timer.Stop() }
