package lab

import (
	"context"
	"fmt"
	"time"
)

const (
	pollEvery      = 5 * time.Millisecond
	eventuallyTime = 10 * time.Second
)

// Eventually asks again and again until ok is true, and waits at most until ctx ends, or 10 s if ctx has no deadline. It
// is the one place where a test polls. An error from ok is taken for "not yet"; if the time runs out, the error
// names what was waited for and wraps ctx's cause and the last such error. ok's context ends with the wait.
func Eventually(ctx context.Context, what string, ok func(context.Context) (bool, error)) error {
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, eventuallyTime)
		defer cancel()
	}
	start := time.Now()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	var last error
	for {
		done, err := ok(ctx)
		if done && err == nil {
			return nil
		}
		if err != nil && ctx.Err() == nil || last == nil {
			last = err // an error of the end itself would hide why it was not done before
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			err := fmt.Errorf("waited %v for %s: %w", time.Since(start).Round(time.Millisecond), what, context.Cause(ctx))
			if last != nil {
				err = fmt.Errorf("%w; last: %w", err, last)
			}
			return err
		}
	}
}
