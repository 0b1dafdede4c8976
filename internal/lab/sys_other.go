//go:build !linux

package lab

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// Elsewhere the lab does what Go offers on every system: no process groups, no stopping.
const (
	sigstop = syscall.Signal(-1)
	sigcont = syscall.Signal(-2)
)

// Now returns nanoseconds that processes of this machine can compare: of the wall clock, for want of a common
// monotonic one.
func Now() int64 { return time.Now().UnixNano() }

func prepare(*exec.Cmd) (release func()) { return func() {} }

func awaitExit(int) bool { return false }

func signalGroup(p *os.Process, sig syscall.Signal) error {
	switch sig {
	case sigstop, sigcont:
		return errors.ErrUnsupported
	}
	return p.Signal(sig)
}
