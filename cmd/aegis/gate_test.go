package main

import (
	"net"
	"sync"
	"testing"
)

// gate is a link to the shared etcd that can turn into a black hole: bytes vanish, connections stay.
type gate struct {
	addr   string
	frozen chan struct{}
	once   sync.Once
}

func newGate(t *testing.T) *gate {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := &gate{addr: l.Addr().String(), frozen: make(chan struct{})}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", shared.endpoint)
			if err != nil {
				_ = in.Close()
				continue
			}
			t.Cleanup(func() { _, _ = in.Close(), out.Close() })
			go g.copy(out, in)
			go g.copy(in, out)
		}
	}()
	return g
}

func (g *gate) copy(to, from net.Conn) {
	defer to.Close()
	b := make([]byte, 32<<10)
	for {
		n, err := from.Read(b)
		if err != nil {
			return
		}
		select {
		case <-g.frozen:
			continue
		default:
		}
		if _, err := to.Write(b[:n]); err != nil {
			return
		}
	}
}

func (g *gate) freeze() { g.once.Do(func() { close(g.frozen) }) }
