package aegis

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"aegis/fence"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// Cluster is the operators' and tools' way in: no lease, no id, nothing to leave. It is safe for concurrent use. Every
// call blocks until etcd answers or ctx ends; calls without a deadline give up after 10 s.
type Cluster struct {
	cli  etcd
	keys keyspace
}

// Open returns the cluster whose keys have the prefix: "" for [DefaultPrefix], [NoPrefix] for none. It does not
// connect.
func Open(cli *clientv3.Client, prefix string) *Cluster {
	return &Cluster{cli: etcd{cli}, keys: newKeyspace(prefix)}
}

const operatorTimeout = 10 * time.Second

func (c *Cluster) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, operatorTimeout)
}

// ElectionInfo is what etcd knows of one election.
type ElectionInfo struct {
	Name       string
	Term       Term          // in office; a zero token when vacant
	Host       string        // of the leader
	PID        int           // of the leader
	Since      time.Time     // by the leader's wall clock
	LeaseLeft  time.Duration // of the leader's lease; rounded down to seconds
	Candidates []Candidate   // the next one first
	LastEnd    string        // how the latest term that is over ended
	Faults     []string      // what should not be: keys without a lease, with somebody else's value, unreadable
}

// Elections returns every election that is led, waited for or was led before, by name.
func (c *Cluster) Elections(ctx context.Context) ([]ElectionInfo, error) {
	ctx, cancel := c.bound(ctx)
	defer cancel()
	v, kvs, cluster, err := c.snapshot(ctx)
	if err != nil {
		return nil, fmt.Errorf("aegis: list elections: %w", err)
	}
	infos := map[string]*ElectionInfo{}
	info := func(name string) *ElectionInfo {
		if infos[name] == nil {
			infos[name] = &ElectionInfo{Name: name, Term: v.state(name).term(name, cluster)}
		}
		return infos[name]
	}
	for name, record := range v.terms {
		i := info(name)
		if v.leaders[name].mod == record.mod {
			i.Host, i.PID, i.Since, i.LastEnd = record.Host, record.PID, record.Since, record.Before
			if i.LastEnd == "" {
				i.LastEnd = c.lastEnd(ctx, name, record.mod)
			}
		} else {
			i.LastEnd = record.last()
		}
	}
	members, err := c.Members(ctx) // a successor by transfer has not written its own record
	if err != nil {
		return nil, err
	}
	for _, i := range infos {
		at := slices.IndexFunc(members, func(m Member) bool { return m.ID == i.Term.Node })
		if i.Term.Token != 0 && i.Host == "" && at >= 0 {
			i.Host, i.PID = members[at].Host, members[at].PID
		}
	}
	left := map[clientv3.LeaseID]time.Duration{}
	for name, l := range v.leaders {
		i := info(name)
		if _, asked := left[l.lease]; !asked && l.lease != 0 {
			ttl, err := c.cli.TimeToLive(ctx, l.lease)
			if err != nil {
				return nil, fmt.Errorf("aegis: lease of the leader of %q: %w", name, err)
			}
			left[l.lease] = time.Duration(max(ttl.TTL, 0)) * time.Second
		}
		i.LeaseLeft = left[l.lease]
	}
	for name, queue := range v.queues {
		info(name).Candidates = shown(queue)
	}
	for _, kv := range kvs {
		if name, fault := c.fault(v, kv); fault != "" && name != "" {
			info(name).Faults = append(info(name).Faults, fault)
		}
	}
	out := make([]ElectionInfo, 0, len(infos))
	for _, i := range infos {
		out = append(out, *i)
	}
	slices.SortFunc(out, func(a, b ElectionInfo) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

// lastEnd looks up in etcd's history how the term before the one won at a revision ended: the winner's watch may not have
// shown it yet. It is "" where there was none or the history has been compacted.
func (c *Cluster) lastEnd(ctx context.Context, name string, won int64) string {
	resp, err := c.cli.Get(ctx, c.keys.term(name), clientv3.WithRev(won-1))
	if err != nil || len(resp.Kvs) == 0 {
		return ""
	}
	t := termEntry{mod: resp.Kvs[0].ModRevision}
	_ = json.Unmarshal(resp.Kvs[0].Value, &t.termRecord)
	return t.last()
}

// snapshot reads all keys at one revision.
func (c *Cluster) snapshot(ctx context.Context) (*view, []*mvccpb.KeyValue, uint64, error) {
	v := newView(c.cli, c.keys, operatorTimeout, slog.New(slog.DiscardHandler), func(map[string]bool) {})
	resp, err := v.read(ctx)
	if err != nil {
		return nil, nil, 0, err
	}
	var kvs []*mvccpb.KeyValue
	for _, r := range resp.Responses {
		kvs = append(kvs, r.GetResponseRange().Kvs...)
	}
	return v, kvs, resp.Header.ClusterId, nil
}

// fault names what is wrong with a key of ours, and the election that it belongs to.
func (c *Cluster) fault(v *view, kv *mvccpb.KeyValue) (name, fault string) {
	dir, rest := c.keys.split(kv.Key)
	switch dir {
	case dirElection:
		r := v.terms[rest]
		switch {
		case kv.Lease == 0:
			return rest, fmt.Sprintf("%s has no lease: nothing will ever remove it; compare and delete it by hand", kv.Key)
		case r.mod != kv.ModRevision:
			return rest, fmt.Sprintf("%s was not written together with its record: by something else than aegis?", kv.Key)
		case string(r.Node) != string(kv.Value):
			return rest, fmt.Sprintf("%s names %q, its record %q", kv.Key, kv.Value, r.Node)
		case r.Offset != v.offset.value:
			return rest, fmt.Sprintf("the term in office has token offset %d, the cluster's is %d: its leader should have stopped", r.Offset, v.offset.value)
		}
	case dirCandidate:
		name, lease, ok := splitCandidate(rest)
		if !ok {
			return "", ""
		}
		if kv.Lease != int64(lease) {
			return name, fmt.Sprintf("%s is under lease %x: nothing will ever remove it; delete it by hand", kv.Key, kv.Lease)
		}
	case dirTerm:
		if !json.Valid(kv.Value) {
			return rest, fmt.Sprintf("%s cannot be read", kv.Key)
		}
	}
	return "", ""
}

// Leader returns the term in office. Errors: [ErrNoLeader] when vacant.
func (c *Cluster) Leader(ctx context.Context, name string) (Term, error) {
	if err := validName("election name", name); err != nil {
		return Term{}, err
	}
	ctx, cancel := c.bound(ctx)
	defer cancel()
	return readLeader(ctx, c.cli, c.keys, name)
}

// Candidates returns who waits for an election, the next one first.
func (c *Cluster) Candidates(ctx context.Context, name string) ([]Candidate, error) {
	if err := validName("election name", name); err != nil {
		return nil, err
	}
	ctx, cancel := c.bound(ctx)
	defer cancel()
	queue, err := readQueue(ctx, c.cli, c.keys, name)
	if err != nil {
		return nil, fmt.Errorf("aegis: candidates of %q: %w", name, err)
	}
	return shown(queue), nil
}

// Observe yields who leads, as [Election.Observe] does, on a watch of its own that lasts as long as the loop.
func (c *Cluster) Observe(ctx context.Context, name string) iter.Seq2[Term, error] {
	return func(yield func(Term, error) bool) {
		if err := validName("election name", name); err != nil {
			yield(Term{}, err)
			return
		}
		ctx, cancel := context.WithCancel(ctx)
		v := newView(c.cli, c.keys, operatorTimeout/3, slog.New(slog.DiscardHandler), func(map[string]bool) {})
		done := make(chan struct{})
		go func() {
			defer close(done)
			v.run(ctx)
		}()
		defer func() {
			cancel()
			<-done
		}()
		v.observe(ctx, name, 0, yield)
	}
}

// Member is a listed node.
type Member struct {
	ID        NodeID
	Host      string
	PID       int
	Started   time.Time
	Program   string
	Meta      map[string]string
	Addresses []string
	Fault     string // what should not be: no lease, unreadable
}

// Members returns the listed nodes, by id.
func (c *Cluster) Members(ctx context.Context) ([]Member, error) {
	ctx, cancel := c.bound(ctx)
	defer cancel()
	resp, err := c.cli.Get(ctx, c.keys.dir(dirNode), clientv3.WithPrefix())
	if err != nil {
		return nil, fmt.Errorf("aegis: list nodes: %w", err)
	}
	var out []Member
	for _, kv := range resp.Kvs {
		_, id := c.keys.split(kv.Key)
		var r nodeRecord
		m := Member{ID: NodeID(id)}
		if err := json.Unmarshal(kv.Value, &r); err != nil {
			m.Fault = fmt.Sprintf("%s cannot be read: %v", kv.Key, err)
		} else if kv.Lease == 0 {
			m.Fault = fmt.Sprintf("%s has no lease: nothing will ever remove it; delete it by hand", kv.Key)
		}
		m.Host, m.PID, m.Started, m.Program, m.Meta, m.Addresses = r.Host, r.PID, r.Started, r.Program, r.Meta, r.Addrs
		out = append(out, m)
	}
	return out, nil
}

// Request asks the leader of the term to stop, wait for its work and hand the election to a waiting candidate, or,
// with to "", to resign. It returns when the wish is written, not when it is granted: Observe shows that. Errors: a
// [*FencedError] when another term is in office by now, [ErrNoLeader] when none is.
func (c *Cluster) Request(ctx context.Context, term Term, to NodeID) error {
	op := "resign"
	if to != "" {
		op = "transfer"
	}
	return c.against(ctx, op, term, func(ctx context.Context, s electionState) ([]clientv3.Op, error) {
		if to != "" {
			queue, err := readQueue(ctx, c.cli, c.keys, term.Election)
			if err != nil {
				return nil, err
			}
			if _, waits := find(queue, to); !waits {
				return nil, fmt.Errorf("%s is not among its waiting candidates", to)
			}
		}
		host, _ := os.Hostname()
		return []clientv3.Op{clientv3.OpPut(c.keys.request(term.Election), encode(requestRecord{Version: recordVersion, Op: op, To: to,
			Term: s.leader.mod, By: fmt.Sprintf("%s, pid %d", host, os.Getpid())}))}, nil
	})
}

// Evict deletes the key of a leader that works on: its watch tells it, and guards refuse it once a rival has won, but
// until it has noticed two may work side by side. Prefer Request. Errors as for Request.
func (c *Cluster) Evict(ctx context.Context, term Term) error {
	return c.against(ctx, opEvict, term, func(_ context.Context, s electionState) ([]clientv3.Op, error) {
		record := s.record.termRecord
		record.Ended, record.Won = "evicted by an operator", s.leader.mod
		return []clientv3.Op{clientv3.OpDelete(c.keys.leader(term.Election)), clientv3.OpPut(c.keys.term(term.Election), encode(record))}, nil
	})
}

const opEvict = "evict"

// against executes ops if the term is in office.
func (c *Cluster) against(ctx context.Context, what string, term Term, ops func(context.Context, electionState) ([]clientv3.Op, error)) error {
	ctx, cancel := c.bound(ctx)
	defer cancel()
	s, _, err := readState(ctx, c.cli, c.keys, term.Election)
	if err != nil {
		return fmt.Errorf("aegis: %s %s: %w", what, term, err)
	}
	now := s.term(term.Election, 0)
	if now.Token == 0 {
		return fmt.Errorf("aegis: %s %s: %w", what, term, ErrNoLeader)
	}
	if now.Token != term.Token {
		return fmt.Errorf("aegis: %s %s: %s is in office: %w", what, term, now, &FencedError{Name: term.Election, Token: term.Token, Newest: now.Token})
	}
	then, err := ops(ctx, s)
	if err != nil {
		return fmt.Errorf("aegis: %s %s: %w", what, term, err)
	}
	resp, err := c.cli.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(c.keys.leader(term.Election)), "=", s.leader.mod)).
		Then(then...).Else(readOps(c.keys, term.Election)...).Commit()
	if err != nil {
		return fmt.Errorf("aegis: %s %s: %w", what, term, err)
	}
	if !resp.Succeeded && stateOf(resp).record.Won == s.leader.mod && what == opEvict {
		return nil // executed twice: the first time did it
	}
	if !resp.Succeeded {
		return fmt.Errorf("aegis: %s %s: the term has just ended: %w", what, term, ErrNoLeader)
	}
	return nil
}

