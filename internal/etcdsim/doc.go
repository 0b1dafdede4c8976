// Package etcdsim is an etcd in memory for virtual time: the real clientv3 client runs on it inside a
// testing/synctest bubble, without network, disk or raft, and an hour of renewals takes milliseconds.
//
// It follows etcd 3.7.3 in what a client can see: revisions, versions, transactions with nested ones and their
// checks, ranges at a revision, compaction, leases and watches, with etcd's own error values. differential_test.go
// drives it and a real embedded etcd with the same random operations and compares every reply.
//
//	machine "a" ── link "a" ──┐              one Cluster: one store, one lessor, one watch hub
//	machine "b" ── link "b" ──┼── Cluster    each link can be cut per direction, delayed, lied on, and asked
//	machine "c" ── link "c" ──┘              for a verdict on every request
//
// # Time
//
// Everything that happens later (a message that arrives, a lease that runs out) is an event on one queue, run in
// order by one timer of Go's time package. Nothing waits in a goroutine of the simulator, so a bubble may end at any
// moment; only the clients must be closed, which [Cluster.Close] does. Close of a client without a connection returns
// context.Canceled: that is clientv3's way.
//
// # What the simulator does not do
//
//   - No members, no raft, no quorum: one server that is up or down. Serializable reads are linearizable.
//   - The client is clientv3 without its retry interceptor, because that one needs a gRPC connection: an error of a
//     unary call goes to the caller. [WithResend] plays the interceptor. A server that is down answers unary calls
//     with Unavailable within a round trip, where a real client would wait for a connection; new streams do wait.
//   - No retransmission: what a cut swallowed is gone, also after the cut is healed.
//   - No authentication, alarms, quotas, RangeStream, Maintenance, Cluster and Auth calls (Unimplemented).
//   - Leases have no checkpoints: after [Cluster.Start] and [Cluster.LeaderChange] every lease has its full TTL, also
//     one of more than five minutes. There is no limit to how many run out at once.
//   - A watch stream has no bound: slow consumers do not become etcd's "victims", fragments do not occur, and any
//     number of unsynced watches is served at each tick.
//   - Two requests of different machines that arrive at the same virtual instant are served in the order in which
//     they were sent; requests that goroutines send at the same instant are in no order, as in life.
package etcdsim
