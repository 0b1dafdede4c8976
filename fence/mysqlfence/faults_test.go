package mysqlfence_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"aegis/fence"
	"aegis/fence/mysqlfence"
	"aegis/internal/servers"
)

// TestErrorsSayWhatToDo: each of these must stop Advance, Do, Exec and Newest alike with an error that names the remedy.
func TestErrorsSayWhatToDo(t *testing.T) {
	ctx := bounded(t)
	expect := func(t *testing.T, g *mysqlfence.Guard, words ...string) {
		t.Helper()
		_, execErr := g.Exec(ctx, term(7), insert, "x")
		_, newestErr := g.Newest(ctx, "boss")
		for what, err := range map[string]error{
			"Advance": g.Advance(ctx, term(7)), "Exec": execErr, "Newest": newestErr,
			"Do": g.Do(ctx, term(7), func(*mysqlfence.Tx) error { return nil }),
		} {
			if err == nil {
				t.Errorf("%s was done", what)
				continue
			}
			for _, word := range words {
				if !strings.Contains(err.Error(), word) {
					t.Errorf("%s: the error does not say %q: %v", what, word, err)
				}
			}
			if strings.Contains(err.Error(), "secret") {
				t.Errorf("%s: the error shows the password: %v", what, err)
			}
		}
	}
	admin, err := sql.Open("mysql", server.DSN(""))
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close()
	t.Run("WrongPassword", func(t *testing.T) {
		c := server.Config(database(t))
		c.User, c.Passwd = "nobody", "secret"
		expect(t, open(t, c.FormatDSN(), mysqlfence.Config{}), "wrong user or password", "1045")
	})
	t.Run("ServerDown", func(t *testing.T) {
		c := server.Config("any")
		c.Addr, c.Passwd = "127.0.0.1:1", "secret"
		expect(t, open(t, c.FormatDSN(), mysqlfence.Config{}), "cannot be reached")
	})
	t.Run("NoDatabase", func(t *testing.T) {
		expect(t, open(t, server.DSN("not_there"), mysqlfence.Config{}), "database does not exist")
		expect(t, open(t, server.DSN(""), mysqlfence.Config{}), "names no database")
	})
	t.Run("MissingSchema", func(t *testing.T) {
		name, err := server.Database()
		if err != nil {
			t.Fatal(err)
		}
		defer server.Drop(name)
		expect(t, open(t, server.DSN(name), mysqlfence.Config{}), "aegis fence install")
	})
	t.Run("NewerSchema", func(t *testing.T) {
		g := guard(t)
		if _, err := g.DB().Exec("UPDATE aegis_meta SET v = 99"); err != nil {
			t.Fatal(err)
		}
		expect(t, g, "version 99", "newer aegis")
		if err := g.Install(ctx); err == nil || !strings.Contains(err.Error(), "version 99") {
			t.Errorf("Install over a newer version returned %v", err)
		}
	})
	t.Run("NotInnoDB", func(t *testing.T) {
		g := guard(t)
		if _, err := g.DB().Exec("ALTER TABLE aegis_fence ENGINE=MyISAM"); err != nil {
			t.Fatal(err)
		}
		expect(t, g, "MyISAM", "ENGINE=InnoDB")
	})
	t.Run("SchemaGoneLater", func(t *testing.T) {
		g := guard(t)
		advance(t, g, 7)
		if _, err := g.DB().Exec("DROP TABLE aegis_fence"); err != nil {
			t.Fatal(err)
		}
		expect(t, g, "aegis fence install")
	})
	t.Run("Autocommit0", func(t *testing.T) {
		g, err := openWith(database(t), params{"autocommit": "0"})
		if err != nil {
			t.Fatal(err)
		}
		defer g.Close()
		g.DB().SetMaxOpenConns(1)
		if _, err := g.Names(ctx); err != nil { // reads, and so begins a transaction
			t.Fatal(err)
		}
		if err := g.Advance(ctx, term(7)); err == nil || !strings.Contains(err.Error(), "autocommit=0") {
			t.Errorf("Advance on a connection with an open transaction returned %v", err)
		}
	})
	t.Run("UnknownDSN", func(t *testing.T) {
		if _, err := mysqlfence.Open("root:secret@nowhere", mysqlfence.Config{}); err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("Open of a bad data source name returned %v", err)
		}
	})
}

