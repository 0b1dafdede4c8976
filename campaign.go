package aegis

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"time"

	"aegis/fence"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// attempt campaigns once under lease l: one transaction, which wins if and only if the leader key is absent.
//
//	If   CreateRevision(leader) = 0 AND ModRevision(offset) = as known
//	Then Put(leader) ; Put(record with this attempt's nonce) [; Delete(own candidate key)]
//	Else read leader, offset, record
//
// It returns the leadership, or an error and the ModRevision of the rival's key where that is what stood in the way.
//
// An answer is not needed for the transaction to count: it may commit later, or have been executed twice, the second
// time failing on its own first. So what tells a win is the nonce in the record beside the leader key, both of one
// revision; and what is no win is swept by [Node.reconcile] once the attempt is no longer live.
func (e *Election) attempt(ctx context.Context, l *lease, candidacy int64) (led *Leadership, rival int64, err error) {
	n := e.node
	nonce := rand.Uint64() | 1
	n.mu.Lock()
	s := n.slots[e.name]
	s.nonce = nonce
	n.mu.Unlock()
	defer func() {
		if led == nil {
			n.mu.Lock()
			s.nonce = 0
			n.mu.Unlock()
			n.reconcileOne(e.name)
		}
	}()

	state := n.view.state(e.name)
	offset, before := state.offset, state.record
	if state.leader.mod != 0 { // the view lags: it has not seen how that term ended
		before = termEntry{}
	}
	for range 4 { // more than one round only when the offset changes under our feet
		record := n.newRecord(nonce, offset, before)
		then := []clientv3.Op{
			clientv3.OpPut(n.keys.leader(e.name), string(n.cfg.ID), clientv3.WithLease(l.id)),
			clientv3.OpPut(n.keys.term(e.name), encode(record)),
		}
		if candidacy != 0 {
			then = append(then, clientv3.OpDelete(n.keys.candidate(e.name, l.id)))
		}
		sent := n.past.mark()
		tctx, cancel := context.WithTimeout(ctx, min(n.callTimeout(), max(l.left(), 0)))
		resp, err := n.cli.Txn(tctx).
			If(clientv3.Compare(clientv3.CreateRevision(n.keys.leader(e.name)), "=", 0),
				clientv3.Compare(clientv3.ModRevision(n.keys.offset()), "=", offset.mod)).
			Then(then...).Else(readOps(n.keys, e.name)...).Commit()
		cancel()
		if err != nil {
			led, err = e.resolve(ctx, l, nonce, err)
			return led, 0, err
		}
		if err := n.sameEtcd(sent, resp.Header); err != nil {
			return nil, 0, fmt.Errorf("aegis: campaign for %q: %w", e.name, err)
		}
		if resp.Succeeded {
			return e.won(ctx, l, resp.Header.Revision, nonce, offset), 0, nil
		}
		now := stateOf(resp)
		switch {
		case now.ours(l, nonce):
			return e.won(ctx, l, now.leader.mod, nonce, offset), 0, nil
		case now.leader.mod != 0:
			holder := now.term(e.name, n.past.clusterID())
			return nil, now.leader.mod, &NotLeaderError{Term: holder, Self: n.ownLease(now.leader.lease)}
		}
		offset = now.offset
	}
	return nil, 0, fmt.Errorf("aegis: campaign for %q: the token offset keeps changing", e.name)
}

func (n *Node) newRecord(nonce uint64, offset offsetEntry, before termEntry) termRecord {
	return termRecord{Version: recordVersion, Nonce: hex64(nonce), Offset: offset.value, Node: n.cfg.ID,
		Since: time.Now(), Host: n.host, PID: os.Getpid(), Before: before.last()}
}

// ours reports that the leader key is this attempt's: under this lease, and of one revision with a record that bears
// this nonce. The node's name in the key proves nothing.
func (s electionState) ours(l *lease, nonce uint64) bool {
	return s.leader.mod != 0 && s.leader.lease == l.id && s.record.mod == s.leader.mod && uint64(s.record.Nonce) == nonce
}

