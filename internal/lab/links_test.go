package lab

import (
	"io"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestReplyLostAfterItsEffect(t *testing.T) {
	c := start(t, 1)
	a, b := client(t, c, "a"), client(t, c, "b")
	put(t, a, "k", "before") // the connection is open
	c.Cut("a", FromServer)
	reply := make(chan error, 1)
	go func() {
		_, err := a.Put(t.Context(), "k", "after")
		reply <- err
	}()
	sees(t, b, "k", "after")
	select {
	case err := <-reply:
		t.Fatalf("the reply came through the cut: %v", err)
	default:
	}
	c.Heal("a")
	select {
	case err := <-reply:
		if err != nil {
			t.Fatalf("healing did not deliver the reply: %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("healing did not deliver the reply")
	}
}

func TestRequestHeldBackIsDeliveredByHealing(t *testing.T) {
	c := start(t, 1)
	a, b := client(t, c, "a"), client(t, c, "b")
	put(t, a, "k", "before")
	c.Cut("a", ToServer)
	reply := make(chan error, 1)
	go func() {
		_, err := a.Put(t.Context(), "k", "late")
		reply <- err
	}()
	for range 100 {
		if resp := get(t, b, "k"); string(resp.Kvs[0].Value) != "before" {
			t.Fatal("the request passed the cut")
		}
	}
	c.Heal("a")
	sees(t, b, "k", "late")
	if err := <-reply; err != nil {
		t.Fatal(err)
	}
}

// pipe returns both ends of a connection through a link of its own, and the link's gates.
func pipe(t *testing.T) (client, server net.Conn, to, from *gate) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	to, from = newGate(), newGate()
	l, err := newLink(
		func() (net.Conn, error) { return dialTCP(ln.Addr().String()) },
		func(c net.Conn) (int, net.Conn, *gate, *gate, error) { return 0, c, to, from, nil })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.close)
	if client, err = dialTCP(l.addr()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	if server, err = ln.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	for _, c := range []net.Conn{client, server} {
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	}
	return client, server, to, from
}

// counter is a destination that counts what is written to it, a byte at a time and slowly.
type counter struct {
	net.Conn
	n atomic.Int64
}

func (c *counter) SetWriteDeadline(time.Time) error { return nil }

func (c *counter) Write(b []byte) (int, error) {
	for range b {
		runtime.Gosched()
		c.n.Add(1)
	}
	return len(b), nil
}

func cut(g *gate)  { g.set(func(g *gate) { g.cut = true }) }
func heal(g *gate) { g.set(func(g *gate) { g.cut = false }) }

// silent fails unless nothing arrives at c for a while.
func silent(t *testing.T, c net.Conn) {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	if n, err := c.Read(make([]byte, 1)); n > 0 || !isTimeout(err) {
		t.Fatalf("something came through the cut: %d bytes, %v", n, err)
	}
	_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
}

func isTimeout(err error) bool {
	e, ok := err.(net.Error)
	return ok && e.Timeout()
}

func TestLink(t *testing.T) {
	t.Run("HealingDeliversEveryByteInOrder", func(t *testing.T) {
		client, server, to, _ := pipe(t)
		const size = 8 << 20 // far more than is buffered, so the sender is held up too
		sent := make([]byte, size)
		for i := range sent {
			sent[i] = byte(i * 7 >> 3)
		}
		cut(to)
		wrote := make(chan error, 1)
		go func() {
			_, err := client.Write(sent)
			wrote <- err
		}()
		silent(t, server)
		// Cuts in the middle of the stream lose nothing either.
		heal(to)
		got := make([]byte, 0, size)
		buf := make([]byte, 1<<20)
		for len(got) < size {
			n, err := io.ReadAtLeast(server, buf[:min(len(buf), size-len(got))], 1)
			if err != nil {
				t.Fatalf("after %d bytes: %v", len(got), err)
			}
			got = append(got, buf[:n]...)
			if len(got)%3 == 0 {
				cut(to)
				heal(to)
			}
		}
		if err := <-wrote; err != nil {
			t.Fatal(err)
		}
		if string(got) != string(sent) {
			t.Fatal("the bytes are not those that were sent")
		}
	})
	t.Run("NoBytePassesOnceACutHasReturned", func(t *testing.T) {
		g, done, dst := newGate(), make(chan struct{}), &counter{}
		var writer sync.WaitGroup
		writer.Go(func() {
			for g.write(done, dst, make([]byte, 10), time.Now(), writeSlice, true) == nil {
			}
		})
		for range 200 {
			for seen := dst.n.Load(); dst.n.Load() == seen; { // it writes
				runtime.Gosched()
			}
			cut(g)
			before := dst.n.Load()
			time.Sleep(100 * time.Microsecond) // the time in which a byte might pass, not a wait for something
			if after := dst.n.Load(); after != before {
				t.Fatalf("%d bytes passed", after-before)
			}
			heal(g)
		}
		close(done)
		cut(g)
		writer.Wait()
	})
	t.Run("TheOtherDirectionGoesOn", func(t *testing.T) {
		client, server, to, _ := pipe(t)
		cut(to)
		if _, err := client.Write([]byte("lost?")); err != nil {
			t.Fatal(err)
		}
		if _, err := server.Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(client, make([]byte, 5)); err != nil {
			t.Fatal(err)
		}
		silent(t, server)
	})
	t.Run("ACutReturnsThoughTheReceiverDoesNotReadAndLosesNothing", func(t *testing.T) {
		const size = 32 << 20
		client, server, to, _ := pipe(t)
		go client.Write(make([]byte, size))
		deadline := time.Now().Add(300 * time.Millisecond)
		for time.Now().Before(deadline) {
			began := time.Now()
			cut(to)
			if took := time.Since(began); took > 2*time.Second {
				t.Fatalf("cutting took %v", took)
			}
			heal(to)
		}
		if n, err := io.CopyN(io.Discard, server, size); err != nil {
			t.Fatalf("after %d bytes: %v", n, err)
		}
	})
	t.Run("UnderACutTheServerHearsOfNoConnection", func(t *testing.T) {
		to, from, dialed := newGate(), newGate(), make(chan struct{}, 1)
		l, err := newLink(
			func() (net.Conn, error) { dialed <- struct{}{}; return nil, errStopped },
			func(c net.Conn) (int, net.Conn, *gate, *gate, error) { return 0, c, to, from, nil })
		if err != nil {
			t.Fatal(err)
		}
		defer l.close()
		cut(to)
		client, err := dialTCP(l.addr())
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		silent(t, client)
		select {
		case <-dialed:
			t.Fatal("the server was dialed")
		default:
		}
		// The refusal is held back as well.
		cut(from)
		heal(to)
		<-dialed
		silent(t, client)
		heal(from)
		if _, err := client.Read(make([]byte, 1)); err == nil || isTimeout(err) {
			t.Fatalf("the refusal did not come: %v", err)
		}
	})
	t.Run("TheEndOfAStreamIsHeldBackToo", func(t *testing.T) {
		client, server, to, from := pipe(t)
		cut(to)
		cut(from)
		client.Close()
		silent(t, server)
		heal(to)
		if _, err := server.Read(make([]byte, 1)); err == nil || isTimeout(err) {
			t.Fatalf("healing did not deliver the end: %v", err)
		}
	})
	t.Run("ADelayHoldsUpOneDirectionAndKeepsOrder", func(t *testing.T) {
		const d = 150 * time.Millisecond
		client, server, to, _ := pipe(t)
		to.set(func(g *gate) { g.delay = d })
		began := time.Now()
		for _, word := range []string{"one ", "two ", "three"} {
			if _, err := io.WriteString(client, word); err != nil {
				t.Fatal(err)
			}
		}
		to.set(func(g *gate) { g.delay = d + 1 })
		got := make([]byte, len("one two three"))
		if _, err := io.ReadFull(server, got); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took < d || string(got) != "one two three" {
			t.Fatalf("got %q after %v", got, took)
		}
	})
}

func TestNewConnectionsUnderACutAreAcceptedAndCarryNothing(t *testing.T) {
	c := start(t, 1)
	c.Cut("a", Both)
	conn, err := dialTCP(c.Endpoints("a")[0])
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "GET /version HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	silent(t, conn)
	c.Heal("a")
	answer := make([]byte, 12)
	if _, err := io.ReadFull(conn, answer); err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 ") {
		t.Fatalf("healing did not deliver the request: %q, %v", answer, err)
	}
}

func TestASlowNodeIsSlowAndOthersAreNot(t *testing.T) {
	const d = 100 * time.Millisecond
	c := start(t, 1)
	a, b := client(t, c, "a"), client(t, c, "b")
	put(t, a, "k", "1")
	put(t, b, "k", "1")
	c.Slow("a", FromServer, d)
	began := time.Now()
	put(t, a, "k", "2")
	slow := time.Since(began)
	began = time.Now()
	put(t, b, "k", "3")
	if fast := time.Since(began); slow < d || fast >= slow {
		t.Fatalf("a took %v, b took %v", slow, fast)
	}
}
