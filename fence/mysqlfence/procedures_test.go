package mysqlfence_test

import (
	"context"
	"database/sql"
	"strings"
	"testing"
	"time"

	"aegis/fence"
	"aegis/fence/mysqlfence"

	"github.com/go-sql-driver/mysql"
)

// account makes an account with the given grants in the database and returns a pool of it.
func account(t *testing.T, admin *sql.DB, database, name string, grants ...string) (*sql.DB, string) {
	t.Helper()
	for _, statement := range append([]string{"DROP USER IF EXISTS " + name, "CREATE USER " + name + " IDENTIFIED BY 'pw'"}, grants...) {
		if _, err := admin.Exec(strings.NewReplacer("%db", database, "%user", name).Replace(statement)); err != nil {
			t.Fatalf("%s: %v", statement, err)
		}
	}
	c := server.Config(database)
	c.User, c.Passwd = name, "pw"
	db, err := sql.Open("mysql", c.FormatDSN())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close(); _, _ = admin.Exec("DROP USER " + name) })
	return db, c.FormatDSN()
}

// TestProceduresForOtherLanguages: what a program without this package does, with EXECUTE on the two procedures and
// rights on its own table alone.
func TestProceduresForOtherLanguages(t *testing.T) {
	g := guard(t)
	var name string
	if err := g.DB().QueryRow("SELECT DATABASE()").Scan(&name); err != nil {
		t.Fatal(err)
	}
	advance(t, g, 7)
	php, _ := account(t, g.DB(), name, "php", "GRANT EXECUTE ON PROCEDURE %db.aegis_admit TO %user", "GRANT EXECUTE ON PROCEDURE %db.aegis_advance TO %user",
		"GRANT SELECT, INSERT ON %db.loot TO %user")
	ctx := bounded(t)
	conn, err := php.Conn(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	do := func(statement string) error { _, err := conn.ExecContext(ctx, statement); return err }
	ok := func(statement string) {
		t.Helper()
		if err := do(statement); err != nil {
			t.Errorf("%s: %v", statement, err)
		}
	}
	refused := func(statement, says string) {
		t.Helper()
		err := do(statement)
		e, _ := err.(*mysql.MySQLError)
		if e == nil || string(e.SQLState[:]) != "45000" || !strings.Contains(e.Message, says) {
			t.Errorf("%s: %v, must be SQLSTATE 45000 with %q", statement, err, says)
		}
	}
	refused("CALL aegis_admit('boss', 7)", "START TRANSACTION first")
	ok("START TRANSACTION")
	ok("CALL aegis_admit('boss', 7)")
	rival := advanceStarts(t, g, term(8))
	if len(rival) > 0 {
		t.Errorf("an advance went past a transaction that was admitted by the procedure: %v", <-rival)
	}
	ok("INSERT INTO loot (item) VALUES ('sword')")
	ok("COMMIT")
	if err := <-rival; err != nil {
		t.Error(err)
	}
	for call, says := range map[string]string{
		"CALL aegis_admit('boss', 7)":                      "token 7 refused, the newest is 8; the term is over",
		"CALL aegis_admit('boss', 9)":                      "token 9 refused, the newest is 8; advance first",
		"CALL aegis_admit('nobody', 9)":                    "token 9 refused, the newest is 0; advance first",
		"CALL aegis_admit('BOSS', 8)":                      "newest is 0",
		"CALL aegis_admit('boss ', 8)":                     "newest is 0",
		"CALL aegis_admit('boss', 0)":                      "invalid token",
		"CALL aegis_admit('boss', 9007199254740992)":       "invalid token",
		"CALL aegis_admit('boss', NULL)":                   "invalid token",
		"CALL aegis_admit('', 8)":                          "1 to 255 bytes",
		"CALL aegis_admit(REPEAT('x', 256), 8)":            "1 to 255 bytes",
		"CALL aegis_admit(NULL, 8)":                        "1 to 255 bytes",
		"CALL aegis_advance('boss', 9, 0, 0)":              "transaction of its own",
		"CALL aegis_advance('boss', 9007199254740992,0,0)": "invalid token",
	} {
		ok("START TRANSACTION")
		refused(call, says)
		ok("ROLLBACK")
	}
	ok("XA START 'theirs'")
	refused("CALL aegis_admit('boss', 8)", "XA PREPARE")
	ok("XA END 'theirs'")
	ok("XA ROLLBACK 'theirs'")
	ok("SET autocommit = 0")
	ok("CALL aegis_admit('boss', 8)")
	ok("COMMIT")
	ok("SET autocommit = 1")

	refused("CALL aegis_advance('boss', 7, 0, 0)", "newest is 8")
	refused("CALL aegis_advance('boss', 8, 5, 0)", "went back")
	refused("CALL aegis_advance('boss', 9, 0, 5)", "foreign cluster")
	ok("CALL aegis_advance('boss', 8, 9223372036854775816, 9223372036854775813)") // the same term
	ok("CALL aegis_advance('boss', 9, 18446744073709551613, 0)")
	ok("CALL aegis_advance('new', 1, 18446744073709551613, 18446744073709551611)")
	if rec, err := g.Newest(ctx, "boss"); err != nil || rec != (fence.Record{Token: 9, Nonce: 18446744073709551613, Cluster: 1<<63 + 5}) {
		t.Errorf("after aegis_advance the fence is %+v, %v", rec, err)
	}
	if rec, err := g.Newest(ctx, "new"); err != nil || rec != (fence.Record{Token: 1, Nonce: 18446744073709551613, Cluster: 18446744073709551611}) {
		t.Errorf("after aegis_advance the fence is %+v, %v", rec, err)
	}
	if names, _ := g.Names(ctx); len(names) != 2 {
		t.Errorf("the names are %q", names)
	}
	for _, statement := range []string{"UPDATE aegis_fence SET token = 1", "DELETE FROM aegis_fence", "SELECT * FROM aegis_fence", "DROP PROCEDURE aegis_admit",
		"DROP TABLE aegis_fence", "TRUNCATE TABLE aegis_fence"} {
		if err := do(statement); err == nil {
			t.Errorf("%s was done by an account that has EXECUTE alone", statement)
		}
	}
}

// TestGrantsOfTheComment: the grants that the package's comment lists are enough.
func TestGrantsOfTheComment(t *testing.T) {
	admin := guard(t)
	var name string
	if err := admin.DB().QueryRow("SELECT DATABASE()").Scan(&name); err != nil {
		t.Fatal(err)
	}
	_, dsn := account(t, admin.DB(), name, "app", "GRANT SELECT, INSERT, UPDATE ON %db.aegis_fence TO %user", "GRANT SELECT, INSERT, UPDATE, DELETE ON %db.aegis_once TO %user",
		"GRANT SELECT ON %db.aegis_meta TO %user", "GRANT SELECT, INSERT, UPDATE ON %db.loot TO %user")
	g := open(t, dsn, mysqlfence.Config{})
	ctx := context.Background()
	advance(t, g, 7)
	_, err1 := g.Exec(ctx, term(7), insert, "sword")
	err2 := g.Do(ctx, term(7), func(tx *mysqlfence.Tx) error { _, err := tx.ExecContext(ctx, insert, "shield"); return err })
	_, _, err3 := g.Once(ctx, term(7), "kill", func(tx *mysqlfence.Tx) ([]byte, error) { return nil, nil })
	_, err4 := g.Forget(ctx, time.Now().Add(-time.Hour))
	_, err5 := g.Names(ctx)
	for _, err := range []error{err1, err2, err3, err4, err5} {
		if err != nil {
			t.Error(err)
		}
	}
	if err := g.Install(ctx); err != nil {
		t.Errorf("Install where nothing is to be done: %v", err)
	}
	// Without PROCESS an advance cannot say who blocks it, and says that.
	_, end := openTransaction(t, g)
	defer end()
	err := g.AdvanceWith(ctx, mysqlfence.AdvanceOptions{Wait: 1}, term(8))
	if err == nil || !strings.Contains(err.Error(), "PROCESS") {
		t.Errorf("a blocked advance without PROCESS returned %v", err)
	}
}
