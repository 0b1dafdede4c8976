package lab

import (
	"fmt"
	"net"
	"slices"
	"time"
)

// clientLink is the link from one node to one member.
type clientLink struct {
	*link
	to, from *gate
}

func (l *clientLink) gates(dir Direction) []*gate {
	var gates []*gate
	if dir&ToServer != 0 {
		gates = append(gates, l.to)
	}
	if dir&FromServer != 0 {
		gates = append(gates, l.from)
	}
	return gates
}

// Endpoints returns the addresses (host:port, one per member, in order) by which the given node reaches the members.
// The node's links are made at its first mention and stay until Close; the addresses never change. A client must not sync its endpoints
// from the cluster: what members advertise are the links of no node. It panics when the cluster is closed or the machine
// has no port left.
func (c *Cluster) Endpoints(node string) []string {
	var addrs []string
	for _, l := range c.links(node) {
		addrs = append(addrs, l.addr())
	}
	return addrs
}

func (c *Cluster) links(node string) []*clientLink {
	c.mu.Lock()
	defer c.mu.Unlock()
	if links, ok := c.nodes[node]; ok {
		return links
	}
	if c.closed {
		panic("lab: links of " + node + ": the cluster is closed")
	}
	var links []*clientLink
	for _, m := range c.members {
		l := &clientLink{to: newGate(), from: newGate()}
		var err error
		l.link, err = newLink(m.dialClient, func(conn net.Conn) (int, net.Conn, *gate, *gate, error) {
			return 0, conn, l.to, l.from, nil
		})
		if err != nil {
			panic(fmt.Sprintf("lab: link from %s to member %d: %v", node, m.index, err))
		}
		links = append(links, l)
	}
	c.nodes[node] = links
	return links
}

func (c *Cluster) linksTo(member int) []*clientLink {
	c.mu.Lock()
	defer c.mu.Unlock()
	var links []*clientLink
	for _, of := range c.nodes {
		links = append(links, of[member])
	}
	return links
}

// each changes the gates of a node's links to the given members, or to all if none is given.
func (c *Cluster) each(node string, dir Direction, members []int, change func(*gate)) {
	for i, l := range c.links(node) {
		if len(members) == 0 || slices.Contains(members, i) {
			for _, g := range l.gates(dir) {
				g.set(change)
			}
		}
	}
}

// Cut makes a black hole of a node's links to the given members, or to all if none is given, in one direction or
// both. When it returns, no byte passes there any more. Nothing is reset: what is sent is taken, up to about 1 MiB a
// connection besides the kernel's buffers, and kept; after that the sender is simply not read. Connecting succeeds
// and carries nothing. Several cuts add up.
func (c *Cluster) Cut(node string, dir Direction, members ...int) {
	c.each(node, dir, members, func(g *gate) { g.cut = true })
}

// Slow delays every byte on a node's links to the given members, or to all if none is given, by d in one direction or
// both; 0 takes the delay away. Order is kept, and throughput is bounded by about 1 MiB per d and connection.
func (c *Cluster) Slow(node string, dir Direction, d time.Duration, members ...int) {
	c.each(node, dir, members, func(g *gate) { g.delay = d })
}

// Heal ends all cuts and delays of a node's links. What was held back is delivered, in order, at once.
func (c *Cluster) Heal(node string) {
	c.each(node, Both, nil, func(g *gate) { g.cut, g.delay = false, 0 })
}

// CutPeers makes a black hole between two members, as [Cluster.Cut] does: ToServer stops what a sends to b, whichever
// of them dialed, FromServer what b sends to a.
func (c *Cluster) CutPeers(a, b int, dir Direction) {
	c.eachPeer(a, b, dir, func(g *gate) { g.cut = true })
}

// SlowPeers delays what two members send to each other; directions as in [Cluster.CutPeers].
func (c *Cluster) SlowPeers(a, b int, dir Direction, d time.Duration) {
	c.eachPeer(a, b, dir, func(g *gate) { g.delay = d })
}

// HealPeers ends all cuts and delays between two members.
func (c *Cluster) HealPeers(a, b int) {
	c.eachPeer(a, b, Both, func(g *gate) { g.cut, g.delay = false, 0 })
}

// Isolate cuts a member off from all others, both ways; clients still reach it. [Cluster.HealAll] ends it.
func (c *Cluster) Isolate(member int) {
	for other := range c.members {
		if other != member {
			c.CutPeers(member, other, Both)
		}
	}
}

// HealAll ends all cuts and delays of all nodes and members.
func (c *Cluster) HealAll() {
	c.mu.Lock()
	var nodes []string
	for node := range c.nodes {
		nodes = append(nodes, node)
	}
	c.mu.Unlock()
	for _, node := range nodes {
		c.Heal(node)
	}
	for a := range c.members {
		for b := range a {
			c.HealPeers(a, b)
		}
	}
}

func (c *Cluster) eachPeer(a, b int, dir Direction, change func(*gate)) {
	if dir&ToServer != 0 {
		c.peerGates[a][b].set(change)
	}
	if dir&FromServer != 0 {
		c.peerGates[b][a].set(change)
	}
}
