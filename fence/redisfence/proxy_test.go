package redisfence_test

import (
	"net"
	"sync"
	"sync/atomic"
	"testing"
)

// proxy stands between a client and the server: it counts round trips and can cut all connections after so many bytes.
type proxy struct {
	net.Listener
	target string
	trips  atomic.Int64 // how often a client spoke after the server did

	mu       sync.Mutex
	up, down int // bytes that still pass in that direction; below 0 is without bound
	conns    map[net.Conn]bool
}

func newProxy(t testing.TB, target string) *proxy {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{Listener: l, target: target, up: -1, down: -1, conns: map[net.Conn]bool{}}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() { p.serve(c) })
		}
	})
	t.Cleanup(func() { l.Close(); p.cut(); all.Wait() })
	return p
}

func (p *proxy) addr() string { return p.Addr().String() }

// arm cuts everything when so many more bytes have passed in one direction.
func (p *proxy) arm(up, down int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.up, p.down = up, down
}

func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.Close()
	}
}

func (p *proxy) serve(c net.Conn) {
	s, err := net.Dial("tcp", p.target)
	if err != nil {
		c.Close()
		return
	}
	p.mu.Lock()
	p.conns[c], p.conns[s] = true, true
	p.mu.Unlock()
	var replied atomic.Bool
	replied.Store(true)
	var both sync.WaitGroup
	pump := func(from, to net.Conn, left *int, count func()) {
		buf := make([]byte, 1<<16)
		for {
			n, err := from.Read(buf)
			if n > 0 {
				count()
				p.mu.Lock()
				cut := *left >= 0 && *left <= n
				if *left >= 0 {
					n = min(n, *left)
					*left -= n
				}
				if cut {
					p.up, p.down = -1, -1
				}
				p.mu.Unlock()
				_, _ = to.Write(buf[:n])
				if cut {
					p.cut()
				}
			}
			if err != nil {
				from.Close()
				to.Close()
				return
			}
		}
	}
	both.Go(func() {
		pump(c, s, &p.up, func() {
			if replied.Swap(false) {
				p.trips.Add(1)
			}
		})
	})
	both.Go(func() { pump(s, c, &p.down, func() { replied.Store(true) }) })
	both.Wait()
	p.mu.Lock()
	delete(p.conns, c)
	delete(p.conns, s)
	p.mu.Unlock()
}
