package sqlitefence_test

import (
	"context"
	"database/sql"
	"errors"
	"path/filepath"
	"testing"

	"aegis/fence"
	"aegis/fence/fencetest"
	"aegis/fence/sqlitefence"
)

func TestConformance(t *testing.T) { fencetest.Test(t, newSubject) }

func TestConformanceOfOnce(t *testing.T) { fencetest.TestOnce(t, newSubject) }

func newSubject(t *testing.T) fencetest.Subject {
	path := filepath.Join(t.TempDir(), "test.db")
	g := reopen(t, path)
	if err := g.Setup(bounded(t), "CREATE TABLE kv (key TEXT PRIMARY KEY, value TEXT)"); err != nil {
		t.Fatal(err)
	}
	return subjectOn(t, g, path)
}

func subjectOn(t *testing.T, g *sqlitefence.Guard, path string) fencetest.Subject {
	return fencetest.Subject{
		Guard: g,
		Write: func(ctx context.Context, term fence.Term, key, value string, between func()) error {
			return g.Do(ctx, term, func(tx *sqlitefence.Tx) error {
				if err := put(ctx, tx, key, value); err != nil {
					return err
				}
				if between != nil {
					between()
				}
				return nil
			})
		},
		Read: func(ctx context.Context, key string) (value string, err error) {
			err = g.DB().QueryRowContext(ctx, "SELECT value FROM kv WHERE key = ?", key).Scan(&value)
			if errors.Is(err, sql.ErrNoRows) {
				return "", nil
			}
			return value, err
		},
		Once: func(ctx context.Context, term fence.Term, key string, fn func(func(key, value string) error) ([]byte, error)) ([]byte, bool, error) {
			return g.Once(ctx, term, key, func(tx *sqlitefence.Tx) ([]byte, error) {
				return fn(func(key, value string) error { return put(ctx, tx, key, value) })
			})
		},
		Reopen: func() (fencetest.Subject, error) {
			if err := g.Close(); err != nil {
				return fencetest.Subject{}, err
			}
			return subjectOn(t, reopen(t, path), path), nil
		},
		Peer: func() (fencetest.Subject, error) { return subjectOn(t, reopen(t, path), path), nil },
	}
}

func put(ctx context.Context, tx *sqlitefence.Tx, key, value string) error {
	_, err := tx.ExecContext(ctx, "INSERT INTO kv VALUES (?1, ?2) ON CONFLICT (key) DO UPDATE SET value = ?2", key, value)
	return err
}
