package aegis

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// Leadership is the live hold on a term inside the process that won it. It ends once and never comes back. It is safe
// for concurrent use.
//
// Its states, and what keeps them:
//
//	held ──(trust in the lease ends | the key is seen to be gone | Resign, Transfer, Leave)──▶ ended ──▶ released
//
// Held is false from the first instant of "ended", the context's end follows at once, and the key is deleted only
// after both, never before. Release compares the key's revision, so a late one leaves a rival's key alone.
type Leadership struct {
	Term // for reading; what is compared is a private copy

	term    Term
	e       *Election
	lease   *lease
	mod     int64 // ModRevision of the leader key
	offset  offsetEntry
	running bool // handed out by Run, which releases after the work has returned
	ctx     context.Context
	cancel  context.CancelCauseFunc

	ended   atomic.Bool
	handed  atomic.Bool // the guards have taken the term
	yielded atomic.Bool // its work is over and its release has failed: the sweep is to take the key

	turn     chan struct{} // holds one token: serializes releases
	released atomic.Bool   // the key is known to be gone or another's
	asked    atomic.Pointer[handover]
	handedTo atomic.Pointer[handover] // set when the key was handed to a successor
}

// handover is how an ended term is to be released: to a successor, or to nobody in particular.
type handover struct{ to NodeID }

func newLeadership(ctx context.Context, e *Election, l *lease, mod int64, offset offsetEntry, term Term) *Leadership {
	led := &Leadership{Term: term, term: term, e: e, lease: l, mod: mod, offset: offset, turn: make(chan struct{}, 1)}
	led.ctx, led.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	return led
}

// Context returns a context that ends when the term does, with a [*LossError] as its cause. It has the values, not the
// cancellation, of the context that was given to Campaign, Await or Run.
func (l *Leadership) Context() context.Context { return l.ctx }

// Held reports whether the term is still held: true only while no rival can have won through the lease's end. It is
// cheap enough for every tick, does not block, and once false stays false. An effect that follows it is not covered
// by it: it may come after the term's end, where only a guard stops it.
func (l *Leadership) Held() bool { return !l.ended.Load() && l.lease.trusted() }

// Left returns for how long the term is held from now on if its lease is not renewed again, 0 when it is over. It does
// not block.
func (l *Leadership) Left() time.Duration {
	if !l.Held() {
		return 0
	}
	return l.LeaseLeft()
}

// LeaseLeft returns for how long the term's lease is trusted, also when the term itself has ended at somebody's wish and
// its key is kept until its work has stopped; 0 when that trust is over. It does not block.
func (l *Leadership) LeaseLeft() time.Duration {
	left := l.lease.left()
	if !l.lease.trusted() {
		return 0
	}
	return max(left, 0)
}

// Cmp returns the comparison that holds in an etcd transaction if and only if the term is still in office there.
func (l *Leadership) Cmp() clientv3.Cmp {
	return clientv3.Compare(clientv3.ModRevision(l.e.node.keys.leader(l.term.Election)), "=", l.mod)
}

// cmps is Cmp and that the key is under this term's lease, for this package's own transactions: in an etcd that was
// restored, a rival's key can have the same revision.
func (l *Leadership) cmps() []clientv3.Cmp {
	return []clientv3.Cmp{l.Cmp(), clientv3.Compare(clientv3.LeaseValue(l.e.node.keys.leader(l.term.Election)), "=", l.lease.id)}
}

// Commit executes ops in one etcd transaction, guarded by [Leadership.Cmp]: etcd itself is the guard. It blocks until
// etcd answers, TTL/3 at most. At most 126 operations with etcd's default limits.
//
// Errors: [ErrFenced] when the term is over, and nothing was done; [ErrUnknown] when the answer was lost; etcd's own,
// and nothing was done. The operations must bear being executed twice in a row, as etcd's client may send them again.
func (l *Leadership) Commit(ctx context.Context, ops ...clientv3.Op) (*clientv3.TxnResponse, error) {
	n := l.e.node
	fail := func(errs ...error) (*clientv3.TxnResponse, error) {
		err := fmt.Errorf("aegis: commit under %s", l.term)
		for _, e := range errs {
			if e != nil {
				err = fmt.Errorf("%w: %w", err, e)
			}
		}
		return nil, err
	}
	if loss := l.loss(); loss != nil {
		return fail(ErrFenced, loss)
	}
	ctx, cancel := context.WithTimeout(ctx, n.callTimeout())
	defer cancel()
	// A key that every commit writes tells a refusal from the second execution of a commit whose first was done just
	// before the term ended: then it was written after this one was sent, and before the rival's term.
	commits := n.keys.commit(l.term.Election)
	sent := n.past.mark()
	resp, err := n.cli.Txn(ctx).If(l.cmps()...).
		Then(append(slices.Clip(ops), clientv3.OpPut(commits, strconv.FormatInt(l.term.Token, 10)))...).
		Else(readOps(n.keys, l.term.Election)...).Commit()
	if err != nil && !undone(err) {
		return fail(ErrUnknown, err)
	}
	var at clientv3.OpOption = clientv3.WithRev(0)
	var newest Term
	if err == nil {
		if err := n.sameEtcd(sent, resp.Header); err != nil {
			return fail(ErrUnknown, err)
		}
		if resp.Succeeded {
			resp.Responses = resp.Responses[:len(ops)]
			return resp, nil
		}
		if now := stateOf(resp); now.leader.mod != 0 {
			newest = now.term(l.term.Election, 0)
			at = clientv3.WithRev(now.leader.mod - 1) // before the rival's own commits
		}
	}
	got, gerr := n.cli.Get(ctx, commits, at)
	switch {
	case gerr != nil:
		return fail(ErrUnknown, err, gerr)
	case len(got.Kvs) > 0 && got.Kvs[0].ModRevision > sent.seen:
		return fail(ErrUnknown, errors.New("a commit of this term was executed meanwhile: this one, sent again by etcd's client, or another"), err)
	case err != nil:
		return fail(err)
	case newest.Token == 0:
		return fail(ErrFenced, errors.New("its key is gone from etcd, and nobody leads"))
	}
	return fail(&FencedError{Name: l.term.Election, Token: l.term.Token, Newest: newest.Token})
}

