package redisfence_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"aegis/fence"
	"aegis/fence/redisfence"
	"aegis/internal/servers"

	"github.com/redis/go-redis/v9"
)

func TestAServerThatCouldEvictTheFenceIsRefused(t *testing.T) {
	r := start(t, servers.RedisConfig{Args: []string{"--maxmemory", "100mb"}})
	c := client(t, r.Addr)
	g := newGuard(t, c, redisfence.Config{})
	ctx := bounded(t)
	token := fence.Token(6)
	for _, policy := range []string{"allkeys-lru", "allkeys-lfu", "allkeys-random"} {
		if err := c.ConfigSet(ctx, "maxmemory-policy", policy).Err(); err != nil {
			t.Fatal(err)
		}
		err := g.Advance(ctx, term(7))
		wantIs(t, err, redisfence.ErrEviction)
		wantSays(t, err, policy, "noeviction", "boss")
		if rec, err := g.Newest(ctx, "boss"); err != nil || rec.Token != 0 {
			t.Errorf("it was taken all the same: %+v, %v", rec, err)
		}
	}
	for _, policy := range []string{"volatile-lru", "volatile-lfu", "volatile-random", "volatile-ttl", "noeviction"} {
		if err := c.ConfigSet(ctx, "maxmemory-policy", policy).Err(); err != nil {
			t.Fatal(err)
		}
		token++
		advance(t, g, token)
	}
	k := g.Key("boss", "k")
	mustExec(t, g, token, "SET", k, "x")

	t.Run("AndAFenceThatIsGoneAdmitsNobody", func(t *testing.T) {
		c.Expire(ctx, "aegis:fence:{boss}:boss", time.Hour) // somebody's mistake, which the next advance mends
		advance(t, g, token)
		if ttl, err := c.TTL(ctx, "aegis:fence:{boss}:boss").Result(); err != nil || ttl != -1 {
			t.Errorf("the fence has a TTL: %v, %v", ttl, err)
		}
		c.Del(ctx, "aegis:fence:{boss}:boss")
		for _, token := range []fence.Token{token - 1, token, token + 1} {
			_, err := g.Exec(ctx, term(token), "SET", k, "y")
			var fenced *fence.FencedError
			if !errors.As(err, &fenced) || fenced.Newest != 0 {
				t.Errorf("%v", err)
			}
		}
		wantValue(t, c, k, "x")
	})
	t.Run("AndSoIsOneThatDoesNotShowItsPolicy", func(t *testing.T) {
		if err := c.Do(ctx, "ACL", "SETUSER", "blind", "on", "nopass", "~*", "&*", "+@all", "-info").Err(); err != nil {
			t.Fatal(err)
		}
		blind := client(t, r.Addr, func(o *redis.Options) { o.Username, o.Password = "blind", "x" })
		err := newGuard(t, blind, redisfence.Config{}).Advance(ctx, term(20))
		wantIs(t, err, redisfence.ErrEviction)
		wantSays(t, err, "INFO", "PolicyUnchecked")
		if err := newGuard(t, blind, redisfence.Config{PolicyUnchecked: true}).Advance(ctx, term(20)); err != nil {
			t.Error(err)
		}
	})
}

