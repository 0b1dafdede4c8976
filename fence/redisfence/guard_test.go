package redisfence_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"testing"
	"time"

	"aegis/fence"
	"aegis/fence/redisfence"

	"github.com/redis/go-redis/v9"
)

func TestKeys(t *testing.T) {
	g, c := open(t)
	ctx := bounded(t)
	advance(t, g, 7)
	p := newProxy(t, server.Addr)
	g = newGuard(t, client(t, p.addr()), redisfence.Config{Prefix: prefix})
	mustExec(t, g, 7, "SET", g.Key("boss", "loot"), "sword") // also asks for the table of commands

	t.Run("OfAnotherSlotAreRefusedBeforeAnythingIsSent", func(t *testing.T) {
		trips := p.trips.Load()
		_, err := g.Exec(ctx, term(7), "SET", "loot", "x")
		wantIs(t, err, redisfence.ErrSlot)
		wantSays(t, err, `"loot"`, "{boss}", "slot")
		_, err = g.Exec(ctx, term(7), "MSET", g.Key("boss", "loot"), "x", "loot:{another}", "x")
		wantIs(t, err, redisfence.ErrSlot)
		_, err = g.Do(ctx, term(7), func(b *redisfence.Batch) error {
			_ = b.Add("SET", g.Key("boss", "loot"), "x")
			_ = b.Add("DEL", "loot") // its error is Do's, whether fn heeds it or not
			return nil
		})
		wantIs(t, err, redisfence.ErrSlot)
		_, err = g.Script(ctx, term(7), redisfence.NewScript("return 1"), []string{"loot"})
		wantIs(t, err, redisfence.ErrSlot)
		if n := p.trips.Load() - trips; n != 0 {
			t.Errorf("%d round trips", n)
		}
		_, err = g.Exec(ctx, term(7), "ZUNIONSTORE", g.Key("boss", "z"), 1, "elsewhere") // the server says where its keys are
		wantIs(t, err, redisfence.ErrSlot)
		wantValue(t, c, g.Key("boss", "loot"), "sword")
	})
	t.Run("AreNotTheGuardsOwn", func(t *testing.T) {
		own := prefix + "fence:{boss}:boss"
		_, err := g.Exec(ctx, term(7), "DEL", own)
		wantSays(t, err, "the guard's own keys")
		_, err = g.Script(ctx, term(7), redisfence.NewScript("return redis.call('DEL', KEYS[1])"), []string{own})
		wantSays(t, err, "the guard's own keys")
	})
	t.Run("CommandsThatCannotBeGuardedAreRefused", func(t *testing.T) {
		for _, args := range [][]any{
			{}, {"NONSENSE"}, {"SET", g.Key("boss", "k")}, {"FLUSHALL"}, {"FLUSHDB"}, {"SWAPDB", 0, 1}, {"SELECT", 1}, {"CONFIG", "SET", "a", "b"},
			{"SUBSCRIBE", "x"}, {"SHUTDOWN"}, {"REPLICAOF", "NO", "ONE"}, {"XGROUP", "CREATE", "elsewhere", "g", "0"},
			append([]any{"DEL"}, make([]any, 8000)...),
		} {
			if v, err := g.Exec(ctx, term(7), args...); err == nil || errors.Is(err, fence.ErrUnknown) {
				t.Errorf("%.20v: %v, %v", args, v, err)
			}
		}
		for _, args := range [][]any{{"SET", g.Key("boss", "k")}, {"EVAL", "return 1", 1, g.Key("boss", "k")}} { // nor found out halfway
			_, err := g.Do(ctx, term(7), func(b *redisfence.Batch) error {
				_ = b.Add("INCR", g.Key("boss", "halfway"))
				_ = b.Add(args...)
				return nil
			})
			if err == nil || errors.Is(err, redisfence.ErrPartial) {
				t.Errorf("%v: %v", args, err)
			}
		}
		wantValue(t, c, g.Key("boss", "halfway"), "")
	})
	t.Run("GuardedCommandsReplyAsEver", func(t *testing.T) {
		k := func(what string) string { return g.Key("boss", what) }
		for _, step := range []struct {
			want any
			args []any
		}{
			{"OK", []any{"set", k("s"), "1"}}, {int64(2), []any{"INCR", k("s")}}, {"2", []any{"GET", k("s")}}, {nil, []any{"GET", k("none")}},
			{int64(2), []any{"HSET", k("h"), "a", 1, "b", []byte("two")}}, {[]any{"1", nil, "two"}, []any{"HMGET", k("h"), "a", "x", "b"}},
			{[]any{}, []any{"LRANGE", k("l"), 0, -1}}, {"OK", []any{"XGROUP", "CREATE", k("x"), "g", "0", "MKSTREAM"}}, {int64(0), []any{"PUBLISH", "news", "x"}},
			{int64(1), []any{"DEL", k("s")}}, {int64(0), append([]any{"DEL"}, slices.Repeat([]any{k("none")}, 6999)...)},
			{int64(0), []any{"ZUNIONSTORE", k("z"), 1, k("none")}}, {"9007199254740993", []any{"EVALME"}},
		} {
			if step.args[0] == "EVALME" { // a value that is no double stays what it is
				step.args = []any{"GET", k("big")}
				mustExec(t, g, 7, "SET", k("big"), int64(9007199254740993))
			}
			if got := mustExec(t, g, 7, step.args...); !reflect.DeepEqual(got, step.want) {
				t.Errorf("%v: %#v; want %#v", step.args, got, step.want)
			}
		}
	})
	t.Run("SlotsAreThoseOfRedis", func(t *testing.T) {
		c := cluster(t)
		g := newGuard(t, c, redisfence.Config{})
		for i, name := range []string{"a", "", "}", "{", "{}", "a}b", "{a}", "a{b}c", "世界", "boss/7", "%7D"} {
			term := fence.Term{Election: name, Token: fence.Token(100 - i)}
			if err := g.Advance(ctx, term); err != nil {
				t.Fatalf("%q: %v", name, err)
			}
			if _, err := g.Exec(ctx, term, "SET", g.Key(name, "loot"), name); err != nil {
				t.Errorf("%q: %v", name, err)
			}
			_, err := g.Do(ctx, term, func(b *redisfence.Batch) error {
				return errors.Join(b.Add("APPEND", g.Key(name, "loot"), "!"), b.Add("SET", g.Key(name, "more"), "x"))
			})
			if err != nil {
				t.Errorf("%q: %v", name, err)
			}
			wantValue(t, c, g.Key(name, "loot"), name+"!")
			old := term
			old.Token--
			_, err = g.Exec(ctx, old, "SET", g.Key(name, "loot"), name)
			wantIs(t, err, fence.ErrFenced)
		}
		if names, err := g.Names(ctx); err != nil || len(names) != 11 || names[0] != "" || !slices.Contains(names, "a}b") {
			t.Errorf("%q, %v", names, err)
		}
		both := []fence.Term{{Election: "a", Token: 1000}, {Election: "世界", Token: 1000}}
		if err := g.Advance(ctx, both...); err != nil { // two slots
			t.Error(err)
		}
		both[0].Token, both[1].Token = 2000, 0
		wantIs(t, g.Advance(ctx, both...), fence.ErrInvalidToken)
		if r, err := g.Newest(ctx, "a"); err != nil || r.Token != 1000 { // what is known to be refused takes nothing along
			t.Errorf("%+v, %v", r, err)
		}
	})
}

