package pgfence

import (
	"context"
	_ "embed"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

const schemaVersion = 1

//go:embed schema.sql
var schema string

// Schema returns what Install executes as a script for psql or a migration tool: plain SQL in one transaction, which may
// be run again at any time, and upgrades.
func Schema() string { return "BEGIN;\n" + schema + "\nCOMMIT;\n" }

// Grants returns the SQL that gives an application's role what it needs to advance, admit, write once and see who blocks,
// and nothing more.
func Grants(role string) string {
	name := pgx.Identifier{role}.Sanitize()
	return "GRANT USAGE ON SCHEMA aegis TO " + name + ";\n" +
		"GRANT EXECUTE ON FUNCTION aegis.version, aegis.advance, aegis.admit, aegis.report, aegis.confirm, aegis.newest, aegis.names, " +
		"aegis.lock_of, aegis.blockers, aegis.once_begin, aegis.once_end TO " + name + ";\n"
}

// Install creates or upgrades the schema aegis, as its owner: the role of the pool. It may be called by any number of
// processes at once, and by roles that may not install where the schema is there already. A schema of a newer version is
// [ErrNewerSchema]. It blocks until ctx ends at the latest.
func (g *Guard) Install(ctx context.Context) error {
	switch version, err := g.version(ctx); {
	case err != nil && !isState(err, "3F000") && !isState(err, "42883") && !isState(err, "42P01") && !isState(err, "42501"):
		return explain(ctx, "install", err)
	case err == nil && version == schemaVersion:
		return nil
	case err == nil && version > schemaVersion:
		return newer(version)
	}
	return g.script(ctx, "install", schema)
}

// Grant executes [Grants] for each role, as the schema's owner.
func (g *Guard) Grant(ctx context.Context, roles ...string) error {
	var all strings.Builder
	for _, role := range roles {
		all.WriteString(Grants(role))
	}
	return g.script(ctx, "grant", all.String())
}

// Uninstall removes the schema with all records and the protection of all tables, as its owner: nothing is guarded then.
func (g *Guard) Uninstall(ctx context.Context) error {
	return g.script(ctx, "uninstall", "drop schema if exists aegis cascade")
}

func (g *Guard) script(ctx context.Context, op, sql string) error {
	conn, err := g.acquire(ctx)
	if err != nil {
		return explain(ctx, op, err)
	}
	defer conn.Release()
	// client_min_messages: nobody wants to read that a table exists already.
	if err := simple(ctx, conn, "begin isolation level read committed; set local client_min_messages = warning; "+sql); err != nil {
		rollback(ctx, conn)
		return explain(ctx, op, err)
	}
	return explain(ctx, op, commit(ctx, conn, &pgx.Batch{}))
}

func (g *Guard) version(ctx context.Context) (version int64, err error) {
	conn, err := g.acquire(ctx)
	if err != nil {
		return 0, err
	}
	defer conn.Release()
	err = conn.QueryRow(ctx, "select aegis.version()").Scan(&version)
	return version, err
}

func newer(version int64) error {
	return fmt.Errorf("pgfence: %w (it is of version %d, this program knows version %d)", ErrNewerSchema, version, schemaVersion)
}

// Protect has every change of the table, its partitions and children refused unless its transaction was admitted for
// the election: see the package's documentation for what that covers. table is a name as in SQL, with its schema if it
// needs one. It may be repeated, and is to be after a partition was added. For the table's owner, with USAGE on schema
// aegis and EXECUTE on aegis.protect, unprotect, check_term and guard. It waits for the table's writers until ctx ends.
func (g *Guard) Protect(ctx context.Context, table, election string) error {
	return g.script(ctx, "protect "+table, fmt.Sprintf("select aegis.protect(%s, %s)", literal(table), literal(election)))
}

// Unprotect lifts Protect. It waits for all who use the table until ctx ends.
func (g *Guard) Unprotect(ctx context.Context, table, election string) error {
	return g.script(ctx, "unprotect "+table, fmt.Sprintf("select aegis.unprotect(%s, %s)", literal(table), literal(election)))
}
