package pgfence_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"aegis/fence"
	"aegis/fence/pgfence"
)

func TestAdvanceNamesAndEndsWhoHoldsItOff(t *testing.T) {
	g, pool := open(t, pgfence.Config{})
	advance(t, g, 7)
	ctx := bounded(t)
	for name, begin := range map[string]string{
		"session":  "SET application_name = 'scene-01'; BEGIN; SELECT aegis.admit('boss', %); INSERT INTO loot (item) VALUES ('lost')",
		"prepared": "BEGIN; SELECT aegis.admit('boss', %); INSERT INTO loot (item) VALUES ('lost'); PREPARE TRANSACTION 'forgotten'",
	} {
		t.Run(name, func(t *testing.T) {
			r, err := g.Newest(ctx, "boss")
			if err != nil {
				t.Fatal(err)
			}
			conn, err := pool.Acquire(ctx)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Release()
			if _, err := conn.Exec(ctx, replaceToken(begin, r.Token)); err != nil {
				t.Fatal(err)
			}
			start := time.Now()
			err = g.AdvanceWith(ctx, pgfence.AdvanceOptions{Wait: 100 * time.Millisecond}, term(r.Token+1))
			if took := time.Since(start); took < 90*time.Millisecond || took > 5*time.Second {
				t.Errorf("waited %v, want 100ms", took)
			}
			blocked, ok := errors.AsType[*pgfence.BlockedError](err)
			if !ok || len(blocked.Blockers) != 1 {
				t.Fatalf("%v", err)
			}
			b := blocked.Blockers[0]
			if name == "session" {
				wantText(t, err, `advance "boss" waited 100ms`, "application scene-01", "idle in transaction", "INSERT INTO loot", "pg_terminate_backend(", "EndBlockers")
				if b.PID != int(conn.Conn().PgConn().PID()) || time.Since(b.Since) > time.Minute || b.Role != "postgres" {
					t.Errorf("%+v", b)
				}
			} else {
				wantText(t, err, `prepared transaction "forgotten"`, "ROLLBACK PREPARED 'forgotten'")
			}
			wantIs(t, err, context.DeadlineExceeded)
			if again, err := g.Newest(ctx, "boss"); err != nil || again != r {
				t.Errorf("the blocked advance left %v, %v", again, err)
			}

			if err := g.AdvanceWith(ctx, pgfence.AdvanceOptions{Wait: 50 * time.Millisecond, EndBlockers: true}, term(r.Token+1)); err != nil {
				t.Fatal(err)
			}
			commit := "COMMIT"
			if name == "prepared" {
				commit = "COMMIT PREPARED 'forgotten'"
			}
			if _, err := conn.Exec(ctx, commit); err == nil {
				t.Error("the ended transaction could commit")
			}
			wantLoot(t, pool)
		})
	}
}

func TestEndingBlockersNeedsTheRight(t *testing.T) {
	name := database(t)
	owner := connect(t, pg.URL(name, "postgres"))
	role := newRole(t, owner)
	g := guardOn(t, owner, pgfence.Config{})
	if err := g.Grant(bounded(t), role); err != nil {
		t.Fatal(err)
	}
	advance(t, g, 7)
	ctx := bounded(t)
	tx, err := owner.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(ctx)
	if err := g.Admit(ctx, tx, term(7)); err != nil {
		t.Fatal(err)
	}
	app := guardOn(t, connect(t, pg.URL(name, role)), pgfence.Config{})
	err = app.AdvanceWith(ctx, pgfence.AdvanceOptions{Wait: 20 * time.Millisecond, EndBlockers: true}, term(8))
	wantText(t, err, "session ", "role postgres", "42501")
	if err := tx.Commit(ctx); err != nil {
		t.Error(err)
	}
	if err := app.Advance(ctx, term(8)); err != nil {
		t.Error(err)
	}
}

func TestAdvanceNamesTheBlockerWithinItsContext(t *testing.T) {
	g, pool := open(t, pgfence.Config{})
	advance(t, g, 7)
	ctx := bounded(t)
	tx, err := pool.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(ctx)
	if err := g.Admit(ctx, tx, term(7)); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	err = g.Advance(short, term(8))
	wantText(t, err, "session ", "idle in transaction")
	wantIs(t, err, context.DeadlineExceeded)
}

