package pgfence_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"os"
	osexec "os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"aegis/fence"
	"aegis/fence/pgfence"
	"aegis/internal/servers"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"
)

// A pooler in transaction mode gives each transaction another session, and replaces its sessions all the time.
func TestPgBouncerInTransactionMode(t *testing.T) {
	t.Parallel()
	bouncer, err := servers.StartPgBouncer(pg, 4)
	if err != nil {
		t.Fatal(err)
	}
	name := database(t)
	t.Cleanup(bouncer.Close)
	backends := map[string]bool{} // of the pooler, as some writes saw them
	var mu sync.Mutex
	t.Cleanup(func() {
		if len(backends) <= 4 {
			t.Errorf("the pooler's sessions were never replaced: %v", backends)
		}
	})
	for mode, option := range map[string]pgx.QueryExecMode{"exec": pgx.QueryExecModeExec, "simple protocol": pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			pooled := func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = option }
			pool := connect(t, bouncer.URL(name), pooled)
			direct := connect(t, pg.URL(name, "postgres"))
			g := guardOn(t, pool, pgfence.Config{})
			ctx := bounded(t)
			const writers, takeovers, writes = 8, 20, 1000
			var newest, wrote, fenced atomic.Int64
			newest.Store(1000)
			term := func(token fence.Token) fence.Term { return fence.Term{Election: mode, Token: token} } // the modes share the database
			advance := func() {
				if err := g.Advance(ctx, term(newest.Load()+1)); err != nil {
					t.Error(err)
				}
				newest.Add(1)
			}
			advance()
			next := make(chan struct{}, writes)
			var wg sync.WaitGroup
			for i := range writers {
				wg.Go(func() {
					for n := 0; ; n++ {
						if _, ok := <-next; !ok {
							return
						}
						for ctx.Err() == nil && !t.Failed() {
							token := newest.Load() // may be over by the time it is used
							var err error
							// The row says what it was written under, and the fence at its commit.
							const stmt = "INSERT INTO loot (item) VALUES ($1)"
							if n%2 == 0 {
								_, err = g.Exec(ctx, term(token), stmt, fmt.Sprint(mode, " ", token))
							} else {
								err = g.Do(ctx, term(token), func(tx *pgfence.Tx) error {
									_, err := tx.Exec(ctx, stmt, fmt.Sprint(mode, " ", token))
									return err
								})
							}
							if errors.Is(err, fence.ErrFenced) {
								fenced.Add(1)
								continue
							}
							if err != nil {
								t.Errorf("writer %d: %v", i, err)
							}
							wrote.Add(1)
							break
						}
					}
				})
			}
			// The takeovers last longer than a session of the pooler does.
			tick := time.NewTicker(320 * time.Millisecond)
			defer tick.Stop()
			for i := range int64(takeovers) {
				<-tick.C
				backend := value(t, pool, "select pg_backend_pid()")
				mu.Lock()
				backends[backend] = true
				mu.Unlock()
				for range writes / takeovers {
					next <- struct{}{}
				}
				for wrote.Load() < i*writes/takeovers+writes/takeovers/2 && ctx.Err() == nil && !t.Failed() {
					_ = direct.Ping(ctx)
				}
				advance()
				// The new leader's first read: what an older token wrote later would be missing in it.
				seen := value(t, direct, "select count(*) from loot where item < $1 and item like $2", fmt.Sprint(mode, " ", newest.Load()), mode+" %")
				exec(t, direct, "INSERT INTO kv VALUES ($1, $2)", fmt.Sprint(mode, " ", newest.Load()), seen)
			}
			close(next)
			wg.Wait()
			if got := value(t, direct, "select count(*) from loot where item like $1", mode+" %"); got != fmt.Sprint(writes) {
				t.Errorf("%s rows, want %d", got, writes)
			}
			if late := value(t, direct, "select string_agg(key, ', ') from kv where key like $1 and value::int <> (select count(*) from loot where item < key and item like $1)", mode+" %"); late != "" {
				t.Errorf("after the takeovers %s rows of older tokens were written", late)
			}
			t.Logf("%d writes, %d refused on the way", wrote.Load(), fenced.Load())

			// No session state is left: locks, settings, prepared statements, temporary objects.
			for range 8 {
				if left := value(t, pool, `select (select count(*) from pg_prepared_statements)::text || ' prepared, setting ' || coalesce(current_setting('aegis.terms', true), '')
					|| ', isolation ' || current_setting('transaction_isolation') || ', lock_timeout ' || current_setting('lock_timeout')`); left != "0 prepared, setting , isolation read committed, lock_timeout 0" {
					t.Errorf("left in the pooler's session: %s", left)
				}
			}
			if locks := value(t, direct, "select count(*) from pg_locks where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database())"); locks != "0" {
				t.Errorf("%s advisory locks are left", locks)
			}
		})
	}
}

