package etcdsim

import (
	"bytes"
	"cmp"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

const maxTxnOps = 128

// plan is a transaction with its compares decided: etcd decides those of nested transactions too before it changes
// anything.
type plan struct {
	succeeded bool
	ops       []*pb.RequestOp
	nested    []*plan // one for each op, nil where the op is no transaction
}

func (c *Cluster) txn(r *pb.TxnRequest) (*pb.TxnResponse, error) {
	if err := checkTxn(r, maxTxnOps); err != nil {
		return nil, err
	}
	for _, ops := range [][]*pb.RequestOp{r.Success, r.Failure} {
		if _, _, err := checkOverlap(ops); err != nil {
			return nil, err
		}
	}
	p := c.decide(r)
	if err := c.checkPlan(p); err != nil {
		return nil, err
	}
	t := &tx{c: c, s: c.store}
	resp, err := t.run(p)
	if err != nil {
		return nil, err
	}
	resp.Header.Revision = t.rev()
	t.end()
	return resp, nil
}

func (c *Cluster) decide(r *pb.TxnRequest) *plan {
	p := &plan{succeeded: true, ops: r.Success}
	for _, cp := range r.Compare {
		if !c.holds(cp) {
			p.succeeded, p.ops = false, r.Failure
			break
		}
	}
	p.nested = make([]*plan, len(p.ops))
	for i, op := range p.ops {
		if n := op.GetRequestTxn(); n != nil {
			p.nested[i] = c.decide(n)
		}
	}
	return p
}

func (c *Cluster) holds(cp *pb.Compare) bool {
	kvs := c.store.all(spanOf(cp.Key, cp.RangeEnd), c.store.rev)
	if len(kvs) == 0 {
		// A key that does not exist has no value, not even an empty one, but it has version 0.
		return cp.Target != pb.Compare_VALUE && compare(cp, &mvccpb.KeyValue{})
	}
	for _, kv := range kvs {
		if !compare(cp, kv) {
			return false
		}
	}
	return true
}

func compare(cp *pb.Compare, kv *mvccpb.KeyValue) bool {
	var r int
	switch cp.Target {
	case pb.Compare_VALUE:
		r = bytes.Compare(kv.Value, cp.GetValue())
	case pb.Compare_CREATE:
		r = cmp.Compare(kv.CreateRevision, cp.GetCreateRevision())
	case pb.Compare_MOD:
		r = cmp.Compare(kv.ModRevision, cp.GetModRevision())
	case pb.Compare_VERSION:
		r = cmp.Compare(kv.Version, cp.GetVersion())
	case pb.Compare_LEASE:
		r = cmp.Compare(kv.Lease, cp.GetLease())
	}
	switch cp.Result {
	case pb.Compare_EQUAL:
		return r == 0
	case pb.Compare_NOT_EQUAL:
		return r != 0
	case pb.Compare_GREATER:
		return r > 0
	case pb.Compare_LESS:
		return r < 0
	}
	return true
}

// checkPlan refuses what cannot be carried out, against the state before the transaction, so that a transaction
// either happens or does not.
func (c *Cluster) checkPlan(p *plan) error {
	for i, op := range p.ops {
		var err error
		switch o := op.Request.(type) {
		case *pb.RequestOp_RequestRange:
			if rev := o.RequestRange.GetRevision(); rev > c.store.rev {
				err = rpctypes.ErrGRPCFutureRev
			} else if rev != 0 && rev < c.store.compact {
				err = rpctypes.ErrGRPCCompacted
			}
		case *pb.RequestOp_RequestPut:
			err = c.checkPutNow(o.RequestPut)
		case *pb.RequestOp_RequestTxn:
			err = c.checkPlan(p.nested[i])
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// checkPutNow checks what depends on the state.
func (c *Cluster) checkPutNow(r *pb.PutRequest) error {
	if r.Lease != 0 && c.leases[r.Lease] == nil {
		return rpctypes.ErrGRPCLeaseNotFound
	}
	if (r.IgnoreValue || r.IgnoreLease) && c.store.get(string(r.Key), c.store.rev) == nil {
		return rpctypes.ErrGRPCKeyNotFound
	}
	return nil
}

func (t *tx) run(p *plan) (*pb.TxnResponse, error) {
	resp := &pb.TxnResponse{Header: &pb.ResponseHeader{}, Succeeded: p.succeeded}
	for i, op := range p.ops {
		out := &pb.ResponseOp{}
		switch o := op.Request.(type) {
		case *pb.RequestOp_RequestRange:
			r, err := t.s.read(o.RequestRange, t.rev())
			if err != nil {
				return nil, err
			}
			out.Response = &pb.ResponseOp_ResponseRange{ResponseRange: r}
		case *pb.RequestOp_RequestPut:
			out.Response = &pb.ResponseOp_ResponsePut{ResponsePut: t.put(o.RequestPut)}
		case *pb.RequestOp_RequestDeleteRange:
			out.Response = &pb.ResponseOp_ResponseDeleteRange{ResponseDeleteRange: t.delete(o.RequestDeleteRange)}
		case *pb.RequestOp_RequestTxn:
			r, err := t.run(p.nested[i])
			if err != nil {
				return nil, err
			}
			out.Response = &pb.ResponseOp_ResponseTxn{ResponseTxn: r}
		}
		resp.Responses = append(resp.Responses, out)
	}
	return resp, nil
}

func checkTxn(r *pb.TxnRequest, limit int) error {
	n := max(len(r.Compare), len(r.Success), len(r.Failure))
	if n > limit {
		return rpctypes.ErrGRPCTooManyOps
	}
	for _, cp := range r.Compare {
		if len(cp.Key) == 0 {
			return rpctypes.ErrGRPCEmptyKey
		}
	}
	for _, ops := range [][]*pb.RequestOp{r.Success, r.Failure} {
		for _, op := range ops {
			var err error
			switch o := op.Request.(type) {
			case *pb.RequestOp_RequestRange:
				err = checkRange(o.RequestRange)
			case *pb.RequestOp_RequestPut:
				err = checkPut(o.RequestPut)
			case *pb.RequestOp_RequestDeleteRange:
				err = checkDelete(o.RequestDeleteRange)
			case *pb.RequestOp_RequestTxn:
				err = checkTxn(o.RequestTxn, limit-n) // so does etcd: levels share the limit
			default:
				err = rpctypes.ErrGRPCKeyNotFound
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

func checkRange(r *pb.RangeRequest) error {
	if len(r.Key) == 0 {
		return rpctypes.ErrGRPCEmptyKey
	}
	_, order := pb.RangeRequest_SortOrder_name[int32(r.SortOrder)]
	_, target := pb.RangeRequest_SortTarget_name[int32(r.SortTarget)]
	if !order || !target {
		return rpctypes.ErrGRPCInvalidSortOption
	}
	return nil
}

func checkPut(r *pb.PutRequest) error {
	switch {
	case len(r.Key) == 0:
		return rpctypes.ErrGRPCEmptyKey
	case r.IgnoreValue && len(r.Value) != 0:
		return rpctypes.ErrGRPCValueProvided
	case r.IgnoreLease && r.Lease != 0:
		return rpctypes.ErrGRPCLeaseProvided
	}
	return nil
}

func checkDelete(r *pb.DeleteRangeRequest) error {
	if len(r.Key) == 0 {
		return rpctypes.ErrGRPCEmptyKey
	}
	return nil
}

// checkOverlap refuses two writes of one key in one transaction, as far as etcd does: puts and deletions of all
// levels against each other, where only the two branches of one nested transaction may put the same key. Etcd takes a
// deletion without end for an empty one here, so a transaction may put a key and delete it in one revision. It returns
// the keys put and the spans deleted.
func checkOverlap(ops []*pb.RequestOp) (puts map[string]bool, dels []span, err error) {
	puts = map[string]bool{}
	deleted := func(key string) bool {
		for _, d := range dels {
			if d.has(key) {
				return true
			}
		}
		return false
	}
	for _, op := range ops {
		if d := op.GetRequestDeleteRange(); d != nil && !bytes.Equal(d.RangeEnd, []byte{0}) {
			dels = append(dels, spanOf(d.Key, d.RangeEnd))
		}
	}
	for _, op := range ops {
		n := op.GetRequestTxn()
		if n == nil {
			continue
		}
		thenPuts, thenDels, err := checkOverlap(n.Success)
		if err != nil {
			return nil, nil, err
		}
		elsePuts, elseDels, err := checkOverlap(n.Failure)
		if err != nil {
			return nil, nil, err
		}
		for k := range thenPuts {
			if puts[k] || deleted(k) {
				return nil, nil, rpctypes.ErrGRPCDuplicateKey
			}
			puts[k] = true
		}
		for k := range elsePuts {
			if puts[k] && !thenPuts[k] || deleted(k) {
				return nil, nil, rpctypes.ErrGRPCDuplicateKey
			}
			puts[k] = true
		}
		dels = append(append(dels, thenDels...), elseDels...)
	}
	for _, op := range ops {
		p := op.GetRequestPut()
		if p == nil {
			continue
		}
		k := string(p.Key)
		if puts[k] || deleted(k) {
			return nil, nil, rpctypes.ErrGRPCDuplicateKey
		}
		puts[k] = true
	}
	return puts, dels, nil
}