func TestScriptCacheFlushedIsNoMatter(t *testing.T) {
	g, c := open(t)
	ctx := bounded(t)
	k := g.Key("boss", "n")
	user := redisfence.NewScript("return redis.call('INCR', KEYS[1])")
	for i, write := range []func() error{
		func() error { return g.Advance(ctx, term(7)) },
		func() error { _, err := g.Exec(ctx, term(7), "INCR", k); return err },
		func() error {
			_, err := g.Do(ctx, term(7), func(b *redisfence.Batch) error { return b.Add("INCR", k) })
			return err
		},
		func() error {
			_, _, err := g.Once(ctx, term(7), "kill", func(b *redisfence.Batch) ([]byte, error) { return nil, b.Add("INCR", k) })
			return err
		},
		func() error { _, err := g.Script(ctx, term(7), user, []string{k}); return err },
	} {
		if err := c.ScriptFlush(ctx).Err(); err != nil {
			t.Fatal(err)
		}
		if err := write(); err != nil {
			t.Errorf("%d: %v", i, err)
		}
	}
	wantValue(t, c, k, "4")
}

func TestRoundTrips(t *testing.T) {
	open(t) // an empty server
	p := newProxy(t, server.Addr)
	g := newGuard(t, client(t, p.addr()), redisfence.Config{Prefix: prefix})
	ctx := bounded(t)
	k := g.Key("boss", "n")
	user := redisfence.NewScript("return redis.call('INCR', KEYS[1])")
	once := func(key string) func() error {
		return func() error {
			_, _, err := g.Once(ctx, term(7), key, func(b *redisfence.Batch) ([]byte, error) { return nil, b.Add("INCR", k) })
			return err
		}
	}
	steps := []struct {
		what  string
		trips int64
		do    func() error
	}{
		{"Advance", 2, func() error { return g.Advance(ctx, term(7)) }},
		{"Exec", 1, func() error { _, err := g.Exec(ctx, term(7), "INCR", k); return err }},
		{"Do", 1, func() error {
			_, err := g.Do(ctx, term(7), func(b *redisfence.Batch) error { return errors.Join(b.Add("INCR", k), b.Add("INCR", k)) })
			return err
		}},
		{"Script", 1, func() error { _, err := g.Script(ctx, term(7), user, []string{k}); return err }},
		{"Once", 2, once("kill")},
		{"Once, repeated", 1, once("kill")},
	}
	for warm := range 2 { // scripts, commands and a connection are known afterwards
		for _, s := range steps {
			before := p.trips.Load()
			if err := s.do(); err != nil {
				t.Fatal(s.what, err)
			}
			if n := p.trips.Load() - before; warm == 1 && s.what != "Once" && n != s.trips {
				t.Errorf("%s takes %d round trips; want %d", s.what, n, s.trips)
			}
		}
	}
	before := p.trips.Load()
	if err := once("another")(); err != nil || p.trips.Load()-before != 2 {
		t.Errorf("Once takes %d round trips, %v; want 2", p.trips.Load()-before, err)
	}
}