func TestReplicaRefusesWithAnExplanation(t *testing.T) {
	if pg.Given() {
		t.Skip("the server was given by a variable: no replica of it is made")
	}
	name := database(t)
	g := guardOn(t, connect(t, pg.URL(name, "postgres")), pgfence.Config{})
	advance(t, g, 7)
	standby, err := pg.Standby()
	if err != nil {
		t.Fatal(err)
	}
	defer standby.Close()
	pool, err := pgxpool.New(bounded(t), standby.URL(name, "postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	until(t, pool, "select count(*) > 0 from aegis.fence")
	replica := guardOn(t, pool, pgfence.Config{})
	ctx := bounded(t)
	_, err = replica.Exec(ctx, term(7), "INSERT INTO loot (item) VALUES ('x')")
	wantText(t, err, "read-only", "primary")
	wantText(t, replica.Do(ctx, term(7), insert("x")), "cannot lock", "primary")
	wantText(t, replica.Advance(ctx, term(8)), "primary")
	tx, err := pool.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(ctx)
	wantText(t, replica.Admit(ctx, tx, term(7)), "FOR SHARE", "cannot lock", "primary")
	if r, err := replica.Newest(ctx, "boss"); err != nil || r.Token != 7 {
		t.Errorf("reading the fence: %v, %v", r, err)
	}
}

func TestErrorsHelpAtNight(t *testing.T) {
	ctx := bounded(t)
	name := database(t)
	super := connect(t, pg.URL(name, "postgres"))
	want := func(name, url string, parts ...string) {
		t.Run(name, func(t *testing.T) {
			g := guardOn(t, connect(t, url), pgfence.Config{})
			for _, err := range []error{g.Advance(ctx, term(7)), g.Do(ctx, term(7), insert("x")), func() error { _, err := g.Exec(ctx, term(7), "SELECT 1"); return err }()} {
				wantText(t, err, append(parts, "pgfence: ")...)
				if errors.Is(err, fence.ErrUnknown) || errors.Is(err, fence.ErrFenced) {
					t.Error(err)
				}
			}
		})
	}
	if !pg.Given() {
		exec(t, super, "CREATE ROLE with_password LOGIN PASSWORD 'right'")
		t.Cleanup(func() { exec(t, super, "DROP ROLE with_password") })
		want("wrong password", strings.Replace(pg.URL(name, "with_password"), "with_password@", "with_password:wrong@", 1), "28P01", "refused user or password", "pg_hba.conf")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	want("server down", "postgres://postgres@"+l.Addr().String()+"/x", "cannot be reached", l.Addr().String())
	want("no such database", pg.URL("nowhere", "postgres"), "3D000", "database does not exist", "nowhere")
	empty, err := pg.Database(ctx, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pg.Drop(context.Background(), empty) })
	want("missing schema", pg.URL(empty, "postgres"), pgfence.ErrNotInstalled.Error(), "Install")
	want("missing right", pg.URL(name, newRole(t, super)), "42501", "Grants")

	t.Run("full disk", func(t *testing.T) { // the server's own error, from a place where it is easy to have
		g := guardOn(t, super, pgfence.Config{})
		advance(t, g, 7)
		exec(t, super, `CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			RAISE EXCEPTION 'could not extend file "base/1/2": No space left on device' USING ERRCODE = '53100'; END $$;
			CREATE TRIGGER full_disk BEFORE INSERT ON loot EXECUTE FUNCTION full_disk()`)
		_, err := g.Exec(ctx, term(7), "INSERT INTO loot (item) VALUES ('x')")
		wantText(t, err, "disk is full", "nothing was written", "53100")
		exec(t, super, "DROP TRIGGER full_disk ON loot")
	})
	for _, c := range []struct {
		cfg  pgfence.Config
		want string
	}{
		{pgfence.Config{Isolation: "chaos"}, "Config.Isolation"},
		{pgfence.Config{Advance: pgfence.AdvanceOptions{Wait: -1}}, "AdvanceOptions.Wait"},
	} {
		_, err := pgfence.New(super, c.cfg)
		wantText(t, err, c.want)
	}
	if _, err := pgfence.New(nil, pgfence.Config{}); err == nil {
		t.Error("a nil pool was taken")
	}
	g := guardOn(t, super, pgfence.Config{})
	for _, name := range []string{"", strings.Repeat("x", 256)} {
		wantText(t, g.Advance(ctx, fence.Term{Election: name, Token: 1}), "1 to 255")
		_, err := super.Exec(ctx, "select aegis.admit($1, 1)", name)
		wantText(t, err, pgfence.StateInvalid)
	}
}

func TestDatabaseSQL(t *testing.T) {
	name := database(t)
	pool := connect(t, pg.URL(name, "postgres"))
	db, err := sql.Open("pgx", pg.URL(name, "postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	ctx := bounded(t)
	write := func(term fence.Term, item string) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if err := pgfence.AdmitSQL(ctx, tx, term); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, "INSERT INTO loot (item) VALUES ($1)", item); err != nil {
			return err
		}
		if err := pgfence.ConfirmSQL(ctx, tx, term); err != nil {
			return err
		}
		return tx.Commit()
	}
	wantFenced(t, write(term(7), "no"), 7, 0)
	for token := range fence.Token(2) {
		if err := pgfence.AdvanceSQL(ctx, db, term(7+token)); err != nil {
			t.Fatal(err)
		}
		if err := write(term(7+token), fmt.Sprint(7+token)); err != nil {
			t.Error(err)
		}
	}
	wantFenced(t, write(term(7), "no"), 7, 8)
	wantFenced(t, pgfence.AdvanceSQL(ctx, db, term(7)), 7, 8)
	twin := term(8)
	twin.Nonce = 1
	wantIs(t, write(twin, "no"), fence.ErrTokenWentBack)
	wantIs(t, write(term(0), "no"), fence.ErrInvalidToken)
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	wantIs(t, pgfence.ConfirmSQL(ctx, tx, term(8)), pgfence.ErrEnded)
	wantLoot(t, pool, "7", "8")
}

// testdata/psql.txt is a session by hand, as the docs show it. AEGIS_UPDATE=1 writes it anew.
func TestPsqlSession(t *testing.T) {
	script, err := os.ReadFile(filepath.Join("testdata", "psql.sql"))
	if err != nil {
		t.Fatal(err)
	}
	psql := osexec.Command("psql", "--no-psqlrc", "--echo-all", "--set=SHOW_CONTEXT=never", "--set=VERBOSITY=default", "--dbname="+pg.URL(database(t), "postgres"))
	psql.Stdin = strings.NewReader(string(script))
	psql.Env = append(os.Environ(), "LC_ALL=C.UTF-8", "TZ=UTC")
	got, err := psql.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, got)
	}
	golden := filepath.Join("testdata", "psql.txt")
	if os.Getenv("AEGIS_UPDATE") != "" {
		if err := os.WriteFile(golden, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != string(want) {
		t.Errorf("the session is another; AEGIS_UPDATE=1 writes %s anew:\n%s", golden, got)
	}
}
