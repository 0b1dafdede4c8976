package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"aegis/internal/clock"
)

// The watchdog is a process between `aegis run` and its child. It exists because a process that is killed or stopped
// kills nobody, and because a parent-death signal reaches one process only:
//
//	aegis run ──orders──▶ watchdog ──parent of──▶ child, leader of a group ──▶ …
//	(etcd, the lease)     (a session of its own;  (its descendants, when orphaned,
//	          ◀─reports── no etcd, no network)     are adopted by the watchdog)
//
// It starts the child, and it alone signals and reaps it, for one term; then it ends. What follows from that:
//
//   - No number is reused under it. A process's number, and its group's, stay taken until its parent has reaped it, and
//     the parent is the watchdog. There is no moment at which a child runs that the watchdog does not know of.
//   - "Gone" is the kernel's word. Orphans of any depth become children of the watchdog (it is their subreaper), so
//     when wait4 says ECHILD, no descendant is left, zombies and those that left the group included.
//   - It needs nobody to act. `aegis run` says until when trust in the lease lasts, as an instant on the boot clock, which
//     both read alike and which counts a suspended machine's sleep; a late order cannot prolong it. At that instant, or
//     when the pipe ends because `aegis run` is dead, the group gets TERM, and KILL after the grace, at the latest when
//     trust's end and the grace have passed. The grace is less than the margin, so that is before the lease's end.
//   - A stop is final: no order makes it start or keep a child after that.
//
// It answers every order. Should it die or stand still, `aegis run` kills it, adopts its descendants likewise, and kills
// them. It answers "start" before it starts anything, so one that did not answer has no child, and another can be told.
// When both are killed at one time, the child gets its parent-death signal; its own children are then left to init. When
// the watchdog is stopped, and then `aegis run` killed, its own parent-death signal is SIGCONT: it goes on and sees that.
//
// Not covered: both are stopped at one time, or within the patience of `aegis run`, and neither killed. Then the child
// outlives the lease until one of them goes on. So it does, for a moment, when all three were frozen and go on.
const watchdogName = "aegis-watchdog" // as argv[0]

// order is what run tells the watchdog.
type order struct {
	Op    string            // "start", "trust" or "stop"
	Trust time.Duration     `json:",omitempty"` // start, trust: when trust ends, on the boot clock
	Grace time.Duration     `json:",omitempty"` // start: from TERM to KILL when trust ends; stop: from now
	Path  string            `json:",omitempty"`
	Args  []string          `json:",omitempty"`
	Env   map[string]string `json:",omitempty"` // added to the environment
}

// report is what the watchdog tells run.
type report struct {
	// "heard" (an order, before it is obeyed), "started", "failed" (to start), "late" (trust was over before the start) or
	// "ended" (nothing is left)
	Op     string
	Pid    int  `json:",omitempty"`
	Errno  int  `json:",omitempty"` // of failed
	Status int  `json:",omitempty"` // of ended: the child's wait status
	Own    bool `json:",omitempty"` // of ended: the child died by itself, before anybody wanted it to
}

// warden is the watchdog's state. Only its loop touches it.
type warden struct {
	brood    brood
	boot     func() time.Duration
	reports  *json.Encoder
	started  chan forked
	trust    time.Duration // when it ends
	grace    time.Duration
	parent   bool // run is there
	forking  bool
	stopping bool
	termed   bool          // TERM was sent
	killAt   time.Duration // while stopping
	pid      int           // of the child; 0 before the start
	reaped   bool          // the child is: its number is no longer ours
	own      bool          // it died before it was to stop
	status   syscall.WaitStatus
	rounds   int // of killing
	over     bool
}

type forked struct {
	pid int
	err error
}

func watchdog() int {
	// Signals for run are not for the watchdog. They are caught, not ignored: the child would inherit that.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGPIPE,
		syscall.SIGTSTP, syscall.SIGTTIN, syscall.SIGTTOU, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGALRM)
	died := make(chan os.Signal, 1)
	signal.Notify(died, syscall.SIGCHLD)
	syscall.CloseOnExec(3) // the child must hold neither pipe open
	syscall.CloseOnExec(4)
	w := &warden{started: make(chan forked, 1), parent: true, reports: json.NewEncoder(os.NewFile(4, "reports")),
		boot: func() time.Duration { d, _ := clock.Machine.Boot(); return d }}
	if err := w.brood.adopt(); err != nil {
		fmt.Fprintf(os.Stderr, "aegis: watchdog: become the parent of orphans: %v\n", err)
		return exitFailure
	}
	run := os.Getppid()
	orders := make(chan order)
	go receive(os.NewFile(3, "orders"), orders)
	alarm := clock.Machine.NewAlarm()
	for {
		if wake := w.step(); wake > 0 {
			alarm.Set(wake)
		}
		if w.over {
			break
		}
		select {
		case o, ok := <-orders:
			if ok {
				_ = w.reports.Encode(report{Op: "heard"}) // does not block: run gives up long before the pipe is full
			} else {
				w.parent, orders = false, nil
			}
			w.obey(o)
		case f := <-w.started:
			w.born(f)
		case <-died:
		case <-alarm.C():
		}
	}
	if !w.parent && w.pid != 0 {
		w.testify(run)
	}
	return 0
}

