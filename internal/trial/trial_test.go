package trial

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"aegis"
	"aegis/internal/lab"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// trial is one cluster and the node processes on it.
type trial struct {
	*testing.T
	cluster *lab.Cluster
	admin   *clientv3.Client // by a link of its own, which nobody cuts
	prefix  string
	system  string
	guard   string

	mu    sync.Mutex
	nodes []*node
}

// newTrial starts a cluster with etcd's own ticks, or with fast ones, for a test that is not about leases' length.
func newTrial(t *testing.T, opts lab.Options) *trial {
	t.Helper()
	opts.NoFsync = true // a disk that other tests keep busy would delay answers by more than the tests allow
	c, err := lab.Start(within(t, 30*time.Second), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return onCluster(t, c)
}

var serial int

// onCluster is a trial on a cluster that is there, under a prefix of its own.
func onCluster(t *testing.T, c *lab.Cluster) *trial {
	t.Helper()
	admin, err := c.Client("admin")
	if err != nil {
		t.Fatal(err)
	}
	serial++
	return &trial{T: t, cluster: c, admin: admin, prefix: fmt.Sprintf("/trial-%d/", serial), system: systemAegis}
}

// in is the same trial for a subtest, which starts no processes.
func (t *trial) in(sub *testing.T) *trial {
	return &trial{T: sub, cluster: t.cluster, admin: t.admin, prefix: t.prefix, system: t.system}
}

func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// node is one node process and all that it has reported.
type node struct {
	*lab.Process
	t    *trial
	id   string
	read sync.WaitGroup

	mu      sync.Mutex
	reports []report
	killed  int64 // when Kill had returned; 0 while it may run
}

// start starts a node process, which joins and campaigns by itself.
func (t *trial) start(id string) *node {
	t.Helper()
	cfg, err := json.Marshal(nodeConfig{System: t.system, ID: id, Endpoints: t.cluster.Endpoints(id), Prefix: t.prefix, Guard: t.guard})
	if err != nil {
		t.Fatal(err)
	}
	p, err := lab.Run(lab.Command{Name: id, Role: roleNode, Env: []string{configEnv + "=" + string(cfg)}})
	if err != nil {
		t.Fatal(err)
	}
	n := &node{Process: p, t: t, id: id}
	n.read.Go(func() {
		for {
			line, err := p.Next(context.Background())
			if err != nil {
				return
			}
			var r report
			if err := json.Unmarshal([]byte(line.Text), &r); err != nil {
				r = report{Kind: "garbage", Note: line.Text}
			}
			n.mu.Lock()
			n.reports = append(n.reports, r)
			n.mu.Unlock()
		}
	})
	t.mu.Lock()
	t.nodes = append(t.nodes, n)
	t.mu.Unlock()
	t.Cleanup(func() {
		p.Close()
		n.read.Wait()
		if t.Failed() {
			t.Logf("%s reported:\n%s\nits log ends with:\n%s", n, n.story(), p.Stderr())
		}
	})
	return n
}

func (n *node) String() string { return n.id }

// story is what the process reported, for a failed test.
func (n *node) story() string {
	var b strings.Builder
	for _, r := range n.all() {
		line, _ := json.Marshal(r)
		fmt.Fprintf(&b, "  %s\n", line)
	}
	return b.String()
}

func (n *node) all() []report {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.reports)
}

func (n *node) find(ok func(report) bool) (report, bool) {
	all := n.all()
	if i := slices.IndexFunc(all, ok); i >= 0 {
		return all[i], true
	}
	return report{}, false
}

