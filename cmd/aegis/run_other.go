//go:build !linux

package main

import (
	"context"
	"errors"
	"log/slog"
)

const watchdogName = "aegis-watchdog"

func watchdog() int { return exitFailure }

type runner struct {
	runFlags
	o   *options
	log *slog.Logger
}

// run rests on what only Linux has: a process that adopts its orphaned descendants, and /proc.
func (r *runner) run(context.Context, string) error {
	return errors.New("run needs Linux; `aegis campaign` works everywhere")
}