// resolve finds out what became of an attempt whose answer was lost, by reading until etcd answers or trust ends. It
// can only find a win: that the key is absent does not prove that it will not come.
func (e *Election) resolve(ctx context.Context, l *lease, nonce uint64, cause error) (*Leadership, error) {
	n := e.node
	fail := func(err error) (*Leadership, error) {
		return nil, fmt.Errorf("aegis: campaign for %q: %w", e.name, err)
	}
	switch {
	case errors.Is(cause, rpctypes.ErrLeaseNotFound):
		l.end(errLeaseGone)
		return fail(cause)
	case undone(cause):
		return fail(cause)
	}
	// When the caller has given up, one look remains to be taken, so that what was won is given back at once.
	for last := false; !last && l.trusted(); {
		last = ctx.Err() != nil
		rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), n.cfg.TTL/6)
		now, err := n.readState(rctx, e.name)
		cancel()
		if err == nil {
			if now.ours(l, nonce) {
				return e.won(ctx, l, now.leader.mod, nonce, now.offsetOfTerm()), nil
			}
			break
		}
		n.poke()
		sleep(ctx, n.cfg.TTL/64+rand.N(n.cfg.TTL/64))
	}
	if ctx.Err() != nil {
		return fail(errors.Join(context.Cause(ctx), cause))
	}
	return fail(cause)
}

// won makes a leadership of a key that etcd said is ours. It is not handed out yet: see handOut.
func (e *Election) won(ctx context.Context, l *lease, mod int64, nonce uint64, offset offsetEntry) *Leadership {
	n := e.node
	led := newLeadership(ctx, e, l, mod, offset,
		Term{Election: e.name, Node: n.cfg.ID, Token: mod + offset.value, Nonce: nonce, Cluster: n.past.clusterID()})
	n.mu.Lock()
	s := n.slots[e.name]
	s.led, s.nonce = led, 0
	led.running = s.running
	n.mu.Unlock()
	n.reconcileOne(e.name) // the view may have passed the key's end already
	return led
}

// handOut advances the guards and then looks for the last time whether there is anything to hand out: the caller still
// wants it and trust lasts. Else the term is given back.
func (e *Election) handOut(ctx context.Context, led *Leadership) (*Leadership, error) {
	n := e.node
	err := fence.ValidToken(led.term.Token)
	if err == nil {
		err = e.advanceGuards(ctx, led)
	}
	switch {
	case err != nil:
	case ctx.Err() != nil:
		err = fmt.Errorf("won too late for its caller: %w", context.Cause(ctx))
	case !led.lease.trusted(): // looked at after the leadership was registered, when leaseEnded cannot have missed it
		err = errTrustEnded
	case led.ended.Load():
		err = led.loss()
	default:
		led.handed.Store(true)
		n.events.emit(Event{Kind: EventElected, Term: led.term})
		return led, nil
	}
	led.end(errResigned)
	dctx, cancel := n.detached(ctx)
	defer cancel()
	_ = led.release(dctx, led.successor()) // or the sweep takes the key
	return nil, fmt.Errorf("aegis: %s was won and given back: %w", led.term, err)
}

// await waits for a trusted lease, then for a turn under it, until it has won.
func (e *Election) await(ctx context.Context) (*Leadership, error) {
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, maxPause) {
		l, err := e.node.awaitLease(ctx)
		if err == nil {
			var led *Leadership
			if led, err = e.awaitUnder(ctx, l); err == nil {
				if led, err = e.handOut(ctx, led); err == nil || errors.Is(err, errGuard) {
					return led, err
				}
			}
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("aegis: waiting to lead %q: %w", e.name, context.Cause(ctx))
		}
		if permanent(err) {
			return nil, err
		}
		e.node.cfg.Logger.Debug("aegis: campaign interrupted; trying again", "election", e.name, "err", err)
		sleep(ctx, pause/2+rand.N(pause))
	}
}

// rankPause is how long a candidate leaves a vacancy to each one before it in the queue.
const rankPause = 25 * time.Millisecond

