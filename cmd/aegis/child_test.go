package main

import (
	"encoding/binary"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// childArg makes the test binary the child of a run: it beats, writing the instant at which it last lived.
const childArg = "test-child"

var discard = slog.New(slog.DiscardHandler)

// monotonic is the kernel's clock, the same in all processes.
func monotonic() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic(err)
	}
	return ts.Nano()
}

// childMain: `stubborn DIR` ignores signals and starts three more that do: a plain child, an orphan in its group and one in
// a session of its own. `beat FILE` is one of these, `fork FILE` starts one and ends.
func childMain(args []string) {
	signal.Ignore(syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	path := args[1]
	switch args[0] {
	case "stubborn":
		again(&syscall.SysProcAttr{}, "beat", filepath.Join(path, "child"))
		again(&syscall.SysProcAttr{Setsid: true}, "beat", filepath.Join(path, "session"))
		if err := again(nil, "fork", filepath.Join(path, "orphan")).Wait(); err != nil {
			panic(err)
		}
		beat(filepath.Join(path, "self"))
	case "fork":
		again(nil, "beat", path)
	case "beat":
		beat(path)
	}
}

func again(attr *syscall.SysProcAttr, args ...string) *exec.Cmd {
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	cmd := exec.Command(self, append([]string{childArg}, args...)...)
	cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = os.Stdout, os.Stderr, attr
	if err := cmd.Start(); err != nil {
		panic(err)
	}
	return cmd
}

func beat(path string) {
	f, err := os.Create(path)
	if err != nil {
		panic(err)
	}
	var b [8]byte
	for said := false; ; time.Sleep(time.Millisecond) {
		binary.LittleEndian.PutUint64(b[:], uint64(monotonic()))
		if _, err := f.WriteAt(b[:], 0); err != nil {
			panic(err)
		}
		if !said {
			fmt.Printf("beating %s %d\n", filepath.Base(path), os.Getpid())
			said = true
		}
	}
}

// lastBeat returns when the one who writes the file last lived.
func lastBeat(path string) (int64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return int64(binary.LittleEndian.Uint64(b)), nil
}
