package aegis

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

type leaderEntry struct {
	node  NodeID
	lease clientv3.LeaseID
	mod   int64
}

type termEntry struct {
	termRecord
	mod int64
}

// last says how the term that the record tells of ended, given that it has; "" when there was none.
func (t termEntry) last() string {
	if t.mod == 0 {
		return ""
	}
	return fmt.Sprintf("%s, token %d: %s", t.Node, cmp.Or(t.Won, t.mod)+t.Offset, cmp.Or(t.Ended, "its lease ran out"))
}

type candidate struct {
	candidateRecord
	lease   clientv3.LeaseID
	created int64
}

type requestEntry struct {
	requestRecord
	mod int64
}

// offsetEntry is the cluster's token offset; the zero entry stands for an absent key.
type offsetEntry struct {
	value, mod int64
}

// electionState is what a view shows of one election at a revision.
type electionState struct {
	rev     int64
	leader  leaderEntry // mod 0: vacant
	record  termEntry   // of the latest term, over or not
	queue   []candidate // not to be changed
	request requestEntry
	offset  offsetEntry
}

// term returns the term in office, or the zero token when the election is vacant.
func (s electionState) term(name string, cluster uint64) Term {
	if s.leader.mod == 0 {
		return Term{Election: name}
	}
	t := Term{Election: name, Node: s.leader.node, Token: s.leader.mod + s.offset.value, Cluster: cluster}
	if s.record.mod == s.leader.mod { // else it was not written by aegis, or the two keys were torn apart by hand
		t.Token, t.Nonce = s.leader.mod+s.record.Offset, uint64(s.record.Nonce)
	}
	return t
}

// offsetOfTerm is the offset under which the term in office won: the present one, or one that was replaced since.
func (s electionState) offsetOfTerm() offsetEntry {
	if s.record.Offset == s.offset.value {
		return s.offset
	}
	return offsetEntry{value: s.record.Offset, mod: -1}
}

// load takes in many keys at once. Queues are put in order at the end: inserting one by one is quadratic.
func (v *view) load(kvs []*mvccpb.KeyValue) {
	queues := map[string][]candidate{}
	for _, kv := range kvs {
		if dir, rest := v.keys.split(kv.Key); dir == dirCandidate {
			if name, c, ok := parseCandidate(kv, rest); ok {
				queues[name] = append(queues[name], c)
			}
		} else {
			v.put(kv)
		}
	}
	for name, queue := range queues {
		slices.SortFunc(queue, turn)
		v.queues[name] = queue
	}
}

func parseCandidate(kv *mvccpb.KeyValue, rest string) (name string, c candidate, ok bool) {
	name, lease, ok := splitCandidate(rest)
	c = candidate{lease: lease, created: kv.CreateRevision}
	_ = json.Unmarshal(kv.Value, &c.candidateRecord)
	return name, c, ok
}

// turn orders candidates: the greater priority first, then the older.
func turn(a, b candidate) int {
	return cmp.Or(cmp.Compare(b.Priority, a.Priority), cmp.Compare(a.created, b.created))
}

// put takes in a key and returns the election that it belongs to, if any. Records that cannot be read count as empty:
// `aegis status` names them.
func (v *view) put(kv *mvccpb.KeyValue) (name string) {
	dir, rest := v.keys.split(kv.Key)
	switch dir {
	case dirElection:
		v.leaders[rest] = leaderEntry{node: NodeID(kv.Value), lease: clientv3.LeaseID(kv.Lease), mod: kv.ModRevision}
		return rest
	case dirTerm:
		t := termEntry{mod: kv.ModRevision}
		_ = json.Unmarshal(kv.Value, &t.termRecord)
		v.terms[rest] = t
		return rest
	case dirCandidate:
		name, c, ok := parseCandidate(kv, rest)
		if !ok {
			return ""
		}
		queue := without(v.queues[name], c.lease)
		i, _ := slices.BinarySearchFunc(queue, c, turn)
		v.queues[name] = slices.Insert(queue, i, c)
		return name
	case dirRequest:
		r := requestEntry{mod: kv.ModRevision}
		_ = json.Unmarshal(kv.Value, &r.requestRecord)
		v.requests[rest] = r
		return rest
	case dirMeta:
		if rest == metaOffset[len(dirMeta):] {
			v.offset = parseOffset(kv)
		}
	}
	return ""
}

func (v *view) drop(key []byte) (name string) {
	dir, rest := v.keys.split(key)
	switch dir {
	case dirElection:
		delete(v.leaders, rest)
		return rest
	case dirTerm:
		delete(v.terms, rest)
		return rest
	case dirCandidate:
		name, lease, ok := splitCandidate(rest)
		if !ok {
			return ""
		}
		if v.queues[name] = without(v.queues[name], lease); len(v.queues[name]) == 0 {
			delete(v.queues, name)
		}
		return name
	case dirRequest:
		delete(v.requests, rest)
		return rest
	case dirMeta:
		if rest == metaOffset[len(dirMeta):] {
			v.offset = offsetEntry{}
		}
	}
	return ""
}

// without returns a new queue: those handed out by state are never changed.
func without(queue []candidate, lease clientv3.LeaseID) []candidate {
	out := make([]candidate, 0, len(queue)+1)
	for _, c := range queue {
		if c.lease != lease {
			out = append(out, c)
		}
	}
	return out
}

func parseOffset(kv *mvccpb.KeyValue) offsetEntry {
	value, _ := strconv.ParseInt(string(kv.Value), 10, 64)
	return offsetEntry{value: value, mod: kv.ModRevision}
}
