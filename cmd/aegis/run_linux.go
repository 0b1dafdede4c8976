package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"aegis"
	"aegis/internal/clock"
)

const (
	// tellEvery is how often the watchdog hears how long trust lasts, and answers.
	tellEvery = 100 * time.Millisecond

	// How many orders a watchdog may leave unanswered: at a term's start, when it has no child, and later, when giving it
	// up kills one. Orders, not time: a machine that was suspended has sent none.
	startPatience = 10
	patience      = 30
)

// runner runs a child for each term of one election. It leaves the child itself to a watchdog; see there.
type runner struct {
	runFlags
	o     *options
	log   *slog.Logger
	node  *aegis.Node
	brood brood
	pid   atomic.Int64 // of the present watchdog

	keeper *keeper       // waits for the next term, so that its start costs the child no time
	hurry  chan struct{} // a second signal: kill at once

	finish    context.CancelFunc // ends Run
	signalled atomic.Bool        // by a signal
	outcome   error              // what to exit with, once ended
	ended     bool
}

func (r *runner) run(ctx context.Context, name string) error {
	ctx, r.finish = context.WithCancel(ctx)
	defer r.finish()
	r.hurry = make(chan struct{}, 1)
	r.brood.spare = func(pid int) bool { return int64(pid) == r.pid.Load() }
	if err := r.brood.adopt(); err != nil {
		return fmt.Errorf("become the parent of orphans: %w", err)
	}
	if err := r.brood.usable(); err != nil {
		return fmt.Errorf("run needs /proc: %w", err)
	}
	defer r.signals()()

	node, holder, err := r.o.join(ctx, &r.nodeFlags, name, r.log)
	if err != nil {
		return interrupted(ctx, err)
	}
	r.node = node
	defer func() {
		if r.keeper != nil {
			r.keeper.close()
		}
		if err := node.Leave(context.WithoutCancel(ctx)); err != nil {
			r.log.Warn("aegis: leave", "err", err)
		}
	}()
	if err := r.prepare(name); err != nil {
		return err
	}
	waiting := r.log.With("election", name, "node", node.ID())
	if holder.Token != 0 {
		waiting = waiting.With("leader", holder.Node, "token", holder.Token)
	}
	waiting.Info("aegis: waiting to lead")
	err = node.Election(name, aegis.WithPriority(r.priority)).Run(ctx, r.term)
	if r.ended {
		return r.outcome
	}
	return interrupted(ctx, err)
}

// signals ends Run at the first signal, hurries at the second, and reaps orphans: those of PID 1, and of a watchdog
// that died.
func (r *runner) signals() (stop func()) {
	sigs, died, done := make(chan os.Signal, 2), make(chan os.Signal, 1), make(chan struct{})
	wanted := []os.Signal{syscall.SIGTERM, syscall.SIGINT}
	if !signal.Ignored(syscall.SIGHUP) { // by nohup
		wanted = append(wanted, syscall.SIGHUP)
	}
	signal.Notify(sigs, wanted...)
	signal.Notify(died, syscall.SIGCHLD)
	go func() {
		for {
			select {
			case s := <-sigs:
				if r.signalled.Swap(true) {
					select {
					case r.hurry <- struct{}{}:
					default:
					}
				}
				r.finish()
				r.log.Info("aegis: stopping", "signal", s.String()) // after the deed: whoever reads the log may stand still
			case <-died:
				r.brood.reapOrphans(0)
			case <-done:
				return
			}
		}
	}()
	return func() {
		signal.Stop(sigs)
		signal.Stop(died)
		close(done)
	}
}

func (r *runner) prepare(name string) (err error) {
	if r.keeper, err = newKeeper(name, &r.pid); err != nil {
		return fmt.Errorf("start the watchdog: %w", err)
	}
	return nil
}

// trust returns when trust in the term's lease ends, on the boot clock. The clock is read first, so that the instant is
// early rather than late. It may go on after the term, whose key is released when the child is gone.
func (r *runner) trust(led *aegis.Leadership) (time.Duration, bool) {
	now, ok := clock.Machine.Boot()
	left := led.LeaseLeft()
	return now + left, ok && left > 0
}

// term has a watchdog run the child for one term. It returns when nothing of it is left.
func (r *runner) term(ctx context.Context, led *aegis.Leadership) error {
	for bound := startPatience; ; bound *= 2 { // it may be the machine that is slow
		if again, err := r.attempt(ctx, led, bound); !again {
			return err
		}
	}
}

