package demo

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"

	"aegis"
	"aegis/fence/sqlitefence"

	"github.com/ncruces/go-sqlite3/driver"
)

// schema is the loot table as it is found in the wild: the owner of the boss is thought to be the only writer, so
// nothing but its word keeps a kill from being paid twice.
const schema = `
CREATE TABLE IF NOT EXISTS kills (id INTEGER PRIMARY KEY, item TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS loot  (id INTEGER PRIMARY KEY, kill INTEGER NOT NULL, item TEXT NOT NULL, player TEXT NOT NULL, scene TEXT NOT NULL, token INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS gold  (player TEXT PRIMARY KEY, balance INTEGER NOT NULL);`

// execer is what a settlement needs of a transaction: *sql.Tx without the guard, *sqlitefence.Tx with it.
type execer interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// store is the SQLite file, with or without the guard in front.
type store struct {
	db    *sql.DB
	guard *sqlitefence.Guard // nil without the fence

	bypass bool // tests: the guard is there, and advanced, but writes go around it
}

func openStore(file string, m mode, bypass bool) (*store, error) {
	db, err := openPlain(file)
	if err != nil || m == plain {
		return &store{db: db}, err
	}
	guard, err := sqlitefence.Open(file, sqlitefence.Config{})
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return &store{db: db, guard: guard, bypass: bypass}, nil
}

func (s *store) Close() error {
	err := s.db.Close()
	if s.guard != nil {
		err = errors.Join(err, s.guard.Close())
	}
	return err
}

// openPlain opens the file as a program without aegis does.
func openPlain(file string) (*sql.DB, error) {
	pragmas := url.Values{"_txlock": {"immediate"}, "_pragma": {"busy_timeout(10000)", "journal_mode(wal)", "synchronous(full)"}}
	db, err := driver.Open("file:" + (&url.URL{Path: file}).EscapedPath() + "?" + pragmas.Encode())
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", file, err)
	}
	return db, nil
}

// settle is the one place where the two runs differ.
func (s *store) settle(ctx context.Context, term aegis.Term, fn func(tx execer) error) error {
	if s.guard != nil && !s.bypass {
		return s.guard.Do(ctx, term, func(tx *sqlitefence.Tx) error { return fn(tx) })
	}
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	if err := fn(tx); err != nil {
		return errors.Join(err, tx.Rollback())
	}
	return tx.Commit()
}

// unpaid returns the oldest kills without loot.
func (s *store) unpaid(ctx context.Context, limit int) ([]int, error) {
	return column[int](ctx, s.db, "SELECT id FROM kills WHERE id NOT IN (SELECT kill FROM loot) ORDER BY id LIMIT ?", limit)
}

func column[T any](ctx context.Context, db *sql.DB, query string, args ...any) (all []T, err error) {
	rows, err := db.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var v T
		if err := rows.Scan(&v); err != nil {
			return nil, err
		}
		all = append(all, v)
	}
	return all, rows.Err()
}

// Payment is a row of the loot table, in the order of the table.
type Payment struct {
	Kill   int         `json:"kill"`
	Item   string      `json:"item"`
	Player string      `json:"player"`
	Scene  string      `json:"scene"`
	Token  aegis.Token `json:"token"`
}

// ledger is what the database says in the end.
type ledger struct {
	kills    []int
	payments []Payment
	gold     int
}

func audit(ctx context.Context, db *sql.DB) (l ledger, err error) {
	if l.kills, err = column[int](ctx, db, "SELECT id FROM kills ORDER BY id"); err != nil {
		return l, err
	}
	if err = db.QueryRowContext(ctx, "SELECT coalesce(sum(balance), 0) FROM gold").Scan(&l.gold); err != nil {
		return l, err
	}
	rows, err := db.QueryContext(ctx, "SELECT kill, item, player, scene, token FROM loot ORDER BY id")
	if err != nil {
		return l, err
	}
	defer rows.Close()
	for rows.Next() {
		var p Payment
		if err := rows.Scan(&p.Kill, &p.Item, &p.Player, &p.Scene, &p.Token); err != nil {
			return l, err
		}
		l.payments = append(l.payments, p)
	}
	return l, rows.Err()
}
