package redisfence

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"aegis/fence"

	"github.com/redis/go-redis/v9"
)

// Config tunes a Guard. The zero value is ready.
type Config struct {
	// Prefix of the guard's own keys. Defaults to "aegis:". Guards of different prefixes do not know each other.
	Prefix string

	// Tag is the hash tag of the fences of all elections. Defaults to each election's own name.
	Tag string

	// AnySlot admits keys of any hash slot. It works on servers that are not a Cluster, and on none that becomes one.
	AnySlot bool

	// Replicas is how many replicas must have an advance before Advance returns nil. Defaults to 0, none. They must
	// acknowledge within ReplicaTimeout, or the context's rest.
	Replicas int

	// ReplicaTimeout defaults to 5 s.
	ReplicaTimeout time.Duration

	// PolicyUnchecked says that you vouch for a maxmemory-policy that evicts no key without a TTL, where the server
	// does not show it to this client (INFO memory).
	PolicyUnchecked bool

	// Report, unless nil, has the guard admit, count and tell what it would refuse.
	Report *fence.Report

	_ struct{}
}

func (c Config) validate() (Config, error) {
	if strings.ContainsAny(c.Prefix, "{}") {
		return c, fmt.Errorf("redisfence: Config.Prefix is %q, must have no braces: they are the hash tag's", c.Prefix)
	}
	if strings.ContainsAny(c.Tag, "{}") {
		return c, fmt.Errorf("redisfence: Config.Tag is %q, must be without its braces", c.Tag)
	}
	if c.Replicas < 0 {
		return c, fmt.Errorf("redisfence: Config.Replicas is %d, below 0", c.Replicas)
	}
	if c.ReplicaTimeout < 0 {
		return c, fmt.Errorf("redisfence: Config.ReplicaTimeout is %v, below 0", c.ReplicaTimeout)
	}
	if c.Prefix == "" {
		c.Prefix = "aegis:"
	}
	if c.ReplicaTimeout == 0 {
		c.ReplicaTimeout = 5 * time.Second
	}
	return c, nil
}

// Guard is a [fence.Guard] on one Redis. It is safe for concurrent use, by any number of processes on the server.
//
// Its methods block until the server answers or ctx's deadline; a ctx that is cancelled earlier is noticed when the
// client's own ReadTimeout is over, at the latest. None of them is ever sent twice. Each of their errors names the
// election, and where it is known, what to do.
type Guard struct {
	cfg      Config
	client   redis.UniversalClient
	cluster  *redis.ClusterClient // the same, or nil
	commands atomic.Pointer[map[string]command]
	latest   atomic.Pointer[claim] // a cache of one
}

var _ fence.Guard = (*Guard)(nil)

// New returns a guard on the server or Cluster that client is connected to. It sends nothing; the server is looked at
// by Advance. The client stays the caller's, who closes it after the guard's last use.
//
// It refuses a client that does not heed the deadlines of contexts (set ContextTimeoutEnabled), and one that spreads
// keys over servers by itself (redis.Ring).
func New(client redis.UniversalClient, cfg Config) (*Guard, error) {
	cfg, err := cfg.validate()
	if err != nil {
		return nil, err
	}
	g := &Guard{cfg: cfg, client: client}
	var heeds bool
	switch c := client.(type) {
	case *redis.Client:
		heeds = c.Options().ContextTimeoutEnabled
	case *redis.ClusterClient:
		heeds = c.Options().ContextTimeoutEnabled
		g.cluster = c
		if cfg.AnySlot {
			return nil, errors.New("redisfence: Config.AnySlot with a client for Redis Cluster, where a script may touch one slot; use Config.Tag")
		}
	default:
		return nil, fmt.Errorf("redisfence: a guard needs a *redis.Client or a *redis.ClusterClient, not a %T: "+
			"a client that spreads keys over servers by itself moves keys away from their fence", client)
	}
	if !heeds {
		return nil, errors.New("redisfence: the client ignores the deadlines of contexts; set ContextTimeoutEnabled in its options")
	}
	return g, nil
}

// Advance makes the guard take the terms' tokens: see [fence.Guard]. All are taken or none, save on a Cluster, where
// terms whose fences lie in different slots are taken slot by slot: after an error some may be taken.
//
// It refuses a server that may evict the fence ([ErrEviction]). Further errors: those of [fence.Record.Advance],
// [fence.ErrUnknown] when the reply was lost, ctx's, or the server's own. It is safe to repeat.
func (g *Guard) Advance(ctx context.Context, terms ...fence.Term) error {
	for _, t := range terms {
		if err := fence.ValidToken(t.Token); err != nil {
			return fmt.Errorf("redisfence: advance %q: %w", t.Election, err)
		}
	}
	groups := [][]fence.Term{terms}
	if g.cluster != nil {
		bySlot := map[uint16]int{}
		groups = nil
		for _, t := range terms {
			s := slot(g.fenceKey(t.Election))
			if _, ok := bySlot[s]; !ok {
				bySlot[s] = len(groups)
				groups = append(groups, nil)
			}
			groups[bySlot[s]] = append(groups[bySlot[s]], t)
		}
	}
	for _, group := range groups {
		if len(group) == 0 {
			continue
		}
		for {
			done, err := g.advance(ctx, group)
			if err != nil {
				return err
			}
			if done {
				break
			}
		}
	}
	return nil
}

