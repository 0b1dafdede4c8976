package etcdsim

import (
	"cmp"
	"maps"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

const maxLeaseTTL = 9_000_000_000 // seconds

type lease struct {
	id       int64
	ttl      int64 // seconds
	deadline time.Time
	keys     map[string]struct{}
}

func (l *lease) refresh(now time.Time) { l.deadline = now.Add(time.Duration(l.ttl) * time.Second) }

func (c *Cluster) grant(r *pb.LeaseGrantRequest) (*pb.LeaseGrantResponse, error) {
	if r.TTL > maxLeaseTTL {
		return nil, rpctypes.ErrGRPCLeaseTTLTooLarge
	}
	id := r.ID
	for id == 0 || r.ID == 0 && c.leases[id] != nil {
		c.leaseSeq++
		id = c.leaseSeq
	}
	if c.leases[id] != nil {
		return nil, rpctypes.ErrGRPCLeaseExist
	}
	l := &lease{id: id, ttl: max(r.TTL, int64((c.minTTL+time.Second-1)/time.Second)), keys: map[string]struct{}{}}
	l.refresh(time.Now())
	c.leases[id] = l
	c.granted[id] = l.ttl
	c.planLook(l.deadline)
	return &pb.LeaseGrantResponse{Header: c.header(c.store.rev), ID: id, TTL: l.ttl}, nil
}

// revoke deletes the lease and, in one revision, all its keys.
func (c *Cluster) revoke(id int64) error {
	l := c.leases[id]
	if l == nil {
		return rpctypes.ErrGRPCLeaseNotFound
	}
	t := &tx{c: c, s: c.store}
	for _, k := range slices.Sorted(maps.Keys(l.keys)) {
		t.remove(k)
	}
	delete(c.leases, id)
	t.end()
	return nil
}

// renew returns the TTL, 0 when the lease is gone. It does not answer at all for a lease that has run out but has
// not been looked at yet: etcd waits for the end of such a lease, and so must the caller.
func (c *Cluster) renew(id int64, now time.Time) (ttl int64, ok bool) {
	l := c.leases[id]
	if l == nil {
		return 0, true
	}
	if !now.Before(l.deadline) {
		return 0, false
	}
	l.refresh(now)
	return l.ttl, true
}

func (c *Cluster) timeToLive(r *pb.LeaseTimeToLiveRequest) *pb.LeaseTimeToLiveResponse {
	l := c.leases[r.ID]
	if l == nil {
		return &pb.LeaseTimeToLiveResponse{Header: c.header(c.store.rev), ID: r.ID, TTL: -1}
	}
	resp := &pb.LeaseTimeToLiveResponse{
		Header: c.header(c.store.rev), ID: r.ID, TTL: int64(time.Until(l.deadline).Seconds()), GrantedTTL: l.ttl,
	}
	if r.Keys {
		for _, k := range slices.Sorted(maps.Keys(l.keys)) {
			resp.Keys = append(resp.Keys, []byte(k))
		}
	}
	return resp
}

func (c *Cluster) byDeadline() []*lease {
	return slices.SortedFunc(maps.Values(c.leases), func(a, b *lease) int {
		return cmp.Or(a.deadline.Compare(b.deadline), cmp.Compare(a.id, b.id))
	})
}

func (c *Cluster) allLeases() *pb.LeaseLeasesResponse {
	resp := &pb.LeaseLeasesResponse{Header: c.header(c.store.rev)}
	for _, l := range c.byDeadline() {
		resp.Leases = append(resp.Leases, &pb.LeaseStatus{ID: l.id})
	}
	return resp
}

// planLook sees to it that the leases are looked at when the one with the given deadline may have run out.
func (c *Cluster) planLook(deadline time.Time) {
	at := c.tick(deadline, c.expiryTick)
	if !c.up || !c.nextLook.IsZero() && !at.Before(c.nextLook) {
		return
	}
	c.nextLook = at
	c.at(at, func() { c.lookAtLeases(at) })
}

// planNextLook plans for the lease that runs out first.
func (c *Cluster) planNextLook() {
	var first *lease
	for _, l := range c.leases {
		if first == nil || l.deadline.Before(first.deadline) {
			first = l
		}
	}
	if first != nil {
		c.planLook(first.deadline)
	}
}

func (c *Cluster) lookAtLeases(planned time.Time) {
	if !c.nextLook.Equal(planned) {
		return // an earlier look was planned after this one, and has planned the next
	}
	c.nextLook = time.Time{}
	if !c.up {
		return
	}
	now := time.Now()
	for _, l := range c.byDeadline() {
		if now.Before(l.deadline) {
			break
		}
		_ = c.revoke(l.id) // it is there
	}
	c.planNextLook()
}

// refreshLeases gives every lease its full TTL, as etcd does when a member becomes leader.
func (c *Cluster) refreshLeases() {
	now := time.Now()
	for _, l := range c.leases {
		l.refresh(now)
	}
	c.planNextLook()
}
