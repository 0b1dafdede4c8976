package pgfence_test

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"testing"

	"aegis/fence/pgfence"

	"github.com/jackc/pgx/v5/pgxpool"
)

// proxy stands between pgx and the server. It counts round trips, which is how often the client began to speak after
// the server had, and cuts connections.
type proxy struct {
	net.Listener
	trips atomic.Int64

	// cut, unless nil, is called with each piece that the server (reply) or the client sends; true drops it and the
	// connection, for the server as the client's death.
	cut atomic.Pointer[func(reply bool, piece []byte) bool]
}

func startProxy(t testing.TB) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{Listener: l}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { p.serve(client) })
		}
	})
	t.Cleanup(func() { l.Close(); wg.Wait() })
	return p
}

func (p *proxy) serve(client net.Conn) {
	server, err := net.Dial("tcp", pgAddress())
	if err != nil {
		client.Close()
		return
	}
	var asked atomic.Bool // the client spoke last
	pass := func(to, from net.Conn, reply bool) {
		defer to.Close()
		defer from.Close()
		buf := make([]byte, 64<<10)
		for {
			n, err := from.Read(buf)
			if n > 0 {
				if asked.CompareAndSwap(reply, !reply) && !reply {
					p.trips.Add(1)
				}
				if cut := p.cut.Load(); cut != nil && (*cut)(reply, buf[:n]) {
					return
				}
				if _, err := to.Write(buf[:n]); err != nil {
					return
				}
			}
			if err != nil {
				return
			}
		}
	}
	var wg sync.WaitGroup
	wg.Go(func() { pass(server, client, false) })
	pass(client, server, true)
	wg.Wait()
}

func pgAddress() string {
	cfg, err := pgxpool.ParseConfig(pg.URL("postgres", "postgres"))
	if err != nil {
		panic(err)
	}
	return net.JoinHostPort(cfg.ConnConfig.Host, itoa(int(cfg.ConnConfig.Port)))
}

// through has a pool dial the proxy.
func through(p *proxy) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) {
		c.ConnConfig.DialFunc = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", p.Addr().String())
		}
	}
}

// Exec is one round trip, and Do has as many as the transaction without a guard.
func TestRoundTrips(t *testing.T) {
	p := startProxy(t)
	pool := connect(t, pg.URL(database(t), "postgres"), through(p), func(c *pgxpool.Config) { c.MaxConns = 1 })
	g := guardOn(t, pool, pgfence.Config{})
	advance(t, g, 7)
	ctx := bounded(t)
	count := func(fn func() error) int64 {
		t.Helper()
		for range 3 { // the first prepare statements
			if err := fn(); err != nil {
				t.Fatal(err)
			}
		}
		before := p.trips.Load()
		if err := fn(); err != nil {
			t.Fatal(err)
		}
		return p.trips.Load() - before
	}
	const stmt = "INSERT INTO loot (item) VALUES ($1)"
	exec := count(func() error { _, err := g.Exec(ctx, term(7), stmt, "sword"); return err })
	do := count(func() error { return g.Do(ctx, term(7), insert("sword")) })
	once := 0
	settle := count(func() error {
		once++
		_, _, err := g.Once(ctx, term(7), itoa(once), func(tx *pgfence.Tx) ([]byte, error) { return nil, insert("sword")(tx) })
		return err
	})
	plain := count(func() error {
		tx, err := pool.Begin(ctx)
		if err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, stmt, "sword"); err != nil {
			return err
		}
		return tx.Commit(ctx)
	})
	if exec != 1 || do != plain || plain != 3 || settle != plain+2 {
		t.Errorf("round trips: Exec %d, plain transaction %d, Do %d, Once %d; want 1, 3, 3, 5", exec, plain, do, settle)
	}
}
