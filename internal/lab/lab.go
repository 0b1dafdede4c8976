// Package lab is a real cluster to experiment on: etcd members in this process, node processes beside it, and links
// between them that can be cut, slowed and healed per direction.
//
//	node process ──link (node-a, 0)──▶ etcd member 0 ◀──peer link──▶ etcd member 1 …
//	             ──link (node-a, 1)──▶ etcd member 1
//
// Every byte between a node and a member, and between two members, passes a link of the lab, so nothing needs
// privileges, firewall rules or name spaces. A node is a name: whoever dials the addresses that [Cluster.Endpoints]
// gives for it is that node as far as the network goes, be it a process or a client in the test itself.
//
// What the lab does not do: it loses no bytes in the middle of a stream, as TCP does not; it stops members as a crash
// of the process does, not as a power failure (what they wrote reaches the disk); and its members share this
// process's CPU, so a busy test slows them all.
//
// Members' addresses stay the same over [Cluster.Stop], [Cluster.Restart] and [Cluster.Restore].
package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// Options say which cluster [Start] builds. The zero value is one member with etcd's own ticks in a temporary
// directory.
type Options struct {
	Members int       // 1 or 3; defaults to 1
	Dir     string    // for data; must hold no earlier cluster; defaults to a temporary one that Close removes
	Fast    bool      // ticks of 10 ms and elections of 100 ms instead of 100 and 1,000: the least lease is 1 s, not 2 s
	NoFsync bool      // nothing is synced to disk; a crash of the machine would lose data, one of a member does not
	Log     io.Writer // takes etcd's warnings and errors, a write at a time; defaults to none
	_       struct{}
}

const (
	startWithin = 30 * time.Second // for a cluster or a member, unless the caller's context ends earlier
	outside     = "outside"        // the node whose links are advertised to clients, and used by the lab itself
	token       = "lab"
)

// Cluster is a running lab. Its methods may be called from any goroutine; those that start and stop members run one
// at a time.
type Cluster struct {
	opts    Options
	dir     string
	ownsDir bool
	log     *zap.Logger
	ids     *identities
	members []*member

	ops sync.Mutex // held by whatever starts or stops members

	mu        sync.Mutex
	nodes     map[string][]*clientLink
	peerGates [][]*gate // [from][to]
	clients   []*clientv3.Client
	closed    bool
}

// Start builds a cluster and returns when every member is ready, or with an error that names what failed; then
// nothing is left behind. It takes 30 s at most, less if ctx ends.
func Start(ctx context.Context, opts Options) (_ *Cluster, err error) {
	if opts.Members == 0 {
		opts.Members = 1
	}
	if opts.Members != 1 && opts.Members != 3 {
		return nil, fmt.Errorf("lab: Members is %d; must be 1 or 3", opts.Members)
	}
	c := &Cluster{opts: opts, dir: opts.Dir, log: zap.NewNop(), nodes: map[string][]*clientLink{}}
	if opts.Log != nil {
		enc := zapcore.NewConsoleEncoder(zap.NewProductionEncoderConfig())
		c.log = zap.New(zapcore.NewCore(enc, zapcore.Lock(zapcore.AddSync(opts.Log)), zap.WarnLevel))
	}
	defer func() {
		if err != nil {
			_ = c.Close()
		}
	}()
	if c.dir == "" {
		if c.dir, err = os.MkdirTemp("", "aegis-lab-"); err != nil {
			return nil, fmt.Errorf("lab: %w", err)
		}
		c.ownsDir = true
	}
	if old, _ := filepath.Glob(filepath.Join(c.dir, "member-*")); len(old) > 0 {
		return nil, fmt.Errorf("lab: %s holds an earlier cluster (%s)", c.dir, filepath.Base(old[0]))
	}
	if c.ids, err = newIdentities(c.dir, opts.Members); err != nil {
		return nil, fmt.Errorf("lab: certificates of the members: %w", err)
	}
	for range opts.Members {
		row := make([]*gate, opts.Members)
		for i := range row {
			row[i] = newGate()
		}
		c.peerGates = append(c.peerGates, row)
	}
	for i := range opts.Members {
		m := &member{index: i, dir: filepath.Join(c.dir, fmt.Sprintf("member-%d", i))}
		if m.peers, err = newLink(m.dialPeer, c.identifyPeer(i)); err != nil {
			return nil, fmt.Errorf("lab: peer link of member %d: %w", i, err)
		}
		c.members = append(c.members, m)
	}
	c.Endpoints(outside)
	if err := c.startAll(ctx); err != nil {
		return nil, err
	}
	return c, nil
}

// Close stops all members, closes the links and the clients of [Cluster.Client], and removes the directory if Start
// made it. It takes about a second, may be called more than once, and reports only what it could not remove.
func (c *Cluster) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	clients := c.clients
	c.mu.Unlock()
	for _, cli := range clients {
		_ = cli.Close() // a client that the test has closed already says so
	}
	c.ops.Lock()
	defer c.ops.Unlock()
	c.stopAll()
	for _, links := range c.nodes {
		for _, l := range links {
			l.close()
		}
	}
	for _, m := range c.members {
		m.peers.close()
	}
	if !c.ownsDir {
		return nil
	}
	if err := os.RemoveAll(c.dir); err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	return nil
}

// Client returns an etcd client that reaches the members as the given node. Close closes it, if the caller has not.
func (c *Cluster) Client(node string) (*clientv3.Client, error) {
	cli, err := clientv3.New(clientv3.Config{
		Endpoints:   c.Endpoints(node),
		DialTimeout: 5 * time.Second,
		Logger:      zap.NewNop(),
	})
	if err != nil {
		return nil, fmt.Errorf("lab: client of %s: %w", node, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		_ = cli.Close()
		return nil, errors.New("lab: the cluster is closed")
	}
	c.clients = append(c.clients, cli)
	return cli, nil
}

// Size returns the number of members, running or not. Members are numbered from 0.
func (c *Cluster) Size() int { return len(c.members) }

// initialCluster is etcd's spelling of all members and their advertised peer addresses.
func (c *Cluster) initialCluster() string {
	var parts []string
	for _, m := range c.members {
		parts = append(parts, m.name()+"="+m.peerURL())
	}
	return strings.Join(parts, ",")
}

func dialTCP(addr string) (net.Conn, error) { return net.DialTimeout("tcp", addr, dialWithin) }
