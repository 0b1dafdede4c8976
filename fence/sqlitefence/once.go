package sqlitefence

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"aegis/fence"
)

// Once runs fn as Do does, but once for each key of the term's election, however many terms, retries and crashes it
// takes: the key is recorded before fn runs and fn's result after, in the transaction of fn's writes. A repeat, under
// this term or a later one, does nothing and returns the first result with first = false. So after [fence.ErrUnknown],
// or after a crash, the same call again makes certain: it is what hands loot out once.
//
// fn's error undoes everything, the key too. Errors are those of Do, and one for an empty key. A key stays recorded
// for good.
func (g *Guard) Once(ctx context.Context, t fence.Term, key string, fn func(tx *Tx) ([]byte, error)) (result []byte, first bool, err error) {
	if key == "" {
		return nil, false, fmt.Errorf("sqlitefence: once %q: the key is empty", t.Election)
	}
	err = g.Do(ctx, t, func(tx *Tx) error {
		const known = "SELECT result FROM aegis_once WHERE name = ? AND key = ?"
		err := tx.tx.QueryRowContext(ctx, known, t.Election, key).Scan(&result)
		if !errors.Is(err, sql.ErrNoRows) {
			return err
		}
		const begin = "INSERT INTO aegis_once (name, key, token, at) VALUES (?, ?, ?, ?)"
		if _, err := tx.tx.ExecContext(ctx, begin, t.Election, key, t.Token, now()); err != nil {
			return err
		}
		if result, err = fn(tx); err != nil {
			return err
		}
		first = true
		const end = "UPDATE aegis_once SET result = ? WHERE name = ? AND key = ?"
		_, err = tx.ExecContext(ctx, end, result, t.Election, key)
		return err
	})
	if err != nil {
		return nil, false, err
	}
	return result, first, nil
}

func now() string { return time.Now().UTC().Format(time.RFC3339Nano) }