func receive(r io.Reader, orders chan<- order) {
	defer close(orders)
	for d := json.NewDecoder(r); ; {
		var o order
		if d.Decode(&o) != nil {
			return
		}
		orders <- o
	}
}

func (w *warden) obey(o order) {
	now := w.boot()
	switch o.Op {
	case "start":
		w.trust, w.grace = o.Trust, o.Grace
		if w.stopping || now >= w.trust {
			w.over = true
			_ = w.reports.Encode(report{Op: "late"})
			return
		}
		w.forking = true
		go fork(o, w.started)
	case "trust":
		if now < w.trust { // else it has ended, and that is that
			w.trust = o.Trust
		}
	case "stop":
		w.stop(now + o.Grace)
	}
}

// stop is final; of several the earliest KILL counts.
func (w *warden) stop(killAt time.Duration) {
	if !w.stopping || killAt < w.killAt {
		w.killAt = killAt
	}
	w.stopping = true
}

// fork starts the child, on a thread that never ends: a parent-death signal is tied to the thread that forked.
func fork(o order, started chan<- forked) {
	runtime.LockOSThread()
	env := slices.DeleteFunc(os.Environ(), func(e string) bool {
		name, _, _ := strings.Cut(e, "=")
		_, replaced := o.Env[name]
		return replaced
	})
	for _, name := range slices.Sorted(maps.Keys(o.Env)) {
		env = append(env, name+"="+o.Env[name])
	}
	pid, err := syscall.ForkExec(o.Path, o.Args, &syscall.ProcAttr{Env: env, Files: []uintptr{0, 1, 2},
		Sys: &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}})
	started <- forked{pid, err}
	select {}
}

func (w *warden) born(f forked) {
	w.forking = false
	if f.err != nil {
		var errno syscall.Errno
		errors.As(f.err, &errno)
		w.over = true
		_ = w.reports.Encode(report{Op: "failed", Errno: int(errno)})
		return
	}
	w.pid = f.pid
	_ = w.reports.Encode(report{Op: "started", Pid: f.pid})
}

// step does what is due, and returns when to look again at the latest; 0 for when something happens.
func (w *warden) step() time.Duration {
	now := w.boot()
	if w.over {
		return 0
	}
	if w.pid == 0 && !w.forking {
		w.over = !w.parent || w.stopping
		return 0
	}
	if w.pid != 0 && !w.reaped {
		if _, dead := look(w.pid); dead {
			w.own = w.own || !w.stopping
			w.stop(now) // what the child has left behind goes with it
		}
	}
	if !w.parent {
		w.stop(now + w.grace)
	}
	if now >= w.trust {
		w.stop(w.trust + w.grace) // and not from now: the machine may have slept
	}
	if w.stopping && now >= w.killAt {
		w.finish()
		return time.Duration(min(w.rounds, 20)) * time.Millisecond
	}
	if w.stopping && !w.termed && w.pid != 0 {
		w.termed = true
		_ = syscall.Kill(-w.pid, syscall.SIGTERM)
		_ = syscall.Kill(-w.pid, syscall.SIGCONT) // a stopped process could not act on it
	}
	if w.pid != 0 {
		w.brood.reapOrphans(w.pid)
	}
	wake := w.trust // even while stopping: run's own stop may be a long one, which trust's end cuts short
	if w.stopping && (w.killAt < wake || now >= wake) {
		wake = w.killAt
	}
	return wake - now
}

// finish kills the group, then whatever else has come to this process, until the kernel says that it has no children.
func (w *warden) finish() {
	w.rounds++
	if w.forking {
		w.brood.kill() // what hangs in its exec has no number here yet
		return
	}
	if !w.reaped {
		_ = syscall.Kill(-w.pid, syscall.SIGKILL)
	}
	if w.rounds > 1 {
		w.brood.kill()
	}
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		switch {
		case err == syscall.EINTR:
		case err != nil: // ECHILD
			w.over = true
			_ = w.reports.Encode(report{Op: "ended", Status: int(w.status), Own: w.own})
			return
		case pid == 0:
			return
		case pid == w.pid:
			w.reaped, w.status = true, status
		}
	}
}

// testify says what happened, since run cannot. It does not wait for a reader of standard error that has stopped.
func (w *warden) testify(run int) {
	said := make(chan struct{})
	go func() {
		fmt.Fprintf(os.Stderr, "aegis: watchdog: `aegis run` (pid %d) died; its child (pid %d) and all its descendants were stopped\n", run, w.pid)
		close(said)
	}()
	select {
	case <-said:
	case <-time.After(time.Second):
	}
}
