// Package sqlitefence is the guard for data in an SQLite file, embedded and without cgo.
//
// The fence and the data that it guards live in one file, so that one transaction holds both. The file is
// authoritative: a write commits only if its token equals the one in table aegis_fence, read under the lock under
// which the write commits.
//
//	Advance(8):   BEGIN IMMEDIATE ─ aegis_fence: 7 → 8 ─ COMMIT
//	                                                      │ SQLite has one writer at a time
//	Do(7, fn):                                            BEGIN IMMEDIATE ─ 7 = 8? no: ErrFenced, ROLLBACK
//
// What may end a transaction behind Go's back (INSERT OR ROLLBACK, a COMMIT or ROLLBACK that fn executes, a failing
// disk, an interrupted statement) is noticed: a commit hook on the writing connection refuses every commit that the
// guard itself did not ask for, and a rollback hook marks the transaction as ended, whereupon nothing of it, and
// nothing that follows it in fn, is written ([ErrEnded]).
//
// # Advance first, then read
//
// [Guard.Advance] is a transaction of its own and must have returned before the new leader reads what it is about to
// change: only then is it certain that the old term's last write is visible, and that no other follows. No function
// of this package does both in one step, on purpose: a read in the transaction of an advance would see a state that
// nobody has promised to be the last.
//
// # What is not covered
//
// Writes that go around this package, through another connection to the same file. Tables of attached databases,
// since SQLite's WAL does not commit two files as one. A file that was restored from a backup, or lies on a file
// system that loses what was synced: the fence is as durable as the file. WAL needs shared memory, so all processes
// must be on one machine; network file systems will not do.
package sqlitefence