func TestReadOnlyServerIsRefused(t *testing.T) {
	if !server.Private() {
		t.Logf("%s: the server is not made read-only", servers.MariaDBVar)
		return
	}
	name := database(t)
	before := open(t, server.DSN(name), mysqlfence.Config{})
	advance(t, before, 7)
	admin := before.DB()
	for _, statement := range []string{"CREATE OR REPLACE USER app IDENTIFIED BY 'app'", "GRANT ALL ON " + name + ".* TO app"} {
		if _, err := admin.Exec(statement); err != nil {
			t.Fatal(err)
		}
	}
	c := server.Config(name)
	c.User, c.Passwd = "app", "app"
	open1 := open(t, c.FormatDSN(), mysqlfence.Config{})
	advance(t, open1, 7) // examined while the server was a primary
	if _, err := admin.Exec("SET GLOBAL read_only = ON"); err != nil {
		t.Fatal(err)
	}
	defer admin.Exec("SET GLOBAL read_only = OFF")
	if err := open(t, server.DSN(name), mysqlfence.Config{}).Advance(bounded(t), term(8)); err == nil || !strings.Contains(err.Error(), "read-only") {
		t.Errorf("a guard that is opened on a read-only server returned %v", err)
	}
	if err := open1.Advance(bounded(t), term(8)); err == nil || !strings.Contains(err.Error(), "read-only") {
		t.Errorf("Advance on a server that became read-only returned %v", err)
	}
	if _, err := open1.Exec(bounded(t), term(7), insert, "x"); err == nil || !strings.Contains(err.Error(), "read-only") {
		t.Errorf("Exec on a server that became read-only returned %v", err)
	}
}

