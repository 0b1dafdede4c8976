package grpcfence

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"aegis/fence"
	"aegis/fence/internal/gate"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const domain = "aegis" // of the ErrorInfo

// statusError is an error of package fence, or of the gate, together with the status by which it travels.
type statusError struct {
	err error
	st  *status.Status
}

func (e *statusError) Error() string              { return e.err.Error() }
func (e *statusError) Unwrap() error              { return e.err }
func (e *statusError) GRPCStatus() *status.Status { return e.st }

// toStatus is what the server returns for an error of the gate, or of a handler's own guard, under term t.
func toStatus(err error, t fence.Term) error {
	var done *statusError
	if errors.As(err, &done) {
		return done
	}
	var (
		term *gate.TermError
		full *gate.FullError
		code = codes.Unavailable
		info = &errdetails.ErrorInfo{Domain: domain, Reason: reasonNotDone}
	)
	if refusal := gate.Refusal(err, t); refusal != nil {
		info.Metadata = refusal
		info.Reason = strings.ToUpper(strings.ReplaceAll(refusal["kind"], "-", "_"))
		switch {
		case errors.Is(err, fence.ErrUnknown):
			code = codes.Aborted
		case errors.Is(err, fence.ErrInvalidToken):
			code = codes.InvalidArgument
		default:
			code = codes.FailedPrecondition
		}
	} else if errors.As(err, &term) {
		code = codes.InvalidArgument
	} else if errors.As(err, &full) {
		code = codes.ResourceExhausted
	}
	st := status.New(code, err.Error())
	if detailed, failed := st.WithDetails(info); failed == nil {
		st = detailed
	}
	return &statusError{err, st}
}

// reasonNotDone marks the refusals that are no error of package fence: the handler did not run.
const reasonNotDone = "NOT_DONE"

// fromStatus makes an error of package fence of a server's refusal and returns other errors as they are. told says
// whether the server's gate or a handler's guard said what became of the call.
func fromStatus(err error) (restored error, told bool) {
	var done *statusError
	if err == nil || errors.As(err, &done) {
		return err, true
	}
	st, ok := status.FromError(err)
	if !ok {
		return err, false
	}
	for _, detail := range st.Details() {
		info, ok := detail.(*errdetails.ErrorInfo)
		if !ok || info.Domain != domain {
			continue
		}
		if refusal := gate.Restore(info.Metadata, st.Message()); refusal != nil {
			return &statusError{refusal, st}, true
		}
		return err, true
	}
	return err, false
}

// lost adds ErrUnknown to an error by which the reply to a call that was sent may have been lost.
func lost(err error) error {
	st, ok := status.FromError(err)
	if !ok {
		return err
	}
	switch st.Code() {
	case codes.Canceled, codes.DeadlineExceeded, codes.Unavailable:
		return &statusError{fmt.Errorf("%w: %w", fence.ErrUnknown, err), st}
	}
	return err
}

// interrupted says whether a handler's error is but the echo of its ended context.
func interrupted(err error) bool {
	return errors.Is(err, context.Canceled) || status.Code(err) == codes.Canceled
}

// explain puts the package's name before errors that do not bear one; fence's own say all by themselves.
func explain(err error) error {
	var fenced *fence.FencedError
	var back *fence.TokenWentBackError
	var foreign *fence.ForeignClusterError
	if err == nil || errors.As(err, &fenced) || errors.As(err, &back) || errors.As(err, &foreign) {
		return err
	}
	return fmt.Errorf("grpcfence: %w", err)
}
