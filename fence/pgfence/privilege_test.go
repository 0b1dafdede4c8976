package pgfence_test

import (
	"context"
	"fmt"
	"os"
	osexec "os/exec"
	"strings"
	"testing"

	"aegis/fence"
	"aegis/fence/pgfence"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

type pgPoolConfig = pgxpool.Config

func replaceToken(sql string, token fence.Token) string {
	return strings.ReplaceAll(sql, "%", fmt.Sprint(token))
}

// newRole creates a role that may log in and nothing more, and drops it after the databases of the test.
func newRole(t testing.TB, pool *pgxpool.Pool) string {
	t.Helper()
	role := fmt.Sprintf("app_%s", pool.Config().ConnConfig.Database)
	exec(t, pool, "CREATE ROLE "+role+" LOGIN")
	t.Cleanup(func() {
		conn, err := pgx.Connect(context.Background(), pool.Config().ConnString())
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close(context.Background())
		if _, err := conn.Exec(context.Background(), "DROP OWNED BY "+role+"; DROP ROLE "+role); err != nil {
			t.Error(err)
		}
	})
	return role
}

func TestAnApplicationRoleCanAdmitAndAdvanceAndNoMore(t *testing.T) {
	name := database(t)
	owner := connect(t, pg.URL(name, "postgres"))
	role := newRole(t, owner)
	ctx := bounded(t)
	g := guardOn(t, owner, pgfence.Config{})
	if err := g.Grant(ctx, role); err != nil {
		t.Fatal(err)
	}
	exec(t, owner, "GRANT ALL ON loot TO "+role+"; GRANT CREATE ON SCHEMA public TO "+role)
	if err := g.Protect(ctx, "loot", "boss"); err != nil {
		t.Fatal(err)
	}
	pool := connect(t, pg.URL(name, role))
	app := guardOn(t, pool, pgfence.Config{})
	advance(t, app, 7)
	if err := app.Do(ctx, term(7), insert("sword")); err != nil {
		t.Error(err)
	}
	if _, _, err := app.Once(ctx, term(7), "kill", func(tx *pgfence.Tx) ([]byte, error) { return nil, insert("shield")(tx) }); err != nil {
		t.Error(err)
	}
	if names, err := app.Names(ctx); err != nil || len(names) != 1 {
		t.Error(names, err)
	}
	if err := app.Install(ctx); err != nil {
		t.Errorf("Install of what is there already: %v", err)
	}
	for _, sql := range []string{
		"UPDATE aegis.fence SET token = 1", "DELETE FROM aegis.fence", "INSERT INTO aegis.fence VALUES ('x', 1, 0, 0, '', now())", "TRUNCATE aegis.fence",
		"SELECT * FROM aegis.fence", "SELECT * FROM aegis.fence FOR UPDATE", "BEGIN; LOCK TABLE aegis.fence", "DELETE FROM aegis.once", "UPDATE aegis.floor SET token = 0",
		"UPDATE aegis.meta SET value = 0", "SELECT aegis.reset('boss')", "SELECT aegis.forget_name('boss')", "SELECT aegis.forget(now())",
		"DROP SCHEMA aegis CASCADE", "DROP FUNCTION aegis.admit", "DROP TABLE aegis.fence", "CREATE TABLE aegis.x (y int)",
		"CREATE OR REPLACE FUNCTION aegis.admit(name text, token bigint, nonce bigint DEFAULT 0, cluster bigint DEFAULT 0) RETURNS bigint LANGUAGE sql AS 'SELECT 1::bigint'",
		"ALTER TABLE loot DISABLE TRIGGER ALL", "SELECT aegis.unprotect('loot', 'boss')", "SET session_replication_role = replica", "DROP TABLE loot",
		"ALTER FUNCTION aegis.admit SET search_path = public",
	} {
		if _, err := pool.Exec(ctx, sql); err == nil || !strings.Contains(err.Error(), "42501") {
			t.Errorf("%s: %v, must lack the right", sql, err)
		}
	}
	wantFenced(t, app.Advance(ctx, term(6)), 6, 7)

	// Objects of the same names in schemas that the role may write are not taken for the fence's.
	conn, err := pool.Acquire(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	if _, err := conn.Exec(ctx, `CREATE TEMP TABLE fence (name text, token bigint, nonce bigint, cluster bigint);
		INSERT INTO fence VALUES ('boss', 6, 0, 0);
		CREATE FUNCTION pg_temp.hashtextextended(text, bigint) RETURNS bigint LANGUAGE sql AS 'SELECT 1::bigint';
		CREATE FUNCTION public.pg_advisory_xact_lock_shared(bigint) RETURNS void LANGUAGE sql AS '';
		CREATE FUNCTION public.never(bigint, bigint) RETURNS boolean LANGUAGE sql AS 'SELECT false';
		CREATE OPERATOR public.<> (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = public.never);
		SET search_path = pg_temp, public, aegis, pg_catalog`); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Exec(ctx, "SELECT aegis.admit('boss', 6)"); err == nil || !strings.Contains(err.Error(), pgfence.StateFenced) {
		t.Errorf("admitted by names of its own: %v", err)
	}
	if _, err := conn.Exec(ctx, "DROP OPERATOR public.<> (bigint, bigint); DROP FUNCTION public.never; DROP FUNCTION public.pg_advisory_xact_lock_shared"); err != nil {
		t.Error(err)
	}
}

// Whoever owns the schema need not be a superuser.
func TestInstallAsAnOrdinaryRole(t *testing.T) {
	ctx := bounded(t)
	name, err := pg.Database(ctx, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pg.Drop(context.Background(), name) })
	super := connect(t, pg.URL(name, "postgres"))
	role := newRole(t, super)
	exec(t, super, "GRANT CREATE ON DATABASE "+name+" TO "+role+"; GRANT CREATE ON SCHEMA public TO "+role)
	pool := connect(t, pg.URL(name, role))
	g := guardOn(t, pool, pgfence.Config{})
	if err := g.Install(ctx); err != nil {
		t.Fatal(err)
	}
	advance(t, g, 7)
	exec(t, pool, "CREATE TABLE loot (id bigint GENERATED ALWAYS AS IDENTITY, item text)")
	if err := g.Protect(ctx, "loot", "boss"); err != nil {
		t.Fatal(err)
	}
	if err := g.Do(ctx, term(7), insert("sword")); err != nil {
		t.Error(err)
	}
	if err := g.Uninstall(ctx); err != nil {
		t.Error(err)
	}
	exec(t, pool, "INSERT INTO loot (item) VALUES ('unguarded')")
}

func TestInstallBySeveralAtOnceAndByPsql(t *testing.T) {
	ctx := bounded(t)
	name, err := pg.Database(ctx, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pg.Drop(context.Background(), name) })
	pool := connect(t, pg.URL(name, "postgres"))
	g := guardOn(t, pool, pgfence.Config{})
	each(8, func(int) {
		if err := g.Install(ctx); err != nil {
			t.Error(err)
		}
	})
	advance(t, g, 7)
	psql := osexec.Command("psql", "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", "--dbname="+pg.URL(name, "postgres"))
	psql.Stdin = strings.NewReader(pgfence.Schema())
	psql.Env = append(os.Environ(), "PGOPTIONS=-c client_min_messages=warning")
	if out, err := psql.CombinedOutput(); err != nil || strings.Contains(string(out), "ERROR") {
		t.Errorf("psql: %v\n%s", err, out)
	}
	if r, err := g.Newest(ctx, "boss"); err != nil || r.Token != 7 {
		t.Errorf("installing again has changed the fence: %v, %v", r, err)
	}

	exec(t, pool, "UPDATE aegis.meta SET value = 2")
	err = g.Install(ctx)
	wantIs(t, err, pgfence.ErrNewerSchema)
	wantText(t, err, "version 2", "version 1", "newer aegis")
	psql = osexec.Command("psql", "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", "--dbname="+pg.URL(name, "postgres"))
	psql.Stdin = strings.NewReader(pgfence.Schema())
	if out, err := psql.CombinedOutput(); err == nil || !strings.Contains(string(out), "of version 2") {
		t.Errorf("psql installed over a newer version: %v\n%s", err, out)
	}
}
