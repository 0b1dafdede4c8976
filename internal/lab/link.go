package lab

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync"
	"time"
)

const (
	held       = 1 << 20 // bytes that one direction of a connection buffers before it stops reading
	dialWithin = 2 * time.Second
)

// link is a listener whose connections are passed on to a server through two gates.
//
// A link behaves as a network does, as far as its ends can tell: a stream never loses bytes in its middle and never
// reorders them; an end of stream, a reset and a refused connection are news that travel through the gates as bytes
// do. Unlike in a real network, connecting succeeds at once (the link's own kernel answers) and what a cut held back
// is delivered as soon as it is healed, whoever has given up waiting meanwhile.
type link struct {
	ln   net.Listener
	dial func() (net.Conn, error)
	// identify finds out who has dialed: its number (of a member; unused on clients' links), the connection to use
	// instead of the plain one, and the gates of both directions.
	identify identify

	done  chan struct{}
	wg    sync.WaitGroup
	mu    sync.Mutex
	conns map[net.Conn]int // who is at the other end: server, unknown, or whoever has dialed
	drops int              // of the server's side
}

type identify func(net.Conn) (dialer int, c net.Conn, to, from *gate, err error)

const (
	server  = -1
	unknown = -2
)

func newLink(dial func() (net.Conn, error), identify identify) (*link, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	l := &link{ln: ln, dial: dial, identify: identify, done: make(chan struct{}), conns: map[net.Conn]int{}}
	l.wg.Go(l.accept)
	return l, nil
}

func (l *link) addr() string { return l.ln.Addr().String() }

// close ends the link and all its connections, and waits for its goroutines.
func (l *link) close() {
	l.mu.Lock()
	select {
	case <-l.done:
	default:
		close(l.done)
	}
	for c := range l.conns {
		_ = c.Close()
	}
	l.mu.Unlock()
	_ = l.ln.Close()
	l.wg.Wait()
}

// drop closes the connections' sides of one party, as the death of its process does.
func (l *link) drop(party int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if party == server {
		l.drops++
	}
	for c, at := range l.conns {
		if at == party {
			_ = c.Close()
		}
	}
}

// own registers the connection of a party, which the returned function closes. After close, it is closed at once.
func (l *link) own(c net.Conn, party int) (release func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.done:
		_ = c.Close()
	default:
		l.conns[c] = party
	}
	return func() {
		_ = c.Close()
		l.mu.Lock()
		delete(l.conns, c)
		l.mu.Unlock()
	}
}

// connect dials the server; a connection to one that was dropped meanwhile fails, as the server may have been restarted.
func (l *link) connect() (c net.Conn, release func(), err error) {
	l.mu.Lock()
	drops := l.drops
	l.mu.Unlock()
	if c, err = l.dial(); err != nil {
		return nil, nil, err
	}
	release = l.own(c, server)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.drops != drops {
		_ = c.Close()
	}
	return c, release, nil
}

func (l *link) accept() {
	for {
		c, err := l.ln.Accept()
		if err != nil {
			return // closed
		}
		l.wg.Go(func() { l.serve(c) })
	}
}

func (l *link) serve(client net.Conn) {
	defer l.own(client, unknown)()
	dialer, wrapped, to, from, err := l.identify(client)
	if err != nil {
		return
	}
	l.own(client, dialer)
	client = wrapped
	if !to.pass(l.done, time.Now()) {
		return
	}
	server, release, err := l.connect()
	if err != nil {
		if from.pass(l.done, time.Now()) {
			end(client, true)
		}
		return
	}
	defer release()
	var both sync.WaitGroup
	both.Go(func() { l.pump(server, client, to) })
	both.Go(func() { l.pump(client, server, from) })
	both.Wait()
}

// chunk is what came at one instant: bytes, or the end of the stream.
type chunk struct {
	b          []byte
	came       time.Time
	end, reset bool
}

// pump moves one direction of one connection from src to dst through g until the stream's end has been delivered.
func (l *link) pump(dst, src net.Conn, g *gate) {
	_, isTLS := dst.(*tls.Conn)
	slice := writeSlice
	if isTLS {
		slice = dialWithin // a TLS stream cannot go on after a write that timed out
	}
	q := &queue{}
	q.cond.L = &q.mu
	var reader sync.WaitGroup
	reader.Go(func() {
		buf := make([]byte, 32<<10)
		for {
			n, err := src.Read(buf)
			now := time.Now()
			if n > 0 {
				q.put(chunk{b: append([]byte(nil), buf[:n]...), came: now})
			}
			if err != nil {
				q.put(chunk{came: now, end: true, reset: !errors.Is(err, io.EOF)})
				return
			}
		}
	})
	for {
		c := q.get()
		if c.end {
			if g.pass(l.done, c.came) {
				end(dst, c.reset)
			}
			break
		}
		if g.write(l.done, dst, c.b, c.came, slice, !isTLS) != nil {
			// The far side is gone. The near side learns it by the other direction, through that direction's gate;
			// what it still sends is lost.
			break
		}
	}
	q.discard()
	reader.Wait()
}

// end tells a side that the stream has ended there.
func end(c net.Conn, reset bool) {
	raw := c
	if t, ok := c.(*tls.Conn); ok {
		raw = t.NetConn()
	}
	if reset {
		if t, ok := raw.(*net.TCPConn); ok {
			_ = t.SetLinger(0)
		}
		_ = raw.Close()
		return
	}
	if w, ok := c.(interface{ CloseWrite() error }); ok {
		_ = w.CloseWrite()
	}
}

// queue is the bytes held on their way: put waits while they are too many.
type queue struct {
	mu        sync.Mutex
	cond      sync.Cond
	chunks    []chunk
	size      int
	discarded bool
}

func (q *queue) put(c chunk) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.size > held && !q.discarded {
		q.cond.Wait()
	}
	if q.discarded {
		return
	}
	q.chunks = append(q.chunks, c)
	q.size += len(c.b)
	q.cond.Broadcast()
}

func (q *queue) get() chunk {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.chunks) == 0 {
		q.cond.Wait()
	}
	c := q.chunks[0]
	q.chunks = q.chunks[1:]
	q.size -= len(c.b)
	q.cond.Broadcast()
	return c
}

// discard has every later put do nothing.
func (q *queue) discard() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.discarded, q.chunks = true, nil
	q.cond.Broadcast()
}
