package lab

import (
	"errors"
	"os"
	"os/exec"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	sigstop = syscall.SIGSTOP
	sigcont = syscall.SIGCONT
)

// Now returns the nanoseconds of CLOCK_MONOTONIC, one clock for all processes of the machine: instants that a process
// of the lab prints can be compared with those of others and of this one.
func Now() int64 {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // cannot fail for this clock
	return ts.Nano()
}

// prepare gives cmd a process group of its own and has the kernel kill it when this process dies. The kernel means
// the *thread* that started it: so the caller's goroutine, which stays until the process has ended, keeps its thread.
func prepare(cmd *exec.Cmd) (release func()) {
	runtime.LockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	return runtime.UnlockOSThread
}

// awaitExit waits until the process has exited and leaves it unreaped, so that its number stays its own; false where
// that cannot be done, at once.
func awaitExit(pid int) bool {
	for {
		var info unix.Siginfo
		err := unix.Waitid(unix.P_PID, pid, &info, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			return err == nil
		}
	}
}

// signalGroup signals the group of a process that is not reaped yet.
func signalGroup(p *os.Process, sig syscall.Signal) error {
	err := syscall.Kill(-p.Pid, sig)
	if errors.Is(err, syscall.ESRCH) {
		return os.ErrProcessDone
	}
	return err
}
