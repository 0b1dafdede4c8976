package fence

import (
	"errors"
	"sync/atomic"
)

// Report, in a guard's configuration, has it admit, count and tell what it would have refused, so that a team sees its
// own stale writes before it switches enforcement on. A nil *Report enforces. It is safe for concurrent use.
//
// While a guard reports it protects nothing. Only refusals are let through: invalid tokens, a store's own errors and
// unknown outcomes are errors as ever.
type Report struct {
	// Tell is called with each refusal that was let through, on the writer's goroutine. It may be nil.
	Tell func(refusal error)

	admitted atomic.Int64
}

// Count returns how many refusals were let through.
func (r *Report) Count() int64 { return r.admitted.Load() }

// Verdict is for guards: it returns nil for a refusal that is only to be reported, and err otherwise.
func (r *Report) Verdict(err error) error {
	if r == nil || errors.Is(err, ErrInvalidToken) ||
		!errors.Is(err, ErrFenced) && !errors.Is(err, ErrTokenWentBack) && !errors.Is(err, ErrForeignCluster) {
		return err
	}
	r.admitted.Add(1)
	if r.Tell != nil {
		r.Tell(err)
	}
	return nil
}
