package mysqlfence_test

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"

	"aegis/fence/mysqlfence"
)

// fate is what a proxy does with a command.
type fate int

const (
	pass      fate = iota
	cut            // close both sides; the server never sees the command
	loseReply      // the server executes it to its end; the reply is lost, and the connection with it
)

// proxy stands between a guard and the server. It counts the commands that a reply is waited for, each a round trip,
// and can lose one.
type proxy struct {
	listener net.Listener
	commands atomic.Int64
	mu       sync.Mutex
	decide   func(query string) fate // nil: pass
	conns    sync.WaitGroup
}

func newProxy(t testing.TB) *proxy {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{listener: l}
	p.conns.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			p.conns.Go(func() { p.serve(client) })
		}
	})
	t.Cleanup(func() { l.Close() })
	return p
}

// guard is a guard on the database that reaches the server through p.
func (p *proxy) guard(t testing.TB, database string) *mysqlfence.Guard {
	c := server.Config(database)
	c.Addr = p.listener.Addr().String()
	return open(t, c.FormatDSN(), mysqlfence.Config{})
}

func (p *proxy) onCommand(decide func(query string) fate) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.decide = decide
}

// once does f to the next command that contains s, and returns a function that reports whether it came.
func (p *proxy) once(s string, f fate) (came func() bool) {
	var done atomic.Bool
	p.onCommand(func(query string) fate {
		if bytes.Contains([]byte(query), []byte(s)) && done.CompareAndSwap(false, true) {
			return f
		}
		return pass
	})
	return done.Load
}

func (p *proxy) serve(client net.Conn) {
	defer client.Close()
	server, err := net.Dial("tcp", server.Addr())
	if err != nil {
		return
	}
	defer server.Close()
	var losing atomic.Bool
	p.conns.Go(func() { // replies, packet by packet
		defer client.Close()
		for {
			packet, err := readPacket(server)
			if err != nil {
				return
			}
			if !losing.Load() {
				if _, err := client.Write(packet); err != nil {
					return
				}
			} else if last(packet[4:]) {
				server.Close()
				return
			}
		}
	})
	for greeting := true; ; greeting = false {
		packet, err := readPacket(client)
		if err != nil {
			return
		}
		if packet[3] == 0 && !greeting && len(packet) > 4 {
			const comQuit, comStmtClose = 1, 25
			if c := packet[4]; c != comQuit && c != comStmtClose {
				p.commands.Add(1)
			}
			p.mu.Lock()
			decide := p.decide
			p.mu.Unlock()
			if decide != nil {
				switch decide(string(packet[5:])) {
				case cut:
					return
				case loseReply:
					losing.Store(true)
				}
			}
		}
		if _, err := server.Write(packet); err != nil {
			return
		}
	}
}

func readPacket(r io.Reader) ([]byte, error) {
	header := make([]byte, 4)
	if _, err := io.ReadFull(r, header); err != nil {
		return nil, err
	}
	size := int(header[0]) | int(header[1])<<8 | int(header[2])<<16
	packet := append(header, make([]byte, size)...)
	_, err := io.ReadFull(r, packet[4:])
	return packet, err
}

// last reports whether a packet ends the reply to a command: an error, or an OK or EOF without more results behind it.
func last(p []byte) bool {
	const moreResults = 8
	switch {
	case len(p) == 0:
		return false
	case p[0] == 0xff:
		return true
	case p[0] == 0xfe && len(p) == 5:
		return binary.LittleEndian.Uint16(p[3:])&moreResults == 0
	case p[0] == 0, p[0] == 0xfe && len(p) < 9: // the latter ends rows where both sides have done with EOF
		rest := skipInt(skipInt(p[1:]))
		return len(rest) >= 2 && binary.LittleEndian.Uint16(rest)&moreResults == 0
	}
	return false
}

func skipInt(p []byte) []byte {
	n := 1
	if len(p) > 0 {
		n += map[byte]int{0xfc: 2, 0xfd: 3, 0xfe: 8}[p[0]]
	}
	return p[min(n, len(p)):]
}
