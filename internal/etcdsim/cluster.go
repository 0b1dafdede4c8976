package etcdsim

import (
	"context"
	"strings"
	"sync"
	"time"

	"aegis/internal/clock"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// Cluster is the simulated etcd with the links of all machines to it. Its methods are safe for concurrent use, take
// effect at once and, unless they say so, do not block.
type Cluster struct {
	toServer, fromServer time.Duration // latency to the server, from the server
	minTTL               time.Duration
	expiryTick           time.Duration
	progressEvery        time.Duration
	resend               bool

	mu   sync.Mutex
	loop loop

	up        bool
	started   chan struct{} // closed while the server is up
	clusterID uint64
	term      uint64

	store    *store
	leases   map[int64]*lease
	attached map[string]int64 // key to lease
	leaseSeq int64
	granted  map[int64]int64 // TTLs of all leases that there ever were, for lies
	nextLook time.Time       // when the leases are looked at; zero when no look is planned

	watchers []*watcher
	nextSync time.Time // when unsynced watchers are served; zero when no service is planned
	links    map[string]*link

	streamSeq uint64
}

// What etcd's own default cluster of one member calls itself: both have their highest bit set.
const (
	defaultClusterID = 0xcdf818194e3a8c32
	memberID         = 0x8e9e05c52164694d
)

// Option changes what [New] makes.
type Option func(*Cluster)

// WithLatency sets how long a message takes to the server and from it. Defaults to 500 µs each.
func WithLatency(to, from time.Duration) Option {
	return func(c *Cluster) { c.toServer, c.fromServer = to, from }
}

// WithClusterID sets the id in every reply's header. Defaults to the id of etcd's own default cluster.
func WithClusterID(id uint64) Option { return func(c *Cluster) { c.clusterID = id } }

// WithMinTTL sets the least TTL of a lease, in whole seconds rounded up. Defaults to 2 s.
func WithMinTTL(d time.Duration) Option { return func(c *Cluster) { c.minTTL = d } }

// WithExpiryTick sets how often leases are looked at, so how late they may end. Defaults to 500 ms; 0 ends each on
// the dot, the earliest that etcd may.
func WithExpiryTick(d time.Duration) Option { return func(c *Cluster) { c.expiryTick = d } }

// WithProgressInterval sets how often watches that asked for progress are told. Defaults to 10 minutes.
func WithProgressInterval(d time.Duration) Option { return func(c *Cluster) { c.progressEvery = d } }

// WithResend has clients send again what failed, as the retry interceptor of a clientv3 with a connection does: any
// unary call that was answered Canceled or DeadlineExceeded while the caller's context lives, and reads, grants and
// revokes that were answered Unavailable; up to 100 times, 25 ms apart. Off by default.
func WithResend() Option { return func(c *Cluster) { c.resend = true } }

// New returns an empty etcd at revision 1. It may be called outside the bubble, its methods may not.
func New(opts ...Option) *Cluster {
	c := &Cluster{
		toServer: 500 * time.Microsecond, fromServer: 500 * time.Microsecond,
		minTTL: 2 * time.Second, expiryTick: 500 * time.Millisecond, progressEvery: 10 * time.Minute,
		up: true, clusterID: defaultClusterID, term: 2,
		store: newStore(), leases: map[int64]*lease{}, attached: map[string]int64{}, granted: map[int64]int64{},
		leaseSeq: 0x694d81417acd4700,
		links:    map[string]*link{},
	}
	for _, o := range opts {
		o(c)
	}
	return c
}

// Client returns a real client for the machine called id. clock.From(cli.Ctx()) finds the machine's clock. Several
// clients of one machine share its link and its clock. Close the cluster before the bubble ends.
func (c *Cluster) Client(id string) *clientv3.Client {
	c.mu.Lock()
	l := c.link(id)
	c.mu.Unlock()
	cli := clientv3.NewCtxClient(clock.With(context.Background(), l.clock))
	cn := &conn{c: c, l: l, ctx: cli.Ctx()}
	cli.KV = clientv3.NewKVFromKVClient(pb.NewKVClient(cn), cli)
	cli.Lease = clientv3.NewLeaseFromLeaseClient(pb.NewLeaseClient(cn), cli, time.Second)
	cli.Watcher = clientv3.NewWatchFromWatchClient(pb.NewWatchClient(cn), cli)
	cli.Cluster = clientv3.NewClusterFromClusterClient(pb.NewClusterClient(cn), cli)
	cli.Maintenance = clientv3.NewMaintenanceFromMaintenanceClient(pb.NewMaintenanceClient(cn), cli)
	cli.Auth = clientv3.NewAuthFromAuthClient(pb.NewAuthClient(cn), cli)
	c.mu.Lock()
	l.clients = append(l.clients, cli)
	c.mu.Unlock()
	return cli
}

// Clock returns the clock of the machine called id.
func (c *Cluster) Clock(id string) *clock.Fake {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.link(id).clock
}

// Close closes all clients of all machines and waits, 300 ms, until the last of their goroutines have ended: a watch
// that nobody reads any more goes on for a quarter of a second, and a bubble must not end before.
func (c *Cluster) Close() {
	c.mu.Lock()
	var clients []*clientv3.Client
	for _, l := range c.links {
		clients = append(clients, l.clients...)
		l.clients = nil
	}
	c.mu.Unlock()
	for _, cli := range clients {
		_ = cli.Close() // context.Canceled, always
	}
	time.Sleep(300 * time.Millisecond)
}

// Revision returns the newest revision.
func (c *Cluster) Revision() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.store.rev
}

// ClusterID returns the id that replies carry at present.
func (c *Cluster) ClusterID() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.clusterID
}

// KV is one key as [Cluster.Dump] shows it.
type KV struct {
	Key, Value        string
	Created, Modified int64 // revisions
	Version           int64
	Lease             clientv3.LeaseID
}

// Dump returns the keys that begin with prefix, in order, as they are now.
func (c *Cluster) Dump(prefix string) []KV {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []KV
	for _, kv := range c.store.all(span{key: prefix}, c.store.rev) {
		if !strings.HasPrefix(string(kv.Key), prefix) {
			break
		}
		out = append(out, dumped(kv))
	}
	return out
}

func dumped(kv *mvccpb.KeyValue) KV {
	return KV{
		Key: string(kv.Key), Value: string(kv.Value), Created: kv.CreateRevision, Modified: kv.ModRevision,
		Version: kv.Version, Lease: clientv3.LeaseID(kv.Lease),
	}
}

// Leases returns the leases that live on the server, with the time that each has left: zero or less for one that has
// run out and was not looked at yet.
func (c *Cluster) Leases() map[clientv3.LeaseID]time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make(map[clientv3.LeaseID]time.Duration, len(c.leases))
	for id, l := range c.leases {
		out[clientv3.LeaseID(id)] = time.Until(l.deadline)
	}
	return out
}

func (c *Cluster) header(rev int64) *pb.ResponseHeader {
	return &pb.ResponseHeader{ClusterId: c.clusterID, MemberId: memberID, Revision: rev, RaftTerm: c.term}
}

// tick returns the first of the server's ticks that is not before t. Ticks have an odd phase, so that what tests do
// at round times does not fall on them.
func (c *Cluster) tick(t time.Time, every time.Duration) time.Time {
	if every <= 0 {
		return t
	}
	const phase = 137 * time.Millisecond
	since := time.Duration(t.Add(-phase).UnixNano()) % every
	if since == 0 {
		return t
	}
	return t.Add(every - since)
}