func TestFailover(t *testing.T) {
	primary := start(t, servers.RedisConfig{})
	replica := start(t, servers.RedisConfig{ReplicaOf: primary})
	ctx := bounded(t)
	pc, rc := client(t, primary.Addr), client(t, replica.Addr)
	g := newGuard(t, pc, redisfence.Config{})
	after := newGuard(t, rc, redisfence.Config{}) // the guard of whoever connects to the replica
	k := g.Key("boss", "k")
	advance(t, g, 7)
	mustExec(t, g, 7, "SET", k, "by 7")
	following := func() {
		t.Helper()
		if n, err := pc.Wait(ctx, 1, 10*time.Second).Result(); n != 1 || err != nil {
			// WAIT speaks of its own connection's writes; a replica that has not attached yet has none of them
			t.Fatal("the replica does not follow: ", n, err)
		}
	}
	for !strings.Contains(rc.Info(ctx, "replication").Val(), "master_link_status:up") {
		if ctx.Err() != nil {
			t.Fatal("the replica does not attach")
		}
	}
	following()

	t.Run("AReadOnlyReplicaIsExplained", func(t *testing.T) {
		for _, err := range []error{
			after.Advance(ctx, term(8)),
			after.Advance(ctx, term(7)), // though it is there already
			second(after.Exec(ctx, term(7), "SET", k, "x")),
		} {
			wantSays(t, err, "read-only replica", "primary", "boss")
			if errors.Is(err, fence.ErrUnknown) {
				t.Error(err)
			}
		}
	})
	t.Run("AnAdvanceWaitsForReplicasThatItIsToldOf", func(t *testing.T) {
		sure := newGuard(t, pc, redisfence.Config{Replicas: 1, ReplicaTimeout: 10 * time.Second})
		if err := sure.Advance(ctx, term(8)); err != nil {
			t.Fatal(err)
		}
		if rec, err := after.Newest(ctx, "boss"); err != nil || rec.Token != 8 {
			t.Errorf("the replica has %+v, %v", rec, err)
		}
		if err := replica.Stop(); err != nil {
			t.Fatal(err)
		}
		hasty := newGuard(t, pc, redisfence.Config{Replicas: 1, ReplicaTimeout: 50 * time.Millisecond})
		err := hasty.Advance(ctx, term(9))
		wantSays(t, err, "0 of 1 replicas", "advance again", "50ms")
		if err := replica.Continue(); err != nil {
			t.Fatal(err)
		}
		if err := sure.Advance(ctx, term(9)); err != nil {
			t.Error(err)
		}
		mustExec(t, g, 9, "SET", k, "by 9")
		following()
	})
	// The replica is cut off, misses the advance to 10 and is promoted. This is the limit that the package's doc prints.
	t.Run("AReplicaThatMissedTheAdvanceAdmitsTheOldTermUntilItIsAdvancedAgain", func(t *testing.T) {
		if err := rc.ReplicaOf(ctx, "NO", "ONE").Err(); err != nil {
			t.Fatal(err)
		}
		advance(t, g, 10)
		if err := primary.Kill(); err != nil {
			t.Fatal(err)
		}
		_, err := after.Exec(ctx, term(10), "SET", k, "by 10")
		wantIs(t, err, fence.ErrFenced)
		wantSays(t, err, "newest is 9", "advance")
		mustExec(t, after, 9, "SET", k, "late, by 9")
		advance(t, after, 10)
		_, err = after.Exec(ctx, term(9), "SET", k, "too late, by 9")
		wantIs(t, err, fence.ErrFenced)
		wantValue(t, rc, k, "late, by 9")
	})
	t.Run("AReplicaWithoutTheFenceAdmitsNobody", func(t *testing.T) {
		if err := rc.FlushAll(ctx).Err(); err != nil {
			t.Fatal(err)
		}
		for _, token := range []fence.Token{9, 10} {
			_, err := after.Exec(ctx, term(token), "SET", k, "x")
			wantIs(t, err, fence.ErrFenced)
			wantSays(t, err, "no token yet", "advance")
		}
		wantValue(t, rc, k, "")
		advance(t, after, 10)
		mustExec(t, after, 10, "SET", k, "by 10")
	})
}

func second[T any](_ T, err error) error { return err }