// Resign ends the term. Inside Run it asks: the context ends, Run releases the key after the function has returned,
// and Resign returns at once. Outside Run, stop your work first: it ends the context and deletes the key, and returns
// when the key is gone, ctx ends, or etcd has not answered for TTL/3.
//
// It is idempotent, may be repeated after an error, and deletes only this term's own key, never a rival's. The term is
// over whatever it returns; after an error the key goes as soon as etcd can be reached, with the lease at the latest.
func (l *Leadership) Resign(ctx context.Context) error {
	if l.running {
		l.ask(errResigned, "")
		return nil
	}
	l.end(errResigned)
	return l.release(ctx, "")
}

// Transfer ends the term and hands it to a waiting candidate in one transaction. Inside Run it asks, as Resign does.
// A successor that does not wait here is an error, and the term goes on; one that is gone at the last moment makes it
// a Resign, and the error says so. A term that is over cannot be transferred any more: the error is a [*LossError];
// repeating a transfer that was done is nil.
func (l *Leadership) Transfer(ctx context.Context, to NodeID) error {
	if l.released.Load() {
		if h := l.handedTo.Load(); h != nil && h.to == to {
			return nil
		}
		return fmt.Errorf("aegis: transfer %s to %s: %w", l.term, to, l.loss())
	}
	if !l.ended.Load() {
		queue := l.e.node.view.state(l.term.Election).queue
		if _, ok := find(queue, to); !ok { // the view may lag: ask
			queue, err := readQueue(ctx, l.e.node.cli, l.e.node.keys, l.term.Election)
			if err != nil {
				return fmt.Errorf("aegis: transfer %s to %s: %w", l.term, to, err)
			}
			if _, ok := find(queue, to); !ok {
				return fmt.Errorf("aegis: transfer %s to %s: %s is not among its waiting candidates; the term goes on", l.term, to, to)
			}
		}
	}
	if l.running {
		if !l.ask(errTransferred, to) {
			return fmt.Errorf("aegis: transfer %s to %s: it is being released already: %w", l.term, to, l.loss())
		}
		return nil
	}
	l.end(errTransferred)
	return l.release(ctx, to)
}

func find(queue []candidate, id NodeID) (candidate, bool) {
	for _, c := range queue {
		if c.Node == id {
			return c, true
		}
	}
	return candidate{}, false
}

// ask ends the term and leaves it to whoever releases it to hand it to the given successor, or to nobody in particular.
// It returns false when that has been decided already.
func (l *Leadership) ask(reason error, to NodeID) bool {
	inTime := l.asked.CompareAndSwap(nil, &handover{to: to})
	l.end(reason)
	return inTime
}

// successor decides to whom the term is to be handed: as asked, or to nobody in particular.
func (l *Leadership) successor() NodeID {
	l.asked.CompareAndSwap(nil, &handover{})
	return l.asked.Load().to
}

// loss returns why the term is over, nil while it is held.
func (l *Leadership) loss() error {
	if l.Held() {
		return nil
	}
	if l.lease.ended.Load() { // its cause is set before
		l.end(l.lease.cause)
	}
	<-l.ctx.Done() // follows at once
	return context.Cause(l.ctx)
}

// end ends the term for a reason; only the first counts. It does not block.
func (l *Leadership) end(reason error) {
	if !l.ended.CompareAndSwap(false, true) {
		return
	}
	l.cancel(&LossError{Term: l.term, Reason: reason})
	for _, own := range []error{errResigned, errTransferred, errReturned, ErrLeft} {
		if errors.Is(reason, own) {
			return
		}
	}
	l.e.node.events.emit(Event{Kind: EventLost, Term: l.term, Err: reason})
}

