package redisfence_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"aegis/fence/redisfence"
	"aegis/internal/servers"

	"github.com/redis/go-redis/v9"
)

// BenchmarkGuardedOverPlain compares guarded writes with the same writes without a guard, over the same connections of
// one server, all under one election: a server in memory, and one that syncs an append-only file before each reply, as a
// fence deserves. A script costs the server about 2.5 µs, whatever the command takes besides. The ways take turns in short rounds, and each round gives one ratio,
// guarded / plain throughput, 1 being as fast; printed are the ratios' quartiles.
func BenchmarkGuardedOverPlain(b *testing.B) {
	for _, durable := range []bool{false, true} {
		r := start(b, servers.RedisConfig{Append: durable})
		for _, conns := range []int{1, 16} {
			b.Run(fmt.Sprintf("durable=%v/conns=%d", durable, conns), func(b *testing.B) { guardedOverPlain(b, r, conns) })
		}
	}
}

func guardedOverPlain(b *testing.B, r *servers.Redis, conns int) {
	c := client(b, r.Addr, func(o *redis.Options) { o.PoolSize, o.MinIdleConns = conns, conns })
	g := newGuard(b, c, redisfence.Config{})
	advance(b, g, 7)
	ctx := context.Background()
	k, k2, k3 := g.Key("boss", "k"), g.Key("boss", "k2"), g.Key("boss", "k3")
	value := "a value of some fifty bytes, as a loot table may have"
	compare(b, conns, "Exec", func() error { return c.Set(ctx, k, value, 0).Err() },
		func() error { return second(g.Exec(ctx, term(7), "SET", k, value)) })
	compare(b, conns, "Do", func() error {
		_, err := c.TxPipelined(ctx, func(p redis.Pipeliner) error {
			p.Set(ctx, k, value, 0)
			p.Incr(ctx, k2)
			p.HSet(ctx, k3, "f", value)
			return nil
		})
		return err
	}, func() error {
		return second(g.Do(ctx, term(7), func(b *redisfence.Batch) error {
			return errors.Join(b.Add("SET", k, value), b.Add("INCR", k2), b.Add("HSET", k3, "f", value))
		}))
	})
	b.ReportMetric(0, "ns/op")
}

// compare reports the quartiles of guarded/plain throughput over interleaved rounds.
func compare(b *testing.B, workers int, name string, plain, guarded func() error) {
	const rounds, each = 15, 1600
	round := func(write func() error) time.Duration {
		var all sync.WaitGroup
		begin := time.Now()
		for range workers {
			all.Go(func() {
				for range each / workers {
					if err := write(); err != nil {
						b.Error(err)
						return
					}
				}
			})
		}
		all.Wait()
		return time.Since(begin)
	}
	round(plain)
	round(guarded)
	var ratios, took []float64
	for i := range rounds {
		var p, g time.Duration
		if i%2 == 0 {
			p = round(plain)
			g = round(guarded)
		} else {
			g = round(guarded)
			p = round(plain)
		}
		ratios = append(ratios, float64(p)/float64(g))
		took = append(took, float64(p.Microseconds())/each)
	}
	slices.Sort(ratios)
	slices.Sort(took)
	b.ReportMetric(took[rounds/2], "µs/plain-"+name)
	b.ReportMetric(ratios[rounds/4], name+"-q1")
	b.ReportMetric(ratios[rounds/2], name+"-median")
	b.ReportMetric(ratios[rounds*3/4], name+"-q3")
}
