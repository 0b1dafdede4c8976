package redisfence

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"

	"aegis/fence"

	"github.com/redis/go-redis/v9"
)

var (
	// ErrSlot: a key does not lie in the fence's hash slot. Nothing was sent.
	ErrSlot = errors.New("not in the slot of the fence")

	// ErrEviction: the server may evict the fence, or does not show whether it may. Nothing was taken.
	ErrEviction = errors.New("the server may evict the fence")

	// ErrPartial: a batch or script failed halfway, and Redis does not undo what was done before. See [PartialError].
	ErrPartial = errors.New("done in part")
)

// errNoReply: of a call that only reads.
var errNoReply = errors.New("no reply")

// PartialError is a batch or a script that the server gave up halfway. The term was in office; what was done before
// stays done. errors.Is(err, ErrPartial) holds.
type PartialError struct {
	Name string // of the election
	Done int    // how many commands were executed before the one that failed; -1 after a script's error, where nobody knows
	Err  error  // of the command that failed
}

func (e *PartialError) Error() string {
	what := fmt.Sprintf("its first %d commands stay done", e.Done)
	if e.Done < 0 {
		what = "what it did before that stays done"
	}
	return fmt.Sprintf("redisfence: %q: done in part: %s, the next failed, and Redis does not undo: %v", e.Name, what, e.Err)
}

// Is reports that every PartialError is ErrPartial.
func (e *PartialError) Is(target error) bool { return target == ErrPartial }

// Unwrap returns the error of the command that failed.
func (e *PartialError) Unwrap() error { return e.Err }

// replyError is an error of the server that came inside a script's.
type replyError string

func (e replyError) Error() string { return string(e) }
func (replyError) RedisError()     {}

const (
	codeFenced  = "AEGISFENCED"
	codePolicy  = "AEGISPOLICY "
	codePartial = "AEGISPARTIAL "
)

// partial reads what a script says about commands that failed halfway.
func partial(name, said string) error {
	number, cause, _ := strings.Cut(said, " ")
	done, err := strconv.Atoi(number)
	if err != nil {
		return fmt.Errorf("redisfence: %q: an unexpected reply %q", name, said)
	}
	if done == 0 {
		return hinted("", name, replyError(cause)) // the first one failed: nothing was done
	}
	return &PartialError{Name: name, Done: done, Err: replyError(cause)}
}

// hints by the first word of the server's error. In none of these cases was anything executed.
var hints = []struct{ code, hint string }{
	{"WRONGPASS", "wrong user name or password: look at the client's Username and Password"},
	{"NOAUTH", "the server wants a password: set the client's Password"},
	{"NOPERM", "the user may not do this: the guard needs EVAL, EVALSHA, COMMAND, INFO, HGET, HSET, PERSIST (for Once HDEL, ZADD, ZREM, TIME) on the keys of its prefix, and the term's own commands"},
	{"The user executing the script", "the user may not run one of the commands itself (ACL)"},
	{"READONLY", "this server is a read-only replica: connect to the primary, and after a failover advance again"},
	{"OOM", "the server's memory is full (maxmemory) and it evicts nothing: free some or raise the limit"},
	{"MISCONF", "the server cannot save to its disk (full?) and accepts no writes until it can"},
	{"LOADING", "the server is loading its data: try again soon"},
	{"MASTERDOWN", "this server is a replica that has lost its primary: connect to the primary"},
	{"CLUSTERDOWN", "the Cluster does not serve this slot at the moment"},
	{"NOREPLICAS", "too few replicas follow (min-replicas-to-write)"},
	{"BUSY", "another script has been running for long; see SCRIPT KILL"},
	{"MOVED", "this server is a node of a Cluster: use redis.NewClusterClient"},
	{"CROSSSLOT", "the keys lie in several slots of a Cluster: give them one tag"},
	{"WRONGTYPE", "a key holds another type than the command expects; if it is the guard's own key, somebody else has written it"},
}

