package etcdsim

import (
	"bytes"
	"maps"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	syncEvery    = 100 * time.Millisecond // how often unsynced watchers are served
	syncMaxRevs  = 1000                   // how many revisions one of them gets at a time
	maxWatchText = "mvcc: watcher range is empty"
)

// watcher is one watch of a stream. A synced one is told of every change as it happens; one whose start lies in the
// past is unsynced until the next tick has served it the past.
type watcher struct {
	s        *stream
	id       int64
	sp       span
	start    int64
	min      int64 // the first revision that it has not seen
	synced   bool
	prevKV   bool
	noPut    bool
	noDelete bool
	progress bool // wants to be told
	quiet    bool // nothing was sent since the last progress tick
}

func (c *Cluster) watchRequest(s *stream, r *pb.WatchRequest, v Verdict) {
	switch u := r.RequestUnion.(type) {
	case *pb.WatchRequest_CreateRequest:
		c.createWatch(s, u.CreateRequest, v)
	case *pb.WatchRequest_CancelRequest:
		id := u.CancelRequest.GetWatchId()
		if w := s.watchers[id]; w != nil {
			delete(s.watchers, id)
			c.watchers = slices.DeleteFunc(c.watchers, func(x *watcher) bool { return x == w })
			c.reply(s, &pb.WatchResponse{Header: c.header(c.store.rev), WatchId: id, Canceled: true}, v)
		}
	case *pb.WatchRequest_ProgressRequest:
		for _, w := range s.watchers {
			if !c.caughtUp(w) {
				return // etcd says nothing at all then
			}
		}
		if len(s.watchers) > 0 {
			c.reply(s, &pb.WatchResponse{Header: c.header(c.store.rev), WatchId: clientv3.InvalidWatchID}, v)
		}
	}
}

// caughtUp says whether progress can be told: not while the past is still to be served, and not for a watch of a
// revision that the store has not reached.
func (c *Cluster) caughtUp(w *watcher) bool { return w.synced && c.store.rev >= w.start }

func (c *Cluster) createWatch(s *stream, r *pb.WatchCreateRequest, v Verdict) {
	key := r.Key
	if len(key) == 0 {
		key = []byte{0}
	}
	refused := func(reason string) {
		c.reply(s, &pb.WatchResponse{
			Header: c.header(c.store.rev), WatchId: clientv3.InvalidWatchID,
			Created: true, Canceled: true, CancelReason: reason,
		}, v)
	}
	sp := spanOf(key, r.RangeEnd)
	if r.StartRevision < 0 {
		refused(rpctypes.ErrCompacted.Error())
		return
	}
	if sp.end != "" && bytes.Compare(key, r.RangeEnd) >= 0 {
		refused(maxWatchText)
		return
	}
	id := r.WatchId
	if id == clientv3.AutoWatchID {
		for s.watchers[s.nextID] != nil {
			s.nextID++
		}
		id = s.nextID
		s.nextID++
	} else if s.watchers[id] != nil {
		refused("mvcc: duplicate watch ID provided on the WatchStream")
		return
	}
	w := &watcher{
		s: s, id: id, sp: sp, start: r.StartRevision, min: r.StartRevision, prevKV: r.PrevKv,
		noPut:    slices.Contains(r.Filters, pb.WatchCreateRequest_NOPUT),
		noDelete: slices.Contains(r.Filters, pb.WatchCreateRequest_NODELETE),
		progress: r.ProgressNotify, quiet: true,
	}
	s.watchers[id] = w
	c.watchers = append(c.watchers, w)
	c.reply(s, &pb.WatchResponse{Header: c.header(c.store.rev), WatchId: id, Created: true}, v)
	if w.start == 0 || w.start > c.store.rev {
		w.synced, w.min = true, max(w.start, c.store.rev+1)
	} else {
		c.planSync()
	}
	if w.progress {
		c.planProgress(s)
	}
}