// etcd was restored: its revisions, and so the tokens, are given out once more.
func TestRestoredEtcdIsTold(t *testing.T) {
	g, pool := open(t, pgfence.Config{})
	advance(t, g, 4711)
	ctx := bounded(t)
	twin := term(4711)
	twin.Nonce = 1
	err := g.Advance(ctx, twin)
	wantIs(t, err, fence.ErrTokenWentBack)
	wantText(t, err, "4711", "boss", "aegis token raise --above")
	err = g.Do(ctx, twin, insert("never"))
	wantIs(t, err, fence.ErrTokenWentBack)
	older := term(400)
	wantFenced(t, g.Advance(ctx, older), 400, 4711) // both numbers; the nodes know that it is newer than what they saw
	raised := term(4711 + 1<<30)
	if err := g.Advance(ctx, raised); err != nil {
		t.Fatal(err)
	}
	if err := g.Do(ctx, raised, insert("sword")); err != nil {
		t.Fatal(err)
	}
	wantLoot(t, pool, "sword")
}

func TestForgottenNamesLetNoOldTokenIn(t *testing.T) {
	g, pool := open(t, pgfence.Config{})
	ctx := bounded(t)
	name := func(name string, token fence.Token, cluster uint64) fence.Term {
		return fence.Term{Election: name, Token: token, Cluster: cluster, Node: "scene-01"}
	}
	for _, x := range []fence.Term{name("a", 7, 1), name("b", 9, 1), name("c", 5, 0), name("d", 3, 2)} {
		if err := g.Advance(ctx, x); err != nil {
			t.Fatal(err)
		}
	}
	names, err := g.Names(ctx)
	if err != nil || len(names) != 4 || names[1].Name != "b" || names[1].Token != 9 || names[1].Node != "scene-01" || time.Since(names[1].At) > time.Minute {
		t.Errorf("%+v, %v", names, err)
	}
	for n, want := range map[string]bool{"a": true, "b": true, "nobody": false} {
		if found, err := g.ForgetName(ctx, n); found != want || err != nil {
			t.Errorf("ForgetName(%s): %v, %v", n, found, err)
		}
	}
	_, err = g.ForgetName(ctx, "c")
	wantText(t, err, "no known cluster")
	_, err = g.Exec(ctx, name("a", 7, 1), "INSERT INTO loot (item) VALUES ('x')")
	wantIs(t, err, fence.ErrFenced)
	for _, x := range []fence.Term{name("a", 7, 1), name("a", 9, 1), name("a", 9, 0), name("b", 9, 1), name("b", 8, 0), name("new", 9, 1)} {
		wantIs(t, g.Advance(ctx, x), fence.ErrFenced)
	}
	for _, x := range []fence.Term{name("a", 10, 1), name("other cluster", 2, 2), name("d", 3, 2), name("c", 5, 0)} {
		if err := g.Advance(ctx, x); err != nil {
			t.Error(err)
		}
	}
	if found, err := g.Reset(ctx, "a"); !found || err != nil {
		t.Error(found, err)
	}
	if r, err := g.Newest(ctx, "a"); err != nil || r != (fence.Record{}) {
		t.Error(r, err)
	}
	wantLoot(t, pool)
}

func TestReportModeLetsThroughAndTells(t *testing.T) {
	for _, level := range levels {
		report := &fence.Report{}
		g, pool := open(t, pgfence.Config{Report: report, Isolation: level})
		ctx := bounded(t)
		advance(t, g, 8)
		if err := g.Do(ctx, term(7), insert("by Do")); err != nil {
			t.Error(err)
		}
		if _, err := g.Exec(ctx, term(7), "INSERT INTO loot (item) VALUES ('by Exec')"); err != nil {
			t.Error(err)
		}
		if err := g.Advance(ctx, term(7)); err != nil {
			t.Error(err)
		}
		if report.Count() != 3 {
			t.Errorf("told of %d refusals, want 3", report.Count())
		}
		if err := g.Do(ctx, term(8), insert("by 8")); err != nil || report.Count() != 3 {
			t.Error(err, report.Count())
		}
		tx, err := pool.Begin(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := g.Admit(ctx, tx, term(6)); err != nil || report.Count() != 4 {
			t.Error(err, report.Count())
		}
		_ = tx.Rollback(ctx)
		wantIs(t, g.Do(ctx, term(0), insert("no")), fence.ErrInvalidToken)
		wantLoot(t, pool, "by Do", "by Exec", "by 8")
	}
}