func hinted(doing, name string, err error) error {
	if doing != "" {
		doing += " "
	}
	for _, h := range hints {
		if redis.HasErrorPrefix(err, h.code) {
			return fmt.Errorf("redisfence: %s%q: %s: %w", doing, name, h.hint, err)
		}
	}
	return fmt.Errorf("redisfence: %s%q: %w", doing, name, err)
}

func notSent(doing, name string, err error) error {
	return fmt.Errorf("redisfence: %s %q: nothing was sent: %w", doing, name, err)
}

// explain says what became of a call that failed with err: refused or not done for a reply of the server, not sent
// where there was no connection, and otherwise lost: fence.ErrUnknown, or errNoReply where nothing was to be written.
func (g *Guard) explain(doing, name string, err, lost error) error {
	var reply redis.Error
	var dial *net.OpError
	switch {
	case errors.As(err, &reply):
		said := reply.Error()
		if rest, ok := strings.CutPrefix(said, codePolicy); ok {
			return g.evicts(name, rest)
		}
		if rest, ok := strings.CutPrefix(said, codePartial); ok {
			return partial(name, rest)
		}
		return hinted(doing, name, err)
	case errors.As(err, &dial) && dial.Op == "dial":
		return fmt.Errorf("redisfence: %s %q: the server cannot be reached; is it running, is the address right? Nothing was sent: %w", doing, name, err)
	case errors.Is(err, redis.ErrPoolTimeout), errors.Is(err, redis.ErrPoolExhausted):
		return notSent(doing, name, fmt.Errorf("all connections of the client's pool are taken; see PoolSize: %w", err))
	case errors.Is(err, redis.ErrClosed):
		return notSent(doing, name, err)
	default:
		return fmt.Errorf("redisfence: %s %q: %w: %w", doing, name, lost, err)
	}
}

func (g *Guard) evicts(name, said string) error {
	if policy, ok := strings.CutPrefix(said, "evicts "); ok {
		return fmt.Errorf("redisfence: advance %q: %w: its maxmemory-policy is %s; set it to noeviction or volatile-… "+
			"(the guard's keys have no TTL), or keep the fence in another Redis", name, ErrEviction, policy)
	}
	return fmt.Errorf("redisfence: advance %q: %w: its maxmemory-policy is not to be seen (%s); allow the user INFO, "+
		"or set Config.PolicyUnchecked if you know it to be noeviction or volatile-…", name, ErrEviction, strings.TrimPrefix(said, "unknown "))
}

// refused turns the script's refusal into the verdict of fence.Record, or returns err as it is.
func refused(err error, t fence.Term) error {
	var reply redis.Error
	if !errors.As(err, &reply) || !strings.HasPrefix(reply.Error(), codeFenced) {
		return err
	}
	rec, derr := decode(t.Election, strings.TrimSpace(strings.TrimPrefix(reply.Error(), codeFenced)))
	if derr != nil {
		return derr
	}
	if verdict := rec.Admit(t); verdict != nil {
		return verdict
	}
	return fmt.Errorf("redisfence: %s: the script refused a term that its record %+v admits; this is a fault of redisfence: %w", t, rec, fence.ErrFenced)
}

// guarded runs a script that begins with admit. In report mode a refusal that is let through runs it again, unguarded.
func (g *Guard) guarded(ctx context.Context, t fence.Term, s script, keys []string, args []any) (any, error) {
	if err := fence.ValidToken(t.Token); err != nil {
		return nil, fmt.Errorf("redisfence: admit %q: %w", t.Election, err)
	}
	c := g.claim(t)
	keys = append([]string{c.key}, keys...)
	args = append([]any{c.want}, args...)
	v, err := g.run(ctx, "write under", t.Election, g.client, s, keys, args)
	if err == nil {
		return v, nil
	}
	err = refused(err, t)
	if g.cfg.Report == nil {
		return v, err
	}
	if err := g.cfg.Report.Verdict(err); err != nil {
		return nil, err
	}
	args[0] = ""
	return g.run(ctx, "write under", t.Election, g.client, s, keys, args)
}
