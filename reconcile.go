package aegis

import (
	"context"
	"errors"
	"math/rand/v2"
	"strconv"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// reconcile holds what the view shows against what this process believes, after each change of either. It does not
// block. nil stands for all elections.
func (n *Node) reconcile(names map[string]bool) {
	if names == nil {
		names = n.view.names()
		n.mu.Lock()
		for name := range n.slots {
			names[name] = true
		}
		n.mu.Unlock()
	}
	for name := range names {
		n.reconcileOne(name)
	}
}

// reconcileOne does so for one election:
//
//   - A term whose key the view shows to be gone or changed, at a revision not older than the term, has ended, however
//     well the lease is renewed.
//   - A term under a replaced token offset ends, and so does one that an operator asks for.
//   - Keys under a lease of this node's that nobody in this process claims are swept: what a request whose answer was
//     lost has written late, or twice.
func (n *Node) reconcileOne(name string) {
	s := n.view.state(name)
	n.mu.Lock()
	slot := n.slots[name]
	var led *Leadership
	if slot != nil {
		led = slot.led
	}
	if slot != nil && slot.gone != 0 && s.rev > slot.gone && s.leader.mod != slot.gone {
		slot.gone = 0
		n.dropIdle(name)
	}
	if l := s.leader; l.mod != 0 && n.leases[l.lease] != nil && !slot.claims(s) {
		n.sweep(n.keys.leader(name), clientv3.ModRevision, l.mod, l.lease)
	}
	for _, c := range s.queue {
		if n.leases[c.lease] != nil && (slot == nil || !slot.waiting || slot.lease != c.lease) {
			n.sweep(n.keys.candidate(name, c.lease), clientv3.CreateRevision, c.created, c.lease)
		}
	}
	if r := s.request; r.mod != 0 && led != nil && r.Term < led.mod {
		n.sweep(n.keys.request(name), clientv3.ModRevision, r.mod, 0) // it saw an earlier term
	}
	n.mu.Unlock()

	if led == nil || s.rev < led.mod {
		return // an event older than the term ends nothing
	}
	switch r := s.request; {
	case s.leader.mod == 0:
		led.lostKey(errKeyGone)
	case s.leader.mod != led.mod:
		led.lostKey(errKeyTaken)
	case s.offset.mod != led.offset.mod:
		led.stepDown(errOffsetRaised, "")
	case r.mod != 0 && r.Term == led.mod:
		n.mu.Lock()
		n.sweep(n.keys.request(name), clientv3.ModRevision, r.mod, 0)
		n.mu.Unlock()
		if _, waits := find(s.queue, r.To); waits || r.To == "" {
			led.stepDown(ErrRequested, r.To)
		}
	}
}

// claims reports whether the leader key that s shows, which is under a lease of this node's, is claimed by the
// leadership whose work is not over, by the live attempt, or by the live candidacy to which it was transferred.
func (slot *slot) claims(s electionState) bool {
	if slot == nil {
		return false
	}
	if slot.led != nil && slot.led.mod == s.leader.mod {
		return !slot.led.yielded.Load()
	}
	if s.leader.mod == slot.gone {
		return true // gone already; the view lags
	}
	if s.record.mod != s.leader.mod {
		return false
	}
	return slot.nonce != 0 && uint64(s.record.Nonce) == slot.nonce ||
		slot.waiting && slot.lease == s.leader.lease && s.record.Candidate != 0 &&
			(slot.created == s.record.Candidate || slot.created == 0) // the answer to the enqueuing is still on its way
}

// sweep deletes a key if its revision is still the one seen, in the background, until that is certain or the node has
// left. n.mu is held.
func (n *Node) sweep(key string, revision func(string) clientv3.Cmp, seen int64, lease clientv3.LeaseID) {
	id := key + "@" + strconv.FormatInt(seen, 10)
	if n.sweeping[id] || n.ctx.Err() != nil {
		return
	}
	n.sweeping[id] = true
	n.wg.Go(func() {
		defer func() {
			n.mu.Lock()
			delete(n.sweeping, id)
			n.mu.Unlock()
		}()
		for pause := rankPause; n.ctx.Err() == nil; pause = min(2*pause, maxPause) {
			ctx, cancel := context.WithTimeout(n.ctx, n.callTimeout())
			resp, err := n.cli.Txn(ctx).If(clientv3.Compare(revision(key), "=", seen),
				clientv3.Compare(clientv3.LeaseValue(key), "=", lease)).Then(clientv3.OpDelete(key)).Commit()
			cancel()
			if err == nil {
				if resp.Succeeded {
					n.events.emit(Event{Kind: EventSwept, Err: errors.New(key)})
				}
				return
			}
			sleep(n.ctx, pause/2+rand.N(pause))
		}
	})
}

// lostKey ends the term because its key is not its own any more.
func (l *Leadership) lostKey(reason error) {
	l.end(reason)
	l.gone("")
}

// stepDown ends the term at somebody else's wish, and releases it when its work is over: Run knows when; a leadership
// outside Run gets the margin, after which G2 lets a rival win.
func (l *Leadership) stepDown(reason error, to NodeID) {
	if l.ended.Load() {
		return
	}
	n := l.e.node
	l.ask(reason, to)
	if l.running {
		return
	}
	n.spawn(func() {
		sleep(n.ctx, n.cfg.Margin)
		ctx, cancel := n.detached(n.ctx)
		defer cancel()
		_ = l.release(ctx, l.successor()) // or the sweep takes the key
	})
}

// spawn starts a goroutine that Leave waits for; after Leave it does nothing.
func (n *Node) spawn(f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ctx.Err() == nil {
		n.wg.Go(f)
	}
}