// attempt has one watchdog run the child. It is to be repeated when the watchdog left bound orders unanswered, the first
// among them, and so has started nothing.
func (r *runner) attempt(ctx context.Context, led *aegis.Leadership, bound int) (again bool, err error) {
	if r.keeper == nil || r.keeper.dead() {
		if err := r.prepare(led.Term.Election); err != nil {
			return false, err
		}
	}
	k := r.keeper
	log := r.log.With("election", led.Term.Election, "token", led.Term.Token)
	trust, ok := r.trust(led)
	if ctx.Err() != nil {
		return false, nil
	}
	if !ok || !led.Held() {
		return false, r.goOn(ctx, led)
	}
	r.keeper = nil

	var due time.Time // when the watchdog must have ended
	var overdue <-chan time.Time
	within := func(d time.Duration) { // the earliest counts
		if at := time.Now().Add(d); due.IsZero() || at.Before(due) {
			due, overdue = at, time.After(d)
		}
	}
	replaced := false // by run itself
	replace := func() {
		if !replaced {
			replaced = true
			k.kill()
			log.Warn("aegis: the watchdog does not answer in time, going on without it", "pid", k.cmd.Process.Pid)
		}
	}
	if k.tell(order{Op: "start", Trust: trust, Grace: r.grace, Path: r.path, Args: r.args, Env: r.environment(led.Term)}) != nil {
		replace() // what it has of the order it cannot read
	}

	tick := time.NewTicker(tellEvery)
	defer tick.Stop()
	stop, lost := ctx.Done(), led.Context().Done()
	heard, unanswered := false, 0
	var last report
	for {
		select {
		case <-tick.C:
			trust, ok := r.trust(led)
			if !ok {
				within(r.grace + (r.margin-r.grace)/4)
			} else if unanswered++; unanswered > bound {
				replace()
			} else {
				_ = k.tell(order{Op: "trust", Trust: trust})
			}
		case <-lost:
			lost, stop = nil, nil
			grace := r.grace
			if errors.Is(context.Cause(led.Context()), aegis.ErrRequested) {
				grace = r.stopGrace // nobody hurries: the lease is renewed until the key is released
			}
			_ = k.tell(order{Op: "stop", Grace: grace})
			within(grace + (r.margin-r.grace)/4)
			log.Warn("aegis: term is over, stopping the child", "reason", lossReason(led), "grace", grace)
		case <-stop:
			stop = nil
			if led.Held() {
				_ = k.tell(order{Op: "stop", Grace: r.stopGrace})
				within(r.stopGrace + time.Second)
				log.Info("aegis: stopping the child", "grace", r.stopGrace)
			}
		case <-r.hurry:
			_ = k.tell(order{Op: "stop"})
			within(time.Second)
		case <-overdue:
			replace()
		case rep, open := <-k.reports:
			if open {
				heard, unanswered, bound = true, 0, patience
				switch rep.Op {
				case "heard":
					continue
				case "started":
					log.Info("aegis: child started", "pid", rep.Pid)
				}
				last = rep
				continue
			}
			_ = k.orders.Close()
			switch {
			case !replaced:
			case !heard:
				if ctx.Err() == nil && led.Held() {
					return true, nil
				}
				last = report{Op: "late"}
			case last.Op == "" || last.Op == "started":
				r.killOrphans()
				last = report{Op: "killed", Status: int(syscall.SIGKILL)}
			}
			if err := r.after(led, log, last); err != nil || r.ended || r.signalled.Load() {
				return false, err
			}
			return false, r.goOn(ctx, led)
		}
	}
}

// environment is what the child has besides run's own: its term, and what it needs to use aegis itself. No password: one
// that run was given as a flag stays with run.
func (r *runner) environment(t aegis.Term) map[string]string {
	env := map[string]string{"AEGIS_ELECTION": t.Election, "AEGIS_NODE": string(t.Node), "AEGIS_TOKEN": strconv.FormatInt(t.Token, 10),
		"AEGIS_ENDPOINTS": strings.Join(r.o.endpoints, ","), "AEGIS_PREFIX": r.o.prefix}
	for name, file := range map[string]string{"AEGIS_CACERT": r.o.cacert, "AEGIS_CERT": r.o.cert, "AEGIS_KEY": r.o.key} {
		if file != "" {
			env[name] = file
		}
	}
	return env
}

// after decides whether run is over when the watchdog has ended.
func (r *runner) after(led *aegis.Leadership, log *slog.Logger, last report) error {
	end := func(err error) error {
		r.outcome, r.ended = err, true
		r.finish()
		return nil
	}
	switch last.Op {
	case "ended", "killed": // by the watchdog, or without it
		code := exitCode(syscall.WaitStatus(last.Status))
		log.Info("aegis: child ended", "code", code)
		if last.Own || r.signalled.Load() {
			return end(&exitError{code: code})
		}
	case "failed":
		errno := syscall.Errno(last.Errno)
		if errno == syscall.ENOENT {
			return end(exitf(exitNotFound, "%s: %w", r.path, errno))
		}
		return end(exitf(exitCannotExec, "%s: %w", r.path, errno))
	case "late":
	default:
		r.killOrphans()
		return end(exitf(exitFailure, "the watchdog of %q died before its child; the child and its descendants were killed, the term %d is given back", led.Term.Election, led.Term.Token))
	}
	if r.exitOnLoss && last.Op == "killed" && led.Held() {
		return end(exitf(exitLost, "the watchdog of %q stood still; the child was killed, the term %d is given back (--exit-on-loss)", led.Term.Election, led.Term.Token))
	}
	if r.exitOnLoss && !led.Held() {
		return end(exitf(exitLost, "%w (--exit-on-loss)", context.Cause(led.Context())))
	}
	return nil
}

// goOn has Run enter the election again, and a watchdog wait for that: what returns while its term is held ends Run.
func (r *runner) goOn(ctx context.Context, led *aegis.Leadership) error {
	if err := led.Resign(ctx); err != nil { // only asks, and changes nothing where the term is over
		return err
	}
	if r.keeper != nil {
		return nil
	}
	return r.prepare(led.Term.Election)
}

// killOrphans kills what a dead watchdog has left to this process, until nothing is left.
func (r *runner) killOrphans() {
	began := time.Now()
	for pause := time.Millisecond; ; pause = min(2*pause, 20*time.Millisecond) {
		r.brood.kill()
		r.brood.reapOrphans(0)
		list, err := r.brood.children()
		if err != nil || len(list) == 0 {
			return
		}
		if !began.IsZero() && time.Since(began) > time.Second {
			began = time.Time{}
			r.log.Error("aegis: cannot kill what the child left behind; the election is held until it is gone", "pid", list[0].pid, "processes", len(list))
		}
		time.Sleep(pause)
	}
}
