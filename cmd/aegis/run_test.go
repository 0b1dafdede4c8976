//go:build linux

package main

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"aegis"
	"aegis/internal/lab"

	"golang.org/x/sys/unix"
)

func TestRunChildKnowsItsTerm(t *testing.T) {
	t.Parallel()
	r := aegisEnv(t, []string{"AEGIS_TOKEN=stale"}, "run", "env test", "--id", "env-1", "--prefix", "/env-test/", "--", "sh", "-c", "env | grep ^AEGIS_")
	r.wants(t, 0, "AEGIS_ELECTION=env test\n", "")
	r.wants(t, 0, "AEGIS_NODE=env-1\n", "")
	r.wants(t, 0, "AEGIS_PREFIX=/env-test/\n", "")
	r.wants(t, 0, "AEGIS_ENDPOINTS="+shared.endpoint+"\n", "")
	if strings.Count(r.stdout, "AEGIS_TOKEN=") != 1 || strings.Contains(r.stdout, "stale") {
		t.Errorf("not one token: %s", r.stdout)
	}
}

func TestRunExitCodeIsTheChilds(t *testing.T) {
	t.Parallel()
	for script, code := range map[string]int{"exit 0": 0, "exit 7": 7, "exit 255": 255, "kill -9 $$": 137, "kill -TERM $$": 143} {
		t.Run(script, func(t *testing.T) {
			aegisCmd(t, "run", "code", "--ttl", "2s", "--", "sh", "-c", script).wants(t, code, "", "")
		})
	}
	vacant(t, "code")
}

// With a TTL of 10 s, a rival that leads within two has not waited for the lease.
func TestRunReleasesAtOnceWhenTheChildDies(t *testing.T) {
	t.Parallel()
	const name = "death"
	p := start(t, "run", name, "--ttl", "10s", "--", "sh", "-c", `trap "" TERM; sleep 1000 & setsid sleep 1000 & echo pid $$; exec sleep 1000`)
	child := atoi(t, strings.TrimPrefix(p.expect(t, "pid"), "pid "))
	won := await(t, name)
	killed := monotonic()
	if err := syscall.Kill(child, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	took := time.Duration((<-won).at - killed)
	if took > 2*time.Second {
		t.Errorf("a rival led %v after the child's death", took)
	}
	t.Logf("a rival led %v after the child's death", took)
	if code := p.code(t); code != 137 {
		t.Errorf("exit code %d, want 137", code)
	}
	p.rest(t) // what the child left behind is gone too
}

func TestRunStopsTheChildWhenToldTo(t *testing.T) {
	t.Parallel()
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP} {
		t.Run(sig.String(), func(t *testing.T) {
			name := "stop " + sig.String()
			p := start(t, "run", name, "--ttl", "2s", "--", "sh", "-c", `trap "echo flushed; exit 5" TERM; echo ready; while :; do sleep 0.01; done`)
			p.expect(t, "ready")
			p.signal(t, sig)
			p.expect(t, "flushed")
			if code := p.code(t); code != 5 {
				t.Errorf("exit code %d, want the child's 5: %s", code, p.stderr())
			}
			p.rest(t)
			vacant(t, name)
		})
	}
}

func TestRunKillsAChildThatDoesNotStop(t *testing.T) {
	t.Parallel()
	for claim, c := range map[string]struct {
		grace   string
		signals int
	}{"AfterTheGrace": {"200ms", 1}, "AtASecondSignal": {"1h", 2}} {
		t.Run(claim, func(t *testing.T) {
			name := "stubborn " + claim
			p := start(t, "run", name, "--ttl", "2s", "--stop-grace", c.grace, "--", os.Args[0], childArg, "stubborn", t.TempDir())
			for range 4 {
				p.expect(t, "beating")
			}
			for n := range c.signals {
				p.signal(t, syscall.SIGTERM)
				eventually(t, "the signal is taken", func() bool { return strings.Count(p.stderr(), "signal=terminated") == n+1 })
			}
			if code := p.code(t); code != 137 {
				t.Errorf("exit code %d, want 137: %s", code, p.stderr())
			}
			p.rest(t)
			vacant(t, name)
		})
	}
}

