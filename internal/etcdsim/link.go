package etcdsim

import (
	"cmp"
	"context"
	"maps"
	"path"
	"slices"
	"time"

	"aegis/internal/clock"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// Direction says which way messages go on a link.
type Direction int

const (
	ToServer   Direction = 1 << iota // requests
	FromServer                       // replies and events
	Both       = ToServer | FromServer
)

// link is a machine's way to the server. Guarded by the cluster's mutex.
type link struct {
	id      string
	clock   *clock.Fake
	clients []*clientv3.Client

	cut    Direction         // where messages are swallowed
	cuts   map[Direction]int // how often each direction was cut: what was on its way then is lost
	silent bool              // watch streams deliver nothing
	liar   bool              // renewals are acknowledged and not made
	hook   func(Call) Verdict

	calls   map[string]int
	streams map[*stream]struct{}
	opened  int // watch streams
}

// ordered returns the streams in the order in which they were opened.
func (l *link) ordered() []*stream {
	return slices.SortedFunc(maps.Keys(l.streams), func(a, b *stream) int { return cmp.Compare(a.id, b.id) })
}

func (c *Cluster) link(id string) *link {
	l := c.links[id]
	if l == nil {
		l = &link{
			id: id, clock: &clock.Fake{}, cuts: map[Direction]int{},
			calls: map[string]int{}, streams: map[*stream]struct{}{},
		}
		c.links[id] = l
	}
	return l
}

// Cut makes a black hole of the link in the given direction: what is sent or under way there is swallowed. Calls
// hang until their context ends, watches are silent. The effect of a request whose reply is swallowed stays.
func (c *Cluster) Cut(id string, d Direction) {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.link(id)
	l.cut |= d
	for _, one := range []Direction{ToServer, FromServer} {
		if d&one != 0 {
			l.cuts[one]++
		}
	}
}

// Heal ends what [Cluster.Cut] and [Cluster.SilenceWatches] did. Streams that lost a message break with Unavailable,
// so that the client opens new ones and goes on where it was. Unary calls that lost one go on hanging.
func (c *Cluster) Heal(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.link(id)
	l.cut, l.silent = 0, false
	for _, s := range l.ordered() {
		if s.lossy {
			c.breakStream(s, errConnection)
		}
	}
}

// SilenceWatches keeps the watch streams of a machine open, and new ones too, but they deliver nothing, not even
// progress, until [Cluster.Heal]. Everything else goes on.
func (c *Cluster) SilenceWatches(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.link(id).silent = true
}

// BreakWatches breaks the watch streams of a machine with Unavailable. The client opens new ones at once.
func (c *Cluster) BreakWatches(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.link(id).ordered() {
		if s.watch {
			c.breakStream(s, errConnection)
		}
	}
}

// Calls returns how many requests of each method a machine has sent, those included that were swallowed: "Range",
// "Put", "DeleteRange", "Txn", "Compact", "LeaseGrant", "LeaseRevoke", "LeaseKeepAlive", "LeaseTimeToLive",
// "LeaseLeases", "WatchCreate", "WatchCancel", "WatchProgress".
func (c *Cluster) Calls(id string) map[string]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.link(id).calls)
}

// WatchStreams returns how many watch streams a machine has opened so far, and how many it has open.
func (c *Cluster) WatchStreams(id string) (opened, open int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.link(id)
	for s := range l.streams {
		if s.watch {
			open++
		}
	}
	return l.opened, open
}

// travel carries something over the link: arrive runs when it is there, lost when it was swallowed. c.mu must be
// held, and is held when they run.
func (c *Cluster) travel(l *link, d Direction, arrive, lost func()) {
	if l.cut&d != 0 {
		lost()
		return
	}
	cuts, latency := l.cuts[d], c.toServer
	if d == FromServer {
		latency = c.fromServer
	}
	c.at(time.Now().Add(latency), func() {
		if l.cuts[d] != cuts {
			lost()
			return
		}
		arrive()
	})
}

var (
	errConnection = status.Error(codes.Unavailable, "error reading from server: EOF")
	errRefused    = status.Error(codes.Unavailable, "connection error: desc = \"transport: Error while dialing: connection refused\"")
	errClosing    = status.Error(codes.Canceled, "grpc: the client connection is closing")
)

