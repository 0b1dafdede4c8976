package aegis

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// Leave takes the node out of the cluster: it stops every Run, Await and Campaign, waits for them as long as ctx
// allows, ends and releases what is left, and revokes the lease, so that nothing of this node remains in etcd. The
// releasing happens within TTL/3 even when ctx is over already, so `defer node.Leave(ctx)` does what it says.
//
// Errors: ctx's cause when work is still running: its terms have ended, and their keys are left until the work
// returns, or to the lease. Otherwise etcd's own: what could not be deleted runs out with the lease. It is idempotent
// and may be repeated after an error. The node is of no further use.
func (n *Node) Leave(ctx context.Context) error {
	n.leaveTurn <- struct{}{} // for TTL/3 and what the other call's ctx allows, at most
	defer func() { <-n.leaveTurn }()
	if n.left {
		return nil
	}
	n.mu.Lock() // no call begins from here on
	n.leave(ErrLeft)
	n.mu.Unlock()
	err := n.awaitCalls(ctx)

	dctx, cancel := n.detached(ctx)
	defer cancel()
	working := map[clientv3.LeaseID]bool{}
	n.mu.Lock()
	var idle []*Leadership
	for _, s := range n.slots {
		if s.led == nil {
			continue
		}
		if s.busy && s.running {
			working[s.led.lease.id] = true // its term ends with the lease, below
		} else {
			idle = append(idle, s.led)
		}
	}
	leases := maps.Clone(n.leases)
	n.mu.Unlock()

	for _, l := range leases {
		l.end(ErrLeft) // stop, then release
	}
	releaseAll(dctx, idle)
	for id := range leases {
		if working[id] {
			continue
		}
		if _, rerr := n.cli.Revoke(dctx, id); rerr != nil && !errors.Is(rerr, rpctypes.ErrLeaseNotFound) {
			err = errors.Join(err, fmt.Errorf("aegis: leave: revoke lease %x, whose keys run out with it: %w", id, rerr))
		}
	}
	if len(working) > 0 && !n.cfg.Unlisted {
		n.mu.Lock()
		incarnation := n.incarnation
		n.mu.Unlock()
		_, rerr := n.cli.Txn(dctx).If(clientv3.Compare(clientv3.ModRevision(n.keys.node(n.cfg.ID)), "=", incarnation)).
			Then(clientv3.OpDelete(n.keys.node(n.cfg.ID))).Commit()
		err = errors.Join(err, rerr)
	}
	n.mu.Lock() // spawn adds to wg under it
	n.cancel()
	n.mu.Unlock()
	n.wg.Wait()
	for _, l := range leases {
		<-l.quiet
	}
	n.left = err == nil
	return err
}

// awaitCalls waits until no call of Campaign, Await or Run is under way, as long as ctx allows.
func (n *Node) awaitCalls(ctx context.Context) error {
	n.mu.Lock()
	idle := n.calls == 0
	n.mu.Unlock()
	if idle {
		return nil
	}
	select {
	case <-n.idle:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("aegis: leave: work is still running: %w", context.Cause(ctx))
	}
}

// releaseAll releases ended terms, several at a time. What fails goes with the lease.
func releaseAll(ctx context.Context, terms []*Leadership) {
	var wg sync.WaitGroup
	limit := make(chan struct{}, 16)
	for _, l := range terms {
		limit <- struct{}{}
		wg.Go(func() {
			defer func() { <-limit }()
			_ = l.release(ctx, "")
		})
	}
	wg.Wait()
}
