package aegis

import (
	"fmt"
	"sync/atomic"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// past is what etcd has shown so far, against which every linearizable answer is held: an etcd that was restored from a
// snapshot or replaced goes on renewing leases, and a watch at a revision that is now in the future stays silent.
type past struct {
	cluster atomic.Uint64 // etcd's cluster id; 0 before the first answer
	seen    atomic.Int64  // the greatest revision that any answer or event showed
	offset  atomic.Int64  // the greatest token offset
}

// check holds the header of a linearizable answer against what was seen before the request was sent.
func (p *past) check(h *pb.ResponseHeader, before int64) error {
	if known := p.cluster.Load(); known != 0 && h.ClusterId != known {
		return fmt.Errorf("%w: etcd answers as cluster %x, it was %x: it was replaced", ErrTokenWentBack, h.ClusterId, known)
	}
	if h.Revision < before {
		return fmt.Errorf("%w: etcd's revision is %d, it was %d: it was restored from a snapshot", ErrTokenWentBack, h.Revision, before)
	}
	raise(&p.seen, h.Revision)
	return nil
}

// forget takes the present etcd for the right one.
func (p *past) forget(h *pb.ResponseHeader) {
	p.seen.Store(h.Revision)
	p.cluster.Store(h.ClusterId)
}

func raise(v *atomic.Int64, to int64) {
	for {
		if old := v.Load(); to <= old || v.CompareAndSwap(old, to) {
			return
		}
	}
}
