package etcdsim_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"aegis/internal/etcdsim"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"
)

var (
	seed  = flag.Uint64("seed", 0, "the differential test's only seed; 0 draws several")
	steps = flag.Int("steps", 500, "operations per seed")
)

// TestAnswersAsEtcdDoes drives a real embedded etcd and the simulator with the same random operations and compares
// every reply and everything that watches deliver.
func TestAnswersAsEtcdDoes(t *testing.T) {
	t.Parallel()
	seeds := []uint64{*seed}
	if *seed == 0 {
		seeds = []uint64{1, rand.Uint64()}
	}
	for _, s := range seeds {
		t.Run(fmt.Sprintf("Seed%d", s), func(t *testing.T) {
			t.Parallel()
			replay := fmt.Sprintf("go test ./internal/etcdsim -run TestAnswersAsEtcdDoes -seed %d -steps %d", s, *steps)
			t.Logf("seed %d", s)
			real := newRun(embedded(t)(), s)
			real.all(*steps)
			var sim *run
			synctest.Test(t, func(t *testing.T) {
				c := etcdsim.New()
				defer c.Close()
				sim = newRun(c.Client("a"), s)
				sim.all(*steps)
			})
			for i, want := range real.log {
				if i >= len(sim.log) || sim.log[i] != want {
					got := "nothing"
					if i < len(sim.log) {
						got = sim.log[i]
					}
					t.Fatalf("step %d differs\n%s\n\nreplay: %s", i, difference(want, got), replay)
				}
			}
		})
	}
}

// run is one pass over a sequence of operations that depends on the seed alone.
type run struct {
	cli     *clientv3.Client
	rnd     *rand.Rand
	log     []string
	rev     int64 // the newest revision seen
	leases  []clientv3.LeaseID
	endless bool // see txn
	watches []*watching
}

type watching struct {
	cancel context.CancelFunc
	what   string
	done   chan struct{}
	seen   []any // events, and what else it said as strings
}

func newRun(cli *clientv3.Client, seed uint64) *run {
	return &run{cli: cli, rnd: rand.New(rand.NewPCG(seed, 0)), rev: 1}
}

func (r *run) all(n int) {
	for range n {
		r.step()
	}
	settle(time.Second) // for the watches
	for i, w := range r.watches {
		w.cancel()
		<-w.done
		text := fmt.Sprintf("watch %d: %s", i, w.what)
		for _, what := range w.seen {
			if e, ok := what.(*mvccpb.Event); ok {
				what = r.text(e)
			}
			text += fmt.Sprintf("\n%s", what)
		}
		r.log = append(r.log, text)
	}
}

// settle lets a real etcd do what nothing tells of: that a watch has nothing more to say.
func settle(d time.Duration) { <-time.After(d) }

func (r *run) step() {
	ctx := context.Background()
	switch p := r.rnd.IntN(100); {
	case p < 55:
		op, what := r.op(0)
		resp, err := r.cli.Do(ctx, op)
		var m proto.Message
		switch {
		case resp.Put() != nil:
			m = (*pb.PutResponse)(resp.Put())
		case resp.Get() != nil:
			m = (*pb.RangeResponse)(resp.Get())
		case resp.Del() != nil:
			m = (*pb.DeleteRangeResponse)(resp.Del())
		case resp.Txn() != nil:
			m = (*pb.TxnResponse)(resp.Txn())
		}
		r.record(what, m, err)
	case p < 80:
		op, what := r.txn(0)
		resp, err := r.cli.Do(ctx, op)
		r.record(what, (*pb.TxnResponse)(resp.Txn()), err)
	case p < 86:
		ttl := int64(1000 + r.rnd.IntN(1000))
		if r.rnd.IntN(10) == 0 {
			ttl = 9_000_000_001
		}
		g, err := r.cli.Grant(ctx, ttl)
		if err == nil {
			r.leases = append(r.leases, g.ID)
			r.record(fmt.Sprintf("grant %d: %d", ttl, g.TTL), &pb.LeaseGrantResponse{Header: g.ResponseHeader}, nil)
		} else {
			r.record("grant", nil, err)
		}
	case p < 90:
		id, name := r.lease(false)
		g, err := r.cli.Revoke(ctx, id)
		r.record("revoke "+name, (*pb.LeaseRevokeResponse)(g), err)
	case p < 92:
		id, name := r.lease(false)
		g, err := r.cli.KeepAliveOnce(ctx, id)
		if g == nil {
			g = &clientv3.LeaseKeepAliveResponse{}
		}
		r.record(fmt.Sprintf("renew %s: %d", name, g.TTL), &pb.LeaseKeepAliveResponse{Header: g.ResponseHeader}, err)
	case p < 94:
		id, name := r.lease(false)
		g, err := r.cli.TimeToLive(ctx, id, clientv3.WithAttachedKeys())
		if g == nil {
			g = &clientv3.LeaseTimeToLiveResponse{}
		}
		slices.SortFunc(g.Keys, slices.Compare)
		r.record(fmt.Sprintf("time to live %s: %d, alive %t, %q", name, g.GrantedTTL, g.TTL > 0, g.Keys),
			&pb.LeaseTimeToLiveResponse{Header: g.ResponseHeader}, err)
	case p < 95:
		g, err := r.cli.Leases(ctx)
		if g == nil {
			g = &clientv3.LeaseLeasesResponse{}
		}
		r.record(fmt.Sprintf("leases %d", len(g.Leases)), &pb.LeaseLeasesResponse{Header: g.ResponseHeader}, err)
	case p < 98:
		r.watch()
	case p < 99:
		if len(r.watches) > 0 {
			w := r.watches[r.rnd.IntN(len(r.watches))]
			settle(400 * time.Millisecond) // it may see what was before, also the past
			w.cancel()
			<-w.done
		}
	default:
		settle(400 * time.Millisecond) // it would take the past away from watches that were not served yet
		g, err := r.cli.Compact(ctx, max(0, r.rev-int64(r.rnd.IntN(40))+2))
		r.record("compact", (*pb.CompactionResponse)(g), err)
	}
}

