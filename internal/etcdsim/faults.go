package etcdsim

import (
	"maps"
	"slices"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// Stop takes the server down: streams break and new ones wait, unary calls fail with Unavailable, leases do not run
// out, data stays.
func (c *Cluster) Stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stop()
}

func (c *Cluster) stop() {
	if !c.up {
		return
	}
	c.up, c.started = false, make(chan struct{})
	c.breakAll(false, errConnection)
}

// Start brings the server up again. Every lease has its full TTL anew, as after a change of etcd's leader.
func (c *Cluster) Start() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.start()
}

func (c *Cluster) start() {
	if c.up {
		return
	}
	c.up = true
	c.term++
	close(c.started)
	c.refreshLeases()
}

// LeaderChange is a change of etcd's leader that took long: every lease has its full TTL anew, and streams that
// require a leader end with ErrNoLeader. Other streams go on.
func (c *Cluster) LeaderChange() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.term++
	c.refreshLeases()
	c.breakAll(true, rpctypes.ErrGRPCNoLeader)
}

func (c *Cluster) breakAll(requireLeader bool, err error) {
	for _, id := range slices.Sorted(maps.Keys(c.links)) {
		for _, s := range c.links[id].ordered() {
			if s.leader || !requireLeader {
				c.breakStream(s, err)
			}
		}
	}
}

// Revoke ends a lease and deletes its keys, as an operator may. It returns rpctypes.ErrLeaseNotFound when there is
// none.
func (c *Cluster) Revoke(id clientv3.LeaseID) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return rpctypes.Error(c.revoke(int64(id)))
}

// Compact forgets what was before rev. It returns rpctypes.ErrCompacted or rpctypes.ErrFutureRev.
func (c *Cluster) Compact(rev int64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return rpctypes.Error(c.compactTo(rev))
}

// Snapshot is what [Cluster.Restore] brings back: data and leases, with their TTLs and not with their age.
type Snapshot struct {
	store    *store
	leases   map[int64]lease
	attached map[string]int64
}

// Snapshot takes one.
func (c *Cluster) Snapshot() *Snapshot {
	c.mu.Lock()
	defer c.mu.Unlock()
	return snapshot(c.store, c.leases, c.attached)
}

func snapshot(s *store, leases map[int64]*lease, attached map[string]int64) *Snapshot {
	n := &Snapshot{store: s.clone(), leases: map[int64]lease{}, attached: maps.Clone(attached)}
	for id, l := range leases {
		n.leases[id] = lease{id: id, ttl: l.ttl, keys: maps.Clone(l.keys)}
	}
	return n
}

// RestoreOption changes what [Cluster.Restore] does.
type RestoreOption func(*Cluster)

// AsCluster gives the restored cluster another id.
func AsCluster(id uint64) RestoreOption { return func(c *Cluster) { c.clusterID = id } }

// BumpRevision raises the revision by n and marks what is before as compacted, as etcdutl does with
// --bump-revision and --mark-compacted.
func BumpRevision(n int64) RestoreOption {
	return func(c *Cluster) {
		c.store.rev += n
		c.store.compactTo(c.store.rev)
	}
}

// Restore replaces everything by the snapshot, in one restart of the server: the revision goes back, leases that
// were granted since are gone, those of the snapshot live and have their full TTL anew. A snapshot can be restored
// any number of times.
func (c *Cluster) Restore(sn *Snapshot, opts ...RestoreOption) {
	c.mu.Lock()
	defer c.mu.Unlock()
	wasUp := c.up
	c.stop()
	c.store, c.attached, c.leases = sn.store.clone(), maps.Clone(sn.attached), map[int64]*lease{}
	for id, l := range sn.leases {
		c.leases[id] = &lease{id: id, ttl: l.ttl, keys: maps.Clone(l.keys)}
	}
	for _, o := range opts {
		o(c)
	}
	if wasUp {
		c.start()
	}
}

// Machines returns the ids of all machines that the cluster has heard of, sorted.
func (c *Cluster) Machines() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Sorted(maps.Keys(c.links))
}
