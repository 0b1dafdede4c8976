// Package pgfence is the guard for data in PostgreSQL 13 or later, for Go programs with pgx or database/sql and, by the
// SQL functions that it installs, for every other language.
//
// The database is authoritative: a write commits only if its token equals the one in table aegis.fence, compared in the
// write's own transaction under locks that last to the commit.
//
//	Do(7, fn):   BEGIN ─ admit: lock "boss" shared ─ row FOR SHARE ─ 7 = 7 ─ fn writes ─ confirm ─ COMMIT
//	Advance(8):                  lock "boss" exclusively … waits … waits … waits … waits ──────────┴─ 7 → 8 ─ COMMIT
//	Do(7, fn):                       lock "boss" shared … queues behind the advance ──────────────────────────┴─ 7 = 8? no: ErrFenced
//
// Both locks are needed. The advisory lock of the name is fair: who asks for it shared waits behind an advance that
// waits for it exclusively, so an unbroken load of old-term writers cannot starve a new leader, as it does where they
// lock the row alone. The row's lock makes the comparison right at every isolation level: at REPEATABLE READ a row that
// was changed after the snapshot is a serialization failure, and not an old token that seems to be the newest. (Two
// names whose hashes are equal, once in 2^64, share an advisory lock: they queue behind each other, and that is all.)
//
// Writers of one term run side by side. Nothing belongs to the session, so poolers in transaction mode (pgbouncer) are
// fine; let pgx not name its statements there:
//
//	config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
//
// # Advance first, then read
//
// [Guard.Advance] is a transaction of its own and must have returned before the new leader reads what it is about to
// change. In one transaction, or one statement, the read's snapshot can be older than the old term's last commit, at
// READ COMMITTED too: no function does both, on purpose.
//
// # From other languages
//
// The refusal is an error of the database, so any client can use the fence (Schema prints what Install installs):
//
//	SELECT aegis.advance('boss', 451);                 -- once per term, in a transaction of its own, before the first read
//
//	BEGIN;
//	SELECT aegis.admit('boss', 451);                   -- first, outside of savepoints and EXCEPTION blocks
//	INSERT INTO loot VALUES ('Ayla', 'sword');
//	COMMIT;
//
//	WITH ok AS (SELECT aegis.admit('boss', 451))       -- one statement, one round trip: the statement must read from
//	INSERT INTO loot SELECT 'Ayla', 'sword' FROM ok;   -- ok, for PostgreSQL does not execute what nobody reads
//
// SQLSTATEs: ZF001 fenced, ZF002 token went back, ZF003 foreign cluster, ZF004 invalid token or name, ZF005 not
// admitted to a protected table, ZF006 the transaction is not the admitted one. DETAIL is JSON with name, token and
// newest, HINT says what to do. Nonce and cluster are optional there; Go's uint64 is the bigint of the same bits.
// Where a savepoint or an EXCEPTION block could swallow the refusal, let aegis.confirm('boss', 451) be the last statement
// before COMMIT, or protect the table.
//
// # Least privilege
//
// Install as a role that is neither the application's nor a superuser; the functions run with its rights (SECURITY
// DEFINER, search_path fixed). [Grants] gives an application role what admitting and advancing need. With that it can
// neither lower a token nor write or read the fence's tables nor drop the guard. It can raise a token as far as it
// likes and so end a term: whoever may advance may do that.
//
// # Protected tables
//
// [Guard.Protect] refuses every INSERT, UPDATE, DELETE, MERGE, COPY and TRUNCATE of a table, its partitions, and what
// cascades into it, unless the transaction was admitted for the election: the programmer who forgets the guard gets an
// error. Round it go: the table's owner and superusers, who can drop or disable the trigger or the table; DDL
// (ALTER TABLE … USING, ATTACH and DETACH PARTITION, DROP); the apply worker of logical replication, which fires row
// triggers alone; TRUNCATE of a partition that was added after the last Protect. session_replication_role does not: the
// triggers are ENABLE ALWAYS. A row trigger covers future partitions and costs an admit for each row of partitioned
// tables.
//
// # What is not covered
//
// Writes to other databases, also by dblink and foreign tables, and effects outside of the transaction: sequences,
// files, NOTIFY's receivers. Prepared transactions: [Tx] refuses PREPARE TRANSACTION; one that was admitted and
// prepared by other means stays right, since it keeps its locks, but holds every advance off until it is resolved, and
// [BlockedError] names it. Replicas refuse to admit, since they cannot lock, and a read there may be old. The fence is
// as durable as the server's commit: a failover to an asynchronous standby, a restored backup or synchronous_commit=off
// with a crash can lose an acknowledged write, and the first two a token too (an advance itself is always synchronous).
package pgfence
