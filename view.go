package aegis

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"
)

// view mirrors the keys of one prefix: a snapshot at some revision, kept up by one watch. It is a level, not a log:
// whoever is woken looks at the present state. What it shows was true at its revision and proves nothing about later
// ones; only etcd's answer to a transaction does.
//
// The watch is cut, compacted away, stays silent: the view lists anew and goes on, by itself, until its context ends.
type view struct {
	cli    etcd
	keys   keyspace
	period time.Duration // how often the watch is asked for a sign of life, at least
	log    *slog.Logger
	// changed is called after each batch, without locks, with the elections touched; nil means any. It must not block.
	changed func(names map[string]bool)

	mu       sync.Mutex
	rev      int64 // of the store's revisions, the one that the maps show; 0 before the first list
	epoch    int   // of the history that they belong to
	leaders  map[string]leaderEntry
	terms    map[string]termEntry
	queues   map[string][]candidate // in the order in which their turn comes
	requests map[string]requestEntry
	offset   offsetEntry
	subs     map[string]map[*subscription]struct{}
	all      map[*subscription]struct{}
	open     bool  // the watch has been open since some list: what happens from now on is shown at once
	err      error // why the mirror is not being kept up at the moment
	fatal    error // the same, where it takes somebody to mend it: those who wait are told

	past     *past         // what etcd has shown, shared with the node
	wentBack func(error)   // called when a list shows another history; may be nil
	patience int           // how many signs of life in a row the watch may owe before it counts as silent
	again    chan struct{} // asks for a new list
	nudge    chan struct{} // somebody waits from now on
}

// forget empties the view, whose history has ended, and has it list anew at once. Revision 0 says that it knows nothing.
func (v *view) forget() {
	v.mu.Lock()
	v.reset()
	v.rev, v.epoch = 0, -1
	v.mu.Unlock()
	poke(v.again)
}

// poke wakes up whoever reads the channel; pokes coalesce.
func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func newView(cli etcd, keys keyspace, period time.Duration, log *slog.Logger, changed func(map[string]bool)) *view {
	v := &view{cli: cli, keys: keys, period: period, log: log, changed: changed,
		subs: map[string]map[*subscription]struct{}{}, all: map[*subscription]struct{}{}, past: &past{}, patience: leastPatience, again: make(chan struct{}, 1), nudge: make(chan struct{}, 1)}
	v.reset()
	return v
}

func (v *view) reset() {
	v.leaders, v.terms = map[string]leaderEntry{}, map[string]termEntry{}
	v.queues, v.requests = map[string][]candidate{}, map[string]requestEntry{}
	v.offset = offsetEntry{}
}

// state returns what the view shows of an election.
func (v *view) state(name string) electionState {
	v.mu.Lock()
	defer v.mu.Unlock()
	return electionState{rev: v.rev, leader: v.leaders[name], record: v.terms[name], queue: v.queues[name],
		request: v.requests[name], offset: v.offset}
}

// status returns whether the view has been kept up since it began, the token offset, and what holds it up at present.
func (v *view) status() (open bool, offset offsetEntry, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.open, v.offset, cmp.Or(v.fatal, v.err)
}

// fatalError says why the view is not kept up where no repetition mends that.
func (v *view) fatalError() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.fatal
}

// names returns the elections that the view knows of, in office, waited for or asked about.
func (v *view) names() map[string]bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	names := map[string]bool{}
	for n := range v.leaders {
		names[n] = true
	}
	for n := range v.queues {
		names[n] = true
	}
	return names
}

// subscription wakes up its owner; wake-ups coalesce.
type subscription struct{ c chan struct{} }

func (s *subscription) wake() { poke(s.c) }

// subscribe wakes up the caller whenever something of the election changes and after each list; the first wake-up is
// already there. An empty name subscribes to the view's own standing only.
func (v *view) subscribe(name string) (s *subscription, cancel func()) {
	s = &subscription{c: make(chan struct{}, 1)}
	s.wake()
	v.mu.Lock()
	defer v.mu.Unlock()
	v.all[s] = struct{}{}
	if v.subs[name] == nil {
		v.subs[name] = map[*subscription]struct{}{}
	}
	v.subs[name][s] = struct{}{}
	poke(v.nudge)
	return s, func() {
		v.mu.Lock()
		defer v.mu.Unlock()
		delete(v.all, s)
		if delete(v.subs[name], s); len(v.subs[name]) == 0 {
			delete(v.subs, name)
		}
	}
}

// run keeps the view up until ctx ends. Those who wait are told of permanent errors, which may be mended all the same.
func (v *view) run(ctx context.Context) {
	timeout := time.Second
	for pause := time.Duration(0); ctx.Err() == nil; {
		err := v.list(ctx, timeout)
		if err == nil {
			pause, timeout = 0, time.Second
			err = v.follow(ctx)
		} else {
			timeout = min(2*timeout, operatorTimeout)
		}
		if ctx.Err() != nil {
			return
		}
		v.fail(err)
		v.log.Debug("aegis: watch interrupted; listing anew", "prefix", string(v.keys), "err", err)
		pause = min(max(2*pause, rankPause), maxPause)
		sleep(ctx, pause/2+rand.N(pause))
	}
}