// awaitUnder waits for its turn in the queue under one lease. An error asks for another try, save permanent ones.
func (e *Election) awaitUnder(ctx context.Context, l *lease) (led *Leadership, err error) {
	n := e.node
	sub, unsubscribe := n.view.subscribe(e.name)
	defer unsubscribe()
	state := n.view.state(e.name)
	var rival int64 // the view must have seen this revision before "vacant" means anything
	if state.leader.mod == 0 && len(state.queue) == 0 {
		if led, rival, err = e.attempt(ctx, l, 0); err == nil || !errors.Is(err, ErrNotLeader) {
			return led, err
		}
	}
	created, err := e.enqueue(ctx, l)
	defer func() { e.dequeue(ctx, l, led != nil) }()
	if err != nil {
		return nil, err
	}

	turn := time.NewTimer(time.Hour)
	defer turn.Stop()
	for vacantSince := (time.Time{}); ; {
		select {
		case <-sub.c:
		case <-turn.C:
		case <-l.done:
			return nil, errors.Join(ErrNotReady, l.cause)
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		if err := n.view.fatalError(); err != nil {
			return nil, err
		}
		state := n.view.state(e.name)
		rank := slices.IndexFunc(state.queue, func(c candidate) bool { return c.lease == l.id && c.created == created })
		switch {
		case state.leader.mod != 0 && state.leader.lease == l.id && state.record.mod == state.leader.mod && state.record.Candidate == created:
			// Handed to us by a transfer.
			return e.won(ctx, l, state.leader.mod, uint64(state.record.Nonce), state.offsetOfTerm()), nil
		case state.rev >= created && rank < 0:
			return nil, errors.New("the candidate key is gone; entering again")
		case state.leader.mod != 0 || state.rev < max(rival, created):
			vacantSince = time.Time{}
			continue
		case vacantSince.IsZero():
			vacantSince = time.Now()
		}
		// Vacant. The head of the queue tries at once, each of the others a little later than the one before it, so
		// that there is no herd and none depends on another's being alive.
		if wait := min(time.Duration(rank)*rankPause, maxPause) - time.Since(vacantSince); wait > 0 {
			turn.Reset(wait)
			continue
		}
		var mod int64
		if led, mod, err = e.attempt(ctx, l, created); err == nil || !errors.Is(err, ErrNotLeader) {
			return led, err
		}
		rival, vacantSince = max(rival, mod), time.Time{}
		sub.wake() // what came meanwhile
	}
}

// enqueue writes the candidate key and returns its CreateRevision.
func (e *Election) enqueue(ctx context.Context, l *lease) (int64, error) {
	n := e.node
	n.mu.Lock()
	s := n.slots[e.name]
	s.waiting, s.created, s.lease = true, 0, l.id
	n.mu.Unlock()
	key := n.keys.candidate(e.name, l.id)
	record := encode(candidateRecord{Version: recordVersion, Node: n.cfg.ID, Priority: e.priority, Since: time.Now()})
	tctx, cancel := context.WithTimeout(ctx, min(n.callTimeout(), max(l.left(), 0)))
	defer cancel()
	sent := n.past.mark()
	resp, err := n.cli.Txn(tctx).If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).
		Then(clientv3.OpPut(key, record, clientv3.WithLease(l.id))).
		Else(clientv3.OpGet(key)).Commit()
	if err != nil {
		if errors.Is(err, rpctypes.ErrLeaseNotFound) {
			l.end(errLeaseGone)
		}
		return 0, fmt.Errorf("aegis: enter the queue of %q: %w", e.name, err)
	}
	if err := n.sameEtcd(sent, resp.Header); err != nil {
		return 0, fmt.Errorf("aegis: enter the queue of %q: %w", e.name, err)
	}
	created := resp.Header.Revision
	if !resp.Succeeded { // executed twice, or left by an earlier try under this lease
		created = resp.Responses[0].GetResponseRange().Kvs[0].CreateRevision
	}
	n.mu.Lock()
	s.created = created
	n.mu.Unlock()
	return created, nil
}

// dequeue withdraws the candidacy. The winning transaction has deleted the key already; otherwise, should deleting it
// now not work out, the sweep takes it.
func (e *Election) dequeue(ctx context.Context, l *lease, won bool) {
	n := e.node
	n.mu.Lock()
	s := n.slots[e.name]
	s.waiting, s.created = false, 0
	n.mu.Unlock()
	if won {
		return
	}
	if !l.ended.Load() { // else the key goes with its lease, or by the sweep when the node has a new one
		dctx, cancel := n.detached(ctx)
		defer cancel()
		_, _ = n.cli.Delete(dctx, n.keys.candidate(e.name, l.id))
	}
	n.reconcileOne(e.name)
}
