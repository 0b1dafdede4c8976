// Package mysqlfence is the guard for data in MySQL 8 or MariaDB 10.6 and newer.
//
// The fence and the data that it guards live in one server, so that one transaction holds both. The server is
// authoritative: a write commits only if its token equals the one in table aegis_fence, read under a lock that is held
// to the commit.
//
//	Do(7, fn):    XA START ─ lock the row shared ─ 7 = 7 ─ fn's writes ─ XA COMMIT ONE PHASE
//	Do(7, fn):      XA START ─ lock the row shared ─ 7 = 7 ─ … side by side …  XA COMMIT
//	Advance(8):                 lock the row exclusively: waits ………………………………………………………─ 7 → 8 ─ COMMIT
//	Do(7, fn):                                     waits behind the advance ……………………………………………─ 7 = 8? no: ErrFenced
//
// The locking read sees what is committed last, not the transaction's snapshot, so the comparison is right at every
// isolation level. InnoDB serves a row's waiters in the order of their coming, so that an advance waits for the
// transactions that run when it comes, and for none that comes later.
//
// Guarded transactions are XA transactions of one phase. Inside one the server refuses what would end it or commit it
// implicitly (COMMIT, DDL, LOCK TABLES), in stored procedures too; after it was rolled back behind Go's back (the
// victim of a deadlock) the server refuses every further statement; and it commits only what has the transaction's
// name. So nothing that fn does can be written outside the transaction that was admitted.
//
// # Install
//
// [Guard.Install] or [Guard.InstallSQL], by an account that may create tables and routines. The writers' account needs
//
//	GRANT SELECT, INSERT, UPDATE ON db.aegis_fence TO app;
//	GRANT SELECT, INSERT, UPDATE, DELETE ON db.aegis_once TO app;   -- DELETE for Forget alone
//	GRANT SELECT ON db.aegis_meta TO app;
//	GRANT PROCESS ON *.* TO app;    -- optional: to name who keeps an advance waiting
//
// and one that uses the procedures alone, which are for other languages, cannot lower a token:
//
//	GRANT EXECUTE ON PROCEDURE db.aegis_admit TO php;
//
//	START TRANSACTION;
//	CALL aegis_admit('boss', 451);  -- an error with SQLSTATE 45000 unless 451 is the newest: ROLLBACK, and stop
//	UPDATE loot SET …;
//	COMMIT;
//
// # Advance first, then read
//
// [Guard.Advance] is a transaction of its own and must have returned before the new leader reads what it is about to
// change: only then is it certain that the old term's last write is visible, and that no other follows. No function
// of this package does both in one step, on purpose: under REPEATABLE READ a transaction's snapshot can be older than
// the lock that it waited for, and the read would miss the old term's last write.
//
// # Cost
//
// With the connections of [Open], Exec takes one round trip, and Do as many as the same transaction unguarded. What a
// guard costs is the server's CPU: on MariaDB 10.11, where a plain one-row INSERT takes 40 µs without the disk, the
// transaction's own statements add about 25 µs and the reading of a second table 40 µs; its lock is not to be seen. So
// Exec is near a plain statement where the disk or the network is slow, and at half of it where 16 connections keep all
// cores busy. Many small writes belong in one Do.
//
// # What is not covered
//
// Writes that go around this package and its procedures. Tables without transactions (MyISAM, Aria, MEMORY): what is
// written there stays, whatever becomes of the transaction. Effects of a transaction that the server acknowledged and
// lost: asynchronous replication and a failover, innodb_flush_log_at_trx_commit below 1, a backup; the fence is as
// durable as the server's commit. Galera clusters and multi-primary groups certify no shared locks and are refused, as
// are servers that are read-only. A proxy that spreads statements over connections must keep an XA transaction on one.
// Caller's own transactions ([Guard.Admit], CALL aegis_admit) have the server's
// protection against their own DDL and deadlocks only in as far as the caller stops at the first error.
package mysqlfence
