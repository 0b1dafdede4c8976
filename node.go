package aegis

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"time"

	"aegis/internal/clock"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// Bounds of [Config.TTL].
const (
	MinTTL = 2 * time.Second // etcd grants no less with its default election timeout
	MaxTTL = 5 * time.Minute // longer leases meet etcd's checkpoints, and a renewal's answer says more than the server keeps
)

// Config says who a node is. The zero value is ready for use.
type Config struct {
	// ID names the node; at most one living process may use it at a time. Defaults to host-pid-random, which never
	// collides; a fixed one is for operators who want to recognise it, and a restart then waits for the old lease to
	// run out. 1 to 255 bytes of UTF-8 without control characters.
	ID NodeID
	// Prefix of all keys in etcd. Defaults to [DefaultPrefix]; [NoPrefix] for none.
	Prefix string
	// TTL of the node's lease: how long after a leader's death another can follow at the earliest. Whole seconds,
	// [MinTTL] to [MaxTTL]. Defaults to 10 s.
	TTL time.Duration
	// Margin before the lease's end at which trust ends: what this process may need to stop, and what clocks may
	// drift. More than 0, less than TTL/2. Defaults to TTL/5.
	Margin time.Duration
	// Meta is shown to others, by `aegis nodes` for one.
	Meta map[string]string
	// Addresses at which this node can be reached, shown to others.
	Addresses []string
	// Unlisted nodes write no node key: they are not among the members, and several may share an ID.
	Unlisted bool
	// Logger takes one line per transition. Defaults to slog.Default().
	Logger *slog.Logger
	// OnEvent is called for each transition, in order, on one goroutine. The queue before it holds 256 events; when
	// it overflows, an EventDropped says how many are missing.
	OnEvent func(Event)

	_ struct{}
}

func (c Config) validate() (Config, error) {
	if c.ID == "" {
		host, err := os.Hostname()
		if err != nil {
			host = "host"
		}
		c.ID = NodeID(fmt.Sprintf("%s-%d-%06x", host, os.Getpid(), rand.N(1<<24)))
	}
	if err := validName("node id", string(c.ID)); err != nil {
		return c, err
	}
	if c.Prefix != NoPrefix && strings.ContainsRune(c.Prefix, 0) {
		return c, fmt.Errorf("%w: prefix %q contains a zero byte", ErrInvalidName, c.Prefix)
	}
	if c.TTL == 0 {
		c.TTL = 10 * time.Second
	}
	if c.TTL < MinTTL || c.TTL > MaxTTL || c.TTL%time.Second != 0 {
		return c, fmt.Errorf("aegis: TTL is %v; it must be whole seconds from %v to %v", c.TTL, MinTTL, MaxTTL)
	}
	if c.Margin == 0 {
		c.Margin = c.TTL / 5
	}
	if c.Margin < 0 || c.Margin >= c.TTL/2 {
		return c, fmt.Errorf("aegis: Margin is %v; it must be more than 0 and less than half of TTL (%v)", c.Margin, c.TTL)
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c, nil
}

// Node is one process of the cluster: one etcd lease, one watch and one clock, however many elections it enters. It
// survives the loss of its lease, of its connection and of etcd, and comes back by itself. It is safe for concurrent
// use.
type Node struct {
	cli     etcd
	cfg     Config
	keys    keyspace
	clk     clock.Clock
	events  *events
	view    *view
	host    string
	started time.Time
	past    past // what etcd has shown so far

	ctx    context.Context // ends when the node has left or the client is closed
	cancel context.CancelFunc
	wg     sync.WaitGroup // goroutines that end with ctx

	leaving   context.Context // ends when Leave is called
	leave     context.CancelCauseFunc
	idle      chan struct{} // closed when the last call has ended after leaving
	leaveTurn chan struct{} // holds one token: serializes Leave
	left      bool          // by whoever has the turn

	mu          sync.Mutex
	lease       *lease                      // the present one; nil while there is none
	ready       chan struct{}               // closed while there is one
	leases      map[clientv3.LeaseID]*lease // those whose keys may still be there
	slots       map[string]*slot            // elections entered
	sweeping    map[string]bool             // keys being swept
	calls       int                         // of Campaign, Await and Run, under way
	incarnation int64                       // ModRevision of the node key that this process wrote last
	halted      *haltedAt                   // etcd went back
	waiting     string                      // what the node waits for; "" when it is ready
	err         error                       // the latest failure since the latest success
	lastRenewal time.Time
}

// Join makes this process a node: it grants a lease, writes the node key, lists and watches the keys under the
// prefix. ctx bounds the call only, which also gives up by itself after max(TTL, 5 s), save where it waits for an
// earlier process of the same ID whose lease is running out, saying so in the log.
//
// Errors: what is wrong with cfg; etcd's own when it cannot be reached or refuses; [ErrNodeIDTaken] naming host and
// pid when a living process has the ID; [ErrTokenWentBack] when etcd is not the cluster that wrote the keys. The
// caller keeps the client and closes it after [Node.Leave].
func Join(ctx context.Context, cli *clientv3.Client, cfg Config) (*Node, error) {
	cfg, err := cfg.validate()
	if err != nil {
		return nil, err
	}
	host, _ := os.Hostname()
	n := &Node{cli: etcd{cli}, cfg: cfg, keys: newKeyspace(cfg.Prefix), clk: clock.From(cli.Ctx()), host: host, started: time.Now(),
		events: newEvents(cfg.Logger, cfg.OnEvent),
		ready:  make(chan struct{}), leaveTurn: make(chan struct{}, 1), idle: make(chan struct{}),
		leases: map[clientv3.LeaseID]*lease{}, slots: map[string]*slot{}, sweeping: map[string]bool{}}
	n.ctx, n.cancel = context.WithCancel(cli.Ctx())
	n.leaving, n.leave = context.WithCancelCause(context.Background())
	n.view = newView(n.cli, n.keys, cfg.TTL/3, cfg.Logger, n.reconcile)
	n.view.past, n.view.wentBack = &n.past, n.halt

	if err := n.join(ctx); err != nil {
		_ = n.Leave(ctx) // what it cannot delete runs out with the lease
		return nil, fmt.Errorf("aegis: join %s as %s: %w", strings.Join(cli.Endpoints(), ","), cfg.ID, err)
	}
	return n, nil
}

func (n *Node) join(ctx context.Context) error {
	l, err := n.openLease(ctx, n.grantTimeout())
	if err != nil {
		return err
	}
	if err := n.install(l); err != nil {
		n.abandon(ctx, l, err)
		return err
	}
	n.events.emit(Event{Kind: EventJoined})
	n.wg.Go(func() { n.view.run(n.ctx) })
	n.wg.Go(func() { n.keep(l) })
	return n.awaitView(ctx)
}

// ID returns the node's id.
func (n *Node) ID() NodeID { return n.cfg.ID }

// awaitView waits until the watch is open: one that is opened after the fact is served late.
func (n *Node) awaitView(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, max(n.cfg.TTL, 5*time.Second))
	defer cancel()
	sub, unsubscribe := n.view.subscribe("")
	defer unsubscribe()
	for {
		if open, _, err := n.view.status(); open {
			return nil
		} else if permanent(err) {
			return err
		}
		select {
		case <-sub.c:
		case <-ctx.Done():
			_, _, err := n.view.status()
			return errors.Join(context.Cause(ctx), err)
		}
	}
}