// conn is a client's gRPC connection: it turns calls into messages on the link.
type conn struct {
	c   *Cluster
	l   *link
	ctx context.Context // ends when the client is closed
}

var _ grpc.ClientConnInterface = (*conn)(nil)

// Invoke implements [grpc.ClientConnInterface].
func (cn *conn) Invoke(ctx context.Context, method string, args, reply any, _ ...grpc.CallOption) error {
	name := path.Base(method)
	for attempt := 1; ; attempt++ {
		err := cn.try(ctx, name, attempt, args.(proto.Message), reply.(proto.Message))
		if err == nil || !cn.c.resend || attempt == resendMax || !sentAgain(ctx, name, err) {
			return err
		}
		t := time.NewTimer(resendPause)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return status.FromContextError(ctx.Err()).Err()
		}
	}
}

const (
	resendMax   = 100
	resendPause = 25 * time.Millisecond
)

// sentAgain is clientv3's rule.
func sentAgain(ctx context.Context, name string, err error) bool {
	switch status.Code(err) {
	case codes.Canceled, codes.DeadlineExceeded:
		return ctx.Err() == nil && err != errClosing
	case codes.Unavailable:
		return slices.Contains([]string{"Range", "LeaseGrant", "LeaseRevoke", "LeaseTimeToLive", "LeaseLeases"}, name)
	}
	return false
}

type outcome struct {
	msg proto.Message
	err error
}

// try sends one unary request and waits for its reply.
func (cn *conn) try(ctx context.Context, name string, attempt int, args, reply proto.Message) error {
	if err := cn.ended(ctx); err != nil {
		return err
	}
	req := proto.Clone(args)
	v := cn.ask(name, attempt, req)
	done := make(chan outcome, 1)
	cn.c.mu.Lock()
	cn.c.sendUnary(cn.l, name, req, v, func(o outcome) { done <- o })
	cn.c.mu.Unlock()
	select {
	case o := <-done:
		if o.err == nil {
			proto.Merge(reply, o.msg)
		}
		return o.err
	case <-ctx.Done():
	case <-cn.ctx.Done():
	}
	return cn.ended(ctx)
}

func (cn *conn) ended(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return status.FromContextError(err).Err()
	}
	if cn.ctx.Err() != nil {
		return errClosing
	}
	return nil
}

// ask counts the request and asks the machine's hook, without any lock, what is to become of it.
func (cn *conn) ask(name string, attempt int, req proto.Message) Verdict {
	cn.c.mu.Lock()
	cn.l.calls[name]++
	hook := cn.l.hook
	cn.c.mu.Unlock()
	if hook == nil {
		return Verdict{}
	}
	return hook(Call{Machine: cn.l.id, Method: name, Attempt: attempt, Request: req})
}

// sendUnary carries a request to the server and its outcome back. c.mu must be held.
func (c *Cluster) sendUnary(l *link, name string, req proto.Message, v Verdict, done func(outcome)) {
	if v.DropRequest {
		return
	}
	lost := func() {}
	answer := func(o outcome) {
		if v.DropReply {
			return
		}
		c.at(time.Now().Add(v.DelayReply), func() {
			c.travel(l, FromServer, func() { done(o) }, lost)
		})
	}
	execute := func() (o outcome) {
		if !c.up {
			return outcome{err: errRefused}
		}
		o.msg, o.err = c.serve(name, req)
		if v.Applied != nil {
			c.loop.outside = append(c.loop.outside, v.Applied)
		}
		return o
	}
	c.travel(l, ToServer, func() {
		c.at(time.Now().Add(v.DelayRequest), func() {
			if v.FailBefore != nil {
				answer(outcome{err: v.FailBefore})
				return
			}
			o := execute()
			if v.Twice && c.up {
				// The reply goes back, says Canceled, and the client sends the request again.
				c.at(time.Now().Add(c.fromServer+c.toServer), func() { answer(v.fail(execute())) })
				return
			}
			answer(v.fail(o))
		})
	}, lost)
}
