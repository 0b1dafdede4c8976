package etcdsim

import (
	"bytes"
	"slices"
	"sort"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

// store is etcd's multi-version store: every key with its versions, and the changes by revision for watches that
// start in the past. Versions and changes are never changed once made, so that snapshots share them.
type store struct {
	rev     int64 // the newest revision
	compact int64 // the oldest revision that can be read; -1 before the first compaction
	keys    []string
	hist    map[string][]version
	log     []change // by revision, from compact on
}

type version struct {
	rev int64
	kv  *mvccpb.KeyValue // nil for a deletion
}

// change is what one revision did.
type change struct {
	rev    int64
	events []*mvccpb.Event
}

func newStore() *store { return &store{rev: 1, compact: -1, hist: map[string][]version{}} }

func (s *store) clone() *store {
	n := *s
	n.keys, n.log = slices.Clone(s.keys), slices.Clone(s.log)
	n.hist = make(map[string][]version, len(s.hist))
	for k, h := range s.hist {
		n.hist[k] = slices.Clone(h)
	}
	return &n
}

// get returns the key as of rev, nil when it does not exist then.
func (s *store) get(key string, rev int64) *mvccpb.KeyValue {
	h := s.hist[key]
	for i := len(h) - 1; i >= 0; i-- {
		if h[i].rev <= rev {
			return h[i].kv
		}
	}
	return nil
}

// all returns the keys of the span as of rev, in order.
func (s *store) all(sp span, rev int64) []*mvccpb.KeyValue {
	if sp.single {
		if kv := s.get(sp.key, rev); kv != nil {
			return []*mvccpb.KeyValue{kv}
		}
		return nil
	}
	var kvs []*mvccpb.KeyValue
	for i := sort.SearchStrings(s.keys, sp.key); i < len(s.keys) && (sp.end == "" || s.keys[i] < sp.end); i++ {
		if kv := s.get(s.keys[i], rev); kv != nil {
			kvs = append(kvs, kv)
		}
	}
	return kvs
}

func (s *store) add(key string, v version) {
	h, ok := s.hist[key]
	if !ok {
		i, _ := slices.BinarySearch(s.keys, key)
		s.keys = slices.Insert(s.keys, i, key)
	}
	s.hist[key] = append(h, v)
}

// compactTo forgets what cannot be read any more.
func (s *store) compactTo(rev int64) {
	s.compact = rev
	var keys []string
	for _, k := range s.keys {
		h := s.hist[k]
		i := 0
		for i+1 < len(h) && h[i+1].rev <= rev {
			i++
		}
		if h[i].kv == nil && h[i].rev <= rev {
			i++
		}
		if i == len(h) {
			delete(s.hist, k)
			continue
		}
		s.hist[k] = slices.Clone(h[i:])
		keys = append(keys, k)
	}
	s.keys = keys
	i := sort.Search(len(s.log), func(i int) bool { return s.log[i].rev >= rev })
	s.log = slices.Clone(s.log[i:])
}

// span is a key or a range of keys. The end "" is no end.
type span struct {
	key, end string
	single   bool
}

func spanOf(key, end []byte) span {
	switch {
	case len(end) == 0:
		return span{key: string(key), single: true}
	case len(end) == 1 && end[0] == 0:
		return span{key: string(key)}
	}
	return span{key: string(key), end: string(end)}
}

func (sp span) has(key string) bool {
	if sp.single {
		return key == sp.key
	}
	return key >= sp.key && (sp.end == "" || key < sp.end)
}

// tx is one write transaction: all its changes share the revision after the store's.
type tx struct {
	c      *Cluster
	s      *store
	events []*mvccpb.Event
}

func (t *tx) rev() int64 {
	if len(t.events) > 0 {
		return t.s.rev + 1
	}
	return t.s.rev
}

func (t *tx) put(r *pb.PutRequest) *pb.PutResponse {
	key, rev := string(r.Key), t.s.rev+1
	old := t.s.get(key, rev)
	kv := &mvccpb.KeyValue{
		Key: r.Key, Value: r.Value, Lease: r.Lease,
		CreateRevision: rev, ModRevision: rev, Version: 1,
	}
	if old == nil && (r.IgnoreValue || r.IgnoreLease) {
		// checkOverlap lets a deletion without end pass, so it can take away what checkPutNow has seen.
		panic("etcdsim: etcd 3.7.3 crashes on this transaction, and again at every start")
	}
	if old != nil {
		kv.CreateRevision, kv.Version = old.CreateRevision, old.Version+1
		if r.IgnoreValue {
			kv.Value = old.Value
		}
		if r.IgnoreLease {
			kv.Lease = old.Lease
		}
	}
	t.s.add(key, version{rev, kv})
	t.events = append(t.events, &mvccpb.Event{Type: mvccpb.Event_PUT, Kv: kv})
	if l := t.c.leases[t.c.attached[key]]; l != nil && l.id != kv.Lease {
		delete(l.keys, key)
		delete(t.c.attached, key)
	}
	if kv.Lease != 0 {
		t.c.leases[kv.Lease].keys[key] = struct{}{}
		t.c.attached[key] = kv.Lease
	}
	resp := &pb.PutResponse{Header: &pb.ResponseHeader{Revision: rev}}
	if r.PrevKv {
		resp.PrevKv = old
	}
	return resp
}

func (t *tx) delete(r *pb.DeleteRangeRequest) *pb.DeleteRangeResponse {
	resp := &pb.DeleteRangeResponse{Header: &pb.ResponseHeader{}}
	kvs := t.s.all(spanOf(r.Key, r.RangeEnd), t.rev())
	if r.PrevKv {
		resp.PrevKvs = kvs
	}
	for _, kv := range kvs {
		t.remove(string(kv.Key))
	}
	resp.Deleted = int64(len(kvs))
	resp.Header.Revision = t.rev()
	return resp
}

func (t *tx) remove(key string) {
	rev := t.s.rev + 1
	t.s.add(key, version{rev, nil})
	t.events = append(t.events, &mvccpb.Event{
		Type: mvccpb.Event_DELETE,
		Kv:   &mvccpb.KeyValue{Key: []byte(key), ModRevision: rev},
	})
	if l := t.c.leases[t.c.attached[key]]; l != nil {
		delete(l.keys, key)
	}
	delete(t.c.attached, key)
}

// end makes the changes the newest revision and tells the watches.
func (t *tx) end() {
	if len(t.events) == 0 {
		return
	}
	t.s.rev++
	t.s.log = append(t.s.log, change{t.s.rev, t.events})
	t.c.notify(t.s.rev, t.events)
}

// read answers a range request; newest is the revision that the reader sees as the newest.
func (s *store) read(r *pb.RangeRequest, newest int64) (*pb.RangeResponse, error) {
	rev := r.Revision
	if rev > newest {
		return nil, rpctypes.ErrGRPCFutureRev
	}
	if rev <= 0 {
		rev = newest
	}
	if rev < s.compact {
		return nil, rpctypes.ErrGRPCCompacted
	}
	kvs := s.all(spanOf(r.Key, r.RangeEnd), rev)
	resp := &pb.RangeResponse{Header: &pb.ResponseHeader{Revision: newest}, Count: int64(len(kvs))}
	if r.CountOnly {
		return resp, nil
	}
	filtered := r.MinModRevision != 0 || r.MaxModRevision != 0 || r.MinCreateRevision != 0 || r.MaxCreateRevision != 0
	if !filtered && inKeyOrder(r.SortTarget, r.SortOrder) && r.Limit > 0 && int64(len(kvs)) > r.Limit+1 {
		kvs = kvs[:r.Limit+1] // before it sorts, though a target without an order is sorted all the same
	}
	kvs = slices.DeleteFunc(kvs, func(kv *mvccpb.KeyValue) bool {
		return r.MaxModRevision != 0 && kv.ModRevision > r.MaxModRevision ||
			r.MinModRevision != 0 && kv.ModRevision < r.MinModRevision ||
			r.MaxCreateRevision != 0 && kv.CreateRevision > r.MaxCreateRevision ||
			r.MinCreateRevision != 0 && kv.CreateRevision < r.MinCreateRevision
	})
	sortKVs(kvs, r)
	if r.Limit > 0 && int64(len(kvs)) > r.Limit {
		kvs, resp.More = kvs[:r.Limit], true
	}
	if r.KeysOnly {
		for i, kv := range kvs {
			kvs[i] = &mvccpb.KeyValue{
				Key: kv.Key, CreateRevision: kv.CreateRevision, ModRevision: kv.ModRevision, Version: kv.Version,
			}
			if r.SortTarget == pb.RangeRequest_VALUE {
				kvs[i].Lease = kv.Lease // etcd takes another path here, which knows the lease
			}
		}
	}
	resp.Kvs = kvs
	return resp, nil
}

// sortKVs sorts as etcd does, with the same unstable algorithm, so that equal elements end up in the same order.
func sortKVs(kvs []*mvccpb.KeyValue, r *pb.RangeRequest) {
	order := r.SortOrder
	if r.SortTarget != pb.RangeRequest_KEY && order == pb.RangeRequest_NONE {
		order = pb.RangeRequest_ASCEND
	}
	if inKeyOrder(r.SortTarget, order) {
		return
	}
	by := &sorter{kvs: kvs}
	switch r.SortTarget {
	case pb.RangeRequest_KEY:
		by.less = func(a, b *mvccpb.KeyValue) bool { return bytes.Compare(a.Key, b.Key) < 0 }
	case pb.RangeRequest_VERSION:
		by.less = func(a, b *mvccpb.KeyValue) bool { return a.Version < b.Version }
	case pb.RangeRequest_CREATE:
		by.less = func(a, b *mvccpb.KeyValue) bool { return a.CreateRevision < b.CreateRevision }
	case pb.RangeRequest_MOD:
		by.less = func(a, b *mvccpb.KeyValue) bool { return a.ModRevision < b.ModRevision }
	case pb.RangeRequest_VALUE:
		by.less = func(a, b *mvccpb.KeyValue) bool { return bytes.Compare(a.Value, b.Value) < 0 }
	}
	if order == pb.RangeRequest_DESCEND {
		sort.Sort(sort.Reverse(by))
	} else {
		sort.Sort(by)
	}
}

func inKeyOrder(by pb.RangeRequest_SortTarget, order pb.RangeRequest_SortOrder) bool {
	return order == pb.RangeRequest_NONE || by == pb.RangeRequest_KEY && order == pb.RangeRequest_ASCEND
}

type sorter struct {
	kvs  []*mvccpb.KeyValue
	less func(a, b *mvccpb.KeyValue) bool
}

func (s *sorter) Len() int           { return len(s.kvs) }
func (s *sorter) Less(i, j int) bool { return s.less(s.kvs[i], s.kvs[j]) }
func (s *sorter) Swap(i, j int)      { s.kvs[i], s.kvs[j] = s.kvs[j], s.kvs[i] }