func TestRunUnderNohupIgnoresHangups(t *testing.T) {
	t.Parallel()
	p, err := launchAs(nil, "/bin/sh", "-c", `trap "" HUP; exec "$0" run nohup -- sh -c 'echo ready; sleep 1000'`, os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.end(syscall.SIGKILL) })
	p.expect(t, "ready")
	p.signal(t, syscall.SIGHUP)
	p.signal(t, syscall.SIGTERM)
	if code := p.code(t); code != 143 || strings.Contains(p.stderr(), "hangup") {
		t.Errorf("exit code %d, want 143: %s", code, p.stderr())
	}
}

func TestRunStartsNothingWhileAnotherLeads(t *testing.T) {
	t.Parallel()
	const name = "standby"
	if _, err := join(t, aegis.Config{}).Election(name).Campaign(bounded(t)); err != nil {
		t.Fatal(err)
	}
	p := start(t, "run", name, "--", "sh", "-c", "echo started")
	eventually(t, "run waits", func() bool { return len(candidates(t, name)) == 1 })
	p.signal(t, syscall.SIGTERM)
	if code := p.code(t); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	if out := p.rest(t); out != "" {
		t.Errorf("the child ran: %s", out)
	}
	if c := candidates(t, name); len(c) != 0 {
		t.Errorf("left behind: %v", c)
	}
}

func TestRunStartsTheChildAnewAfterALoss(t *testing.T) {
	t.Parallel()
	const name = "anew"
	p := start(t, "run", name, "--ttl", "2s", "--", "sh", "-c", `echo "token $AEGIS_TOKEN"; exec sleep 1000`)
	last := 0
	for range 3 {
		token := atoi(t, strings.TrimPrefix(p.expect(t, "token"), "token "))
		if token <= last {
			t.Errorf("token %d after %d", token, last)
		}
		last = token
		aegisCmd(t, "evict", name, "--now").wants(t, 0, "", "")
	}
	p.expect(t, "token")
	p.signal(t, syscall.SIGTERM)
	if code := p.code(t); code != 143 {
		t.Errorf("exit code %d, want 143", code)
	}
	p.rest(t)
}

func TestRunExitOnLoss(t *testing.T) {
	t.Parallel()
	const name = "exit on loss"
	p := start(t, "run", name, "--ttl", "2s", "--exit-on-loss", "--", "sh", "-c", `echo ready; exec sleep 1000`)
	p.expect(t, "ready")
	aegisCmd(t, "evict", name, "--now").wants(t, 0, "", "")
	if code := p.code(t); code != 4 {
		t.Errorf("exit code %d, want 4", code)
	}
	p.rest(t)
	oneLineError(t, result{stderr: p.stderr()})
}

func TestRunHandsOverWhenAskedTo(t *testing.T) {
	t.Parallel()
	const name = "handover"
	p := start(t, "run", name, "--id", "handover-a", "--", "sh", "-c", `trap "echo flushed; exit" TERM; echo ready; while :; do sleep 0.01; done`)
	p.expect(t, "ready")
	q := start(t, "run", name, "--id", "handover-b", "--", "sh", "-c", `echo ready; exec sleep 1000`)
	eventually(t, "handover-b waits", func() bool { return len(candidates(t, name)) == 1 })
	aegisCmd(t, "transfer", name, "handover-b").wants(t, 0, "handover-b leads", "")
	p.expect(t, "flushed")
	q.expect(t, "ready")
}

// An operator's request hurries nobody: the lease is renewed until the key is released, so --stop-grace holds in full,
// three times as long here as the trust that was there when the term ended.
func TestRunGivesTheChildItsStopGraceWhenAskedToResign(t *testing.T) {
	t.Parallel()
	const name = "asked"
	p := start(t, "run", name, "--ttl", "2s", "--stop-grace", "1h", "--", "sh", "-c", `trap "sleep 5; echo flushed; exit" TERM; echo ready; while :; do sleep 0.01; done`)
	p.expect(t, "ready")
	won := await(t, name)
	aegisCmd(t, "evict", name, "--wait", "1ms").wants(t, 5, "", "")
	p.expect(t, "flushed")
	flushed := monotonic()
	if w := <-won; w.at < flushed-int64(time.Second) {
		t.Errorf("a rival led %v before the child had ended", time.Duration(flushed-w.at))
	}
}