func TestABatchThatFailsHalfwaySaysWhatStaysDone(t *testing.T) {
	g, c := open(t)
	ctx := bounded(t)
	advance(t, g, 7)
	n, list := g.Key("boss", "n"), g.Key("boss", "list")
	mustExec(t, g, 7, "RPUSH", list, "x")
	batch := func(at int) func(b *redisfence.Batch) error {
		return func(b *redisfence.Batch) error {
			for i := range 4 {
				if i == at {
					if err := b.Add("INCR", list); err != nil {
						return err
					}
				}
				if err := b.Add("INCR", n); err != nil {
					return err
				}
			}
			return nil
		}
	}
	_, err := g.Do(ctx, term(7), batch(2))
	var part *redisfence.PartialError
	if !errors.As(err, &part) || part.Done != 2 || !errors.Is(err, redisfence.ErrPartial) || errors.Is(err, fence.ErrUnknown) {
		t.Errorf("%v", err)
	}
	wantSays(t, err, `"boss"`, "first 2 commands", "WRONGTYPE", "does not undo")
	wantValue(t, c, n, "2")
	_, err = g.Do(ctx, term(7), batch(0))
	if err == nil || errors.Is(err, redisfence.ErrPartial) {
		t.Errorf("the first command failed, so nothing was done: %v", err)
	}
	wantValue(t, c, n, "2")

	t.Run("AndOnceDoesNotRepeatIt", func(t *testing.T) {
		for range 2 {
			_, _, err := g.Once(ctx, term(7), "kill", func(b *redisfence.Batch) ([]byte, error) { return []byte("sword"), batch(2)(b) })
			if !errors.As(err, &part) || part.Done != 2 {
				t.Errorf("%v", err)
			}
			wantValue(t, c, n, "4")
		}
		for range 2 { // nothing was done, so it may be tried again
			_, first, err := g.Once(ctx, term(7), "another", func(b *redisfence.Batch) ([]byte, error) { return nil, batch(0)(b) })
			if err == nil || first || errors.Is(err, redisfence.ErrPartial) {
				t.Errorf("first=%v, %v", first, err)
			}
		}
		if _, first, err := g.Once(ctx, term(7), "another", func(b *redisfence.Batch) ([]byte, error) { return nil, b.Add("INCR", n) }); !first || err != nil {
			t.Errorf("first=%v, %v", first, err)
		}
		wantValue(t, c, n, "5")
	})
}

