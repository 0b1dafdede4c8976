package mysqlfence_test

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"testing"
	"time"

	"aegis/fence"
	"aegis/fence/mysqlfence"
	"aegis/internal/servers"

	"github.com/go-sql-driver/mysql"
)

var server *servers.MariaDB

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	_ = mysql.SetLogger(&mysql.NopLogger{}) // says on stderr that connections are lost, which tests do
	var err error
	server, err = servers.StartMariaDB()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer server.Close()
	return m.Run()
}

// bounded is a context for one test.
func bounded(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func term(token fence.Token) fence.Term {
	return fence.Term{Election: "boss", Node: "scene-01", Token: token, Nonce: 1<<63 + uint64(token), Cluster: 1<<63 + 5}
}

// database returns the name of a new database with the guard's tables and a table loot.
func database(t testing.TB) string {
	t.Helper()
	name, err := server.Database()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Drop(name) }) // the server may be down, and goes anyway
	g := open(t, server.DSN(name), mysqlfence.Config{})
	if err := g.Install(bounded(t)); err != nil {
		t.Fatal(err)
	}
	if _, err := g.DB().Exec("CREATE TABLE loot (id INT PRIMARY KEY AUTO_INCREMENT, item VARCHAR(100), UNIQUE KEY (item))"); err != nil {
		t.Fatal(err)
	}
	if _, err := g.DB().Exec("CREATE TABLE kv (k VARBINARY(255) PRIMARY KEY, v BLOB)"); err != nil {
		t.Fatal(err)
	}
	return name
}

func open(t testing.TB, dsn string, cfg mysqlfence.Config) *mysqlfence.Guard {
	t.Helper()
	g, err := mysqlfence.Open(dsn, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = g.Close() })
	return g
}

// guard is a guard on a new database.
func guard(t testing.TB) *mysqlfence.Guard {
	return open(t, server.DSN(database(t)), mysqlfence.Config{})
}

func advance(t testing.TB, g *mysqlfence.Guard, token fence.Token) {
	t.Helper()
	if err := g.Advance(bounded(t), term(token)); err != nil {
		t.Fatal(err)
	}
}

// items returns the committed loot, in order.
func items(t testing.TB, g *mysqlfence.Guard) []string {
	t.Helper()
	return list(t, g.DB(), "SELECT item FROM loot ORDER BY id")
}

func list(t testing.TB, db *sql.DB, query string) []string {
	t.Helper()
	rows, err := db.Query(query)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var all []string
	for rows.Next() {
		var s string
		if err := rows.Scan(&s); err != nil {
			t.Fatal(err)
		}
		all = append(all, s)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return all
}
