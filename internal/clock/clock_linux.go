package clock

import (
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

func (machine) Boot() (time.Duration, bool) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0, false
	}
	return time.Duration(ts.Nano()), true
}

// bootAlarm is a Go timer beside a kernel timer on the boot clock, which a sleep does not hold up. The kernel timer
// costs one file descriptor and no polling; where there is none to be had, the Go timer does alone.
type bootAlarm struct {
	c     chan struct{}
	timer *time.Timer
	mu    sync.Mutex
	file  *os.File // nil when not available or stopped
	fd    int
	done  chan struct{} // closed when its goroutine is gone
}

func (machine) NewAlarm() Alarm {
	a := &bootAlarm{c: make(chan struct{}, 1)}
	a.timer = time.AfterFunc(time.Hour, func() { ring(a.c) })
	a.timer.Stop()
	fd, err := unix.TimerfdCreate(unix.CLOCK_BOOTTIME, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return a
	}
	file := os.NewFile(uintptr(fd), "timerfd")
	a.file, a.fd, a.done = file, fd, make(chan struct{})
	go func() {
		defer close(a.done)
		var expirations [8]byte
		for {
			if _, err := file.Read(expirations[:]); err != nil {
				return // closed by Stop
			}
			ring(a.c)
		}
	}()
	return a
}

func (a *bootAlarm) Set(d time.Duration) {
	d = max(d, 1) // a kernel timer of 0 is switched off
	a.timer.Reset(d)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.file != nil {
		spec := unix.ItimerSpec{Value: unix.NsecToTimespec(int64(d))}
		_ = unix.TimerfdSettime(a.fd, 0, &spec, nil) // cannot fail for an open descriptor and a positive time
	}
}

func (a *bootAlarm) C() <-chan struct{} { return a.c }

func (a *bootAlarm) Stop() {
	a.timer.Stop()
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.file != nil {
		_ = a.file.Close()
		a.file = nil
		<-a.done
	}
}