func TestUserScript(t *testing.T) {
	g, c := open(t)
	ctx := bounded(t)
	advance(t, g, 7)
	n := g.Key("boss", "n")
	s := redisfence.NewScript(`-- a comment
local by = tonumber(ARGV[1])
if #KEYS ~= 1 or #ARGV ~= 1 then return redis.error_reply('KEYS and ARGV') end
return {redis.call('INCRBY', KEYS[1], by), false, 'x'} -- the last line has one too`)
	v, err := g.Script(ctx, term(7), s, []string{n}, 5)
	if err != nil || !reflect.DeepEqual(v, []any{int64(5), nil, "x"}) {
		t.Errorf("%#v, %v", v, err)
	}
	_, err = g.Script(ctx, term(8), s, []string{n}, 5)
	wantIs(t, err, fence.ErrFenced)
	advance(t, g, 8)
	_, err = g.Script(ctx, term(7), s, []string{n}, 5)
	wantIs(t, err, fence.ErrFenced)
	wantValue(t, c, n, "5")

	t.Run("WhoseErrorIsRaisedIsDoneInPart", func(t *testing.T) {
		_, err := g.Script(ctx, term(8), redisfence.NewScript("redis.call('INCR', KEYS[1])\n\nerror('oops')"), []string{n})
		wantIs(t, err, redisfence.ErrPartial)
		wantSays(t, err, "oops", ":3:") // the line is the user's own
		wantValue(t, c, n, "6")
		_, err = g.Script(ctx, term(8), redisfence.NewScript("return redis.call('LPUSH', KEYS[1], 1)"), []string{n})
		wantIs(t, err, redisfence.ErrPartial)
		wantSays(t, err, "WRONGTYPE")
	})
	t.Run("WhoseErrorIsReturnedIsItsOwn", func(t *testing.T) {
		_, err := g.Script(ctx, term(8), redisfence.NewScript("return redis.error_reply('BROKE no gold')"), []string{n})
		if !redis.HasErrorPrefix(errors.Unwrap(err), "BROKE") || errors.Is(err, redisfence.ErrPartial) {
			t.Error(err)
		}
		_, err = g.Script(ctx, term(8), redisfence.NewScript("return ((("), []string{n})
		wantSays(t, err, "compiling")
	})
}

