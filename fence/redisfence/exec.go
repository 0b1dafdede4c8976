package redisfence

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"aegis/fence"
)

// Exec executes one command, such as "SET", key, value, if t's token is the newest that the guard has taken, in one
// round trip. It returns the reply as RESP2 has it: string, int64, []any, nil. It has passed through Lua, so an integer
// beyond 2^53 comes back rounded; what is stored is exact.
//
// The command, its number of arguments and its keys are checked before anything is sent; the first call asks the server
// for its table of commands. Commands that Redis does not allow in scripts are refused, and so are those that touch
// everything (FLUSHALL) or the guard's own keys.
//
// Errors: [fence.ErrFenced] with both tokens, [fence.ErrTokenWentBack], [fence.ErrForeignCluster], [ErrSlot], or the
// server's own; in all these cases nothing was done. Only [fence.ErrUnknown] leaves that open: the reply was lost.
func (g *Guard) Exec(ctx context.Context, t fence.Term, args ...any) (any, error) {
	keys, err := g.keysOf(ctx, t, args)
	if err != nil {
		return nil, err
	}
	return g.guarded(ctx, t, execScript, keys, args)
}

// Batch collects commands. It must not be used after the function that it was passed to has returned.
type Batch struct {
	g    *Guard
	ctx  context.Context
	t    fence.Term
	keys []string
	args []any
	err  error
}

// Add appends a command, such as "SET", key, value. Nothing is sent yet, so there is no reply yet. The command is
// checked as by [Guard.Exec]; what is wrong with it is returned, and by Do and Once again, which then do nothing.
func (b *Batch) Add(args ...any) error {
	if b.err != nil {
		return b.err
	}
	keys, err := b.g.keysOf(b.ctx, b.t, args)
	if err != nil {
		b.err = err
		return err
	}
	for _, key := range keys {
		if len(b.keys) > 32 || !slices.Contains(b.keys, key) { // a key that is named twice does no harm
			b.keys = append(b.keys, key)
		}
	}
	b.args = append(append(b.args, len(args)), args...)
	return nil
}

// Do executes the commands that fn collects, in one atomic step and one round trip, if t's token is the newest that the
// guard has taken, and returns their replies. fn runs once, before anything is sent, so it cannot read: what depends on
// the present state belongs in a script ([Guard.Script]). An error of fn is returned, and nothing is done.
//
// Errors are those of Exec, and [ErrPartial]: a command failed after others were executed, which Redis does not undo.
func (g *Guard) Do(ctx context.Context, t fence.Term, fn func(b *Batch) error) ([]any, error) {
	b := &Batch{g: g, ctx: ctx, t: t}
	if err := fn(b); err != nil {
		return nil, err
	}
	if b.err != nil {
		return nil, b.err
	}
	v, err := g.guarded(ctx, t, doScript, b.keys, b.args)
	if err != nil {
		return nil, err
	}
	replies, ok := v.([]any)
	if !ok {
		return nil, fmt.Errorf("redisfence: %s: an unexpected reply %v", t, v)
	}
	return replies, nil
}

// Script is a user's Lua script behind the comparison. It is safe for concurrent use.
type Script struct{ script script }

// NewScript takes the source of a script as EVAL takes it; lines in Redis' errors are its own. It must not begin with
// "#!": flags belong to a whole script, of which it is a part. It panics if it does.
func NewScript(src string) *Script {
	if strings.HasPrefix(src, "#!") {
		panic("redisfence: NewScript: the source begins with #!; remove this line")
	}
	return &Script{newScript(wrapped(src))}
}

// Script runs s if t's token is the newest that the guard has taken, in the same atomic step. s sees keys as KEYS and
// args as ARGV, and should touch no other keys; those of other slots and the guard's own are refused.
//
// Errors are those of Exec. An error that the script returns (redis.error_reply) is returned as it is: what the script
// has done before it knows best. One that it raises, or that redis.call raises in it, is [ErrPartial].
func (g *Guard) Script(ctx context.Context, t fence.Term, s *Script, keys []string, args ...any) (any, error) {
	if len(keys) > maxArgs || len(args) > maxArgs {
		return nil, fmt.Errorf("redisfence: %s: a script of %d keys and %d arguments; %d each at most", t, len(keys), len(args), maxArgs)
	}
	if err := g.admissible(t, keys); err != nil {
		return nil, err
	}
	return g.guarded(ctx, t, s.script, keys, args)
}