// callTimeout bounds unary calls that are not renewals.
func (n *Node) callTimeout() time.Duration { return n.cfg.TTL / 3 }

// detached returns a context for cleaning up, which goes on when ctx is over, within a bound.
func (n *Node) detached(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), n.callTimeout())
}

// grantTimeout bounds a patient attempt to get a lease. Attempts to get back in begin with less, so that one that was
// sent into a black hole is not waited for long after the hole has closed.
func (n *Node) grantTimeout() time.Duration { return max(n.callTimeout(), 5*time.Second) }

// openLease grants a lease and registers the node under it.
func (n *Node) openLease(ctx context.Context, timeout time.Duration) (*lease, error) {
	for {
		tctx, cancel := context.WithTimeout(ctx, timeout)
		start := clock.Start(n.clk)
		resp, err := n.cli.Grant(tctx, int64(n.cfg.TTL/time.Second))
		cancel()
		if err != nil {
			return nil, fmt.Errorf("grant a lease: %w", err)
		}
		l := newLease(resp.ID, n.clk, start, time.Duration(resp.TTL)*time.Second, n.cfg.Margin, n.leaseEnded)
		other, err := n.register(ctx, l, resp.GetClusterId())
		if err == nil && other == nil {
			return l, nil
		}
		n.abandon(ctx, l, cmp.Or(err, ErrNodeIDTaken))
		if err == nil {
			err = n.waitOut(ctx, other)
		}
		if err != nil {
			return nil, err
		}
	}
}

// abandon ends a lease that was never used.
func (n *Node) abandon(ctx context.Context, l *lease, reason error) {
	l.end(reason)
	ctx, cancel := n.detached(ctx)
	defer cancel()
	_, _ = n.cli.Revoke(ctx, l.id) // or it runs out
	<-l.quiet
}

// install makes l the node's present lease, unless the node is leaving or has halted meanwhile.
func (n *Node) install(l *lease) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.leaving.Err() != nil {
		return ErrLeft
	}
	if n.halted != nil {
		return n.halted.err
	}
	for id, old := range n.leases { // those that have certainly run out
		if old.left() < -10*n.cfg.TTL {
			delete(n.leases, id)
		}
	}
	n.leases[l.id] = l
	if l.ended.Load() {
		return nil
	}
	n.lease, n.waiting, n.err = l, "", nil
	n.lastRenewal = time.Now()
	close(n.ready)
	return nil
}

