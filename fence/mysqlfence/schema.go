package mysqlfence

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"strings"
)

// schemaVersion grows when the tables or procedures change; Install brings older ones up to it, newer ones are refused.
const schemaVersion = 1

// Names are bytes: two that differ in case, accents or trailing spaces are two.
var schema = []string{
	`CREATE TABLE IF NOT EXISTS %aegis_meta (
	k VARBINARY(64) NOT NULL PRIMARY KEY,
	v BIGINT UNSIGNED NOT NULL
) ENGINE=InnoDB`,
	`CREATE TABLE IF NOT EXISTS %aegis_fence (
	name    VARBINARY(255) NOT NULL PRIMARY KEY,
	token   BIGINT NOT NULL,
	nonce   BIGINT UNSIGNED NOT NULL,
	cluster BIGINT UNSIGNED NOT NULL,
	node    VARBINARY(255) NOT NULL,
	at      DATETIME(6) NOT NULL
) ENGINE=InnoDB`,
	`CREATE TABLE IF NOT EXISTS %aegis_once (
	name   VARBINARY(255) NOT NULL,
	k      VARBINARY(512) NOT NULL,
	token  BIGINT NOT NULL,
	result LONGBLOB,
	at     DATETIME(6) NOT NULL,
	PRIMARY KEY (name, k),
	KEY at (at)
) ENGINE=InnoDB`,
}

const setVersion = "INSERT INTO %aegis_meta (k, v) VALUES ('schema', 1) ON DUPLICATE KEY UPDATE v = 1"

func (g *Guard) sql(statement string) string { return strings.ReplaceAll(statement, "%", g.tables) }

// Install creates the guard's tables aegis_meta, aegis_fence and aegis_once, and the procedures aegis_admit and
// aegis_advance for other languages. It may be called by every process at every start: what is there stays, and
// several calls at once take turns. It needs the privileges CREATE, CREATE ROUTINE and ALTER ROUTINE in the database,
// which writers do not: see the package's comment. Tables of a newer version of this package are an error.
func (g *Guard) Install(ctx context.Context) error {
	if err := g.checkServer(ctx); err != nil {
		return err
	}
	conn, err := g.db.Conn(ctx)
	if err != nil {
		return g.explain(ctx, "install", err)
	}
	defer conn.Close()
	var got sql.NullInt64
	if err := conn.QueryRowContext(ctx, "SELECT GET_LOCK('aegis_install', 60)").Scan(&got); err != nil {
		return g.explain(ctx, "install", err)
	}
	if got.Int64 != 1 {
		return errors.New("mysqlfence: install: another session has held the lock 'aegis_install' for 60 s")
	}
	defer func() { _, _ = conn.ExecContext(context.WithoutCancel(ctx), "DO RELEASE_LOCK('aegis_install')") }()
	version, err := g.version(ctx, conn)
	if err != nil && !missing(err) {
		return err
	}
	if version == schemaVersion {
		return nil
	}
	for _, statement := range g.statements() {
		if _, err := conn.ExecContext(ctx, statement); err != nil {
			return g.explain(ctx, "install", err)
		}
	}
	return nil
}

func (g *Guard) statements() []string {
	var all []string
	for _, statement := range schema {
		all = append(all, g.sql(statement))
	}
	all = append(all, g.procedures()...)
	return append(all, g.sql(setVersion)) // last, so that an interrupted Install begins again
}

// InstallSQL returns what [Guard.Install] executes, for the mysql client and for migration tools that know its
// DELIMITER. It may be executed any number of times.
func (g *Guard) InstallSQL() string {
	var b strings.Builder
	b.WriteString("DELIMITER //\n")
	for _, statement := range g.statements() {
		b.WriteString(statement + "//\n")
	}
	b.WriteString("DELIMITER ;\n")
	return b.String()
}

