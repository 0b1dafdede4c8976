package main

import (
	"bytes"
	"errors"
	"os"
	"strconv"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// brood is what this process has to answer for: its children, and as a "child subreaper" every descendant whose own
// parent has died. A child's number, and its group's, cannot be reused until it is reaped, and only brood reaps; so what
// it kills under its lock is what it means to kill.
type brood struct {
	mu    sync.Mutex
	spare func(pid int) bool // children that somebody else reaps
}

// usable reports why children cannot be listed, if so.
func (b *brood) usable() error {
	self, err := os.Readlink("/proc/self")
	if err == nil && self != strconv.Itoa(os.Getpid()) {
		err = errors.New("it shows another pid namespace; mount the one of this container")
	}
	return err
}

// adopt makes this process the parent of its orphaned descendants, instead of init.
func (b *brood) adopt() error { return unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }

// proc is a child as /proc shows it.
type proc struct {
	pid   int
	state byte
	pgrp  int
}

// children lists this process's children, zombies included. It costs a walk over /proc: the kernel's own list
// (/proc/…/children) is optional and skips entries when children exit meanwhile.
func (b *brood) children() ([]proc, error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	self := []byte(strconv.Itoa(os.Getpid()))
	var out []proc
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		stat, err := os.ReadFile("/proc/" + name + "/stat")
		if err != nil {
			continue // gone
		}
		// pid (name, which may hold anything) state ppid pgrp …
		f := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
		if len(f) < 3 || !bytes.Equal(f[1], self) || b.spare != nil && b.spare(pid) {
			continue
		}
		if child, _ := look(pid); !child { // /proc may be of another pid namespace, in which numbers mean others
			continue
		}
		pgrp, _ := strconv.Atoi(string(f[2]))
		out = append(out, proc{pid: pid, state: f[0][0], pgrp: pgrp})
	}
	return out, nil
}

// reapOrphans reaps what has died among the adopted, so that a child that runs for long leaves no zombies; leader, if
// any, is left alone. It is called often, and costs one system call when nobody has died.
func (b *brood) reapOrphans(leader int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for {
		pid := anyDead()
		if pid == 0 {
			return
		}
		if pid == leader || b.spare != nil && b.spare(pid) {
			break // others may hide behind it
		}
		_, _ = syscall.Wait4(pid, nil, syscall.WNOHANG, nil)
	}
	list, _ := b.children()
	for _, p := range list {
		if p.state == 'Z' && p.pid != leader {
			_, _ = syscall.Wait4(p.pid, nil, syscall.WNOHANG, nil)
		}
	}
}

// kill kills the children, each with its group if it leads one. Their own children are adopted thereby; the next call
// kills those.
func (b *brood) kill() {
	b.mu.Lock()
	defer b.mu.Unlock()
	list, _ := b.children()
	for _, p := range list {
		if p.pgrp == p.pid {
			_ = syscall.Kill(-p.pid, syscall.SIGKILL)
		}
		_ = syscall.Kill(p.pid, syscall.SIGKILL)
	}
}

// look asks the kernel whether pid is a child of this process, and whether it has died, without reaping it.
func look(pid int) (child, dead bool) {
	zombie, err := peek(unix.P_PID, pid)
	return err == nil, zombie != 0
}

// anyDead returns a child that has died and is not reaped, 0 if there is none.
func anyDead() int {
	zombie, _ := peek(unix.P_ALL, 0)
	return zombie
}

func peek(kind, id int) (zombie int, err error) {
	// The kernel's siginfo_t, of which x/sys names the head alone. The rest is aligned as a pointer.
	var info struct {
		_    [3]int32
		rest struct {
			_   [0]uintptr
			pid int32
		}
		_ unix.Siginfo // at least as much room as the kernel fills
	}
	for {
		err := unix.Waitid(kind, id, (*unix.Siginfo)(unsafe.Pointer(&info)), unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
		if err == nil {
			return int(info.rest.pid), nil
		}
		if err != unix.EINTR {
			return 0, err
		}
	}
}

// exitCode is the shell's: 128+n when signal n killed the process.
func exitCode(s syscall.WaitStatus) int {
	if s.Signaled() {
		return exitSignal + int(s.Signal())
	}
	return s.ExitStatus()
}
