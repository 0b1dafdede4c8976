package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"aegis"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Exit codes, documented in the root's help. 64 and above are left to the child of run, to shells and to signals.
const (
	exitFailure     = 1
	exitUsage       = 2
	exitNotLeader   = 3
	exitLost        = 4
	exitTimeout     = 5
	exitUnreachable = 6
	exitCannotExec  = 126
	exitNotFound    = 127
	exitSignal      = 128
)

// exitError is an error whose exit code is decided. A nil err is a code without a message: the child's own.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

func exitf(code int, format string, args ...any) error {
	return &exitError{code: code, err: fmt.Errorf(format, args...)}
}

func usagef(format string, args ...any) error { return exitf(exitUsage, format, args...) }

// report prints err, if any, as one line, and returns the exit code.
func (o *options) report(cmd *cobra.Command, err error) int {
	if o.cli != nil {
		defer o.cli.Close()
	}
	if err == nil {
		return 0
	}
	code, err := o.classify(err)
	if err == nil {
		return code
	}
	msg := oneLine(err)
	if code == exitUsage {
		msg += fmt.Sprintf("; see '%s --help'", cmd.CommandPath())
	}
	fmt.Fprintln(os.Stderr, "aegis: "+msg)
	return code
}

func (o *options) classify(err error) (int, error) {
	var decided *exitError
	switch {
	case errors.As(err, &decided):
		return decided.code, decided.err
	case !o.running || errors.Is(err, aegis.ErrInvalidName):
		return exitUsage, err
	case refused(err):
		return exitUnreachable, fmt.Errorf("etcd at %s refuses: %w; look at --user, --password and the user's roles", o.where(), err)
	case errors.Is(err, aegis.ErrNotLeader), errors.Is(err, aegis.ErrNoLeader):
		return exitNotLeader, err
	case errors.Is(err, aegis.ErrLost):
		return exitLost, err
	case unavailable(err), timedOut(err) && o.cli != nil && !o.cli.connected():
		if o.cli != nil && timedOut(err) {
			err = fmt.Errorf("%w: %s", err, o.cli.diagnose())
		}
		return exitUnreachable, fmt.Errorf("etcd at %s cannot be reached: %w; is it running there? --endpoints or AEGIS_ENDPOINTS say where, `aegis dev` starts one to try", o.where(), err)
	case timedOut(err):
		return exitTimeout, fmt.Errorf("no answer within %v from etcd at %s, which is connected: has it lost its quorum? %w", o.timeout, o.where(), err)
	}
	return exitFailure, err
}

func (o *options) where() string { return strings.Join(o.endpoints, ",") }

func refused(err error) bool {
	for _, e := range []error{rpctypes.ErrPermissionDenied, rpctypes.ErrAuthFailed, rpctypes.ErrInvalidAuthToken, rpctypes.ErrUserEmpty, rpctypes.ErrUserNotFound} {
		if errors.Is(err, e) {
			return true
		}
	}
	return code(err) == codes.Unauthenticated || code(err) == codes.PermissionDenied
}

func unavailable(err error) bool { return code(err) == codes.Unavailable }

func timedOut(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || code(err) == codes.DeadlineExceeded
}

// code looks for a gRPC status anywhere in the chain.
func code(err error) codes.Code {
	var e rpctypes.EtcdError
	if errors.As(err, &e) {
		return e.Code()
	}
	return status.Code(err)
}

// oneLine makes a single line out of err: joined errors on several lines, and prefixes that the packages repeat, are
// for reading in a program.
func oneLine(err error) string {
	msg := strings.ReplaceAll(strings.TrimPrefix(err.Error(), "aegis: "), "\n", "; ")
	msg = strings.ReplaceAll(msg, ": aegis: ", ": ")
	return strings.ReplaceAll(msg, "; aegis: ", "; ")
}
