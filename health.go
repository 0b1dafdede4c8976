package aegis

import "time"

// Health tells how a node stands.
type Health struct {
	State       string        // "joined", "waiting" (for what Waiting says), "halted" (etcd went back) or "left"
	LeaseLeft   time.Duration // how long trust lasts without another renewal; 0 when there is none
	LastRenewal time.Time     // of the lease, by the wall clock
	Waiting     string        // what for; "" when joined
	Err         error         // the latest failure since the latest success
}

// Ready reports whether the node can lead: it is joined and its lease is trusted, leader or not. It fits a readiness
// probe.
func (h Health) Ready() bool { return h.State == "joined" }

// Health returns how the node stands. It does not block.
func (n *Node) Health() Health {
	n.mu.Lock()
	l := n.lease
	h := Health{State: "waiting", LastRenewal: n.lastRenewal, Waiting: n.waiting, Err: n.err}
	if n.halted != nil {
		h.State, h.Waiting = "halted", "aegis token raise"
	}
	n.mu.Unlock()
	if l != nil && l.trusted() {
		h.State, h.LeaseLeft = "joined", l.left()
	}
	if _, _, err := n.view.status(); h.Err == nil {
		h.Err = err
	}
	if n.leaving.Err() != nil {
		h.State, h.Waiting = "left", ""
	}
	return h
}
