package lab

import (
	"errors"
	"net"
	"os"
	"sync"
	"time"
)

// Direction says which way bytes flow on a link: from the side that dials to the server, back, or either.
type Direction int

// The directions of a link. Cutting FromServer alone is how a reply is lost after its effect.
const (
	ToServer Direction = 1 << iota
	FromServer
	Both = ToServer | FromServer
)

// String names the direction.
func (d Direction) String() string {
	switch d {
	case ToServer:
		return "to the server"
	case FromServer:
		return "from the server"
	case Both:
		return "both ways"
	}
	return "nowhere"
}

// gate is one direction of one link, through which the bytes of all its connections pass.
//
// Bytes are written to the far side while mu is held shared, so once set has returned nothing passes under the old
// setting. writeSlice bounds how long a far side that does not read can hold up a change.
type gate struct {
	mu      sync.RWMutex
	cut     bool
	delay   time.Duration
	changed chan struct{} // closed and replaced at each change
}

const writeSlice = 50 * time.Millisecond

func newGate() *gate { return &gate{changed: make(chan struct{})} }

// set changes the gate; when it has returned, no byte passes under the old setting any more.
func (g *gate) set(change func(*gate)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	change(g)
	close(g.changed)
	g.changed = make(chan struct{})
}

// pass waits until what came at the given instant may leave; false when done was closed first.
func (g *gate) pass(done <-chan struct{}, came time.Time) bool {
	for {
		g.mu.RLock()
		cut, wait, changed := g.cut, time.Until(came.Add(g.delay)), g.changed
		g.mu.RUnlock()
		if !cut && wait <= 0 {
			return true
		}
		var due <-chan time.Time // never, while cut
		if !cut {
			due = time.After(wait)
		}
		select {
		case <-due:
		case <-changed:
		case <-done:
			return false
		}
	}
}

// write passes b on to dst, stopping whenever the gate closes. slice is the longest that one write may take;
// a destination whose writes cannot be resumed (TLS) has resume false, and a slow one fails.
func (g *gate) write(done <-chan struct{}, dst net.Conn, b []byte, came time.Time, slice time.Duration, resume bool) error {
	for len(b) > 0 {
		if !g.pass(done, came) {
			return net.ErrClosed
		}
		g.mu.RLock()
		if g.cut {
			g.mu.RUnlock()
			continue
		}
		_ = dst.SetWriteDeadline(time.Now().Add(slice))
		n, err := dst.Write(b)
		g.mu.RUnlock()
		if b = b[n:]; err != nil && !(resume && errors.Is(err, os.ErrDeadlineExceeded)) {
			return err
		}
	}
	return nil
}