// advance takes terms of one slot, unless somebody else advances one of them at the same time: then it is not done. The
// rules are fence.Record's; the script takes their verdict if the records that it was about are still the same.
func (g *Guard) advance(ctx context.Context, terms []fence.Term) (done bool, err error) {
	var names []string
	for _, t := range terms {
		if !slices.Contains(names, t.Election) {
			names = append(names, t.Election)
		}
	}
	old, err := g.records(ctx, names)
	if err != nil {
		return false, err
	}
	next := slices.Clone(old)
	node := make([]fence.NodeID, len(names))
	for _, t := range terms {
		i := slices.Index(names, t.Election)
		r, err := next[i].Advance(t)
		if err := g.cfg.Report.Verdict(err); err != nil {
			return false, err
		}
		next[i], node[i] = r, t.Node
	}
	keys := make([]string, len(names))
	check := "1"
	if g.cfg.PolicyUnchecked {
		check = "0"
	}
	args := []any{check, time.Now().UTC().Format(time.RFC3339Nano)}
	for i, name := range names {
		keys[i] = g.fenceKey(name)
		args = append(args, encode(old[i]), encode(next[i]), string(node[i]))
	}
	v, err := g.advanceAndWait(ctx, names[0], keys, args)
	if err != nil {
		return false, err
	}
	return v == int64(1), nil
}

func (g *Guard) advanceAndWait(ctx context.Context, name string, keys []string, args []any) (any, error) {
	if g.cfg.Replicas == 0 {
		return g.run(ctx, "advance", name, g.client, advanceScript, keys, args)
	}
	node, _ := g.client.(*redis.Client)
	if g.cluster != nil {
		var err error
		if node, err = g.cluster.MasterForKey(ctx, keys[0]); err != nil {
			return nil, g.explain("advance", name, err, errNoReply)
		}
	}
	conn := node.Conn() // WAIT speaks of the writes of its own connection
	defer conn.Close()
	v, err := g.run(ctx, "advance", name, conn, advanceScript, keys, args)
	if err != nil || v != int64(1) {
		return v, err
	}
	timeout := g.cfg.ReplicaTimeout
	if end, ok := ctx.Deadline(); ok {
		timeout = min(timeout, time.Until(end)*9/10)
	}
	wait := conn.Wait(ctx, g.cfg.Replicas, max(timeout, time.Millisecond))
	if err := wait.Err(); err != nil {
		return nil, fmt.Errorf("redisfence: advance %q: the primary has taken it, but the replicas were not heard of; advance again: %w: %w", name, fence.ErrUnknown, err)
	}
	if n := wait.Val(); n < int64(g.cfg.Replicas) {
		return nil, fmt.Errorf("redisfence: advance %q: the primary has taken it, but only %d of %d replicas within %v; "+
			"mend the replication and advance again: %w", name, n, g.cfg.Replicas, timeout.Round(time.Millisecond), fence.ErrUnknown)
	}
	return v, nil
}

// Newest returns what the guard has taken for the name; the zero Record if it has taken nothing.
func (g *Guard) Newest(ctx context.Context, name string) (fence.Record, error) {
	all, err := g.records(ctx, []string{name})
	if err != nil {
		return fence.Record{}, err
	}
	return all[0], nil
}

// records returns the records of names whose fences lie in one slot, of one instant.
func (g *Guard) records(ctx context.Context, names []string) ([]fence.Record, error) {
	keys := make([]string, len(names))
	for i, name := range names {
		keys[i] = g.fenceKey(name)
	}
	v, err := g.run(ctx, "read the fence of", names[0], g.client, readScript, keys, nil)
	if err != nil {
		return nil, err
	}
	list, _ := v.([]any)
	if len(list) != len(names) {
		return nil, fmt.Errorf("redisfence: read the fence of %q: an unexpected reply %v", names[0], v)
	}
	out := make([]fence.Record, len(names))
	for i, name := range names {
		s, _ := list[i].(string)
		if out[i], err = decode(name, s); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// Names returns the names for which the guard has taken a token, sorted by their bytes. It goes through all keys of the
// server (SCAN), on a Cluster of all its primaries: for operators, not for every tick.
func (g *Guard) Names(ctx context.Context) ([]string, error) { return g.scan(ctx, "fence") }

// Reset is the way down that operators have: the name is as if it had never been advanced, and whatever token comes
// first is taken, a stale one too. Stop all writers of the name before. It reports whether there was a record.
func (g *Guard) Reset(ctx context.Context, name string) (found bool, err error) {
	v, err := g.run(ctx, "reset", name, g.client, resetScript, []string{g.fenceKey(name)}, nil)
	return v == int64(1), err
}

// scan returns the elections for which there are own keys of the kind, sorted.
func (g *Guard) scan(ctx context.Context, kind string) ([]string, error) {
	prefix := g.cfg.Prefix + kind + ":{"
	scan := func(ctx context.Context, c *redis.Client) (found []string, err error) {
		it := c.Scan(ctx, 0, glob(prefix)+"*", 1000).Iterator()
		for it.Next(ctx) {
			if _, name, ok := strings.Cut(strings.TrimPrefix(it.Val(), prefix), "}:"); ok {
				found = append(found, name)
			}
		}
		return found, it.Err()
	}
	var names []string
	var err error
	if g.cluster == nil {
		names, err = scan(ctx, g.client.(*redis.Client))
	} else {
		all := make(chan []string, 1)
		all <- nil
		err = g.cluster.ForEachMaster(ctx, func(ctx context.Context, c *redis.Client) error {
			some, err := scan(ctx, c)
			all <- append(<-all, some...)
			return err
		})
		names = <-all
	}
	if err != nil {
		return nil, g.explain("list the names of", kind, err, errNoReply)
	}
	slices.Sort(names) // SCAN may name a key twice
	return slices.Compact(names), nil
}