// TestFullDiskIsFailedNotUnknown: a server whose files may not grow says no, and nothing is written.
func TestFullDiskIsFailedNotUnknown(t *testing.T) {
	if !server.Private() {
		t.Logf("%s: no server with a small disk", servers.MariaDBVar)
		return
	}
	small, err := servers.StartMariaDB("--innodb-file-per-table=0", "--innodb-data-file-path=ibdata1:12M:autoextend:max:16M")
	if err != nil {
		t.Fatal(err)
	}
	defer small.Close()
	name, err := small.Database()
	if err != nil {
		t.Fatal(err)
	}
	g := open(t, small.DSN(name), mysqlfence.Config{})
	ctx := bounded(t)
	if err := g.Install(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := g.DB().Exec("CREATE TABLE big (id INT PRIMARY KEY AUTO_INCREMENT, item LONGBLOB)"); err != nil {
		t.Fatal(err)
	}
	advance(t, g, 7)
	rows := 0
	for err == nil {
		if _, err = g.Exec(ctx, term(7), "INSERT INTO big (item) VALUES (REPEAT('x', 500000))"); err == nil {
			rows++
		}
	}
	if errors.Is(err, fence.ErrUnknown) || !strings.Contains(err.Error(), "disk is full") {
		t.Errorf("Exec on a full disk returned %v", err)
	}
	err = g.Do(ctx, term(7), func(tx *mysqlfence.Tx) error {
		_, err := tx.ExecContext(ctx, "INSERT INTO big (item) VALUES (REPEAT('x', 500000))")
		return err
	})
	if err == nil || errors.Is(err, fence.ErrUnknown) {
		t.Errorf("Do on a full disk returned %v", err)
	}
	if got := list(t, g.DB(), "SELECT COUNT(*) FROM big"); got[0] != fmt.Sprint(rows) {
		t.Errorf("%s rows of %d that were acknowledged", got[0], rows)
	}
	if err := g.Advance(ctx, term(8)); err != nil && !strings.Contains(err.Error(), "disk is full") { // it may need a page, too
		t.Errorf("Advance on a full disk returned %v", err)
	}
}

// TestFenceSurvivesACrash: the server is killed; a pool that was open goes on by itself.
func TestFenceSurvivesACrash(t *testing.T) {
	if !server.Private() {
		t.Logf("%s: the server is not killed", servers.MariaDBVar)
		return
	}
	g := guard(t)
	advance(t, g, 7)
	advance(t, g, 8)
	if _, err := g.Exec(bounded(t), term(8), insert, "by 8"); err != nil {
		t.Fatal(err)
	}
	if err := server.Kill(); err != nil {
		t.Fatal(err)
	}
	_, down := g.Exec(bounded(t), term(8), insert, "while down")
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	if down == nil || errors.Is(down, fence.ErrUnknown) || !strings.Contains(down.Error(), "cannot be reached") {
		t.Errorf("Exec while the server was down returned %v", down)
	}
	if _, err := g.Exec(bounded(t), term(7), insert, "stale"); !errors.Is(err, fence.ErrFenced) {
		t.Errorf("after the crash a stale write is %v", err)
	}
	if _, err := g.Exec(bounded(t), term(8), insert, "again by 8"); err != nil {
		t.Errorf("after the crash the leader's write is %v", err)
	}
	if got := items(t, g); !slices.Equal(got, []string{"by 8", "again by 8"}) {
		t.Errorf("the items are %q", got)
	}
}

func TestInstallByManyAtOnce(t *testing.T) {
	name, err := server.Database()
	if err != nil {
		t.Fatal(err)
	}
	defer server.Drop(name)
	var all sync.WaitGroup
	for range 8 {
		g := open(t, server.DSN(name), mysqlfence.Config{})
		all.Go(func() {
			for range 3 {
				if err := g.Install(bounded(t)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	elsewhere := open(t, server.DSN(""), mysqlfence.Config{Database: name})
	advance(t, elsewhere, 7)
	if err := elsewhere.Install(bounded(t)); err != nil {
		t.Error(err)
	}
	names, err := elsewhere.Names(bounded(t))
	if err != nil || !slices.Equal(names, []string{"boss"}) {
		t.Errorf("the names are %q, %v", names, err)
	}
	if rec, err := elsewhere.Newest(bounded(t), "boss"); err != nil || rec != (fence.Record{Token: 7, Nonce: 1<<63 + 7, Cluster: 1<<63 + 5}) {
		t.Errorf("Newest returned %+v, %v", rec, err)
	}
	if rec, err := elsewhere.Newest(bounded(t), "nobody"); err != nil || rec != (fence.Record{}) {
		t.Errorf("Newest of nobody returned %+v, %v", rec, err)
	}
}

// TestInstallSQLIsForTheClient: what InstallSQL prints installs the guard through the mysql client, twice.
func TestInstallSQLIsForTheClient(t *testing.T) {
	name, err := server.Database()
	if err != nil {
		t.Fatal(err)
	}
	defer server.Drop(name)
	g := open(t, server.DSN(name), mysqlfence.Config{})
	client, err := exec.LookPath("mysql")
	if err != nil {
		t.Fatalf("%v: `make servers` installs it with the server", err)
	}
	c := server.Config(name)
	host, port, _ := strings.Cut(c.Addr, ":")
	for range 2 {
		cmd := exec.Command(client, "--no-defaults", "--protocol=tcp", "-h", host, "-P", port, "-u", c.User, "--password="+c.Passwd, name)
		cmd.Stdin = strings.NewReader(g.InstallSQL())
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		advance(t, g, 7)
	}
}

func TestReportAdmitsCountsAndTells(t *testing.T) {
	name := database(t)
	advance(t, open(t, server.DSN(name), mysqlfence.Config{}), 8)
	var told []error
	report := &fence.Report{Tell: func(err error) { told = append(told, err) }}
	g := open(t, server.DSN(name), mysqlfence.Config{Report: report})
	ctx := bounded(t)
	_, err1 := g.Exec(ctx, term(7), insert, "by 7")
	err2 := g.Do(ctx, term(7), func(tx *mysqlfence.Tx) error {
		_, err := tx.ExecContext(ctx, insert, "also by 7")
		return err
	})
	err3 := g.Advance(ctx, term(7))
	_, err4 := g.Exec(ctx, term(8), insert, "by 8")
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		t.Error(err)
	}
	if report.Count() != 3 || len(told) != 3 || !errors.Is(told[0], fence.ErrFenced) {
		t.Errorf("%d were counted and %q told, must be 3", report.Count(), told)
	}
	if got := items(t, g); len(got) != 3 {
		t.Errorf("the items are %q", got)
	}
	if rec, _ := g.Newest(ctx, "boss"); rec.Token != 8 {
		t.Errorf("a reported advance has lowered the fence to %d", rec.Token)
	}
	if _, err := g.Exec(ctx, term(0), insert, "by 0"); !errors.Is(err, fence.ErrInvalidToken) {
		t.Errorf("an invalid token is %v", err)
	}
}

func TestForgetRemovesOldSettlementsAlone(t *testing.T) {
	g := guard(t)
	advance(t, g, 7)
	ctx := bounded(t)
	runs := 0
	once := func(key string) bool {
		t.Helper()
		_, first, err := g.Once(ctx, term(7), key, func(tx *mysqlfence.Tx) ([]byte, error) { runs++; return []byte(key), nil })
		if err != nil {
			t.Fatal(err)
		}
		return first
	}
	once("old")
	once("new")
	if _, err := g.DB().Exec("UPDATE aegis_once SET at = at - INTERVAL 2 DAY WHERE k = 'old'"); err != nil {
		t.Fatal(err)
	}
	if n, err := g.Forget(ctx, time.Now().Add(-24*time.Hour)); err != nil || n != 1 {
		t.Errorf("Forget returned %d, %v; must remove one", n, err)
	}
	if once("new") || !once("old") || runs != 3 {
		t.Errorf("fn ran %d times", runs)
	}
	if _, err := g.Exec(ctx, term(6), insert, "stale"); !errors.Is(err, fence.ErrFenced) {
		t.Errorf("after Forget a stale write is %v", err)
	}
}

func TestExecReturnsTheStatementsResult(t *testing.T) {
	g := guard(t)
	advance(t, g, 7)
	ctx := context.Background()
	res, err := g.Exec(ctx, term(7), "INSERT INTO loot (item) VALUES (?), (?), (?); \n", "a", "b", "c")
	if err != nil {
		t.Fatal(err)
	}
	id, _ := res.LastInsertId()
	n, _ := res.RowsAffected()
	if n != 3 || id != 1 {
		t.Errorf("%d rows affected, first id %d; must be 3 and 1", n, id)
	}
	res, err = g.Exec(ctx, term(7), "UPDATE loot SET item = CONCAT(item, '!') WHERE item <> ? -- a comment at the end", "a")
	if err != nil {
		t.Fatal(err)
	}
	if n, _ := res.RowsAffected(); n != 2 {
		t.Errorf("%d rows affected, must be 2", n)
	}
	for _, bad := range []string{"INSERT INTO loot (item) VALUES ('a", "INSERT INTO loot (item) VALUES ('a') /* open", "INSERT INTO", "SELECT (SELECT 1 UNION SELECT 2)",
		"SELECT 9223372036854775807 + 1", "INSERT INTO loot (item) VALUES ('a')", "INSERT INTO nowhere VALUES (1)"} {
		if _, err := g.Exec(ctx, term(7), bad); err == nil || errors.Is(err, fence.ErrFenced) || errors.Is(err, fence.ErrUnknown) {
			t.Errorf("Exec(%q) returned %v, must be the server's error", bad, err)
		}
	}
	if _, err := g.Exec(ctx, term(7), insert, make(chan int)); err == nil || errors.Is(err, fence.ErrUnknown) {
		t.Errorf("an argument of no use returned %v", err)
	}
	if _, err := g.Exec(ctx, term(7), insert); err == nil || errors.Is(err, fence.ErrUnknown) {
		t.Errorf("a missing argument returned %v", err)
	}
	if got := items(t, g); !slices.Equal(got, []string{"a", "b!", "c!"}) {
		t.Errorf("the items are %q", got)
	}
}