// version returns the version of the tables, and an error for those of a newer one.
func (g *Guard) version(ctx context.Context, conn interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}) (int, error) {
	var version int
	err := conn.QueryRowContext(ctx, g.sql("SELECT v FROM %aegis_meta WHERE k = 'schema'")).Scan(&version)
	if errors.Is(err, sql.ErrNoRows) {
		return 0, nil
	}
	if err == nil && version > schemaVersion {
		err = fmt.Errorf("mysqlfence: the aegis tables are of version %d, this program knows version %d; use a newer aegis", version, schemaVersion)
	}
	return version, err
}

// checkTables refuses tables that are not there, are newer than this program, or know no row locks.
func (g *Guard) checkTables(ctx context.Context) error {
	version, err := g.version(ctx, g.db)
	if err != nil {
		return g.explain(ctx, "look at the tables", err)
	}
	if version < schemaVersion {
		return errNotInstalled
	}
	where := "DATABASE()"
	if g.cfg.Database != "" {
		where = "CONVERT(" + literal(g.cfg.Database) + " USING utf8mb4)"
	}
	rows, err := g.db.QueryContext(ctx, "SELECT TABLE_NAME, COALESCE(ENGINE, '') FROM information_schema.TABLES WHERE TABLE_SCHEMA = "+where+
		" AND TABLE_NAME IN ('aegis_fence', 'aegis_once')")
	if err != nil {
		return g.explain(ctx, "look at the tables", err)
	}
	defer rows.Close()
	n := 0
	for rows.Next() {
		var table, engine string
		if err := rows.Scan(&table, &engine); err != nil {
			return err
		}
		if n++; !strings.EqualFold(engine, "InnoDB") {
			return fmt.Errorf("mysqlfence: table %s has the engine %q, which has no row locks and no transactions that would do; ALTER TABLE %s ENGINE=InnoDB", table, engine, table)
		}
	}
	if err := rows.Err(); err != nil {
		return g.explain(ctx, "look at the tables", err)
	}
	if n < 2 {
		return errNotInstalled
	}
	return nil
}

var errNotInstalled = errors.New("mysqlfence: the guard's tables are not there, or this account may not see them: " +
	"`aegis fence install --url mysql://…`, or Guard.Install")

func missing(err error) bool {
	n := number(err)
	return n == 1146 || n == 1305 // no such table, no such routine
}

// explain adds to err what was tried and what to do about it.
func (g *Guard) explain(ctx context.Context, what string, err error) error {
	if err == nil {
		return nil
	}
	hint := ""
	var dial *net.OpError
	switch n := number(err); {
	case ctx.Err() != nil && n == 0:
		return fmt.Errorf("mysqlfence: %s: %w: %w", what, context.Cause(ctx), err)
	case unsent(err):
		hint = "the server closes connections at once; is it stopping?"
	case missing(err) && strings.Contains(err.Error(), "aegis_"):
		return fmt.Errorf("%w: %w", errNotInstalled, err)
	case n == 1045 || n == 1698:
		hint = "wrong user or password in the data source name, or the account may not come from this host"
	case n == 1044 || n == 1142 || n == 1143 || n == 1227 || n == 1370:
		hint = "the account lacks a privilege; the package's comment lists the grants"
	case n == 1046:
		hint = "the data source name names no database, nor does Config.Database"
	case n == 1049:
		hint = "the database does not exist"
	case n == 1040 || n == 1203 || n == 1226:
		hint = "the server takes no more connections; bound the pools (SetMaxOpenConns)"
	case n == 1290 || n == 1792 || n == 1836:
		hint = "the server is read-only (a replica?); connect to the primary"
	case n == 1021 || n == 1114 || n == 28 || n == 3 || n == 1041:
		hint = "the server's disk is full; nothing was written"
	case n == errXAOutside:
		hint = "the pool's connection is in a transaction already: autocommit=0 in the data source name, or a BEGIN that nobody ended"
	case n == 1053 || n == 1927 || n == 1317:
		hint = "the server is stopping, or somebody has killed the session"
	case errors.As(err, &dial) && dial.Op == "dial":
		hint = "the server cannot be reached; is it running, are host and port right?"
	}
	if hint != "" {
		hint = " (" + hint + ")"
	}
	return fmt.Errorf("mysqlfence: %s%s: %w", what, hint, err)
}
