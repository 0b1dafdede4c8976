package pgfence_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"aegis/fence"
	"aegis/fence/pgfence"
	"aegis/internal/servers"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// pg is the one server of this package's tests, template a database with the schema and the tables below.
var (
	pg       *servers.Postgres
	template string
)

const tables = `CREATE TABLE kv (key text PRIMARY KEY, value text);
	CREATE TABLE loot (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, item text);`

// TestMain makes the test binary the killed process of the settlement test too.
func TestMain(m *testing.M) {
	if url := os.Getenv("AEGIS_TEST_SETTLER"); url != "" {
		playSettler(url)
		return
	}
	os.Exit(func() int {
		var err error
		// Benchmarks want real commits; the rest wants speed.
		bench := false
		for _, a := range os.Args {
			bench = bench || strings.HasPrefix(a, "-test.bench=")
		}
		pg, err = servers.StartPostgres(servers.PostgresConfig{Fsync: bench, Settings: []string{"max_prepared_transactions=8"}})
		if err == nil {
			defer pg.Close()
			err = prepareTemplate()
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return m.Run()
	}())
}

func prepareTemplate() error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	var err error
	if template, err = pg.Database(ctx, ""); err != nil {
		return err
	}
	pool, err := pgxpool.New(ctx, pg.URL(template, "postgres"))
	if err != nil {
		return err
	}
	defer pool.Close()
	g, err := pgfence.New(pool, pgfence.Config{})
	if err == nil {
		err = g.Install(ctx)
	}
	if err == nil {
		_, err = pool.Exec(ctx, tables)
	}
	return err
}

// bounded is a context that ends before the test's patience does.
func bounded(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// database returns a database with schema and tables, dropped when the test ends.
func database(t testing.TB) string {
	t.Helper()
	name, err := pg.Database(bounded(t), template)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := pg.Drop(context.Background(), name); err != nil {
			t.Error(err)
		}
	})
	return name
}

func connect(t testing.TB, url string, options ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxConns = 24
	for _, o := range options {
		o(cfg)
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

func guardOn(t testing.TB, pool *pgxpool.Pool, cfg pgfence.Config) *pgfence.Guard {
	t.Helper()
	g, err := pgfence.New(pool, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// open returns a guard on a database of its own.
func open(t testing.TB, cfg pgfence.Config) (*pgfence.Guard, *pgxpool.Pool) {
	t.Helper()
	pool := connect(t, pg.URL(database(t), "postgres"))
	return guardOn(t, pool, cfg), pool
}

func term(token fence.Token) fence.Term {
	return fence.Term{Election: "boss", Node: "scene-01", Token: token, Nonce: uint64(token) << 8, Cluster: 0xc0ffee}
}

func advance(t testing.TB, g *pgfence.Guard, token fence.Token) {
	t.Helper()
	if err := g.Advance(bounded(t), term(token)); err != nil {
		t.Fatal(err)
	}
}

func exec(t testing.TB, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	if _, err := pool.Exec(bounded(t), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// value returns the first column of the only row, as text.
func value(t testing.TB, pool *pgxpool.Pool, sql string, args ...any) string {
	t.Helper()
	var v string
	if err := pool.QueryRow(bounded(t), "select coalesce(("+sql+")::text, '')", args...).Scan(&v); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

func wantLoot(t testing.TB, pool *pgxpool.Pool, want ...string) {
	t.Helper()
	if got := value(t, pool, "select string_agg(item, ' ' order by id) from loot"); got != strings.Join(want, " ") {
		t.Errorf("the loot is %q, want %q", got, strings.Join(want, " "))
	}
}

func wantIs(t testing.TB, err, target error) {
	t.Helper()
	if !errors.Is(err, target) {
		t.Errorf("got: %v; want: %v", err, target)
	}
}

// wantFenced demands a FencedError with both numbers.
func wantFenced(t testing.TB, err error, token, newest fence.Token) {
	t.Helper()
	f, ok := errors.AsType[*fence.FencedError](err)
	if !ok || f.Name != "boss" || f.Token != token || f.Newest != newest {
		t.Errorf("got: %v; want FencedError{boss %d %d}", err, token, newest)
	}
}

func wantText(t testing.TB, err error, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%v\n  does not say %q", err, part)
		}
	}
}

func insert(item string) func(*pgfence.Tx) error {
	return func(tx *pgfence.Tx) error {
		_, err := tx.Exec(context.Background(), "INSERT INTO loot (item) VALUES ($1)", item)
		return err
	}
}

// until waits, 20 s at most, for a query to be true.
func until(t testing.TB, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); value(t, pool, sql, args...) != "true"; time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never true: %s %v", sql, args)
		}
	}
}

// untilWaiting waits until n sessions wait for an advisory lock.
func untilWaiting(t testing.TB, pool *pgxpool.Pool, n int) {
	t.Helper()
	until(t, pool, "select count(*) >= $1::int from pg_locks where locktype = 'advisory' and not granted and database = (select oid from pg_database where datname = current_database())", n)
}

func seeded(t testing.TB) *rand.Rand {
	seed := rand.Uint64()
	if s := os.Getenv("AEGIS_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("replay: AEGIS_SEED=%d go test -run '^%s$' ./fence/pgfence", seed, t.Name())
	return rand.New(rand.NewPCG(seed, 0))
}

// each runs fn n times at once and waits.
func each(n int, fn func(i int)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { fn(i) })
	}
	wg.Wait()
}

var levels = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}
