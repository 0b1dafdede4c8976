// Package redisfence is the guard for data in Redis (6 and newer, Valkey), alone, with replicas or as a Cluster.
//
// The fence lies beside the data that it guards, and one script compares and writes: Redis runs scripts one at a time,
// so nothing fits between. The server is authoritative: a command is executed only if its term's token equals the one
// in the election's fence key at that instant.
//
//	Advance(8):             fence{boss}: 7 → 8
//	                                      │ one script at a time
//	Exec(7, "SET", …):                    EVALSHA: 7 = 8? no: ErrFenced, SET is not executed
//	Exec(8, "SET", …):                    EVALSHA: 8 = 8, SET in the same step
//
// It builds on go-redis, since that is the client which a Go service has already, with Cluster and Sentinel, and since
// it lets a command forbid its own repetition: a write that is silently sent twice has no outcome that one could tell.
//
// # Keys
//
// In Redis a script may touch the keys of one hash slot. The fence of election boss/7 is the hash
//
//	aegis:fence:{boss/7}:boss/7
//
// so what its leader writes must carry the same tag, as in loot:{boss/7}; [Guard.Key] makes such keys. Commands with
// other keys are refused before anything is sent ([ErrSlot]). [Config.Tag] puts the fences of all elections into one
// slot, for data that several of them write; [Config.AnySlot] lifts the rule for a server that will never be a Cluster.
//
// # Advance first, then read
//
// [Guard.Advance] must have returned before the new leader reads what it is about to change: only then is it certain
// that the old term's last write is visible, and that no other follows. Read afterwards, and from the primary: a
// replica shows the past. A server that was restarted, restored or failed over may have forgotten the token: advance
// again after reconnecting.
//
// # What is not covered
//
// The fence is as durable as the server's own writes, which is less than it seems:
//
//   - Replication is asynchronous. A replica that is promoted may lack the newest advance, and so admit the old term
//     again, together with losing whatever else it lacks, until the new leader advances again. One without any record
//     admits nobody. [Config.Replicas] has Advance wait for replicas, which narrows the gap and does not close it.
//   - Without an append-only file, or with one that is synced every second, a crash goes back in time likewise.
//   - A server that may evict the fence key (a maxmemory-policy of allkeys-…) is refused by Advance. A policy of
//     volatile-… is fine, as the guard's keys have no TTL. An evicted or deleted fence admits nobody, but an old leader
//     could advance it again.
//   - Redis does not roll back. Of a batch whose third command fails, two are done: [PartialError]. Names, arities and
//     keys are checked before anything is sent, so what is left are a wrong type, a bad option, a number out of range.
//   - Commands that go around this package, and keys that a script of yours touches without declaring them.
//
// Where that is too little, keep the fence and what must not be lost in a database, and let Redis hold what may be
// computed anew.
package redisfence
