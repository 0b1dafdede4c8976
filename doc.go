// Package aegis gives every piece of singleton work in a cluster exactly one owner, on etcd.
//
// etcd is authoritative about who leads; the clock decides how long this process may believe it; and the store that the
// work writes to has the last word, for it compares the term's token in the same atomic step as the write.
//
//	       trust ends = start of the answered renewal + granted TTL − margin
//	       │
//	leader ├──── Held ────┤ context ended, work stops │
//	etcd   ├───────────── lease ──────────────────────┤ key gone
//	rival                                             ├── wins, greater token ── guards advance ── works ──▶
//	guard  ├───────── admits the old token ────────────────────────────────────┤ refuses it, whatever comes late
//
// A process joins once ([Join]) and enters any number of elections with its one lease ([Node.Election]). The main path
// is [Election.Run]: it waits for its turn, works, and starts over, term after term. What each return and context means
// is said there.
//
// What fails, and how:
//
//   - The lease cannot be renewed in time: every term of the node ends before etcd can let the lease run out. The node
//     gets a new lease and enters again, by itself.
//   - The key is seen to be gone or another's, however well the lease is renewed: that term ends.
//   - An answer is lost: whether the transaction won is read from etcd, by a nonce; what nobody claims is swept.
//   - The process is stopped and wakes up late: [Leadership.Held] says no at its first call; a write that is already on
//     its way is refused by the guard, and by nothing else.
//   - etcd is restored from a snapshot: its revisions, and so the tokens, start in the past. Nodes notice and stay out
//     until an operator has raised the token offset.
//
// Not promised: effects that no guard sees, such as a packet to a player, may come from a leader whose term has just
// ended; hypervisor pauses that stop every clock defeat Held, though not the guards. See docs/guarantees.md.
package aegis
