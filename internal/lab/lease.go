package lab

import (
	"context"
	"sync"
	"sync/atomic"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// LyingLease is an etcd lease client that can be told to lie about renewals. Put it in a client's place:
//
//	liar := lab.NewLyingLease(cli.Lease)
//	cli.Lease = liar
//	liar.Lie(true)
//
// While it lies, KeepAliveOnce asks nobody and answers with the lease's full TTL, so the lease runs out on the server
// while its holder believes in it. Everything else is the client's own, KeepAlive too. It is safe for concurrent use.
type LyingLease struct {
	clientv3.Lease
	lying atomic.Bool
	lies  atomic.Int64

	mu     sync.Mutex
	ttl    map[clientv3.LeaseID]int64
	header pb.ResponseHeader // of the last true answer
}

// NewLyingLease wraps a lease client; it tells the truth until [LyingLease.Lie].
func NewLyingLease(l clientv3.Lease) *LyingLease {
	return &LyingLease{Lease: l, ttl: map[clientv3.LeaseID]int64{}}
}

// Lie switches lying on or off, for answers from now on.
func (l *LyingLease) Lie(on bool) { l.lying.Store(on) }

// Lies returns how many renewals have been lied about.
func (l *LyingLease) Lies() int64 { return l.lies.Load() }

// Grant is the client's own; the liar learns the TTL from it.
func (l *LyingLease) Grant(ctx context.Context, ttl int64) (*clientv3.LeaseGrantResponse, error) {
	resp, err := l.Lease.Grant(ctx, ttl)
	if err == nil {
		l.learn(resp.ID, resp.TTL, resp.ResponseHeader)
	}
	return resp, err
}

// KeepAliveOnce renews a lease, or claims to: a lease whose TTL it has never seen is renewed truly.
func (l *LyingLease) KeepAliveOnce(ctx context.Context, id clientv3.LeaseID) (*clientv3.LeaseKeepAliveResponse, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	l.mu.Lock()
	ttl, known := l.ttl[id]
	header := &pb.ResponseHeader{
		ClusterId: l.header.ClusterId, MemberId: l.header.MemberId, Revision: l.header.Revision, RaftTerm: l.header.RaftTerm,
	}
	l.mu.Unlock()
	if known && l.lying.Load() {
		l.lies.Add(1)
		return &clientv3.LeaseKeepAliveResponse{ResponseHeader: header, ID: id, TTL: ttl}, nil
	}
	resp, err := l.Lease.KeepAliveOnce(ctx, id)
	if err == nil {
		l.learn(resp.ID, resp.TTL, resp.ResponseHeader)
	}
	return resp, err
}

func (l *LyingLease) learn(id clientv3.LeaseID, ttl int64, header *pb.ResponseHeader) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ttl[id] = ttl
	if header != nil {
		l.header.ClusterId, l.header.MemberId = header.ClusterId, header.MemberId
		l.header.Revision, l.header.RaftTerm = header.Revision, header.RaftTerm
	}
}