var keys = []string{"a", "a/", "a/1", "a/2", "a0", "b", "b/x", "b/y", "c", "c\x00", "z", "\xff", "\xff\xff"}

func (r *run) key() string {
	if r.rnd.IntN(100) == 0 {
		return ""
	}
	return keys[r.rnd.IntN(len(keys))]
}

func (r *run) chance(n int) bool { return r.rnd.IntN(n) == 0 }

// lease draws one that was granted, or none, or one that never was.
func (r *run) lease(none bool) (clientv3.LeaseID, string) {
	switch i := r.rnd.IntN(20); {
	case i == 0 || len(r.leases) == 0:
		return 12345, "unknown"
	case i < 8 && none:
		return 0, "none"
	}
	i := len(r.leases) - 1 - r.rnd.IntN(min(len(r.leases), 6))
	return r.leases[i], fmt.Sprint("#", i)
}

func (r *run) span(k string, endless bool) (opts []clientv3.OpOption, what string) {
	n := r.rnd.IntN(8)
	if !endless && (n == 1 || n == 0 && clientv3.GetPrefixRangeEnd(k) == "\x00") {
		n = 7
	}
	switch n {
	case 0:
		return []clientv3.OpOption{clientv3.WithPrefix()}, "prefix"
	case 1:
		return []clientv3.OpOption{clientv3.WithFromKey()}, "from"
	case 2:
		k := r.key()
		return []clientv3.OpOption{clientv3.WithRange(k)}, fmt.Sprintf("to %q", k)
	}
	return nil, "one"
}

func (r *run) revision() int64 {
	switch r.rnd.IntN(6) {
	case 0:
		return max(0, r.rev-int64(r.rnd.IntN(60)))
	case 1:
		return r.rev - int64(r.rnd.IntN(4)) + 2
	}
	return 0
}

func (r *run) op(depth int) (clientv3.Op, string) {
	k := r.key()
	switch p := r.rnd.IntN(10); {
	case p < 4:
		v := fmt.Sprint("v", r.rnd.IntN(5))
		id, lease := r.lease(true)
		opts := []clientv3.OpOption{clientv3.WithLease(id)}
		if r.chance(3) {
			opts = append(opts, clientv3.WithPrevKV())
		}
		if r.chance(10) && (depth == 0 || !r.endless) {
			opts = append(opts, clientv3.WithIgnoreValue())
			if !r.chance(5) {
				v = ""
			}
		}
		if r.chance(10) && (depth == 0 || !r.endless) {
			opts = append(opts, clientv3.WithIgnoreLease())
			if !r.chance(5) {
				opts = append(opts, clientv3.WithLease(0))
			}
		}
		return clientv3.OpPut(k, v, opts...), fmt.Sprintf("put %q %q lease %s (%d options)", k, v, lease, len(opts))
	case p < 6:
		opts, sp := r.span(k, r.endless || depth == 0)
		if r.chance(2) {
			opts = append(opts, clientv3.WithPrevKV())
		}
		return clientv3.OpDelete(k, opts...), fmt.Sprintf("delete %q %s", k, sp)
	case p < 7 && depth < 3 && depth > 0:
		return r.txn(depth)
	}
	opts, sp := r.span(k, true)
	rev := r.revision()
	opts = append(opts, clientv3.WithRev(rev))
	if r.chance(4) {
		opts = append(opts, clientv3.WithLimit(int64(r.rnd.IntN(4))))
	}
	if r.chance(6) {
		opts = append(opts, clientv3.WithKeysOnly())
	}
	if r.chance(8) {
		opts = append(opts, clientv3.WithCountOnly())
	}
	if r.chance(4) {
		by := []clientv3.SortTarget{clientv3.SortByKey, clientv3.SortByVersion, clientv3.SortByCreateRevision,
			clientv3.SortByModRevision, clientv3.SortByValue}[r.rnd.IntN(5)]
		order := []clientv3.SortOrder{clientv3.SortNone, clientv3.SortAscend, clientv3.SortDescend}[r.rnd.IntN(3)]
		opts = append(opts, clientv3.WithSort(by, order))
		sp += fmt.Sprintf(" by %d in order %d", by, order)
	}
	for i, bound := range []func(int64) clientv3.OpOption{
		clientv3.WithMinModRev, clientv3.WithMaxModRev, clientv3.WithMinCreateRev, clientv3.WithMaxCreateRev,
	} {
		if r.chance(12) {
			b := r.rev - int64(r.rnd.IntN(20))
			opts = append(opts, bound(b))
			sp += fmt.Sprintf(" bound %d: %d", i, b)
		}
	}
	return clientv3.OpGet(k, opts...), fmt.Sprintf("get %q %s at %d (%d options)", k, sp, rev, len(opts))
}

