package etcdsim

import (
	"context"
	"io"
	"path"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// stream is one gRPC stream, both ends of it. Fields below ctx are guarded by the cluster's mutex.
type stream struct {
	cn     *conn
	watch  bool // else it renews leases
	leader bool // WithRequireLeader
	ctx    context.Context

	id    uint64
	lossy bool // a message was swallowed in either direction: healing the link breaks the stream
	gap   bool // one from the server was: none after it is delivered
	dead  bool // the server has done with it

	// Messages keep their order when one is delayed: the next starts when the one before is through.
	requestsFree, repliesFree time.Time

	watchers    map[int64]*watcher
	nextID      int64
	progressing bool // progress is told from time to time

	inbox  []proto.Message // arrived, not yet received
	err    error           // how the stream ended, once that has arrived
	notify chan struct{}
}

var _ grpc.ClientStream = (*stream)(nil)

// NewStream implements [grpc.ClientConnInterface].
func (cn *conn) NewStream(ctx context.Context, _ *grpc.StreamDesc, method string, _ ...grpc.CallOption) (grpc.ClientStream, error) {
	name := path.Base(method)
	if name != "Watch" && name != "LeaseKeepAlive" {
		return nil, status.Error(codes.Unimplemented, "etcdsim does not do "+name)
	}
	if err := cn.waitUp(ctx); err != nil {
		return nil, err
	}
	s := &stream{
		cn: cn, watch: name == "Watch", ctx: ctx,
		watchers: map[int64]*watcher{}, notify: make(chan struct{}, 1),
	}
	if md, ok := metadata.FromOutgoingContext(ctx); ok {
		s.leader = slices.Contains(md.Get(rpctypes.MetadataRequireLeaderKey), rpctypes.MetadataHasLeader)
	}
	c := cn.c
	c.mu.Lock()
	c.streamSeq++
	s.id = c.streamSeq
	cn.l.streams[s] = struct{}{}
	if s.watch {
		cn.l.opened++
	}
	c.mu.Unlock()
	context.AfterFunc(ctx, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.forget(s)
	})
	return s, nil
}

// waitUp waits for a server that is down, as a real client does until it has a connection.
func (cn *conn) waitUp(ctx context.Context) error {
	for {
		if err := cn.ended(ctx); err != nil {
			return err
		}
		cn.c.mu.Lock()
		up, started := cn.c.up, cn.c.started
		cn.c.mu.Unlock()
		if up {
			return nil
		}
		select {
		case <-started:
		case <-ctx.Done():
		case <-cn.ctx.Done():
		}
	}
}

// SendMsg implements [grpc.ClientStream].
func (s *stream) SendMsg(m any) error {
	if err := s.cn.ended(s.ctx); err != nil {
		return err
	}
	req := proto.Clone(m.(proto.Message))
	v := s.cn.ask(methodOf(req), 1, req)
	c := s.cn.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.err != nil {
		return io.EOF // as gRPC: the reason is for RecvMsg to tell
	}
	if v.DropRequest {
		return nil
	}
	c.travel(s.cn.l, ToServer, func() {
		c.inTurn(&s.requestsFree, v.DelayRequest, func() { c.serveStream(s, req, v) })
	}, func() { s.lossy = true })
	return nil
}

func methodOf(req proto.Message) string {
	r, ok := req.(*pb.WatchRequest)
	if !ok {
		return "LeaseKeepAlive"
	}
	switch r.RequestUnion.(type) {
	case *pb.WatchRequest_CreateRequest:
		return "WatchCreate"
	case *pb.WatchRequest_CancelRequest:
		return "WatchCancel"
	}
	return "WatchProgress"
}

// RecvMsg implements [grpc.ClientStream].
func (s *stream) RecvMsg(m any) error {
	for {
		s.cn.c.mu.Lock()
		var msg proto.Message
		if len(s.inbox) > 0 {
			msg, s.inbox = s.inbox[0], s.inbox[1:]
		}
		err := s.err
		s.cn.c.mu.Unlock()
		if msg != nil {
			proto.Merge(m.(proto.Message), msg)
			return nil
		}
		if err != nil {
			return err
		}
		select {
		case <-s.notify:
			continue
		case <-s.ctx.Done():
		case <-s.cn.ctx.Done():
		}
		return s.cn.ended(s.ctx)
	}
}

