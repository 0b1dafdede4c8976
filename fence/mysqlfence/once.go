package mysqlfence

import (
	"context"
	"fmt"
	"time"

	"aegis/fence"
)

// MaxKey is the greatest length of a key of [Guard.Once], in bytes.
const MaxKey = 512

// Once runs fn as Do does, but once for each key of the term's election, however many terms, retries and crashes it
// takes: the key is recorded before fn runs and fn's result after, in the transaction of fn's writes. A repeat, under
// this term or a later one, does nothing and returns the first result with first = false. So after [fence.ErrUnknown],
// or after a crash, the same call again makes certain: it is what hands loot out once.
//
// fn's error undoes everything, the key too. Errors are those of Do, and one for a key that is empty or longer than
// MaxKey. A key stays recorded until [Guard.Forget] removes it. Concurrent calls with one key wait for one another.
func (g *Guard) Once(ctx context.Context, t fence.Term, key string, fn func(tx *Tx) ([]byte, error)) (result []byte, first bool, err error) {
	if key == "" || len(key) > MaxKey {
		return nil, false, fmt.Errorf("mysqlfence: once %q: a key has 1 to %d bytes, this one has %d", t.Election, MaxKey, len(key))
	}
	where := " WHERE name = " + literal(t.Election) + " AND k = " + literal(key)
	err = g.Do(ctx, t, func(tx *Tx) error {
		result, first = nil, false // fn may run again
		begin := fmt.Sprintf("INSERT INTO %saegis_once (name, k, token, at) VALUES (%s, %s, %d, UTC_TIMESTAMP(6))",
			g.tables, literal(t.Election), literal(key), t.Token)
		_, err := tx.ExecContext(ctx, begin)
		if number(err) == errDuplicate { // which has waited for whoever was about to record it
			known := "SELECT result FROM " + g.tables + "aegis_once" + where + " LOCK IN SHARE MODE" // a snapshot may be older
			return tx.QueryRowContext(ctx, known).Scan(&result)
		}
		if err != nil {
			return g.explain(ctx, "once", err)
		}
		if result, err = fn(tx); err != nil {
			return err
		}
		first = true
		end := "UPDATE " + g.tables + "aegis_once SET result = " + bytesLiteral(result) + where
		_, err = tx.ExecContext(ctx, end)
		return err
	})
	if err != nil {
		return nil, false, err
	}
	return result, first, nil
}

func bytesLiteral(b []byte) string {
	if b == nil {
		return "NULL"
	}
	return literal(string(b))
}

// Forget removes the records of [Guard.Once] from before the given instant, by the server's clock, and returns how many. A
// repeat of a forgotten key runs again, so before must be further back than any repeat can come. The fence itself is
// not touched: its records, one for each name, say which tokens are old, and none is ever removed.
func (g *Guard) Forget(ctx context.Context, before time.Time) (removed int64, err error) {
	if err := g.examine(ctx); err != nil {
		return 0, err
	}
	const batch = 1000 // so that no writer waits long for its locks
	query := fmt.Sprintf("DELETE FROM %saegis_once WHERE at < '%s' LIMIT %d", g.tables, before.UTC().Format("2006-01-02 15:04:05.000000"), batch)
	for {
		res, err := g.db.ExecContext(ctx, query)
		if number(err) == errDeadlock && ctx.Err() == nil {
			continue
		}
		if err != nil {
			return removed, g.explain(ctx, "forget", err)
		}
		n, err := res.RowsAffected()
		if removed += n; err != nil || n < batch {
			return removed, err
		}
	}
}