// release deletes the term's key, or hands it to a successor, if it is still this term's. The term must have ended and
// its work must be over: from here on the key is unclaimed, and should release fail, the sweep takes it.
func (l *Leadership) release(ctx context.Context, to NodeID) error {
	n := l.e.node
	defer func() {
		if !l.released.Load() && !l.yielded.Swap(true) {
			n.reconcileOne(l.term.Election)
		}
	}()
	select {
	case l.turn <- struct{}{}:
		defer func() { <-l.turn }()
	case <-ctx.Done():
	}
	switch {
	case l.released.Load():
		return nil
	case ctx.Err() != nil:
		return l.unreleased(context.Cause(ctx))
	}
	ctx, cancel := context.WithTimeout(ctx, n.callTimeout())
	defer cancel()
	var refused error
	if to != "" {
		done, err := l.handOver(ctx, to)
		if done {
			l.handedTo.Store(&handover{to: to})
			l.gone(fmt.Sprintf("transferred to %s", to))
			return nil
		}
		refused = fmt.Errorf("aegis: transfer %s to %s: refused, resigned instead: %w", l.term, to, err)
	}
	how := "resigned"
	if loss, ok := context.Cause(l.ctx).(*LossError); ok {
		how = loss.Reason.Error()
	}
	record := n.newRecord(l.term.Nonce, l.offset, termEntry{})
	if seen := n.view.state(l.term.Election).record; seen.mod == l.mod {
		record = seen.termRecord
	}
	record.Ended, record.Won = how, l.mod
	resp, err := n.cli.Txn(ctx).If(l.cmps()...).
		Then(clientv3.OpDelete(n.keys.leader(l.term.Election)), clientv3.OpPut(n.keys.term(l.term.Election), encode(record))).Commit()
	if err != nil {
		return errors.Join(refused, l.unreleased(err))
	}
	if resp.Succeeded {
		l.gone(how)
	} else { // executed before, or the key is gone or a rival's: it is not ours in any case
		l.gone("")
	}
	return refused
}

func (l *Leadership) unreleased(err error) error {
	return fmt.Errorf("aegis: release %s: its key may still be there; it goes with the lease at the latest, or resign again: %w", l.term, err)
}

// handOver puts the successor's id under the successor's lease into the leader key.
func (l *Leadership) handOver(ctx context.Context, to NodeID) (bool, error) {
	n := l.e.node
	name := l.term.Election
	next, ok := find(n.view.state(name).queue, to)
	if !ok {
		queue, err := readQueue(ctx, n.cli, n.keys, name)
		if err != nil {
			return false, err
		}
		if next, ok = find(queue, to); !ok {
			return false, errors.New("it is not waiting any more")
		}
	}
	nonce := rand.Uint64() | 1
	record := termRecord{Version: recordVersion, Nonce: hex64(nonce), Offset: l.offset.value, Node: to, Since: time.Now(),
		Candidate: next.created, Before: fmt.Sprintf("%s, token %d: transferred", l.term.Node, l.term.Token)}
	key := n.keys.candidate(name, next.lease)
	resp, err := n.cli.Txn(ctx).
		If(append(l.cmps(), clientv3.Compare(clientv3.CreateRevision(key), "=", next.created),
			clientv3.Compare(clientv3.ModRevision(n.keys.offset()), "=", l.offset.mod))...).
		Then(clientv3.OpPut(n.keys.leader(name), string(to), clientv3.WithLease(next.lease)),
			clientv3.OpPut(n.keys.term(name), encode(record)),
			clientv3.OpDelete(key)).
		Else(readOps(n.keys, name)...).Commit()
	switch {
	case errors.Is(err, rpctypes.ErrLeaseNotFound):
		return false, errors.New("its lease has run out")
	case err != nil: // it may have been done all the same
		rctx, cancel := n.detached(ctx)
		defer cancel()
		now, rerr := n.readState(rctx, name)
		return rerr == nil && now.record.mod == now.leader.mod && uint64(now.record.Nonce) == nonce, err
	case resp.Succeeded:
		return true, nil
	}
	now := stateOf(resp)
	if now.record.mod == now.leader.mod && uint64(now.record.Nonce) == nonce { // executed twice
		return true, nil
	}
	return false, errors.New("it is not waiting any more, or the term was over")
}

// gone notes that the key is not this term's any more; how is set when this process released it.
func (l *Leadership) gone(how string) {
	if l.released.Swap(true) {
		return
	}
	n := l.e.node
	n.mu.Lock()
	if s := n.slots[l.term.Election]; s != nil && s.led == l {
		s.led, s.gone = nil, l.mod
		n.dropIdle(l.term.Election)
	}
	n.mu.Unlock()
	if how != "" {
		n.events.emit(Event{Kind: EventReleased, Term: l.term, Err: errors.New(how)})
	}
}