// CloseSend implements [grpc.ClientStream]. clientv3 ends the context right after.
func (s *stream) CloseSend() error { return nil }

// Context implements [grpc.ClientStream].
func (s *stream) Context() context.Context { return s.ctx }

// Header implements [grpc.ClientStream].
func (s *stream) Header() (metadata.MD, error) { return metadata.MD{}, nil }

// Trailer implements [grpc.ClientStream].
func (s *stream) Trailer() metadata.MD { return metadata.MD{} }

// inTurn runs f after the delay, and after what was delayed before it. c.mu must be held.
func (c *Cluster) inTurn(free *time.Time, delay time.Duration, f func()) {
	t := time.Now()
	if free.After(t) {
		t = *free
	}
	*free = t.Add(delay)
	c.at(*free, f)
}

// serveStream carries a message out that has arrived on a stream. c.mu must be held.
func (c *Cluster) serveStream(s *stream, req proto.Message, v Verdict) {
	switch {
	case s.dead:
		return
	case !c.up:
		c.breakStream(s, errConnection)
		return
	case v.FailBefore != nil:
		c.breakStream(s, v.FailBefore)
		return
	}
	switch r := req.(type) {
	case *pb.LeaseKeepAliveRequest:
		if !c.keepAlive(s, r, v) {
			return // it waits
		}
	case *pb.WatchRequest:
		c.watchRequest(s, r, v)
	}
	if v.Applied != nil {
		c.loop.outside = append(c.loop.outside, v.Applied)
	}
	if v.FailAfter != nil {
		c.breakStream(s, v.FailAfter)
	}
}

func (c *Cluster) keepAlive(s *stream, r *pb.LeaseKeepAliveRequest, v Verdict) bool {
	// etcd makes the header before it renews: the revision may be older than a revocation that the TTL shows.
	resp := &pb.LeaseKeepAliveResponse{ID: r.ID, Header: c.header(c.store.rev)}
	if v.Acknowledge || s.cn.l.liar {
		resp.TTL = c.granted[r.ID]
	} else {
		now := time.Now()
		ttl, ok := c.renew(r.ID, now)
		if !ok {
			c.at(c.tick(now.Add(1), c.expiryTick), func() { c.serveStream(s, r, v) })
			return false
		}
		resp.TTL = ttl
	}
	c.reply(s, resp, v)
	return true
}

// reply sends a message to the stream's client. c.mu must be held.
func (c *Cluster) reply(s *stream, msg proto.Message, v Verdict) {
	if v.DropReply || v.FailAfter != nil {
		return
	}
	c.inTurn(&s.repliesFree, v.DelayReply, func() {
		lost := func() { s.lossy, s.gap = true, true }
		c.travel(s.cn.l, FromServer, func() {
			if s.watch && s.cn.l.silent {
				lost()
			} else if s.err == nil && !s.gap {
				s.inbox = append(s.inbox, msg)
				s.wake()
			}
		}, lost)
	})
}

// breakStream ends a stream from the server's side. c.mu must be held.
func (c *Cluster) breakStream(s *stream, err error) {
	s.dead = true
	c.dropWatchers(s)
	c.inTurn(&s.repliesFree, 0, func() {
		c.travel(s.cn.l, FromServer, func() {
			if s.err == nil {
				s.err = err
				s.wake()
			}
			delete(s.cn.l.streams, s)
		}, func() { s.lossy = true })
	})
}

// forget ends a stream from the client's side. c.mu must be held.
func (c *Cluster) forget(s *stream) {
	s.dead = true
	c.dropWatchers(s)
	delete(s.cn.l.streams, s)
}

func (s *stream) wake() {
	select {
	case s.notify <- struct{}{}:
	default:
	}
}