// await waits for a report and fails the test if it does not come in time.
func (n *node) await(d time.Duration, what string, ok func(report) bool) report {
	n.t.Helper()
	var r report
	err := lab.Eventually(within(n.t.T, d), n.id+" to report "+what, func(context.Context) (bool, error) {
		var found bool
		if r, found = n.find(ok); found {
			return true, nil
		}
		select {
		case <-n.Done():
			return false, fmt.Errorf("the process has ended")
		default:
			return false, nil
		}
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return r
}

// wins waits for a term of this node with a token greater than the given one.
func (n *node) wins(d time.Duration, above int64) report {
	n.t.Helper()
	return n.await(d, fmt.Sprintf("a win above token %d", above), func(r report) bool { return r.Kind == "won" && r.Token > above })
}

// ends waits for the end of a term.
func (n *node) ends(d time.Duration, token int64) report {
	n.t.Helper()
	return n.await(d, fmt.Sprintf("the end of term %d", token), func(r report) bool { return r.Kind == "end" && r.Token == token })
}

// do sends an order and waits for the report of its kind that follows.
func (n *node) do(d time.Duration, kind, order string) report {
	n.t.Helper()
	before := len(n.all())
	if err := n.Send(order); err != nil {
		n.t.Fatal(err)
	}
	var r report
	err := lab.Eventually(within(n.t.T, d), fmt.Sprintf("%s to answer %q", n.id, order), func(context.Context) (bool, error) {
		all := n.all()[before:]
		i := slices.IndexFunc(all, func(r report) bool { return r.Kind == kind })
		if i >= 0 {
			r = all[i]
		}
		return i >= 0, nil
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return r
}

// queued waits until a node waits for its turn in etcd.
func (t *trial) queued(d time.Duration, id string) {
	t.Helper()
	err := lab.Eventually(within(t.T, d), id+" to wait in the queue", func(ctx context.Context) (bool, error) {
		if t.system == systemConcurrency {
			resp, err := t.admin.Get(ctx, t.prefix+election+"/", clientv3.WithPrefix(), clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortAscend))
			if err != nil {
				return false, err
			}
			return slices.ContainsFunc(resp.Kvs[min(1, len(resp.Kvs)):], func(kv *kv) bool { return string(kv.Value) == id }), nil
		}
		infos, err := aegis.Open(t.admin, t.prefix).Elections(ctx)
		if err != nil {
			return false, err
		}
		for _, e := range infos {
			if e.Name == election && slices.ContainsFunc(e.Candidates, func(c aegis.Candidate) bool { return string(c.Node) == id }) {
				return e.Term.Token != 0, nil
			}
		}
		return false, nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// reign is the time for which a node's Held said yes under one term, at its widest.
type reign struct {
	node        string
	token       int64
	first, last int64 // last is the end of time while the term is held
}

func (r reign) String() string { return fmt.Sprintf("%s (token %d)", r.node, r.token) }

// reigns returns what all node processes reported, in the order of their beginnings.
func (t *trial) reigns() []reign {
	t.mu.Lock()
	nodes := slices.Clone(t.nodes)
	t.mu.Unlock()
	var out []reign
	for _, n := range nodes {
		n.mu.Lock()
		for _, r := range n.reports {
			switch r.Kind {
			case "won":
				last := int64(math.MaxInt64)
				if n.killed != 0 {
					last = n.killed
				}
				out = append(out, reign{n.id, r.Token, r.First.Before, last})
			case "end":
				i := slices.IndexFunc(out, func(o reign) bool { return o.node == n.id && o.token == r.Token })
				if i >= 0 {
					out[i].last = r.Last.After
				}
			}
		}
		n.mu.Unlock()
	}
	slices.SortFunc(out, func(a, b reign) int { return cmp.Compare(a.first, b.first) })
	return out
}

// overlap is two reigns at one time.
type overlap struct {
	a, b reign
	time.Duration
}

// overlaps compares every reign with every other.
func overlaps(reigns []reign) []overlap {
	var out []overlap
	for i, a := range reigns {
		for _, b := range reigns[i+1:] {
			if both := min(a.last, b.last) - max(a.first, b.first); both > 0 {
				out = append(out, overlap{a, b, time.Duration(both)})
			}
		}
	}
	return out
}

// noOverlap fails the test if two terms were held at one time, or tokens did not grow.
func (t *trial) noOverlap() {
	t.Helper()
	for _, o := range overlaps(t.reigns()) {
		t.Errorf("%v and %v both held for %v", o.a, o.b, o.Duration)
	}
	t.growingTokens()
}

// growingTokens fails the test unless tokens have grown in the order of the wins.
func (t *trial) growingTokens() {
	t.Helper()
	reigns := t.reigns()
	for i := 1; i < len(reigns); i++ {
		if reigns[i].token <= reigns[i-1].token {
			t.Errorf("%v follows %v", reigns[i], reigns[i-1])
		}
	}
}