// leaseEnded ends every term under l. It is called by whoever finds that trust is over: the alarm, a renewal, or a
// caller of Held.
func (n *Node) leaseEnded(l *lease, reason error) {
	n.mu.Lock()
	installed := n.lease == l
	if installed {
		n.lease, n.ready, n.waiting, n.err = nil, make(chan struct{}), "a new lease", reason
	}
	var terms []*Leadership
	for _, s := range n.slots {
		if s.led != nil && s.led.lease == l {
			terms = append(terms, s.led)
		}
	}
	n.mu.Unlock()
	for _, t := range terms {
		t.end(reason)
	}
	if installed && !errors.Is(reason, ErrLeft) {
		n.events.emit(Event{Kind: EventLeaseLost, Err: reason})
	}
}

// trustedLease returns the present lease if it is trusted.
func (n *Node) trustedLease() (*lease, error) {
	n.mu.Lock()
	l, waiting, err := n.lease, n.waiting, n.err
	n.mu.Unlock()
	if l != nil && l.trusted() {
		return l, nil
	}
	if n.leaving.Err() != nil {
		return nil, ErrLeft
	}
	return nil, errors.Join(fmt.Errorf("%w: waiting for %s", ErrNotReady, waiting), err)
}

// awaitLease waits until the node has a trusted lease.
func (n *Node) awaitLease(ctx context.Context) (*lease, error) {
	for {
		n.mu.Lock()
		l, ready := n.lease, n.ready
		n.mu.Unlock()
		if l != nil && l.trusted() {
			return l, nil
		}
		if l != nil { // its end is being dealt with
			ready = l.told
		}
		select {
		case <-ready:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// keep renews the lease and gets a new one whenever it is lost, until the node leaves.
func (n *Node) keep(l *lease) {
	ctx, cancel := context.WithCancel(n.ctx)
	defer cancel()
	defer context.AfterFunc(n.leaving, cancel)() // no new lease from then on; the present one is renewed until Leave ends it
	for {
		n.renewUntilEnd(l)
		timeout := time.Second
		for pause := 25 * time.Millisecond; ; pause = min(2*pause, maxPause) {
			if ctx.Err() != nil || n.leaving.Err() != nil { // the latter is there before ctx follows it
				return
			}
			err := n.awaitRaise()
			if err == nil {
				l, err = n.openLease(ctx, timeout)
				timeout = min(2*timeout, n.grantTimeout())
			}
			if err == nil {
				if err = n.install(l); err == nil {
					n.events.emit(Event{Kind: EventJoined})
					break
				}
				n.abandon(ctx, l, err)
			}
			n.failed("a new lease", err)
			n.poke()
			sleep(ctx, pause/2+rand.N(pause))
		}
	}
}

// maxPause bounds the pauses between attempts to get back in.
const maxPause = 500 * time.Millisecond

// poke has the client's connection try again at once: gRPC's own pauses grow to two minutes.
func (n *Node) poke() {
	if conn := n.cli.ActiveConnection(); conn != nil {
		conn.ResetConnectBackoff()
	}
}

func (n *Node) failed(waiting string, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.waiting, n.err = waiting, err
}

// renewUntilEnd renews l every TTL/3 until it has ended or the node leaves.
func (n *Node) renewUntilEnd(l *lease) {
	t := l.trust.Load()
	timer := time.NewTimer(n.cfg.TTL/3 - t.from.Elapsed(n.clk)) // counted from the grant
	defer timer.Stop()
	for {
		select {
		case <-l.told:
			return
		case <-n.ctx.Done():
			return
		case <-timer.C:
		}
		began := time.Now()
		n.renewOnce(l)
		timer.Reset(max(n.cfg.TTL/3-time.Since(began), 0))
	}
}

// renewOnce is one round: a renewal, repeated while trust lasts, then a look whether this is still the same etcd.
func (n *Node) renewOnce(l *lease) {
	timeout := n.cfg.TTL / 6
	for l.trusted() && n.ctx.Err() == nil {
		ctx, cancel := context.WithTimeout(n.ctx, timeout)
		start := clock.Start(n.clk)
		resp, err := n.cli.KeepAliveOnce(ctx, l.id)
		cancel()
		if errors.Is(err, rpctypes.ErrLeaseNotFound) {
			l.end(errLeaseGone)
			return
		}
		if err == nil {
			if !l.renewed(start, time.Duration(resp.TTL)*time.Second) {
				return
			}
			n.mu.Lock()
			n.lastRenewal, n.err = time.Now(), nil
			n.mu.Unlock()
			break
		}
		n.failed("", fmt.Errorf("renew the lease: %w", err))
		n.poke()
		sleep(n.ctx, timeout/8+rand.N(timeout/8))
	}
	if l.trusted() && n.ctx.Err() == nil {
		n.checkSameEtcd(l, timeout)
	}
}
