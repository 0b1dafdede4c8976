package pgfence_test

import (
	"errors"
	"strings"
	"testing"

	"aegis/fence"
	"aegis/fence/pgfence"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

func TestProtectedTableRefusesWhatIsNotAdmitted(t *testing.T) {
	g, pool := open(t, pgfence.Config{})
	ctx := bounded(t)
	guild := fence.Term{Election: "guild", Token: 7}
	if err := g.Advance(ctx, term(7), guild); err != nil {
		t.Fatal(err)
	}
	exec(t, pool, `
		CREATE TABLE player (id int PRIMARY KEY);
		CREATE TABLE bag (id int PRIMARY KEY, player int REFERENCES player ON DELETE CASCADE ON UPDATE CASCADE);
		CREATE TABLE log (day int, what text) PARTITION BY RANGE (day);
		CREATE TABLE log_1 PARTITION OF log FOR VALUES FROM (0) TO (10);
		CREATE TABLE log_2 PARTITION OF log FOR VALUES FROM (10) TO (20) PARTITION BY RANGE (day);
		CREATE TABLE log_2_1 PARTITION OF log_2 FOR VALUES FROM (10) TO (20);
		CREATE TABLE zone (name text);
		CREATE TABLE dungeon (floor int) INHERITS (zone);
		CREATE VIEW bags AS SELECT * FROM bag;
		CREATE FUNCTION forgetful() RETURNS void LANGUAGE sql AS 'INSERT INTO bag VALUES (99, 1)';
		INSERT INTO player VALUES (1), (2);
		INSERT INTO bag VALUES (1, 1), (2, 2);
		INSERT INTO log VALUES (1, 'a'), (11, 'b');`)
	protected := []string{"bag", "log", "zone"}
	for range 2 { // it may be repeated
		for _, table := range protected {
			if err := g.Protect(ctx, table, "boss"); err != nil {
				t.Fatal(err)
			}
		}
	}
	exec(t, pool, `CREATE TABLE log_3 PARTITION OF log FOR VALUES FROM (20) TO (30);
		CREATE TABLE log_4 (day int, what text); ALTER TABLE log ATTACH PARTITION log_4 FOR VALUES FROM (30) TO (40)`)
	copyIn := "COPY bag FROM STDIN"
	writes := []string{
		"INSERT INTO bag VALUES (10, 1)", "UPDATE bag SET player = 2 WHERE id = 1", "DELETE FROM bag WHERE id = 2", "TRUNCATE bag", "TRUNCATE player CASCADE", copyIn,
		"MERGE INTO bag USING (VALUES (1)) v (id) ON bag.id = v.id WHEN MATCHED THEN DELETE", "INSERT INTO bags VALUES (11, 1)", "SELECT forgetful()",
		"WITH x AS (INSERT INTO bag VALUES (12, 1) RETURNING 1) SELECT * FROM x", "WITH x AS (INSERT INTO bag VALUES (12, 1) RETURNING 1) SELECT 1",
		"DELETE FROM player WHERE id = 1", "UPDATE player SET id = 3 WHERE id = 2", "INSERT INTO bag VALUES (1, 1) ON CONFLICT DO NOTHING", "UPDATE bag SET player = 1 WHERE false",
		"INSERT INTO log VALUES (2, 'x')", "INSERT INTO log_1 VALUES (2, 'x')", "UPDATE log_1 SET what = 'x'", "UPDATE log SET day = 12 WHERE day = 1", "DELETE FROM log_2", "TRUNCATE log_1", "TRUNCATE log",
		"INSERT INTO log_2_1 VALUES (12, 'x')", "TRUNCATE log_2_1", "INSERT INTO log_3 VALUES (22, 'x')", "INSERT INTO log_4 VALUES (32, 'x')", "INSERT INTO log VALUES (33, 'x')",
		"INSERT INTO zone VALUES ('x')", "INSERT INTO dungeon VALUES ('x', 1)", "TRUNCATE dungeon",
		"SET LOCAL session_replication_role = replica; DELETE FROM bag", "SET LOCAL session_replication_role = replica; TRUNCATE log_1",
		"EXPLAIN ANALYZE DELETE FROM bag",
	}
	attempt := func(admit, sql string) error {
		conn, err := pool.Acquire(ctx)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Release()
		if _, err := conn.Exec(ctx, "BEGIN"); err != nil {
			t.Fatal(err)
		}
		defer conn.Exec(ctx, "ROLLBACK")
		if _, err := conn.Exec(ctx, admit); err != nil {
			t.Fatalf("%s: %v", admit, err)
		}
		if sql == copyIn {
			_, err = conn.Conn().PgConn().CopyFrom(ctx, strings.NewReader("20\t1\n"), sql)
		} else {
			_, err = conn.Exec(ctx, sql)
		}
		return err
	}
	for _, sql := range writes {
		for name, admit := range map[string]string{
			"not admitted":                   "SELECT 1",
			"admitted for another election":  "SELECT aegis.admit('guild', 7)",
			"admission was rolled back":      "SAVEPOINT a; SELECT aegis.admit('boss', 7); ROLLBACK TO a",
			"refusal was swallowed":          "DO $$ BEGIN PERFORM aegis.admit('boss', 6); EXCEPTION WHEN OTHERS THEN NULL; END $$",
			"claims a token that is not so":  `SET LOCAL aegis.terms = '{"boss": [6, 0, 0]}'`,
			"claims one to come":             `SET LOCAL aegis.terms = '{"boss": [8, 0, 0]}'`,
			"claims nothing in its own form": `SET LOCAL aegis.terms = '{"boss": null}'`,
		} {
			err := attempt(admit, sql)
			e, ok := errors.AsType[*pgconn.PgError](err)
			if !ok || !strings.HasPrefix(e.Code, "ZF") {
				t.Errorf("%s, %s: %v, must be refused", name, sql, err)
			} else if name == "not admitted" && (!strings.Contains(e.Hint, "SELECT aegis.admit('boss', <token>)") || !strings.Contains(e.Hint, "aegis.unprotect(") || !strings.Contains(e.Message, `protected by "boss"`)) {
				t.Errorf("%s: %s; %s", sql, e.Message, e.Hint)
			}
		}
		if err := attempt("SELECT aegis.admit('boss', 7)", sql); err != nil {
			t.Errorf("admitted: %s: %v", sql, err)
		}
	}

	// In Go the programmer who forgets gets ErrFenced, and the guard's own ways work.
	err := g.Do(ctx, guild, func(tx *pgfence.Tx) error { _, err := tx.Exec(ctx, "DELETE FROM bag"); return err })
	wantIs(t, err, fence.ErrFenced)
	wantText(t, err, "bag", `protected by "boss"`, "aegis.admit")
	if _, err := g.Exec(ctx, term(7), "INSERT INTO bag VALUES (30, 1)"); err != nil {
		t.Error(err)
	}
	if err := g.Do(ctx, term(7), func(tx *pgfence.Tx) error {
		n, err := tx.CopyFrom(ctx, pgx.Identifier{"bag"}, []string{"id", "player"}, pgx.CopyFromRows([][]any{{31, 1}, {32, 1}}))
		if n != 2 {
			t.Errorf("copied %d rows", n)
		}
		return err
	}); err != nil {
		t.Error(err)
	}

	// A transaction that was let in by the trigger alone holds its locks all the same.
	tx, err := pool.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(ctx, `SET LOCAL aegis.terms = '{"boss": [7, 0, 0]}'; INSERT INTO bag VALUES (40, 1)`); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- g.Advance(ctx, term(8)) }()
	untilWaiting(t, pool, 1)
	if err := tx.Commit(ctx); err != nil {
		t.Error(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}

	for _, table := range protected {
		if err := g.Unprotect(ctx, table, "boss"); err != nil {
			t.Error(err)
		}
	}
	for _, sql := range writes {
		if err := attempt("SELECT 1", sql); err != nil {
			t.Errorf("unprotected: %s: %v", sql, err)
		}
	}
	if left := value(t, pool, "select count(*) from pg_trigger where tgfoid = 'aegis.guard'::regproc"); left != "0" {
		t.Errorf("%s triggers are left", left)
	}
	wantText(t, g.Protect(ctx, "bags", "boss"), "not a table")
	if err := g.Protect(ctx, "nowhere", "boss"); err == nil {
		t.Error("protected a table that does not exist")
	}
}
