package clock_test

import (
	"testing"
	"testing/synctest"
	"time"

	"aegis/internal/clock"
)

func TestElapsed(t *testing.T) {
	for name, c := range map[string]struct {
		then func(f *clock.Fake)
		want time.Duration
	}{
		"TimePassing":            {func(*clock.Fake) { time.Sleep(time.Second) }, time.Second},
		"SleepCounts":            {func(f *clock.Fake) { time.Sleep(time.Second); f.Sleep(time.Minute) }, time.Minute + time.Second},
		"WallSetForwardDoesNot":  {func(f *clock.Fake) { time.Sleep(time.Second); f.SetWall(time.Hour) }, time.Second},
		"WallSetBackDoesNot":     {func(f *clock.Fake) { time.Sleep(time.Second); f.SetWall(-time.Hour) }, time.Second},
		"SleepAndWallSetBack":    {func(f *clock.Fake) { f.Sleep(time.Minute); f.SetWall(-time.Hour) }, time.Minute},
		"SleepBelowDisagreement": {func(f *clock.Fake) { f.Sleep(clock.Disagreement) }, 0}, // the margin covers it
		"SleepAboveDisagreement": {func(f *clock.Fake) { f.Sleep(clock.Disagreement + 1) }, clock.Disagreement + 1},
		"ManyShortSleepsAddUp": {func(f *clock.Fake) {
			for range 10 {
				f.Sleep(20 * time.Millisecond)
			}
		}, 200 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &clock.Fake{}
				m := clock.Start(f)
				c.then(f)
				if got := m.Elapsed(f); got != c.want {
					t.Fatalf("elapsed %v; want %v", got, c.want)
				}
			})
		})
	}
}

// noBoot is a machine without a clock that counts sleep.
type noBoot struct{ clock.Fake }

func (*noBoot) Boot() (time.Duration, bool) { return 0, false }

func TestWithoutABootClockTheLargerProgressCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &noBoot{}
		m := clock.Start(f)
		f.Sleep(time.Minute)
		if got := m.Elapsed(f); got != time.Minute {
			t.Fatalf("elapsed %v", got)
		}
	})
}

// The machine's own clock, in real time.
func TestMachine(t *testing.T) {
	m := clock.Start(clock.Machine)
	before := m.Elapsed(clock.Machine)
	alarm := clock.Machine.NewAlarm()
	alarm.Set(20 * time.Millisecond)
	select {
	case <-alarm.C():
	case <-time.After(5 * time.Second):
		t.Fatal("the alarm does not ring")
	}
	if after := m.Elapsed(clock.Machine); after < before+20*time.Millisecond {
		t.Fatalf("the alarm rang after %v", after-before)
	}
	alarm.Set(0) // rings at once
	select {
	case <-alarm.C():
	case <-time.After(5 * time.Second):
		t.Fatal("the alarm does not ring again")
	}
	alarm.Set(time.Hour)
	alarm.Stop()
	alarm.Stop()
	alarm.Set(time.Millisecond) // harmless
	if a, b := boot(t), boot(t); b < a {
		t.Fatalf("the boot clock went from %v to %v", a, b)
	}
}

func boot(t *testing.T) time.Duration {
	d, ok := clock.Machine.Boot()
	if !ok {
		t.Log("no boot clock here")
	}
	return d
}
