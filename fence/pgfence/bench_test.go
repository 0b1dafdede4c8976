package pgfence_test

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"aegis/fence/pgfence"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// BenchmarkGuardedOverPlain compares guarded writes with the same writes without a guard, on the same pool and table, by
// 1, 16 and 64 connections on one election, with fsync. Disks and neighbours drift, so the ways take turns in short
// rounds; what counts are the quartiles of the rounds' ratios: guarded / plain throughput, 1 being as fast.
//
//	go test -run '^$' -bench GuardedOverPlain -benchtime 21x ./fence/pgfence      (21 rounds of about 2 s)
func BenchmarkGuardedOverPlain(b *testing.B) {
	for _, conns := range []int{1, 16, 64} {
		b.Run(fmt.Sprintf("conns=%d", conns), func(b *testing.B) { benchmarkRatio(b, conns) })
	}
}

// turn is how long one way writes in one round.
var turn = func() time.Duration {
	if ms, err := strconv.Atoi(os.Getenv("AEGIS_BENCH_TURN_MS")); err == nil {
		return time.Duration(ms) * time.Millisecond
	}
	return 400 * time.Millisecond
}()

func benchmarkRatio(b *testing.B, conns int) {
	const stmt = "INSERT INTO loot (item) VALUES ($1)"
	ctx := context.Background()
	pool := connect(b, pg.SocketURL(database(b), "postgres"), func(c *pgxpool.Config) { c.MaxConns, c.MinConns = int32(conns), int32(conns) })
	g := guardOn(b, pool, pgfence.Config{})
	advance(b, g, 7)
	ways := []struct {
		name  string
		write func() error
		rate  []float64
	}{
		{name: "plain statement", write: func() error { _, err := pool.Exec(ctx, stmt, "sword"); return err }},
		{name: "Exec", write: func() error { _, err := g.Exec(ctx, term(7), stmt, "sword"); return err }},
		{name: "plain transaction", write: func() error {
			return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { _, err := tx.Exec(ctx, stmt, "sword"); return err })
		}},
		{name: "Do", write: func() error {
			return g.Do(ctx, term(7), func(tx *pgfence.Tx) error { _, err := tx.Exec(ctx, stmt, "sword"); return err })
		}},
	}
	run := func(i int) float64 {
		var n atomic.Int64
		start := time.Now()
		each(conns, func(int) {
			for time.Since(start) < turn {
				if err := ways[i].write(); err != nil {
					b.Error(ways[i].name, err)
					return
				}
				n.Add(1)
			}
		})
		return float64(n.Load()) / time.Since(start).Seconds()
	}
	for i := range ways {
		run(i) // statements are prepared, caches warm
	}
	for b.Loop() {
		order := []int{0, 1, 2, 3}
		if len(ways[0].rate)%2 == 1 { // who comes first after a pause has no advantage
			order = []int{1, 0, 3, 2}
		}
		for _, i := range order {
			ways[i].rate = append(ways[i].rate, run(i))
		}
	}
	b.ReportMetric(0, "ns/op")
	for _, pair := range [][2]int{{0, 1}, {2, 3}} {
		var ratios []float64
		for n := range ways[pair[0]].rate {
			ratios = append(ratios, ways[pair[1]].rate[n]/ways[pair[0]].rate[n])
		}
		slices.Sort(ratios)
		slices.Sort(ways[pair[0]].rate)
		name := ways[pair[1]].name
		b.ReportMetric(ways[pair[0]].rate[len(ratios)/2], "plain/s-for-"+name)
		b.ReportMetric(ratios[len(ratios)/4], name+"/plain-q1")
		b.ReportMetric(ratios[len(ratios)/2], name+"/plain-median")
		b.ReportMetric(ratios[len(ratios)*3/4], name+"/plain-q3")
	}
}
