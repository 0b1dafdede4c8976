package aegis

import (
	"errors"
	"fmt"

	"aegis/fence"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
)

// Aliases, so that a program needs one import until it uses a guard.
type (
	NodeID      = fence.NodeID
	Token       = fence.Token
	Term        = fence.Term
	Guard       = fence.Guard
	Fencer      = fence.Fencer
	FencedError = fence.FencedError
)

// Errors of guards and tokens; see package fence.
var (
	ErrFenced         = fence.ErrFenced
	ErrUnknown        = fence.ErrUnknown
	ErrTokenWentBack  = fence.ErrTokenWentBack
	ErrForeignCluster = fence.ErrForeignCluster
)

// Errors of elections and nodes. Returned errors wrap one of these with what was tried, on which election, who holds
// it and what to do next; test with [errors.Is].
var (
	// ErrNotLeader: another holds the election, or this node does already.
	ErrNotLeader = errors.New("not the leader")
	// ErrNoLeader: the election is vacant.
	ErrNoLeader = errors.New("no leader")
	// ErrLost: you held the term, and it has ended.
	ErrLost = errors.New("leadership lost")
	// ErrNodeIDTaken: another living process uses this NodeID.
	ErrNodeIDTaken = errors.New("node id taken")
	// ErrLeft: the node has left the cluster.
	ErrLeft = errors.New("the node has left")
	// ErrNotReady: the node has no trusted lease at the moment; it is getting one by itself.
	ErrNotReady = errors.New("the node has no trusted lease")
	// ErrRequested: an operator asked the leader to resign or to hand over. It is wrapped in the term's [*LossError].
	ErrRequested = errors.New("an operator asked")
	// ErrInvalidName: a name is empty, too long, not UTF-8, has control characters, or is reserved.
	ErrInvalidName = errors.New("invalid name")
)

// NotLeaderError names the holder of an election that could not be won. errors.Is(err, ErrNotLeader) holds.
type NotLeaderError struct {
	Term Term // the holder's, as far as it is known
	Self bool // it is this node itself, by another call
}

func (e *NotLeaderError) Error() string {
	if e.Self {
		return fmt.Sprintf("not the leader of %q: this node (%s) leads it or campaigns for it already; use Current, or wait for that call", e.Term.Election, e.Term.Node)
	}
	return fmt.Sprintf("not the leader of %q: %s holds it with token %d; wait for a turn, or have it transferred", e.Term.Election, e.Term.Node, e.Term.Token)
}

// Is reports that every NotLeaderError is ErrNotLeader.
func (e *NotLeaderError) Is(target error) bool { return target == ErrNotLeader }

// LossError is the cause with which a leadership's context ends. errors.Is(err, ErrLost) holds.
type LossError struct {
	Term   Term
	Reason error // why: trust in the lease ended, the key changed hands, it was resigned …
}

func (e *LossError) Error() string {
	return fmt.Sprintf("leadership of %s has ended: %v", e.Term, e.Reason)
}

// Is reports that every LossError is ErrLost.
func (e *LossError) Is(target error) bool { return target == ErrLost }

// Unwrap returns the reason.
func (e *LossError) Unwrap() error { return e.Reason }

// Reasons of losses that this package gives.
var (
	errTrustEnded   = errors.New("its lease could not be renewed in time")
	errLeaseGone    = errors.New("etcd no longer knows its lease")
	errKeyGone      = errors.New("its key was deleted")
	errKeyTaken     = errors.New("its key changed hands")
	errResigned     = errors.New("resigned")
	errTransferred  = errors.New("transferred")
	errOffsetRaised = errors.New("the token offset was raised")
)

// permanent reports an error that no repetition mends: a name, authentication, permission.
func permanent(err error) bool {
	for _, p := range []error{ErrInvalidName, ErrLeft, rpctypes.ErrPermissionDenied, rpctypes.ErrAuthFailed, rpctypes.ErrUserEmpty, rpctypes.ErrUserNotFound} {
		if errors.Is(err, p) {
			return true
		}
	}
	return false
}

// undone reports an error of etcd's own that proves that the request had no effect. Everything else, a context's end and
// Canceled above all, leaves it open whether the request was executed, will be, or was executed twice. So does "no
// space", which etcd answers after it has executed, and whatever gRPC itself found wrong with the answer.
func undone(err error) bool {
	var e rpctypes.EtcdError
	if !errors.As(err, &e) {
		return false
	}
	switch e.Code() {
	case codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.PermissionDenied, codes.FailedPrecondition,
		codes.OutOfRange, codes.Unauthenticated:
		return true
	}
	return errors.Is(err, rpctypes.ErrTooManyRequests)
}
