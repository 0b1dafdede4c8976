package redisfence_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"aegis/fence"
	"aegis/fence/redisfence"
	"aegis/internal/lab"
	"aegis/internal/servers"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"
)

// server is the one that most tests share, each under a prefix of its own. It syncs an append-only file before it replies.
var server *servers.Redis

func TestMain(m *testing.M) {
	if lab.Role() == "settle" {
		settleForever()
	}
	logging.Disable() // the client's own log: broken connections are what these tests are about
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	var err error
	if server, err = servers.SharedRedis(ctx, servers.RedisConfig{Append: true}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	server.Close()
	os.Exit(code)
}

func start(t testing.TB, cfg servers.RedisConfig) *servers.Redis {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	r, err := servers.StartRedis(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return r
}

func bounded(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func client(t testing.TB, addr string, change ...func(*redis.Options)) *redis.Client {
	o := &redis.Options{Addr: addr, ContextTimeoutEnabled: true, DisableIdentity: true}
	for _, c := range change {
		c(o)
	}
	c := redis.NewClient(o)
	t.Cleanup(func() { c.Close() })
	return c
}

func newGuard(t testing.TB, c redis.UniversalClient, cfg redisfence.Config) *redisfence.Guard {
	t.Helper()
	g, err := redisfence.New(c, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

var prefixes atomic.Int64

// fresh is a prefix that nobody has used on this server.
func fresh() string { return fmt.Sprintf("t%d-%d:", time.Now().UnixNano(), prefixes.Add(1)) }

const prefix = "aegis:" // the default

// open empties the shared server and returns a guard on it.
func open(t testing.TB) (*redisfence.Guard, *redis.Client) {
	t.Helper()
	c := client(t, server.Addr)
	if err := c.FlushAll(bounded(t)).Err(); err != nil {
		t.Fatal(err)
	}
	return newGuard(t, c, redisfence.Config{}), c
}

func term(token fence.Token) fence.Term {
	return fence.Term{Election: "boss", Node: "scene-01", Token: token, Nonce: uint64(token) + 1<<63, Cluster: 1<<63 + 1}
}

func advance(t testing.TB, g *redisfence.Guard, tokens ...fence.Token) {
	t.Helper()
	for _, token := range tokens {
		if err := g.Advance(bounded(t), term(token)); err != nil {
			t.Fatal(err)
		}
	}
}

func mustExec(t testing.TB, g *redisfence.Guard, token fence.Token, args ...any) any {
	t.Helper()
	v, err := g.Exec(bounded(t), term(token), args...)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func wantIs(t testing.TB, err, target error) {
	t.Helper()
	if !errors.Is(err, target) {
		t.Errorf("error is %v; want %v", err, target)
	}
}

func wantSays(t testing.TB, err error, words ...string) {
	t.Helper()
	for _, w := range words {
		if err == nil || !strings.Contains(err.Error(), w) {
			t.Errorf("error is %v; want it to say %q", err, w)
		}
	}
}

func wantValue(t testing.TB, c redis.UniversalClient, key, want string) {
	t.Helper()
	got, err := c.Get(bounded(t), key).Result()
	if err != nil && !errors.Is(err, redis.Nil) || got != want {
		t.Errorf("%s is %q, %v; want %q", key, got, err, want)
	}
}