func (v *view) fail(err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.err, v.fatal = err, nil
	if permanent(err) || errors.Is(err, ErrTokenWentBack) {
		v.fatal = err
	}
	for s := range v.all {
		s.wake()
	}
}

// list takes a snapshot of all keys at one revision.
func (v *view) list(ctx context.Context, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if _, err := v.read(ctx); err != nil {
		return err
	}
	v.changed(nil)
	return nil
}

func (v *view) read(ctx context.Context) (*clientv3.TxnResponse, error) {
	var gets []clientv3.Op
	for _, dir := range []string{dirCandidate, dirElection, dirMeta, dirRequest, dirTerm} {
		gets = append(gets, clientv3.OpGet(v.keys.dir(dir), clientv3.WithPrefix()))
	}
	sent := v.past.mark()
	resp, err := v.cli.Txn(ctx).Then(gets...).Commit()
	if err != nil {
		return nil, fmt.Errorf("list keys under %s: %w", v.keys.dir(""), err)
	}
	if err := v.past.check(sent, resp.Header); err != nil {
		if v.wentBack != nil && errors.Is(err, ErrTokenWentBack) {
			v.wentBack(err)
		}
		return nil, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.reset()
	v.epoch = sent.epoch
	for _, r := range resp.Responses {
		v.load(r.GetResponseRange().Kvs)
	}
	v.rev, v.err, v.fatal = resp.Header.Revision, nil, nil
	v.past.saw(v.epoch, 0, v.offset.value)
	for s := range v.all {
		s.wake()
	}
	return resp, nil
}

var errRelist = errors.New("a new list was asked for")

var watchSerial atomic.Int64

// follow applies the watch's events from the view's revision on, until it breaks or is silent for two periods.
func (v *view) follow(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// Metadata of its own give the watch a stream of its own: one that hangs is not shared with the next watch.
	ctx = metadata.AppendToOutgoingContext(ctx, "aegis-watch", strconv.FormatInt(watchSerial.Add(1), 10))
	first, end := v.keys.watched()
	v.mu.Lock()
	from := v.rev + 1
	v.mu.Unlock()
	// Watch returns only when the server has said that the watch is there.
	late := time.AfterFunc(time.Duration(v.patience+1)*v.signPeriod(), cancel)
	events := v.cli.Watch(ctx, first, clientv3.WithRange(end), clientv3.WithRev(from), clientv3.WithCreatedNotify(), clientv3.WithProgressNotify())
	inTime := late.Stop()
	defer func() {
		cancel()
		for range events { //nolint:revive // drained until the client closes it, so that its goroutines are gone
		}
	}()
	if !inTime {
		v.patience = min(2*v.patience, mostPatience)
		return fmt.Errorf("watch of %s was not there in time", v.keys.dir(""))
	}
	ticker := time.NewTicker(v.signPeriod())
	defer ticker.Stop()
	for owed := 0; ; {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-v.again:
			return errRelist
		case <-v.nudge:
			ticker.Reset(v.signPeriod())
		case resp, ok := <-events:
			if !ok {
				return fmt.Errorf("watch of %s closed", v.keys.dir(""))
			}
			if err := resp.Err(); err != nil {
				return fmt.Errorf("watch of %s: %w", v.keys.dir(""), err)
			}
			owed = 0
			v.apply(&resp)
		case <-ticker.C:
			if owed >= v.patience {
				v.patience = min(2*v.patience, mostPatience) // should etcd be overloaded, listing more often does not help it
				return fmt.Errorf("watch of %s owes %d signs of life", v.keys.dir(""), owed)
			}
			if owed == 0 {
				v.patience = max(v.patience-1, leastPatience)
			}
			owed++
			_ = v.cli.RequestProgress(ctx) // an error shows as silence
			ticker.Reset(v.signPeriod())
		}
	}
}

// How many signs of life a watch may owe in a row before it counts as silent.
const (
	leastPatience = 2
	mostPatience  = 16
)

// signPeriod is how often a sign of life is asked for: more often when somebody waits for what the watch has to tell.
func (v *view) signPeriod() time.Duration {
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.all) > 0 {
		return min(v.period, 300*time.Millisecond)
	}
	return v.period
}

func (v *view) apply(resp *clientv3.WatchResponse) {
	touched := map[string]bool{}
	v.mu.Lock()
	if !v.past.saw(v.epoch, 0, 0) {
		v.mu.Unlock()
		return // of a history that has ended
	}
	offset := v.offset
	if resp.Created && !v.open {
		v.open = true
		for s := range v.all {
			s.wake()
		}
	}
	if resp.IsProgressNotify() { // only then does the header's revision say that nothing before it is still to come
		v.rev = max(v.rev, resp.Header.Revision)
	}
	for _, ev := range resp.Events {
		v.rev = max(v.rev, ev.Kv.ModRevision)
		if ev.Type == mvccpb.DELETE {
			touched[v.drop(ev.Kv.Key)] = true
		} else {
			touched[v.put(ev.Kv)] = true
		}
	}
	delete(touched, "")
	for name := range touched {
		for s := range v.subs[name] {
			s.wake()
		}
	}
	v.past.saw(v.epoch, v.rev, v.offset.value)
	if offset != v.offset {
		touched = nil // concerns every election
	}
	v.mu.Unlock()
	if len(resp.Events) > 0 {
		v.changed(touched)
	}
}
