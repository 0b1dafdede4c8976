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

// tellEvery is how often the watchdog hears how long trust lasts.
const tellEvery = 100 * time.Millisecond

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
// early rather than late.
func (r *runner) trust(led *aegis.Leadership) (time.Duration, bool) {
	now, ok := clock.Machine.Boot()
	left := led.Left()
	return now + left, ok && left > 0
}

// term has a watchdog run the child for one term. It returns when nothing of it is left.
func (r *runner) term(ctx context.Context, led *aegis.Leadership) error {
	if r.keeper == nil || r.keeper.dead() {
		if err := r.prepare(led.Term.Election); err != nil {
			return err
		}
	}
	k := r.keeper
	log := r.log.With("election", led.Term.Election, "token", led.Term.Token)
	trust, ok := r.trust(led)
	if ctx.Err() != nil {
		return nil
	}
	if !ok {
		return r.goOn(ctx, led)
	}
	k.tell(order{Op: "start", Trust: trust, Grace: r.grace, Path: r.path, Args: r.args, Env: r.environment(led.Term)})
	r.keeper = nil

	tick := time.NewTicker(tellEvery)
	defer tick.Stop()
	stop, lost := ctx.Done(), led.Context().Done()
	var silent <-chan time.Time // by when the watchdog must have reported
	var last report
	replaced := false // by run itself
	for {
		select {
		case <-tick.C:
			if trust, ok := r.trust(led); ok {
				k.tell(order{Op: "trust", Trust: trust})
			}
		case <-lost:
			lost, stop = nil, nil
			grace := r.grace
			if errors.Is(context.Cause(led.Context()), aegis.ErrRequested) {
				grace = r.stopGrace // nobody hurries: the lease is renewed until the key is released
			}
			k.tell(order{Op: "stop", Grace: grace})
			silent = time.After(grace + (r.margin-r.grace)/4)
			log.Warn("aegis: term is over, stopping the child", "reason", lossReason(led), "grace", grace)
		case <-stop:
			stop = nil
			if led.Held() {
				k.tell(order{Op: "stop", Grace: r.stopGrace})
				silent = time.After(r.stopGrace + time.Second)
				log.Info("aegis: stopping the child", "grace", r.stopGrace)
			}
		case <-r.hurry:
			k.tell(order{Op: "stop"})
			silent = time.After(time.Second)
		case <-silent:
			silent, replaced = nil, true
			k.kill()
			log.Warn("aegis: the watchdog does not report in time, killing the child without it", "pid", k.cmd.Process.Pid)
		case rep, open := <-k.reports:
			if open {
				if last = rep; rep.Op == "started" {
					log.Info("aegis: child started", "pid", rep.Pid)
				}
				continue
			}
			_ = k.orders.Close()
			if replaced && (last.Op == "" || last.Op == "started") {
				r.killOrphans()
				last = report{Op: "ended", Status: int(syscall.SIGKILL)}
			}
			if err := r.after(led, log, last); err != nil || r.ended || r.signalled.Load() {
				return err
			}
			return r.goOn(ctx, led)
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
	case "ended":
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