// idle starts a run that waits behind a rival, and stops its watchdog, which waits for the first term.
func idle(t *testing.T, name string, command ...string) (p *process, watchdog int, resign func()) {
	t.Helper()
	led, err := join(t, aegis.Config{}).Election(name).Campaign(bounded(t))
	if err != nil {
		t.Fatal(err)
	}
	p = start(t, append([]string{"run", name, "--ttl", "2s", "--"}, command...)...)
	eventually(t, "run waits", func() bool { return strings.Contains(p.stderr(), "waiting to lead") && len(candidates(t, name)) == 1 })
	watchdog = watchdogOf(t, p)
	if err := syscall.Kill(watchdog, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	return p, watchdog, func() {
		if err := led.Resign(bounded(t)); err != nil {
			t.Error(err)
		}
	}
}

func TestRunReplacesAnIdleWatchdogThatStandsStill(t *testing.T) {
	t.Parallel()
	for claim, command := range map[string][]string{
		"ShortOrder": {"sh", "-c", "echo started"},
		"LongOrder":  append([]string{"sh", "-c", "echo started", "sh"}, longArgs()...), // it does not fit into the pipe
	} {
		t.Run(claim, func(t *testing.T) {
			t.Parallel()
			p, watchdog, resign := idle(t, "idle "+claim, command...)
			resign()
			p.expect(t, "started")
			if code := p.code(t); code != 0 {
				t.Errorf("exit code %d, want the child's 0: %s", code, p.stderr())
			}
			if more := p.rest(t); more != "" {
				t.Errorf("a second child: %s", more)
			}
			if err := syscall.Kill(watchdog, 0); err != syscall.ESRCH {
				t.Errorf("the old watchdog is still there: %v", err)
			}
		})
	}
}

// The order does not fit into the pipe, and the watchdog takes its time to read it.
func TestRunWaitsForAWatchdogToTakeALongOrder(t *testing.T) {
	t.Parallel()
	p, watchdog, resign := idle(t, "long order", append([]string{"sh", "-c", `echo "started with $#"`, "sh"}, longArgs()...)...)
	resign()
	eventually(t, "the order is being written", func() bool { return unread(t, p) })
	<-time.After(200 * time.Millisecond)
	if err := syscall.Kill(watchdog, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	p.expect(t, fmt.Sprint("started with ", len(longArgs())))
	if code := p.code(t); code != 0 || strings.Contains(p.stderr(), "without it") {
		t.Errorf("exit code %d, want 0 and the first watchdog: %s", code, p.stderr())
	}
}

// longArgs are arguments of 1.5 MB; the kernel takes 2 MB, the environment included.
func longArgs() []string { return slices.Repeat([]string{strings.Repeat("x", 100_000)}, 15) }

// unread reports whether an order lies in the pipe to the watchdog.
func unread(t *testing.T, p *process) bool {
	t.Helper()
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", watchdogOf(t, p)))
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if filepath.Base(fd) != "3" {
			continue
		}
		f, err := os.OpenFile(fd, os.O_RDONLY|syscall.O_NONBLOCK, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		n, err := unix.IoctlGetInt(int(f.Fd()), unix.TIOCINQ)
		if err != nil {
			t.Fatal(err)
		}
		return n > 0
	}
	return false
}

func TestRunEndsThoughItsIdleWatchdogStandsStill(t *testing.T) {
	t.Parallel()
	const name = "idle end"
	p, _, _ := idle(t, name, "sh", "-c", "echo started")
	p.signal(t, syscall.SIGTERM)
	if code := p.code(t); code != 0 {
		t.Errorf("exit code %d, want 0: %s", code, p.stderr())
	}
	if out := p.rest(t); out != "" {
		t.Errorf("the child ran: %s", out)
	}
	if c := candidates(t, name); len(c) != 0 {
		t.Errorf("left behind: %v", c)
	}
}

// While nothing happens the watchdog reads its orders, ten a second, and nothing else: /proc holds a file for each of
// the machine's processes.
func TestWatchdogIsQuietWhileNothingDies(t *testing.T) {
	t.Parallel()
	p := start(t, "run", "quiet", "--ttl", "2s", "--", "sh", "-c", "echo ready; exec sleep 1000")
	p.expect(t, "ready")
	eventually(t, "the child is known", func() bool { return strings.Contains(p.stderr(), "child started") })
	file := fmt.Sprintf("/proc/%d/io", watchdogOf(t, p))
	reads := func() (n int) {
		io, err := os.ReadFile(file)
		if err != nil {
			t.Skipf("UNTESTED: how much the watchdog reads: %v", err)
		}
		if _, after, ok := strings.Cut(string(io), "syscr: "); ok {
			n = atoi(t, strings.Fields(after)[0])
		}
		return n
	}
	before, began := reads(), time.Now()
	<-time.After(2 * time.Second)
	n, took := reads()-before, time.Since(began)
	t.Logf("%d reads in %v", n, took)
	if n == 0 || n > 3*int(took/tellEvery) {
		t.Errorf("%d reads in %v, want about one in %v", n, took, tellEvery)
	}
}

// win is the instant at which a rival knew that it leads.
type win struct {
	at   int64
	term aegis.Term
}

// await has a rival wait for the election, and returns when it is among the candidates.
func await(t *testing.T, name string) <-chan win {
	t.Helper()
	n := join(t, aegis.Config{TTL: 2 * time.Second})
	won := make(chan win, 1)
	go func() {
		led, err := n.Election(name).Await(bounded(t))
		at := monotonic()
		if err != nil {
			t.Errorf("the rival does not win: %v", err)
			won <- win{at: at}
			return
		}
		won <- win{at, led.Term}
	}()
	eventually(t, "the rival waits", func() bool { return len(candidates(t, name)) == 1 })
	return won
}

// The promise of run: whatever happens to run, and whatever the child does, its whole group is dead before another can
// lead. The child, a child of its, an orphan in its group and one that left the group ignore TERM and beat every
// millisecond; each one's last beat is compared with the rival's win on the kernel's clock.
func TestRunGroupIsDeadBeforeARivalLeads(t *testing.T) {
	t.Parallel()
	signalTo := func(sig syscall.Signal) func(*testing.T, *process, *gate) {
		return func(t *testing.T, p *process, _ *gate) { p.signal(t, sig) }
	}
	signalWatchdog := func(sig syscall.Signal) func(*testing.T, *process, *gate) {
		return func(t *testing.T, p *process, _ *gate) {
			if err := syscall.Kill(watchdogOf(t, p), sig); err != nil {
				t.Fatal(err)
			}
		}
	}
	cut := func(_ *testing.T, _ *process, g *gate) { g.freeze() }
	ask := func(t *testing.T, p *process, _ *gate) { aegisCmd(t, "evict", p.cmd.Args[2], "--wait", "1ms") }
	stopping := func(t *testing.T, p *process, _ *gate) {
		eventually(t, "the child is told to stop", func() bool { return strings.Contains(p.stderr(), "stopping the child") })
	}
	for _, c := range []struct {
		claim  string
		faults []func(*testing.T, *process, *gate)
		code   int // of run, once continued
	}{
		{"RunIsCutFromEtcd", []func(*testing.T, *process, *gate){cut}, 4},
		{"RunIsKilled", []func(*testing.T, *process, *gate){signalTo(syscall.SIGKILL)}, 137},
		{"RunIsStopped", []func(*testing.T, *process, *gate){signalTo(syscall.SIGSTOP)}, 4},
		{"RunIsCutThenStopped", []func(*testing.T, *process, *gate){cut, signalTo(syscall.SIGSTOP)}, 4},
		{"RunIsStoppedWhileItGivesTheChildLongToStop", []func(*testing.T, *process, *gate){signalTo(syscall.SIGTERM), stopping, signalTo(syscall.SIGSTOP)}, 137},
		{"RunIsAskedToResignThenCutFromEtcd", []func(*testing.T, *process, *gate){ask, stopping, cut}, 4},
		{"RunIsAskedToResignThenItsWatchdogIsStoppedAndRunCutFromEtcd", []func(*testing.T, *process, *gate){ask, stopping, signalWatchdog(syscall.SIGSTOP), cut}, 4},
		{"WatchdogIsStopped", []func(*testing.T, *process, *gate){signalWatchdog(syscall.SIGSTOP)}, 4},
		{"WatchdogIsStoppedThenRunIsKilled", []func(*testing.T, *process, *gate){signalWatchdog(syscall.SIGSTOP), signalTo(syscall.SIGKILL)}, 137},
		{"WatchdogIsKilled", []func(*testing.T, *process, *gate){signalWatchdog(syscall.SIGKILL)}, 1},
		{"WatchdogIsStoppedAndRunCutFromEtcd", []func(*testing.T, *process, *gate){signalWatchdog(syscall.SIGSTOP), cut}, 4},
	} {
		t.Run(c.claim, func(t *testing.T) {
			t.Parallel()
			name, dir, g := "group "+c.claim, t.TempDir(), newGate(t)
			p := start(t, "run", name, "--ttl", "2s", "--endpoints", g.addr, "--exit-on-loss", "--stop-grace", "1h", "--", os.Args[0], childArg, "stubborn", dir)
			leader := 0
			for range 4 {
				var who string
				var pid int
				if _, err := fmt.Sscanf(p.expect(t, "beating"), "beating %s %d", &who, &pid); err != nil {
					t.Fatal(err)
				}
				if who == "self" {
					leader = pid
				}
			}
			won := await(t, name)
			for _, fault := range c.faults {
				fault(t, p, g)
			}
			w := <-won
			if err := syscall.Kill(-leader, 0); err != syscall.ESRCH {
				t.Errorf("the group %d is still there: %v", leader, err)
			}
			for _, who := range []string{"self", "child", "orphan", "session"} {
				last, err := lastBeat(filepath.Join(dir, who))
				if err != nil {
					t.Fatal(err)
				}
				spare := time.Duration(w.at - last)
				t.Logf("%s was dead %v before the rival led", who, spare)
				if spare <= 0 {
					t.Errorf("%s lived %v after a rival led\n%s", who, -spare, p.stderr())
				}
			}
			_ = p.cmd.Process.Signal(syscall.SIGCONT)
			if code := p.code(t); code != c.code {
				t.Errorf("exit code %d, want %d\n%s", code, c.code, p.stderr())
			}
			p.rest(t)
		})
	}
}

// watchdogOf returns the number of run's watchdog.
func watchdogOf(t *testing.T, p *process) int {
	t.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range stats {
		stat, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		pid, rest, _ := strings.Cut(string(stat), " ")
		f := strings.Fields(rest[strings.LastIndexByte(rest, ')')+1:])
		if f[1] != strconv.Itoa(p.cmd.Process.Pid) {
			continue
		}
		if cmdline, _ := os.ReadFile("/proc/" + pid + "/cmdline"); strings.HasPrefix(string(cmdline), watchdogName) {
			return atoi(t, pid)
		}
	}
	t.Fatal("run has no watchdog")
	return 0
}

// SIGTERM at about the moment of winning: before, while the child is being started, and after. No child may survive it,
// or start when run is over, and the election must be free.
func TestRunSIGTERMAroundWinning(t *testing.T) {
	t.Parallel()
	rounds := 100
	if testing.Short() {
		rounds = 10
	}
	const lanes = 4
	seed := lab.Seed(t)
	for lane := range lanes {
		t.Run(fmt.Sprint("Lane", lane), func(t *testing.T) {
			t.Parallel()
			rng := rand.New(rand.NewPCG(seed, uint64(lane)))
			holder := join(t, aegis.Config{TTL: 10 * time.Second})
			for round := range rounds / lanes {
				sigtermAround(t, holder, fmt.Sprintf("around %d/%d", lane, round), time.Duration(rng.Int64N(int64(100*time.Millisecond)))-50*time.Millisecond)
			}
		})
	}
}

func sigtermAround(t *testing.T, holder *aegis.Node, name string, offset time.Duration) {
	t.Helper()
	led, err := holder.Election(name).Campaign(bounded(t))
	if err != nil {
		t.Fatal(err)
	}
	// The child that is alive holds standard output; it says when it started, on the clock of /proc/uptime.
	p := start(t, "run", name, "--ttl", "2s", "--", "sh", "-c", `read up _ </proc/uptime; echo "$up"; exec sleep 1000`)
	eventually(t, "run waits", func() bool { return strings.Contains(p.stderr(), "waiting to lead") && len(candidates(t, name)) == 1 })
	resign := func() {
		if err := led.Resign(bounded(t)); err != nil {
			t.Error(err)
		}
	}
	if offset < 0 {
		p.signal(t, syscall.SIGTERM)
		<-time.After(-offset)
		resign()
	} else {
		resign()
		<-time.After(offset)
		p.signal(t, syscall.SIGTERM)
	}
	code := p.code(t)
	over := uptime(t)
	vacant(t, name)
	out := strings.Fields(p.rest(t))
	switch {
	case code != 0 && code != 143, code == 0 && len(out) > 0, len(out) > 1:
		t.Errorf("SIGTERM %v after winning: exit code %d, children started: %v\n%s", offset, code, out, p.stderr())
	case len(out) == 1:
		if at, err := strconv.ParseFloat(out[0], 64); err != nil || at > over {
			t.Errorf("SIGTERM %v after winning: a child started at %v (%v), run was over at %v", offset, at, err, over)
		}
	}
}

func uptime(t *testing.T) float64 {
	t.Helper()
	b, err := os.ReadFile("/proc/uptime")
	if err != nil {
		t.Fatal(err)
	}
	f, err := strconv.ParseFloat(strings.Fields(string(b))[0], 64)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// As PID 1 of a container, run reaps whatever the container's processes leave to it.
func TestRunAsPID1ReapsOrphans(t *testing.T) {
	t.Parallel()
	if out, err := exec.Command("unshare", "-p", "-f", "--mount-proc", "true").CombinedOutput(); err != nil {
		t.Skipf("UNTESTED: run as PID 1 (unshare needs root and util-linux): %v: %s", err, out)
	}
	const name = "pid 1"
	p, err := launchAs(nil, "unshare", "-p", "-f", "--mount-proc", "--kill-child", os.Args[0], "run", name, "--ttl", "2s", "--",
		"sh", "-c", `echo "parent $PPID"; trap "exit 3" TERM; while :; do sleep 0.01; done`)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.end(syscall.SIGKILL) })
	p.expect(t, "parent")
	init := onlyChild(t, p.cmd.Process.Pid)
	// What another process of the container leaves behind goes to PID 1: here, an orphan that says so and ends.
	stranger, err := launchAs(nil, "nsenter", "-t", strconv.Itoa(init), "-p", "-m", "sh", "-c",
		`(while [ "$(cut -d" " -f4 /proc/self/stat)" = x ]; do :; done; sh -c 'while read -r _ _ _ parent _ </proc/$$/stat && [ "$parent" != 1 ]; do sleep 0.01; done; echo adopted $$' &) `)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stranger.end(syscall.SIGKILL) })
	orphan := strings.TrimPrefix(stranger.expect(t, "adopted"), "adopted ")
	eventually(t, "the orphan is reaped", func() bool {
		_, err := os.Stat(fmt.Sprintf("/proc/%d/root/proc/%s", init, orphan))
		return os.IsNotExist(err)
	})
	if err := syscall.Kill(init, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code := p.code(t); code != 3 {
		t.Errorf("exit code %d, want the child's 3: %s", code, p.stderr())
	}
	p.rest(t)
	vacant(t, name)
}

// onlyChild returns the number of a process's child.
func onlyChild(t *testing.T, parent int) (pid int) {
	t.Helper()
	eventually(t, "a child", func() bool {
		stats, _ := filepath.Glob("/proc/[0-9]*/stat")
		for _, path := range stats {
			stat, err := os.ReadFile(path)
			if err != nil {
				continue
			}
			if f := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:])); f[1] == strconv.Itoa(parent) {
				pid = atoi(t, strings.Fields(string(stat))[0])
				return true
			}
		}
		return false
	})
	return pid
}

func atoi(t *testing.T, s string) int {
	t.Helper()
	n, err := strconv.Atoi(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
