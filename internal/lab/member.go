package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"sync"
	"sync/atomic"

	"go.etcd.io/etcd/server/v3/embed"
)

// member is one etcd server and the link that other members reach it by. It listens on ports that change with each
// start; the links that lead there do not.
type member struct {
	index int
	dir   string
	peers *link

	// Cluster.ops guards starting and stopping; links and Leader look at any time.
	running atomic.Pointer[embed.Etcd]
	down    atomic.Bool // it has been stopped and not been started since
}

func (m *member) name() string    { return fmt.Sprintf("m%d", m.index) }
func (m *member) peerURL() string { return "https://" + m.peers.addr() }

var errStopped = errors.New("the member is stopped")

func (m *member) dialPeer() (net.Conn, error) {
	e := m.running.Load()
	if e == nil {
		return nil, errStopped
	}
	return dialTCP(e.Peers[0].Addr().String())
}

func (m *member) dialClient() (net.Conn, error) {
	e := m.running.Load()
	if e == nil {
		return nil, errStopped
	}
	return dialTCP(e.Clients[0].Addr().String())
}

// launch starts the member without waiting until it is ready.
func (c *Cluster) launch(m *member) error {
	cfg := embed.NewConfig()
	cfg.Name, cfg.Dir = m.name(), m.dir
	any := url.URL{Scheme: "http", Host: "127.0.0.1:0"}
	cfg.ListenPeerUrls, cfg.ListenClientUrls = []url.URL{any}, []url.URL{any}
	cfg.AdvertisePeerUrls = []url.URL{{Scheme: "https", Host: m.peers.addr()}}
	cfg.AdvertiseClientUrls = []url.URL{{Scheme: "http", Host: c.Endpoints(outside)[m.index]}}
	cfg.PeerTLSInfo = c.ids.tlsInfo(m.index)
	cfg.InitialCluster, cfg.InitialClusterToken = c.initialCluster(), token
	cfg.UnsafeNoFsync = c.opts.NoFsync
	cfg.EnableGRPCGateway = false // it would dial port 0
	if c.opts.Fast {
		cfg.TickMs, cfg.ElectionMs = 10, 100
	}
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(c.log.Named(m.name()))
	m.down.Store(false)
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		return fmt.Errorf("lab: start member %d: %w", m.index, err)
	}
	m.running.Store(e)
	return nil
}

// awaitReady waits until the member serves clients, which takes a quorum.
func (m *member) awaitReady(ctx context.Context) error {
	e := m.running.Load()
	select {
	case <-e.Server.ReadyNotify():
		return nil
	case err := <-e.Err():
		return fmt.Errorf("lab: member %d failed: %w", m.index, err)
	case <-ctx.Done():
		return fmt.Errorf("lab: member %d is not ready: %w", m.index, context.Cause(ctx))
	}
}

func (c *Cluster) startAll(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	for _, step := range []func(*member) error{c.launch, func(m *member) error { return m.awaitReady(ctx) }} {
		errs := make([]error, len(c.members))
		var wg sync.WaitGroup
		for i, m := range c.members {
			wg.Go(func() { errs[i] = step(m) })
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			return err
		}
	}
	return nil
}

// halt stops the member as a crash does: nothing is handed over.
func (c *Cluster) halt(m *member) {
	e := m.running.Swap(nil)
	if e == nil {
		return
	}
	// The network goes first: otherwise a member waits for its clients, and for answers from members that are stopped or
	// cut off, for seconds.
	m.down.Store(true)
	hangUp := func() {
		m.peers.drop(server)
		for _, l := range c.linksTo(m.index) {
			l.drop(server)
		}
		for _, other := range c.members {
			other.peers.drop(m.index)
		}
	}
	hangUp()
	e.Server.HardStop()
	hangUp() // what was being dialed meanwhile
	e.Close()
}

func (c *Cluster) stopAll() {
	var wg sync.WaitGroup
	for _, m := range c.members {
		wg.Go(func() { c.halt(m) })
	}
	wg.Wait()
}

// Stop stops a member as a crash of its process does: it hands over nothing, its connections are reset and new ones
// refused. It returns when the member has stopped; a member that is stopped already is no error.
func (c *Cluster) Stop(member int) {
	c.ops.Lock()
	defer c.ops.Unlock()
	c.halt(c.members[member])
}

// Restart starts a stopped member again, with the same data behind the same addresses, and returns when it is ready,
// which takes a quorum of running members. After an error for want of one it runs on and becomes ready with it. It takes
// 30 s at most, less if ctx ends.
func (c *Cluster) Restart(ctx context.Context, member int) error {
	c.ops.Lock()
	defer c.ops.Unlock()
	ctx, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	m := c.members[member]
	if m.running.Load() == nil {
		if c.isClosed() {
			return errors.New("lab: the cluster is closed")
		}
		if err := c.launch(m); err != nil {
			return err
		}
	}
	return m.awaitReady(ctx)
}

func (c *Cluster) isClosed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}

// Running tells whether a member runs.
func (c *Cluster) Running(member int) bool { return c.members[member].running.Load() != nil }

// Leader returns the running member that believes itself leader, in the latest term if there are several (an isolated
// leader goes on believing for about an election timeout); false when none does.
func (c *Cluster) Leader() (member int, ok bool) {
	var latest uint64
	for i, m := range c.members {
		e := m.running.Load()
		if e == nil {
			continue
		}
		// The term is read first: it may belong to an older belief, never to a later one.
		term := e.Server.Term()
		if e.Server.Leader() == e.Server.MemberID() && term >= latest {
			member, ok, latest = i, true, term
		}
	}
	return member, ok
}
