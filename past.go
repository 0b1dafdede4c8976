package aegis

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// past is what etcd has shown so far, against which every linearizable answer is held: an etcd that was restored from a
// snapshot or replaced goes on renewing leases, and a watch at a revision that is now in the future stays silent.
//
// When an operator has declared such an etcd to be the right one, a new history begins. What was sent in an earlier one
// and is answered late proves nothing about the present one: hence the epochs.
type past struct {
	mu      sync.Mutex
	epoch   int    // counts histories
	cluster uint64 // etcd's cluster id; 0 before the first answer
	seen    int64  // the greatest revision that any answer or event showed
	offset  int64  // the greatest token offset
}

// mark is what was known when a request was sent.
type mark struct {
	epoch int
	seen  int64
}

var errEarlierHistory = errors.New("the answer belongs to an etcd that has been replaced since")

func (p *past) mark() mark {
	p.mu.Lock()
	defer p.mu.Unlock()
	return mark{epoch: p.epoch, seen: p.seen}
}

// check holds the header of a linearizable answer against what was known when the request was sent. Errors:
// ErrTokenWentBack when it comes from another history, errEarlierHistory when the request does.
func (p *past) check(m mark, h *pb.ResponseHeader) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case m.epoch != p.epoch:
		return errEarlierHistory
	case p.cluster != 0 && h.ClusterId != p.cluster:
		return fmt.Errorf("%w: etcd answers as cluster %x, it was %x: it was replaced", ErrTokenWentBack, h.ClusterId, p.cluster)
	case h.Revision < m.seen:
		return fmt.Errorf("%w: etcd's revision is %d, it was %d: it was restored from a snapshot", ErrTokenWentBack, h.Revision, m.seen)
	}
	p.seen = max(p.seen, h.Revision)
	return nil
}

// saw notes a revision and an offset that were shown in an epoch, and reports whether it is the present one.
func (p *past) saw(epoch int, revision, offset int64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if epoch != p.epoch {
		return false
	}
	p.seen, p.offset = max(p.seen, revision), max(p.offset, offset)
	return true
}

// joined notes the cluster's id at the first answer.
func (p *past) joined(cluster uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cluster == 0 {
		p.cluster = cluster
	}
}

// greatest returns the greatest token that can have been given out as far as was seen, and the greatest offset.
func (p *past) greatest() (token, offset int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.seen + p.offset, p.offset
}

func (p *past) clusterID() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cluster
}

// forget begins a new history: the present etcd is the right one.
func (p *past) forget(h *pb.ResponseHeader) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.epoch++
	p.seen, p.cluster = h.Revision, h.ClusterId
}

// haltedAt remembers what the node had seen when it found that etcd went back.
type haltedAt struct {
	token  int64 // the greatest that can have been given out
	offset int64
	err    error
}

// checkSameEtcd reads one key linearizably. A revision below the greatest seen, another cluster or a changed node key
// mean a restored or replaced etcd, in which leases go on renewing and watches at a future revision stay silent.
func (n *Node) checkSameEtcd(l *lease, timeout time.Duration) {
	ctx, cancel := context.WithTimeout(n.ctx, timeout)
	defer cancel()
	sent := n.past.mark()
	key := n.keys.node(n.cfg.ID)
	if n.cfg.Unlisted {
		key = n.keys.offset()
	}
	resp, err := n.cli.Get(ctx, key)
	if err != nil {
		n.failed("", fmt.Errorf("read %s: %w", key, err))
		return
	}
	if n.sameEtcd(sent, resp.Header) != nil {
		return
	}
	if !n.cfg.Unlisted && (len(resp.Kvs) == 0 || resp.Kvs[0].ModRevision != l.incarnation) {
		l.end(fmt.Errorf("its node key %s was changed or deleted", key))
	}
}

// sameEtcd checks the header of a linearizable answer. If it comes from another history, the node halts.
func (n *Node) sameEtcd(sent mark, h *pb.ResponseHeader) error {
	err := n.past.check(sent, h)
	if errors.Is(err, ErrTokenWentBack) {
		n.halt(err)
	}
	return err
}

// halt ends all terms and keeps the node out of elections until the token offset has been raised.
func (n *Node) halt(err error) {
	n.mu.Lock()
	first, l := n.halted == nil, n.lease
	if first {
		n.halted = &haltedAt{err: err}
		n.halted.token, n.halted.offset = n.past.greatest()
	}
	n.mu.Unlock()
	if first {
		n.events.emit(Event{Kind: EventHalted, Err: fmt.Errorf("%w; nobody campaigns until `aegis token raise`", err)})
	}
	if l != nil {
		l.end(err)
	}
}

// awaitRaise returns nil when the node is not halted, or not any more: the offset was raised so far that new tokens
// are above every one that this node can have seen.
func (n *Node) awaitRaise() error {
	n.mu.Lock()
	h := n.halted
	n.mu.Unlock()
	if h == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(n.ctx, n.callTimeout())
	defer cancel()
	resp, err := n.cli.Txn(ctx).Then(clientv3.OpGet(n.keys.offset()), clientv3.OpGet(n.keys.cluster())).Commit()
	if err != nil {
		return err
	}
	offset := offsetEntry{}
	if kvs := resp.Responses[0].GetResponseRange().Kvs; len(kvs) > 0 {
		offset = parseOffset(kvs[0])
	}
	foreign := n.checkCluster(resp.Responses[1].GetResponseRange().Kvs, strconv.FormatUint(resp.Header.ClusterId, 16))
	if foreign != nil || offset.value <= h.offset || resp.Header.Revision+offset.value <= h.token {
		return fmt.Errorf("%w; run `aegis token raise --above %d`", h.err, h.token)
	}
	n.past.forget(resp.Header)
	n.view.forget()
	n.mu.Lock()
	defer n.mu.Unlock()
	n.halted, n.incarnation = nil, 0
	for name, s := range n.slots {
		s.gone = 0 // a revision of the old history
		n.dropIdle(name)
	}
	return nil
}
