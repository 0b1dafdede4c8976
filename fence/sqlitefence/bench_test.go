package sqlitefence_test

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"aegis/fence/sqlitefence"

	"github.com/ncruces/go-sqlite3"
	"github.com/ncruces/go-sqlite3/driver"
)

// BenchmarkGuardedOverPlain compares guarded writes with the same writes without a guard, on files and connections of
// the same kind, one writer. Disks drift, so the ways take turns in short rounds, and what counts are the ratios of
// the medians: guarded / plain throughput, 1 being as fast.
func BenchmarkGuardedOverPlain(b *testing.B) {
	const insert = "INSERT INTO loot (item) VALUES (?)"
	ctx := context.Background()
	g, _ := open(b)
	advance(b, g, 7)
	db, err := driver.Open(filepath.Join(b.TempDir(), "plain.db"), func(c *sqlite3.Conn) error {
		return c.Exec("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL")
	})
	if err != nil {
		b.Fatal(err)
	}
	defer db.Close()
	db.SetMaxOpenConns(1)
	if _, err := db.Exec("CREATE TABLE loot (id INTEGER PRIMARY KEY, item TEXT UNIQUE)"); err != nil {
		b.Fatal(err)
	}

	n := 0
	item := func() string { n++; return fmt.Sprint("item ", n) }
	ways := []struct {
		name  string
		write func() error
		took  []time.Duration
	}{
		{name: "plain statement", write: func() error {
			_, err := db.ExecContext(ctx, insert, item())
			return err
		}},
		{name: "Exec", write: func() error {
			_, err := g.Exec(ctx, term(7), insert, item())
			return err
		}},
		{name: "plain transaction", write: func() error {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			defer tx.Rollback()
			for range 3 {
				if _, err := tx.ExecContext(ctx, insert, item()); err != nil {
					return err
				}
			}
			return tx.Commit()
		}},
		{name: "Do", write: func() error {
			return g.Do(ctx, term(7), func(tx *sqlitefence.Tx) error {
				for range 3 {
					if _, err := tx.ExecContext(ctx, insert, item()); err != nil {
						return err
					}
				}
				return nil
			})
		}},
	}
	for b.Loop() {
		for i := range ways {
			start := time.Now()
			for range 10 {
				if err := ways[i].write(); err != nil {
					b.Fatal(ways[i].name, err)
				}
			}
			ways[i].took = append(ways[i].took, time.Since(start))
		}
	}
	median := func(i int) float64 {
		slices.Sort(ways[i].took)
		return float64(ways[i].took[len(ways[i].took)/2]) / 10
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(median(0)/1e3, "µs/plain-stmt")
	b.ReportMetric(median(1)/1e3, "µs/Exec")
	b.ReportMetric(median(0)/median(1), "Exec/plain-stmt")
	b.ReportMetric(median(2)/1e3, "µs/plain-tx")
	b.ReportMetric(median(3)/1e3, "µs/Do")
	b.ReportMetric(median(2)/median(3), "Do/plain-tx")
}