func TestErrorsAreExplained(t *testing.T) {
	r := start(t, servers.RedisConfig{Password: "secret", Args: []string{"--maxmemory", "3mb", "--save", "3600 1000000", "--enable-protected-configs", "yes"}})
	ctx := bounded(t)
	admin := client(t, r.Addr, func(o *redis.Options) { o.Password = "secret" })
	g := newGuard(t, admin, redisfence.Config{})
	k := g.Key("boss", "k")
	advance(t, g, 7)
	mustExec(t, g, 7, "SET", k, "by 7")
	both := func(t *testing.T, g *redisfence.Guard, words ...string) {
		t.Helper()
		for _, err := range []error{
			g.Advance(ctx, term(8)),
			second(g.Exec(ctx, term(7), "SET", k, "x")),
			second(g.Do(ctx, term(7), func(b *redisfence.Batch) error { return b.Add("SET", k, "x") })),
		} {
			wantSays(t, err, append(words, "boss")...)
			if errors.Is(err, fence.ErrUnknown) || errors.Is(err, redisfence.ErrPartial) {
				t.Errorf("nothing was done, and that is known: %v", err)
			}
		}
	}

	t.Run("NoPassword", func(t *testing.T) {
		both(t, newGuard(t, client(t, r.Addr), redisfence.Config{}), "wants a password")
	})
	t.Run("WrongPassword", func(t *testing.T) {
		both(t, newGuard(t, client(t, r.Addr, func(o *redis.Options) { o.Password = "guess" }), redisfence.Config{}), "wrong user name or password")
	})
	t.Run("NoPermission", func(t *testing.T) {
		if err := admin.Do(ctx, "ACL", "SETUSER", "guest", "on", ">x", "~*", "+@read", "+@connection", "+command").Err(); err != nil {
			t.Fatal(err)
		}
		both(t, newGuard(t, client(t, r.Addr, func(o *redis.Options) { o.Username, o.Password = "guest", "x" }), redisfence.Config{}), "EVALSHA")
	})
	t.Run("LeastPrivilege", func(t *testing.T) { // what the hint and the docs say is enough
		rule := strings.Fields("ACL SETUSER app on >x ~aegis:* ~*:{boss} &* -@all +hello +client +eval +evalsha +command +info +hget +hset +persist +hdel +zadd +zrem +time +set")
		words := make([]any, len(rule))
		for i, w := range rule {
			words[i] = w
		}
		if err := admin.Do(ctx, words...).Err(); err != nil {
			t.Fatal(err)
		}
		g := newGuard(t, client(t, r.Addr, func(o *redis.Options) { o.Username, o.Password = "app", "x" }), redisfence.Config{})
		advance(t, g, 7)
		mustExec(t, g, 7, "SET", k, "by 7")
		if _, first, err := g.Once(ctx, term(7), "kill", func(b *redisfence.Batch) ([]byte, error) { return nil, b.Add("SET", k, "by 7") }); !first || err != nil {
			t.Error(err)
		}
		_, err := g.Exec(ctx, term(7), "APPEND", k, "x")
		wantSays(t, err, "may not run")
	})
	t.Run("MemoryFull", func(t *testing.T) {
		big := client(t, r.Addr, func(o *redis.Options) { o.Password = "secret" })
		for i := 0; ; i++ {
			if err := big.Append(ctx, "{boss}big", strings.Repeat("x", 100_000)).Err(); err != nil {
				break
			}
		}
		both(t, g, "memory is full")
		_, first, err := g.Once(ctx, term(7), "full", func(b *redisfence.Batch) ([]byte, error) { return []byte("sword"), b.Add("SET", k, "x") })
		wantSays(t, err, "memory is full")
		wantValue(t, admin, k, "by 7")
		if err := big.Del(ctx, "{boss}big").Err(); err != nil || first {
			t.Fatal(err)
		}
		if _, first, err = g.Once(ctx, term(7), "full", func(b *redisfence.Batch) ([]byte, error) { return nil, b.Add("SET", k, "by 7") }); err != nil || !first {
			t.Error(first, err)
		}
	})
	t.Run("FullDisk", func(t *testing.T) {
		gone := filepath.Join(r.Dir, "gone")
		if err := errors.Join(os.Mkdir(gone, 0o700), admin.ConfigSet(ctx, "dir", gone).Err(), os.Remove(gone)); err != nil {
			t.Fatal(err)
		}
		if err := admin.BgSave(ctx).Err(); err != nil {
			t.Fatal(err)
		}
		for !strings.Contains(admin.Info(ctx, "persistence").Val(), "rdb_last_bgsave_status:err") {
			if ctx.Err() != nil {
				t.Fatal("the save does not fail")
			}
		}
		both(t, g, "cannot save to its disk")
		if err := errors.Join(admin.ConfigSet(ctx, "dir", r.Dir).Err(), admin.Save(ctx).Err()); err != nil {
			t.Fatal(err)
		}
		mustExec(t, g, 7, "SET", k, "by 7")
	})
	t.Run("FenceOfANewerVersion", func(t *testing.T) {
		fenceKey := "aegis:fence:{boss}:boss"
		was := admin.HGet(ctx, fenceKey, "r").Val()
		for _, strange := range []string{"v2:7:0:0", "7", "7:0", "0:0:0", "9007199254740992:0:0", "7:-1:0"} {
			admin.HSet(ctx, fenceKey, "r", strange)
			both(t, g, "newer", strange)
		}
		admin.HSet(ctx, fenceKey, "r", was)
	})
	t.Run("FenceOfAnotherType", func(t *testing.T) {
		other := newGuard(t, admin, redisfence.Config{Prefix: "other:"})
		admin.Set(ctx, "other:fence:{boss}:boss", "x", 0)
		both(t, other, "another type", "guard's own key")
	})
	t.Run("NotARedis", func(t *testing.T) {
		err := newGuard(t, client(t, "127.0.0.1:1"), redisfence.Config{}).Advance(ctx, term(8))
		wantSays(t, err, "cannot be reached", "is it running", "boss")
	})
	t.Run("ServerDown", func(t *testing.T) {
		if err := r.Kill(); err != nil {
			t.Fatal(err)
		}
		_, err := g.Exec(ctx, term(7), "SET", k, "x")
		if err == nil {
			t.Error("done by a dead server")
		}
		both(t, g, "cannot be reached", "Nothing was sent")
	})
}

func TestAServerThatHangsDoesNotOutlastTheContext(t *testing.T) {
	r := start(t, servers.RedisConfig{})
	c := client(t, r.Addr)
	g := newGuard(t, c, redisfence.Config{})
	advance(t, g, 7)
	k := g.Key("boss", "n")
	mustExec(t, g, 7, "INCR", k)
	if err := r.Stop(); err != nil {
		t.Fatal(err)
	}
	for what, call := range map[string]func(context.Context) error{
		"Exec":    func(ctx context.Context) error { return second(g.Exec(ctx, term(7), "INCR", k)) },
		"Advance": func(ctx context.Context) error { return g.Advance(ctx, term(8)) },
	} {
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		begin := time.Now()
		err := call(ctx)
		cancel()
		if took := time.Since(begin); err == nil || took > 2*time.Second {
			t.Errorf("%s took %v: %v", what, took, err)
		}
		if what == "Exec" {
			wantIs(t, err, fence.ErrUnknown) // indeed it is executed when the server goes on
		}
	}
	over, cancel := context.WithCancel(context.Background())
	cancel()
	_, err := g.Exec(over, term(7), "INCR", k)
	wantIs(t, err, context.Canceled)
	if errors.Is(err, fence.ErrUnknown) {
		t.Errorf("nothing was sent, and that is known: %v", err)
	}
	if err := r.Continue(); err != nil {
		t.Fatal(err)
	}
	for c.Get(bounded(t), k).Val() != "2" {
		if bounded(t).Err() != nil {
			t.Fatal("never executed")
		}
	}
}