func TestForgetRemovesOldKeysAndNoFence(t *testing.T) {
	g, c := open(t)
	ctx := bounded(t)
	advance(t, g, 7, 8)
	settle := func(key string) bool {
		_, first, err := g.Once(ctx, term(8), key, func(b *redisfence.Batch) ([]byte, error) { return nil, nil })
		if err != nil {
			t.Fatal(err)
		}
		return first
	}
	const many = 1500 // more than one step of Forget
	for i := range many {
		settle(fmt.Sprint("kill", i))
	}
	now, err := c.Time(ctx).Result()
	if err != nil {
		t.Fatal(err)
	}
	if n, err := g.Forget(ctx, now.Add(-time.Hour)); n != 0 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	if settle("kill0") {
		t.Error("forgotten too early")
	}
	if n, err := g.Forget(ctx, now); n != many || err != nil {
		t.Errorf("%d, %v; want %d", n, err, many)
	}
	if !settle("kill0") {
		t.Error("not forgotten")
	}
	_, err = g.Exec(ctx, term(7), "SET", g.Key("boss", "k"), "x")
	wantIs(t, err, fence.ErrFenced)
	wantIs(t, g.Advance(ctx, term(7)), fence.ErrFenced)
	if names, err := g.Names(ctx); err != nil || !slices.Equal(names, []string{"boss"}) {
		t.Errorf("%q, %v", names, err)
	}
	if r, err := g.Newest(ctx, "boss"); err != nil || r != (fence.Record{Token: 8, Nonce: term(8).Nonce, Cluster: term(8).Cluster}) {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestEveryWayToWriteIsGuarded(t *testing.T) {
	g, c := open(t)
	ctx := bounded(t)
	advance(t, g, 7)
	k := g.Key("boss", "k")
	script := redisfence.NewScript("return redis.call('SET', KEYS[1], 'stale')")
	set := func(b *redisfence.Batch) error { return b.Add("SET", k, "stale") }
	_, _, err := g.Once(ctx, term(7), "taken over", func(b *redisfence.Batch) ([]byte, error) {
		advance(t, g, 8) // between its look and its commit
		return nil, set(b)
	})
	wantIs(t, err, fence.ErrFenced)
	for what, err := range map[string]error{
		"Exec":   second(g.Exec(ctx, term(7), "SET", k, "stale")),
		"Do":     second(g.Do(ctx, term(7), set)),
		"Script": second(g.Script(ctx, term(7), script, []string{k})),
		"delete": second(g.Exec(ctx, term(7), "DEL", k)),
	} {
		var fenced *fence.FencedError
		if !errors.As(err, &fenced) || fenced.Token != 7 || fenced.Newest != 8 {
			t.Errorf("%s: %v", what, err)
		}
	}
	wantValue(t, c, k, "")
}

func TestResetIsTheWayDown(t *testing.T) {
	g, _ := open(t)
	advance(t, g, 8)
	for _, want := range []bool{true, false} {
		if found, err := g.Reset(bounded(t), "boss"); found != want || err != nil {
			t.Errorf("%v, %v", found, err)
		}
	}
	advance(t, g, 7)
	mustExec(t, g, 7, "SET", g.Key("boss", "k"), "x")
}

func TestReportModeAdmitsAndTells(t *testing.T) {
	g, c := open(t)
	ctx := bounded(t)
	advance(t, g, 7, 8)
	var told []error
	report := &fence.Report{Tell: func(err error) { told = append(told, err) }}
	g = newGuard(t, c, redisfence.Config{Prefix: prefix, Report: report})
	mustExec(t, g, 7, "SET", g.Key("boss", "k"), "by 7")
	wantValue(t, c, g.Key("boss", "k"), "by 7")
	if err := g.Advance(ctx, term(7)); err != nil {
		t.Error(err)
	}
	if len(told) != 2 || report.Count() != 2 || !errors.Is(told[0], fence.ErrFenced) {
		t.Errorf("told %v", told)
	}
	if r, err := g.Newest(ctx, "boss"); err != nil || r.Token != 8 {
		t.Errorf("the advance that was let through lowered the token: %+v, %v", r, err)
	}
	_, err := g.Exec(ctx, fence.Term{Election: "boss"}, "SET", g.Key("boss", "k"), "x")
	wantIs(t, err, fence.ErrInvalidToken)
}

func TestNewRefuses(t *testing.T) {
	for what, open := range map[string]func() (*redisfence.Guard, error){
		"ContextTimeoutEnabled": func() (*redisfence.Guard, error) {
			return redisfence.New(redis.NewClient(&redis.Options{}), redisfence.Config{})
		},
		"*redis.Ring": func() (*redisfence.Guard, error) {
			return redisfence.New(redis.NewRing(&redis.RingOptions{ContextTimeoutEnabled: true}), redisfence.Config{})
		},
		"AnySlot": func() (*redisfence.Guard, error) {
			return redisfence.New(redis.NewClusterClient(&redis.ClusterOptions{ContextTimeoutEnabled: true}), redisfence.Config{AnySlot: true})
		},
		"Prefix":         func() (*redisfence.Guard, error) { return redisfence.New(nil, redisfence.Config{Prefix: "{a}"}) },
		"Tag":            func() (*redisfence.Guard, error) { return redisfence.New(nil, redisfence.Config{Tag: "{a}"}) },
		"Replicas":       func() (*redisfence.Guard, error) { return redisfence.New(nil, redisfence.Config{Replicas: -1}) },
		"ReplicaTimeout": func() (*redisfence.Guard, error) { return redisfence.New(nil, redisfence.Config{ReplicaTimeout: -1}) },
	} {
		_, err := open()
		wantSays(t, err, what)
	}
}

func TestAdvanceGetsInUnder64Writers(t *testing.T) {
	g, c := open(t)
	advance(t, g, 7)
	ctx, cancel := context.WithCancel(bounded(t))
	defer cancel()
	took := make(chan time.Duration, 64)
	for range cap(took) {
		go func() {
			longest := time.Duration(0)
			for ctx.Err() == nil {
				begin := time.Now()
				_, err := g.Exec(ctx, term(7), "INCR", g.Key("boss", "n"))
				longest = max(longest, time.Since(begin))
				if err != nil {
					if !errors.Is(err, fence.ErrFenced) {
						t.Error(err)
					}
					break
				}
			}
			took <- longest
		}()
	}
	for {
		if n, _ := c.Get(ctx, g.Key("boss", "n")).Int(); n >= 200 {
			break
		}
	}
	begin := time.Now()
	advance(t, g, 8)
	mine := time.Since(begin)
	seen, err := c.Get(ctx, g.Key("boss", "n")).Result() // the new leader's first read
	if err != nil {
		t.Fatal(err)
	}
	longest := time.Duration(0)
	for range cap(took) {
		longest = max(longest, <-took)
	}
	wantValue(t, c, g.Key("boss", "n"), seen)
	if mine > 10*longest {
		t.Errorf("Advance took %v, the longest write %v", mine, longest)
	}
}
