package aegis

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// Election is one name that at most one node leads at a time, seen from one node. Elections of one name and node are
// the same election, however often [Node.Election] made them. It is safe for concurrent use.
type Election struct {
	node     *Node
	name     string
	err      error // a bad name, reported by the first use
	guards   []Guard
	priority int
}

// ElectionOption changes how a node takes part in an election.
type ElectionOption func(*Election)

// WithGuards has the guards take each new term's token before Campaign, Await or Run hand the term out: nobody works
// without its guard. A guard that cannot be reached is tried again for up to TTL; then the term is given back.
func WithGuards(guards ...Guard) ElectionOption {
	return func(e *Election) { e.guards = append(e.guards, guards...) }
}

// WithPriority sets this node's place in the queue: waiting candidates of greater priority come first, then those
// that have waited longer. Defaults to 0. A leader is never displaced by a candidate of greater priority.
func WithPriority(p int) ElectionOption { return func(e *Election) { e.priority = p } }

// Election returns the election of that name: 1 to 255 bytes of UTF-8 without control characters, not beginning with
// "shard/". A bad name is reported by the first use.
func (n *Node) Election(name string, opts ...ElectionOption) *Election {
	e := &Election{node: n, name: name, err: validElection(name)}
	for _, o := range opts {
		o(e)
	}
	return e
}

// Name returns the election's name.
func (e *Election) Name() string { return e.name }

// slot is what a node has to do with one election. Its fields are under Node.mu.
//
// It is what makes a key claimed: a leader key under one of this node's leases that is neither of the live attempt,
// nor of the leadership, nor a transfer to the live candidacy is swept, wherever it comes from. See Node.reconcile.
type slot struct {
	busy    bool             // a call of Campaign, Await or Run is under way
	running bool             // it is Run
	nonce   uint64           // of the attempt under way; 0 when there is none
	waiting bool             // a candidate key of ours is there or on its way
	lease   clientv3.LeaseID // that the candidate key is under
	created int64            // CreateRevision of that key once it is known
	led     *Leadership      // the latest, until its key is known to be gone
	gone    int64            // ModRevision of that key, until the view has seen it go
}

// begin claims the election for one call of Campaign, Await or Run. The context returned also ends when the node
// leaves. done must be called at the end.
func (e *Election) begin(ctx context.Context) (_ context.Context, done func(), err error) {
	if e.err != nil {
		return nil, nil, e.err
	}
	n := e.node
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.leaving.Err() != nil {
		return nil, nil, ErrLeft
	}
	s := n.slots[e.name]
	if s == nil {
		s = &slot{}
		n.slots[e.name] = s
	}
	if s.busy || s.led != nil && !s.led.ended.Load() {
		self := &NotLeaderError{Term: Term{Election: e.name, Node: n.cfg.ID}, Self: true}
		if s.led != nil {
			self.Term = s.led.term
		}
		return nil, nil, self
	}
	s.busy = true
	n.calls++
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(n.leaving, func() { cancel(ErrLeft) })
	return ctx, func() {
		stop()
		cancel(nil)
		n.mu.Lock()
		s.busy, s.running = false, false
		n.dropIdle(e.name)
		if n.calls--; n.calls == 0 && n.leaving.Err() != nil {
			close(n.idle)
		}
		n.mu.Unlock()
	}, nil
}

// dropIdle forgets a slot that says nothing any more. n.mu is held.
func (n *Node) dropIdle(name string) {
	if s := n.slots[name]; s != nil && !s.busy && s.nonce == 0 && !s.waiting && s.led == nil && s.gone == 0 {
		delete(n.slots, name)
	}
}

// Campaign tries once to win and does not block for the election to become vacant. ctx bounds the call only: the
// leadership returned outlives it.
//
// Errors: a [*NotLeaderError] naming the holder when another leads, or this node itself when it leads or campaigns
// already; [ErrNotReady] while the node has no lease; ctx's cause or etcd's own error, after which nothing is left
// behind: should the transaction still commit later, its key is deleted.
func (e *Election) Campaign(ctx context.Context) (*Leadership, error) {
	ctx, done, err := e.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	l, err := e.node.trustedLease()
	if err != nil {
		return nil, fmt.Errorf("aegis: campaign for %q: %w", e.name, err)
	}
	led, _, err := e.attempt(ctx, l, 0)
	if err != nil {
		return nil, err
	}
	return e.handOut(ctx, led)
}

// Await waits its turn and wins. It blocks until it has won, ctx ends or a permanent error: lost leases, cut
// connections and restarts of etcd are waited out. ctx bounds the call only: the leadership returned outlives it.
//
// Errors: ctx's cause; a [*NotLeaderError] when this node leads or campaigns already; permanent ones (name,
// authentication, permission); guards that refuse or cannot be reached.
func (e *Election) Await(ctx context.Context) (*Leadership, error) {
	ctx, done, err := e.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	return e.await(ctx)
}

// Current returns this node's present leadership, for handlers that run beside [Election.Run]. It does not block.
func (e *Election) Current() (*Leadership, bool) {
	n := e.node
	n.mu.Lock()
	var led *Leadership
	if s := n.slots[e.name]; s != nil {
		led = s.led
	}
	n.mu.Unlock() // Held may end the lease, which takes the lock
	if led == nil || !led.handed.Load() || !led.Held() {
		return nil, false
	}
	return led, true
}

