package mysqlfence_test

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"aegis/fence/mysqlfence"
)

// BenchmarkGuardedOverPlain compares guarded writes with the same writes without a guard, on one pool, with 1 and 16
// connections and one election. Disks drift, so the ways take turns in short rounds, and what counts are the ratios of
// each round: guarded / plain throughput, 1 being as fast; their median and quartiles.
//
//	go test -run '^$' -bench GuardedOverPlain -benchtime 15x ./fence/mysqlfence
func BenchmarkGuardedOverPlain(b *testing.B) {
	for _, connections := range []int{1, 16} {
		b.Run(fmt.Sprint("connections=", connections), func(b *testing.B) { compare(b, connections) })
	}
}

func compare(b *testing.B, connections int) {
	g := guard(b)
	advance(b, g, 7)
	db := g.DB()
	db.SetMaxOpenConns(connections)
	db.SetMaxIdleConns(connections)
	ctx := context.Background()
	var n atomic.Int64
	item := func() string { return fmt.Sprint("item ", n.Add(1)) }
	three := func(tx interface {
		ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	}) error {
		for range 3 {
			if _, err := tx.ExecContext(ctx, insert, item()); err != nil {
				return err
			}
		}
		return nil
	}
	ways := []struct {
		name  string
		write func() error
	}{
		{"plain-stmt", func() error { _, err := db.ExecContext(ctx, insert, item()); return err }},
		{"Exec", func() error { _, err := g.Exec(ctx, term(7), insert, item()); return err }},
		{"plain-tx", func() error {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			defer tx.Rollback()
			if err := three(tx); err != nil {
				return err
			}
			return tx.Commit()
		}},
		{"Do", func() error { return g.Do(ctx, term(7), func(tx *mysqlfence.Tx) error { return three(tx) }) }},
	}
	round := func(write func() error) time.Duration {
		const each = 200
		var failed atomic.Value
		start := time.Now()
		var wg sync.WaitGroup
		for range connections {
			wg.Go(func() {
				for range max(each/connections, 25) {
					if err := write(); err != nil {
						failed.Store(err)
						return
					}
				}
			})
		}
		wg.Wait()
		if err := failed.Load(); err != nil {
			b.Fatal(err)
		}
		return time.Since(start)
	}
	for _, w := range ways { // warm
		round(w.write)
	}
	ratios := map[string][]float64{}
	for b.Loop() {
		took := make([]time.Duration, len(ways))
		for _, i := range append([]int{0, 1, 2, 3}, 3, 2, 1, 0) { // there and back: a drift within the round cancels
			took[i] += round(ways[i].write)
		}
		ratios["Exec/plain"] = append(ratios["Exec/plain"], float64(took[0])/float64(took[1]))
		ratios["Do/plain"] = append(ratios["Do/plain"], float64(took[2])/float64(took[3]))
	}
	b.ReportMetric(0, "ns/op")
	for name, all := range ratios {
		slices.Sort(all)
		for q, label := range []string{"", "q1", "median", "q3"} {
			if q > 0 {
				b.ReportMetric(all[(len(all)-1)*q/4], strings.Join([]string{name, label}, "-"))
			}
		}
	}
}
