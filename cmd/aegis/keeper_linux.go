package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// keeper is run's end of a watchdog.
type keeper struct {
	cmd     *exec.Cmd
	mu      sync.Mutex // serializes orders
	orders  *os.File
	reports chan report // closed when the watchdog is dead and reaped
}

// newKeeper starts a watchdog, which waits for orders.
func newKeeper(name string, pid *atomic.Int64) (*keeper, error) {
	in, orders, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer in.Close()
	reports, out, err := os.Pipe()
	if err != nil {
		_ = orders.Close()
		return nil, err
	}
	defer out.Close()
	// /proc/self/exe is this very program, whatever has been installed over it since.
	cmd := &exec.Cmd{Path: "/proc/self/exe", Args: []string{watchdogName, name}, Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
		ExtraFiles: []*os.File{in, out}, SysProcAttr: &syscall.SysProcAttr{Setsid: true,
			Pdeathsig: syscall.SIGCONT}} // so that one that was stopped sees that run is dead
	if err := cmd.Start(); err != nil {
		_, _ = orders.Close(), reports.Close()
		return nil, err
	}
	pid.Store(int64(cmd.Process.Pid))
	k := &keeper{cmd: cmd, orders: orders, reports: make(chan report, 4)}
	go func() {
		defer close(k.reports)
		defer reports.Close()
		for d := json.NewDecoder(reports); ; {
			var r report
			if d.Decode(&r) != nil {
				break
			}
			k.reports <- r
		}
		_ = cmd.Wait()
		pid.CompareAndSwap(int64(cmd.Process.Pid), 0)
	}()
	return k, nil
}

// tell sends an order, within 50 ms; within a second if it starts a child, whose command line can be megabytes long.
// What cannot be sent need not arrive: the watchdog is dead, or stands still and is given up.
func (k *keeper) tell(o order) error {
	b, err := json.Marshal(o)
	if err != nil {
		return err
	}
	bound := 50 * time.Millisecond // for what is written whole or not at all
	if o.Op == "start" {
		bound = time.Second
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	_ = k.orders.SetWriteDeadline(time.Now().Add(bound))
	_, err = k.orders.Write(b)
	return err
}

// dead reports whether an idle watchdog has died.
func (k *keeper) dead() bool {
	select {
	case <-k.reports:
		return true
	default:
		return false
	}
}

// kill kills the watchdog; its descendants become run's.
func (k *keeper) kill() { _ = k.cmd.Process.Kill() }

// close ends an idle watchdog, which has no child, and waits for it.
func (k *keeper) close() {
	k.kill() // it may stand still
	_ = k.orders.Close()
	for range k.reports {
	}
}