func (c *Cluster) dropWatchers(s *stream) {
	if len(s.watchers) == 0 {
		return
	}
	clear(s.watchers)
	c.watchers = slices.DeleteFunc(c.watchers, func(w *watcher) bool { return w.s == s })
}

// notify tells the synced watchers of a revision.
func (c *Cluster) notify(rev int64, events []*mvccpb.Event) {
	for _, w := range c.watchers {
		if w.synced && rev >= w.min {
			if matching := w.matching(events); len(matching) > 0 {
				w.min = rev + 1
				c.tell(w, rev, matching)
			}
		}
	}
}

func (w *watcher) matching(events []*mvccpb.Event) (out []*mvccpb.Event) {
	for _, e := range events {
		if w.sp.has(string(e.Kv.Key)) {
			out = append(out, e)
		}
	}
	return out
}

// tell sends events to a watcher, less what it does not want.
func (c *Cluster) tell(w *watcher, rev int64, events []*mvccpb.Event) {
	var out []*mvccpb.Event
	for _, e := range events {
		if e.Type == mvccpb.Event_PUT && w.noPut || e.Type == mvccpb.Event_DELETE && w.noDelete {
			continue
		}
		if w.prevKV && (e.Type == mvccpb.Event_DELETE || e.Kv.CreateRevision != e.Kv.ModRevision) {
			e = &mvccpb.Event{Type: e.Type, Kv: e.Kv}
			if before := e.Kv.ModRevision - 1; before >= c.store.compact {
				e.PrevKv = c.store.get(string(e.Kv.Key), before)
			}
		}
		out = append(out, e)
	}
	if len(out) == 0 {
		return
	}
	w.quiet = false
	c.reply(w.s, &pb.WatchResponse{Header: c.header(rev), WatchId: w.id, Events: out}, Verdict{})
}

// planSync has the unsynced watchers served at the next tick.
func (c *Cluster) planSync() {
	at := c.tick(time.Now().Add(1), syncEvery)
	if c.nextSync.Equal(at) {
		return
	}
	c.nextSync = at
	c.at(at, c.sync)
}

func (c *Cluster) sync() {
	c.nextSync = time.Time{}
	for _, w := range slices.Clone(c.watchers) {
		if w.synced {
			continue
		}
		if w.min < c.store.compact {
			c.watchers = slices.DeleteFunc(c.watchers, func(x *watcher) bool { return x == w })
			// The id stays taken until the client cancels it. etcd's header has no revision here.
			c.reply(w.s, &pb.WatchResponse{
				Header: c.header(0), WatchId: w.id, CompactRevision: c.store.compact, Canceled: true,
			}, Verdict{})
			continue
		}
		c.serveThePast(w)
	}
}

func (c *Cluster) serveThePast(w *watcher) {
	var events []*mvccpb.Event
	revs, next := 0, c.store.rev+1
	for _, ch := range c.store.log {
		if ch.rev < w.min {
			continue
		}
		m := w.matching(ch.events)
		if len(m) == 0 {
			continue
		}
		if revs++; revs > syncMaxRevs {
			next = ch.rev
			break
		}
		events = append(events, m...)
	}
	w.min = next
	if w.synced = next > c.store.rev; !w.synced {
		c.planSync()
	}
	c.tell(w, c.store.rev, events)
}

// planProgress tells the stream's watchers that want to know how far the store has come, from time to time.
func (c *Cluster) planProgress(s *stream) {
	if s.progressing {
		return
	}
	s.progressing = true
	var round func()
	round = func() {
		if s.dead {
			return
		}
		for _, id := range slices.Sorted(maps.Keys(s.watchers)) {
			w := s.watchers[id]
			if w.progress && w.quiet && c.caughtUp(w) {
				c.reply(s, &pb.WatchResponse{Header: c.header(c.store.rev), WatchId: w.id}, Verdict{})
			}
			w.quiet = true
		}
		c.at(time.Now().Add(c.progressEvery), round)
	}
	c.at(time.Now().Add(c.progressEvery), round)
}