// TokenOffset returns what is added to etcd's revisions to make tokens: 0 unless it was raised.
func (c *Cluster) TokenOffset(ctx context.Context) (int64, error) {
	ctx, cancel := c.bound(ctx)
	defer cancel()
	resp, err := c.cli.Get(ctx, c.keys.offset())
	if err != nil {
		return 0, fmt.Errorf("aegis: read the token offset: %w", err)
	}
	if len(resp.Kvs) == 0 {
		return 0, nil
	}
	return parseOffset(resp.Kvs[0]).value, nil
}

// tokenGap is how far above everything known the token offset is raised: tokens that were given out but have not
// reached a guard yet count too, and 2^30 is more than an etcd gives out between a snapshot and its restore.
const tokenGap = 1 << 30

// RaiseToken raises the cluster's token offset so that every later token is more than 2^30 above both the given one
// and every token that this etcd can have given out; it never lowers it. It also declares this etcd to be the one that
// the keys belong to. Every term in office ends. It is for after a restore of etcd: see [ErrTokenWentBack].
//
// above is the greatest token that any guard has taken, 0 if there are no guards. It returns the new offset.
func (c *Cluster) RaiseToken(ctx context.Context, above Token) (int64, error) {
	ctx, cancel := c.bound(ctx)
	defer cancel()
	for {
		resp, err := c.cli.Get(ctx, c.keys.offset())
		if err != nil {
			return 0, fmt.Errorf("aegis: raise the token offset: %w", err)
		}
		old := offsetEntry{}
		if len(resp.Kvs) > 0 {
			old = parseOffset(resp.Kvs[0])
		}
		offset := max(above, resp.Header.Revision+old.value) + tokenGap
		if err := fence.ValidToken(offset + resp.Header.Revision + tokenGap); err != nil || above < 0 {
			return old.value, fmt.Errorf("aegis: raise the token offset above %d: %w", above, errors.Join(err, fence.ErrInvalidToken))
		}
		put, err := c.cli.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(c.keys.offset()), "=", old.mod)).
			Then(clientv3.OpPut(c.keys.offset(), strconv.FormatInt(offset, 10)),
				clientv3.OpPut(c.keys.cluster(), strconv.FormatUint(resp.Header.ClusterId, 16))).Commit()
		if err != nil {
			return old.value, fmt.Errorf("aegis: raise the token offset: %w", err)
		}
		if put.Succeeded {
			return offset, nil
		}
	}
}

// Prune removes the records of elections that are vacant, and returns their names. Elections that are led or waited
// for keep theirs. Nothing rests on those records but the memory of how the last term ended.
func (c *Cluster) Prune(ctx context.Context) ([]string, error) {
	ctx, cancel := c.bound(ctx)
	defer cancel()
	v, _, _, err := c.snapshot(ctx)
	if err != nil {
		return nil, fmt.Errorf("aegis: prune: %w", err)
	}
	var removed []string
	for name, record := range v.terms {
		if v.leaders[name].mod != 0 || len(v.queues[name]) > 0 {
			continue
		}
		resp, err := c.cli.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(c.keys.leader(name)), "=", 0),
			clientv3.Compare(clientv3.ModRevision(c.keys.term(name)), "=", record.mod)).
			Then(clientv3.OpDelete(c.keys.term(name)), clientv3.OpDelete(c.keys.request(name)), clientv3.OpDelete(c.keys.commit(name))).Commit()
		if err != nil {
			return removed, fmt.Errorf("aegis: prune %q: %w", name, err)
		}
		if resp.Succeeded {
			removed = append(removed, name)
		}
	}
	slices.Sort(removed)
	return removed, nil
}
