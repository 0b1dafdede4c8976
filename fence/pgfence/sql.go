package pgfence

import (
	"context"
	"database/sql"

	"aegis/fence"
)

// AdmitSQL is [Guard.Admit] for database/sql, with pgx's stdlib driver or any other whose errors have a method
// SQLState. Call it right after BeginTx, and [ConfirmSQL] right before Commit where savepoints are in use. The caller
// runs the transaction anew after a serialization failure (SQLSTATE 40001 or 40P01); if the term is over, the next
// attempt is [fence.ErrFenced].
func AdmitSQL(ctx context.Context, tx *sql.Tx, t fence.Term) error {
	if err := valid(t); err != nil {
		return err
	}
	_, err := tx.ExecContext(ctx, admitSQL, t.Election, t.Token, int64(t.Nonce), int64(t.Cluster))
	return foreign(ctx, t, err)
}

// ConfirmSQL returns [ErrEnded] unless tx was admitted under t and the admission has not been rolled back.
func ConfirmSQL(ctx context.Context, tx *sql.Tx, t fence.Term) error {
	_, err := tx.ExecContext(ctx, "select aegis.confirm($1, $2)", t.Election, t.Token)
	return foreign(ctx, t, err)
}

// AdvanceSQL is [Guard.Advance] for database/sql. It waits for the transactions that were admitted before it until ctx
// ends; it names nobody.
func AdvanceSQL(ctx context.Context, db *sql.DB, t fence.Term) error {
	if err := valid(t); err != nil {
		return err
	}
	tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return explain(ctx, "advance", &acquireError{err})
	}
	defer tx.Rollback() // nothing to do after a commit
	_, err = tx.ExecContext(ctx, "select aegis.advance($1, $2, $3, $4, $5)", t.Election, t.Token, int64(t.Nonce), int64(t.Cluster), string(t.Node))
	if err != nil {
		return foreign(ctx, t, err)
	}
	if err := tx.Commit(); err != nil {
		return unknown(ctx, err)
	}
	return nil
}
