package redisfence

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"aegis/fence"
)

// Once executes the commands that fn collects as Do does, but once for each key of the term's election, however many
// terms, retries and crashes it takes: the key, fn's result and the commands are one atomic step. A repeat, under this
// term or a later one, does nothing and returns the first result with first = false. So after [fence.ErrUnknown], or
// after a crash, the same call again makes certain: it is what hands loot out once.
//
// It takes two round trips: one to see whether the key was done, and if not, one for the commands. Two calls at once
// may both run fn; the commands of one are executed, and both return its result. An error of fn leaves nothing.
//
// Errors are those of Do, and one for an empty key. After an [ErrPartial] the key counts as done, and repeats return the
// same error: what was done of it must not be done twice, so somebody has to look.
func (g *Guard) Once(ctx context.Context, t fence.Term, key string, fn func(b *Batch) ([]byte, error)) (result []byte, first bool, err error) {
	if key == "" {
		return nil, false, fmt.Errorf("redisfence: once %q: the key is empty", t.Election)
	}
	done, order := g.ownKey("once", t.Election), g.ownKey("when", t.Election)
	v, err := g.guarded(ctx, t, lookScript, []string{done}, []any{key})
	if err != nil {
		return nil, false, err
	}
	if v != nil {
		return known(t, v)
	}
	b := &Batch{g: g, ctx: ctx, t: t}
	if result, err = fn(b); err != nil {
		return nil, false, err
	}
	if b.err != nil {
		return nil, false, b.err
	}
	v, err = g.guarded(ctx, t, onceScript, append([]string{done, order}, b.keys...), append([]any{key, result}, b.args...))
	if err != nil {
		return nil, false, err
	}
	switch reply, _ := v.([]any); {
	case len(reply) != 2:
		return nil, false, fmt.Errorf("redisfence: once %q: an unexpected reply %v", t.Election, v)
	case reply[0] == int64(1): // another call was faster
		return known(t, reply[1])
	}
	return result, true, nil
}

// known reads what is recorded of a key that was done.
func known(t fence.Term, v any) ([]byte, bool, error) {
	s, _ := v.(string)
	switch {
	case s != "" && s[0] == 'D':
		return []byte(s[1:]), false, nil
	case s != "" && s[0] == 'P':
		return nil, false, partial(t.Election, s[1:])
	}
	return nil, false, fmt.Errorf("redisfence: once %q: its record reads %q; a newer version wrote it, so use a newer aegis; or somebody else did", t.Election, s)
}

// Forget removes what Once has recorded before the given time, by the server's clock, for all elections, and returns how
// many keys that were. A Once that is repeated after its key was forgotten is a new one, so keep them for longer than
// anybody may retry. It needs no term, as it removes nothing that fences: a fence, some 100 bytes for each name, is never
// forgotten, since its lack would let an old leader advance again.
//
// It goes through all keys of the server, as [Guard.Names] does, and removes 1,000 at a time. After an error it has
// removed as many as it says.
func (g *Guard) Forget(ctx context.Context, before time.Time) (removed int64, err error) {
	elections, err := g.scan(ctx, "when")
	if err != nil {
		return 0, err
	}
	seconds := strconv.FormatInt(before.Unix(), 10) + fmt.Sprintf(".%06d", before.Nanosecond()/1000)
	for _, election := range elections {
		keys := []string{g.ownKey("once", election), g.ownKey("when", election)}
		for n := int64(1000); n == 1000; removed += n {
			v, err := g.run(ctx, "forget keys of", election, g.client, forgetScript, keys, []any{seconds})
			if err != nil {
				return removed, err
			}
			n, _ = v.(int64)
		}
	}
	return removed, nil
}