// Leader asks etcd who leads. It blocks until etcd answers, at most TTL/3. Errors: [ErrNoLeader] when the election is
// vacant, ctx's cause, etcd's own.
func (e *Election) Leader(ctx context.Context) (Term, error) {
	if e.err != nil {
		return Term{}, e.err
	}
	ctx, cancel := context.WithTimeout(ctx, e.node.callTimeout())
	defer cancel()
	return readLeader(ctx, e.node.cli, e.node.keys, e.name)
}

// readLeader reads the term in office linearizably.
func readLeader(ctx context.Context, cli etcd, keys keyspace, name string) (Term, error) {
	s, cluster, err := readState(ctx, cli, keys, name)
	if err != nil {
		return Term{}, fmt.Errorf("aegis: who leads %q: %w", name, err)
	}
	if s.leader.mod == 0 {
		return Term{}, fmt.Errorf("%w of %q", ErrNoLeader, name)
	}
	return s.term(name, cluster), nil
}

// readState reads leader key, record and offset in one transaction.
func readState(ctx context.Context, cli etcd, keys keyspace, name string) (electionState, uint64, error) {
	resp, err := cli.Txn(ctx).Then(readOps(keys, name)...).Commit()
	if err != nil {
		return electionState{}, 0, err
	}
	return stateOf(resp), resp.Header.ClusterId, nil
}

// readState reads as the function does, and halts the node when etcd is not the one that it was.
func (n *Node) readState(ctx context.Context, name string) (electionState, error) {
	sent := n.past.mark()
	resp, err := n.cli.Txn(ctx).Then(readOps(n.keys, name)...).Commit()
	if err != nil {
		return electionState{}, err
	}
	if err := n.sameEtcd(sent, resp.Header); err != nil {
		return electionState{}, err
	}
	return stateOf(resp), nil
}

// readOps are the reads whose answers stateOf understands.
func readOps(keys keyspace, name string) []clientv3.Op {
	return []clientv3.Op{clientv3.OpGet(keys.leader(name)), clientv3.OpGet(keys.offset()), clientv3.OpGet(keys.term(name))}
}

func stateOf(resp *clientv3.TxnResponse) electionState {
	s := electionState{rev: resp.Header.Revision}
	if kvs := resp.Responses[0].GetResponseRange().Kvs; len(kvs) > 0 {
		s.leader = leaderEntry{node: NodeID(kvs[0].Value), lease: clientv3.LeaseID(kvs[0].Lease), mod: kvs[0].ModRevision}
	}
	if kvs := resp.Responses[1].GetResponseRange().Kvs; len(kvs) > 0 {
		s.offset = parseOffset(kvs[0])
	}
	if kvs := resp.Responses[2].GetResponseRange().Kvs; len(kvs) > 0 {
		s.record.mod = kvs[0].ModRevision
		_ = json.Unmarshal(kvs[0].Value, &s.record.termRecord)
	}
	return s
}

// Observe yields who leads: the present state at once, then newer ones. It is a level, not a log: it may skip terms,
// never goes back, and says that the election is vacant by a zero token. Between states it blocks. It ends with an
// error when ctx ends or a permanent one; cut and compacted watches are mended on the way.
func (e *Election) Observe(ctx context.Context) iter.Seq2[Term, error] {
	return func(yield func(Term, error) bool) {
		if e.err != nil {
			yield(Term{}, e.err)
			return
		}
		e.node.view.observe(ctx, e.name, e.node.past.clusterID(), yield)
	}
}

func (v *view) observe(ctx context.Context, name string, cluster uint64, yield func(Term, error) bool) {
	sub, unsubscribe := v.subscribe(name)
	defer unsubscribe()
	var last electionState
	for first := true; ; {
		select {
		case <-sub.c:
		case <-ctx.Done():
			yield(Term{}, context.Cause(ctx))
			return
		}
		if err := v.fatalError(); err != nil {
			yield(Term{}, err)
			return
		}
		s := v.state(name)
		if s.rev == 0 {
			continue // not listed yet
		}
		if s.rev < last.rev {
			yield(Term{}, fmt.Errorf("aegis: observe %q: %w: etcd's revision is %d, it was %d", name, ErrTokenWentBack, s.rev, last.rev))
			return
		}
		changed := first || s.leader != last.leader
		first, last = false, s
		if changed && !yield(s.term(name, cluster), nil) {
			return
		}
	}
}

// Candidate is a node that waits for its turn.
type Candidate struct {
	Node     NodeID
	Priority int
	Since    time.Time // by its own wall clock
}

// Candidates asks etcd who waits, the next one first. It blocks until etcd answers, at most TTL/3.
func (e *Election) Candidates(ctx context.Context) ([]Candidate, error) {
	if e.err != nil {
		return nil, e.err
	}
	ctx, cancel := context.WithTimeout(ctx, e.node.callTimeout())
	defer cancel()
	queue, err := readQueue(ctx, e.node.cli, e.node.keys, e.name)
	if err != nil {
		return nil, fmt.Errorf("aegis: candidates of %q: %w", e.name, err)
	}
	return shown(queue), nil
}

func shown(queue []candidate) []Candidate {
	out := make([]Candidate, 0, len(queue))
	for _, c := range queue {
		out = append(out, Candidate{Node: c.Node, Priority: c.Priority, Since: c.Since})
	}
	return out
}

func readQueue(ctx context.Context, cli etcd, keys keyspace, name string) ([]candidate, error) {
	resp, err := cli.Get(ctx, keys.candidates(name), clientv3.WithPrefix())
	if err != nil {
		return nil, err
	}
	v := newView(etcd{}, keys, 0, nil, nil)
	v.load(resp.Kvs)
	return v.queues[name], nil
}
