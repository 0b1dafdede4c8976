package pgfence_test

import (
	"context"
	"errors"
	"testing"

	"aegis/fence"
	"aegis/fence/fencetest"
	"aegis/fence/pgfence"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

func TestConformance(t *testing.T) {
	for _, level := range levels[:2] { // serializable is repeatable read to the guard; TestConformanceOfOnce has it
		t.Run(string(level), func(t *testing.T) {
			fencetest.Test(t, func(t *testing.T) fencetest.Subject { return newSubject(t, pgfence.Config{Isolation: level}) })
		})
	}
}

func TestConformanceOfOnce(t *testing.T) {
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			fencetest.TestOnce(t, func(t *testing.T) fencetest.Subject { return newSubject(t, pgfence.Config{Isolation: level}) })
		})
	}
}

// TestConformanceOfExec lets the suite write by the one guarded statement, TestConformanceOfAdmit in transactions of its own.
func TestConformanceOfExec(t *testing.T) {
	fencetest.Test(t, func(t *testing.T) fencetest.Subject {
		s := newSubject(t, pgfence.Config{})
		return withExec(s)
	})
}

func withExec(s fencetest.Subject) fencetest.Subject {
	g := s.Guard.(*pgfence.Guard)
	s.Write = func(ctx context.Context, term fence.Term, key, value string, between func()) error {
		if between != nil { // it admits and commits in one step
			between()
		}
		_, err := g.Exec(ctx, term, upsert, key, value)
		return err
	}
	if reopen := s.Reopen; reopen != nil {
		s.Reopen = func() (fencetest.Subject, error) {
			s, err := reopen()
			return withExec(s), err
		}
	}
	if peer := s.Peer; peer != nil {
		s.Peer = func() (fencetest.Subject, error) {
			s, err := peer()
			return withExec(s), err
		}
	}
	return s
}

func TestConformanceOfAdmit(t *testing.T) {
	fencetest.Test(t, func(t *testing.T) fencetest.Subject {
		pool := connect(t, pg.URL(database(t), "postgres"))
		g := guardOn(t, pool, pgfence.Config{})
		s := subjectOn(t, g, pool, false)
		s.Reopen, s.Peer = nil, nil
		s.Write = func(ctx context.Context, term fence.Term, key, value string, between func()) error {
			return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				if err := g.Admit(ctx, tx, term); err != nil {
					return err
				}
				if _, err := tx.Exec(ctx, upsert, key, value); err != nil {
					return err
				}
				if between != nil {
					between()
				}
				return nil
			})
		}
		return s
	})
}

const upsert = "INSERT INTO kv VALUES ($1, $2) ON CONFLICT (key) DO UPDATE SET value = $2"

func newSubject(t *testing.T, cfg pgfence.Config) fencetest.Subject {
	pool := connect(t, pg.URL(database(t), "postgres"))
	return subjectOn(t, guardOn(t, pool, cfg), pool, true, cfg)
}

// subjectOn is a subject that restarts the server as a crash would when it is reopened first, and then, for speed, kills
// its sessions only.
func subjectOn(t *testing.T, g *pgfence.Guard, pool *pgxpool.Pool, restart bool, cfg ...pgfence.Config) fencetest.Subject {
	anew := func() (*pgfence.Guard, *pgxpool.Pool) {
		p := connect(t, pool.Config().ConnString())
		return guardOn(t, p, cfg[0]), p
	}
	return fencetest.Subject{
		Guard: g,
		Write: func(ctx context.Context, term fence.Term, key, value string, between func()) error {
			called := false
			return g.Do(ctx, term, func(tx *pgfence.Tx) error {
				if _, err := tx.Exec(ctx, upsert, key, value); err != nil {
					return err
				}
				if between != nil && !called { // fn may run again
					called = true
					between()
				}
				return nil
			})
		},
		Read: func(ctx context.Context, key string) (value string, err error) {
			err = pool.QueryRow(ctx, "SELECT value FROM kv WHERE key = $1", key).Scan(&value)
			if errors.Is(err, pgx.ErrNoRows) {
				return "", nil
			}
			return value, err
		},
		Once: func(ctx context.Context, term fence.Term, key string, fn func(func(key, value string) error) ([]byte, error)) ([]byte, bool, error) {
			return g.Once(ctx, term, key, func(tx *pgfence.Tx) ([]byte, error) {
				return fn(func(key, value string) error {
					_, err := tx.Exec(ctx, upsert, key, value)
					return err
				})
			})
		},
		Reopen: func() (fencetest.Subject, error) {
			if restart && !pg.Given() {
				pg.Stop()
				if err := pg.Start(); err != nil {
					return fencetest.Subject{}, err
				}
			}
			pool.Reset()
			g, p := anew()
			return subjectOn(t, g, p, false, cfg...), nil
		},
		Peer: func() (fencetest.Subject, error) {
			g, p := anew()
			return subjectOn(t, g, p, restart, cfg...), nil
		},
	}
}
