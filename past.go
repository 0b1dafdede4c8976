package aegis

import (
	"errors"
	"fmt"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
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