func (r *run) txn(depth int) (clientv3.Op, string) {
	var cmps []clientv3.Cmp
	var then, els []clientv3.Op
	var what []string
	if depth == 0 {
		// A deletion without end and a put that keeps what was there, in one transaction, crash etcd 3.7.3.
		r.endless = r.chance(2)
	}
	if r.chance(100) {
		for range 127 + r.rnd.IntN(3) {
			then = append(then, clientv3.OpGet("a"))
		}
	}
	for range r.rnd.IntN(3) {
		c, w := r.cmp()
		cmps = append(cmps, c)
		what = append(what, w)
	}
	for _, ops := range []*[]clientv3.Op{&then, &els} {
		what = append(what, "-")
		for range r.rnd.IntN(4) {
			o, w := r.op(depth + 1)
			*ops = append(*ops, o)
			what = append(what, w)
		}
	}
	return clientv3.OpTxn(cmps, then, els), "txn [" + strings.Join(what, "; ") + "]"
}

func (r *run) cmp() (c clientv3.Cmp, what string) {
	k := r.key()
	result := []string{"=", "!=", "<", ">"}[r.rnd.IntN(4)]
	recent := r.rev - int64(r.rnd.IntN(10))
	switch r.rnd.IntN(5) {
	case 0:
		c = clientv3.Compare(clientv3.Version(k), result, r.rnd.IntN(3))
	case 1:
		c = clientv3.Compare(clientv3.CreateRevision(k), result, recent*int64(r.rnd.IntN(2)))
	case 2:
		c = clientv3.Compare(clientv3.ModRevision(k), result, recent*int64(r.rnd.IntN(2)))
	case 3:
		c = clientv3.Compare(clientv3.Value(k), result, fmt.Sprint("v", r.rnd.IntN(5)))
	case 4:
		// Only whether there is one: ids differ.
		c = clientv3.Compare(clientv3.LeaseValue(k), []string{"=", "!="}[r.rnd.IntN(2)], clientv3.LeaseID(0))
	}
	switch r.rnd.IntN(8) {
	case 0:
		c = c.WithPrefix()
	case 1:
		c = c.WithRange(r.key())
	case 2:
		c = c.WithRange("\x00")
	}
	return c, fmt.Sprintf("if %q %s", k, result)
}

func (r *run) watch() {
	k := r.key()
	opts, sp := r.span(k, true)
	rev := r.revision()
	opts = append(opts, clientv3.WithRev(rev), clientv3.WithCreatedNotify())
	if r.chance(2) {
		opts = append(opts, clientv3.WithPrevKV())
	}
	if r.chance(6) {
		opts = append(opts, clientv3.WithFilterPut())
	}
	if r.chance(6) {
		opts = append(opts, clientv3.WithFilterDelete())
	}
	ctx, cancel := context.WithCancel(context.Background())
	w := &watching{
		cancel: cancel, done: make(chan struct{}),
		what: fmt.Sprintf("%q %s from %d (%d options), opened at %d", k, sp, rev, len(opts), r.rev),
	}
	ch := r.cli.Watch(ctx, k, opts...)
	go func() {
		defer close(w.done)
		last := int64(0)
		for resp := range ch {
			switch {
			case resp.Err() != nil:
				w.seen = append(w.seen, fmt.Sprintf("%v, compacted %d", resp.Err(), resp.CompactRevision))
			case resp.Created:
				w.seen = append(w.seen, fmt.Sprintf("created at %d", resp.Header.Revision))
			default:
				if len(resp.Events) > 0 && resp.Events[0].Kv.ModRevision == last {
					w.seen = append(w.seen, fmt.Sprintf("revision %d is split", last))
				}
				for _, e := range resp.Events {
					w.seen, last = append(w.seen, e), e.Kv.ModRevision
				}
			}
		}
	}()
	r.watches = append(r.watches, w)
}

func (r *run) record(what string, m proto.Message, err error) {
	text := fmt.Sprintf("%s\n→ ", what)
	if err != nil {
		text += err.Error()
	} else {
		text += r.text(m)
		if h, ok := m.(interface{ GetHeader() *pb.ResponseHeader }); ok {
			r.rev = max(r.rev, h.GetHeader().GetRevision())
		}
	}
	r.log = append(r.log, text)
}
