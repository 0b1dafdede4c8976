package mysqlfence_test

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"testing"

	"aegis/fence"
	"aegis/fence/fencetest"
	"aegis/fence/mysqlfence"
)

// TestConformance runs the suite at each isolation level, with a round trip for each statement, and for guarded
// statements, whose hook is called before their one step.
func TestConformance(t *testing.T) {
	for _, level := range []string{"READ-UNCOMMITTED", "READ-COMMITTED", "REPEATABLE-READ", "SERIALIZABLE"} {
		t.Run(level, func(t *testing.T) {
			t.Parallel()
			fencetest.Test(t, func(t *testing.T) fencetest.Subject {
				return subject(t, params{isolationVariable(t): level}, writeByDo)
			})
		})
	}
	t.Run("Admit", func(t *testing.T) {
		t.Parallel()
		fencetest.Test(t, func(t *testing.T) fencetest.Subject { return subject(t, nil, writeByAdmit) })
	})
	t.Run("Exec", func(t *testing.T) {
		t.Parallel()
		fencetest.Test(t, func(t *testing.T) fencetest.Subject { return subject(t, nil, writeByExec) })
	})
	t.Run("OneStatementAPacket", func(t *testing.T) {
		t.Parallel()
		fencetest.Test(t, func(t *testing.T) fencetest.Subject { return subject(t, params{"aegis": "plain"}, writeByDo) })
	})
	t.Run("SnapshotIsolation", func(t *testing.T) {
		t.Parallel()
		fencetest.Test(t, func(t *testing.T) fencetest.Subject {
			return subject(t, params{"innodb_snapshot_isolation": "ON"}, writeByAdmit)
		})
	})
}

func TestConformanceOfOnce(t *testing.T) {
	t.Run("Default", func(t *testing.T) {
		fencetest.TestOnce(t, func(t *testing.T) fencetest.Subject { return subject(t, nil, writeByDo) })
	})
	t.Run("OneStatementAPacket", func(t *testing.T) {
		fencetest.TestOnce(t, func(t *testing.T) fencetest.Subject { return subject(t, params{"aegis": "plain"}, writeByDo) })
	})
}

// params are session variables; "aegis": "plain" stands for a pool as people have it, without Open's settings.
type params map[string]string

// isolationVariable is the name of the isolation level: MariaDB before 11.1 calls it otherwise.
func isolationVariable(t *testing.T) string {
	db, err := sql.Open("mysql", server.DSN(""))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	var name, value string
	if err := db.QueryRow("SHOW VARIABLES WHERE Variable_name IN ('tx_isolation', 'transaction_isolation')").Scan(&name, &value); err != nil {
		t.Fatal(err)
	}
	return name
}

type writer func(ctx context.Context, g *mysqlfence.Guard, t fence.Term, key, value string, between func()) error

func subject(t *testing.T, p params, write writer) fencetest.Subject {
	return subjectOn(t, database(t), p, write)
}

func subjectOn(t *testing.T, name string, p params, write writer) fencetest.Subject {
	g, err := openWith(name, p)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { g.DB().Close() })
	return fencetest.Subject{
		Guard: g,
		Write: func(ctx context.Context, term fence.Term, key, value string, between func()) error {
			return write(ctx, g, term, key, value, between)
		},
		Read: func(ctx context.Context, key string) (value string, err error) {
			err = g.DB().QueryRowContext(ctx, "SELECT v FROM kv WHERE k = ?", key).Scan(&value)
			if errors.Is(err, sql.ErrNoRows) {
				return "", nil
			}
			return value, err
		},
		Once: func(ctx context.Context, term fence.Term, key string, fn func(func(key, value string) error) ([]byte, error)) ([]byte, bool, error) {
			return g.Once(ctx, term, key, func(tx *mysqlfence.Tx) ([]byte, error) {
				return fn(func(key, value string) error { return put(ctx, tx, key, value) })
			})
		},
		Reopen: func() (fencetest.Subject, error) {
			if err := g.DB().Close(); err != nil {
				return fencetest.Subject{}, err
			}
			return subjectOn(t, name, p, write), nil
		},
		Peer: func() (fencetest.Subject, error) { return subjectOn(t, name, p, write), nil },
	}
}

func openWith(database string, p params) (*mysqlfence.Guard, error) {
	c := server.Config(database)
	c.Params = map[string]string{}
	for k, v := range p {
		if k != "aegis" {
			if c.Params[k] = v; strings.Contains(v, "-") {
				c.Params[k] = "'" + v + "'"
			}
		}
	}
	if p["aegis"] == "" {
		return mysqlfence.Open(c.FormatDSN(), mysqlfence.Config{})
	}
	db, err := sql.Open("mysql", c.FormatDSN())
	if err != nil {
		return nil, err
	}
	return mysqlfence.New(db, mysqlfence.Config{})
}

const upsert = "INSERT INTO kv VALUES (?, ?) ON DUPLICATE KEY UPDATE v = VALUES(v)"

func put(ctx context.Context, tx interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}, key, value string) error {
	_, err := tx.ExecContext(ctx, upsert, key, value)
	return err
}

func writeByDo(ctx context.Context, g *mysqlfence.Guard, t fence.Term, key, value string, between func()) error {
	first := true
	return g.Do(ctx, t, func(tx *mysqlfence.Tx) error {
		if err := put(ctx, tx, key, value); err != nil {
			return err
		}
		if between != nil && first {
			first = false
			between()
		}
		return nil
	})
}

func writeByAdmit(ctx context.Context, g *mysqlfence.Guard, t fence.Term, key, value string, between func()) error {
	tx, err := g.DB().BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := g.Admit(ctx, tx, t); err != nil {
		return err
	}
	if err := put(ctx, tx, key, value); err != nil {
		return err
	}
	if between != nil {
		between()
	}
	return tx.Commit()
}

func writeByExec(ctx context.Context, g *mysqlfence.Guard, t fence.Term, key, value string, between func()) error {
	if between != nil {
		between()
	}
	_, err := g.Exec(ctx, t, upsert, key, value)
	return err
}
