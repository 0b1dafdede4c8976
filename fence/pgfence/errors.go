package pgfence

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strconv"

	"aegis/fence"

	"github.com/jackc/pgx/v5/pgconn"
)

// SQLSTATEs of the schema's refusals, for callers of the SQL functions. Errors of this package are told apart by
// [errors.Is] and fence's errors instead.
const (
	StateFenced         = "ZF001" // fence.ErrFenced
	StateTokenWentBack  = "ZF002" // fence.ErrTokenWentBack
	StateForeignCluster = "ZF003" // fence.ErrForeignCluster
	StateInvalid        = "ZF004" // fence.ErrInvalidToken
	StateNotAdmitted    = "ZF005" // fence.ErrFenced: a protected table in a transaction that was not admitted
	StateEnded          = "ZF006" // ErrEnded
	StateNewerSchema    = "ZF007" // ErrNewerSchema
)

var (
	// ErrEnded: something ended the guarded transaction before its commit, or rolled its admission back, or a failed
	// statement was overlooked inside fn. Nothing that came after the end was written.
	ErrEnded = errors.New("pgfence: the guarded transaction was ended inside fn")

	// ErrNotInstalled: the database has no schema aegis, or this role may not use it.
	ErrNotInstalled = errors.New("the schema aegis is missing in this database")

	// ErrNewerSchema: the database's schema aegis is of a newer version than this program knows.
	ErrNewerSchema = errors.New("the schema aegis is of a newer version; use a newer aegis")
)

const (
	serializationFailure = "40001"
	deadlockDetected     = "40P01"
	lockNotAvailable     = "55P03"
)

func isState(err error, state string) bool {
	e, ok := errors.AsType[*pgconn.PgError](err)
	return ok && e.Code == state
}

// retriable: nothing was done, and the same again may succeed.
func retriable(err error) bool {
	return (isState(err, serializationFailure) || isState(err, deadlockDetected)) && !errors.Is(err, fence.ErrUnknown)
}

// fatal errors end the session: the last one before the reply to a commit does not say what became of it.
func fatal(e *pgconn.PgError) bool {
	severity := e.SeverityUnlocalized
	if severity == "" {
		severity = e.Severity
	}
	return severity != "ERROR"
}

func valid(t fence.Term) error {
	if err := fence.ValidToken(t.Token); err != nil {
		return fmt.Errorf("pgfence: %q: %w", t.Election, err)
	}
	if n := len(t.Election); n < 1 || n > 255 {
		return fmt.Errorf("pgfence: the election's name has %d bytes, must have 1 to 255", n)
	}
	return nil
}

type acquireError struct{ err error }

func (e *acquireError) Error() string { return e.err.Error() }
func (e *acquireError) Unwrap() error { return e.err }

// detail is what the schema puts into DETAIL.
type detail struct {
	Name         string
	Token        json.Number
	Newest       fence.Token
	Cluster      string
	KnownCluster string `json:"known_cluster"`
}

// refusal turns an error with an SQLSTATE of the schema into fence's, nil if it is none.
func refusal(state, text, message string) error {
	var d detail
	_ = json.Unmarshal([]byte(text), &d)
	token, _ := strconv.ParseInt(d.Token.String(), 10, 64)
	switch state {
	case StateFenced:
		return &fence.FencedError{Name: d.Name, Token: token, Newest: d.Newest}
	case StateTokenWentBack:
		return &fence.TokenWentBackError{Name: d.Name, Token: token, Newest: d.Newest}
	case StateForeignCluster:
		cluster, _ := strconv.ParseUint(d.Cluster, 16, 64)
		known, _ := strconv.ParseUint(d.KnownCluster, 16, 64)
		return &fence.ForeignClusterError{Name: d.Name, Cluster: cluster, Known: known}
	case StateInvalid:
		return fmt.Errorf("pgfence: %w: %w: %s", fence.ErrFenced, fence.ErrInvalidToken, message)
	case StateNotAdmitted:
		return fmt.Errorf("pgfence: %w: %s", fence.ErrFenced, message)
	case StateEnded:
		return fmt.Errorf("%w: %s", ErrEnded, message)
	case StateNewerSchema:
		return fmt.Errorf("pgfence: %w: %s", ErrNewerSchema, message)
	}
	return nil
}

// reported is the refusal that aegis.report returned for t.
func reported(t fence.Term, text *string) error {
	if text == nil {
		return nil
	}
	if err := refusal((*text)[:5], (*text)[5:], ""); err != nil {
		return err
	}
	return fmt.Errorf("pgfence: %s: %s", t, *text)
}

// explain turns the database's refusals into fence's errors and adds what to do to others. op "" is for errors of fn,
// which are the caller's own and stay as they are unless they are refusals.
func explain(ctx context.Context, op string, err error) error {
	if err == nil {
		return nil
	}
	pgerr, ok := errors.AsType[*pgconn.PgError](err)
	if ok {
		message := pgerr.Message
		if pgerr.Hint != "" {
			message += "; " + pgerr.Hint
		}
		if r := refusal(pgerr.Code, pgerr.Detail, message); r != nil {
			if op == "" && !errors.Is(err, r) {
				return fmt.Errorf("%w [%w]", r, err)
			}
			return r
		}
	}
	if op == "" {
		return err
	}
	hint := ""
	if ok {
		hint = advice(pgerr)
	}
	if _, unreachable := errors.AsType[*acquireError](err); unreachable && !ok && ctx.Err() == nil {
		hint = "the server cannot be reached: check that it runs, and the pool's address"
	}
	switch {
	case ok && (pgerr.Code == "3F000" || pgerr.Code == "42883" || pgerr.Code == "42P01") && !errors.Is(err, ErrNotInstalled):
		err = fmt.Errorf("%w: %w", ErrNotInstalled, err)
	case ok && pgerr.Code == "25P02":
		err = fmt.Errorf("%w: a statement had failed: %w", ErrEnded, err)
	case ctx.Err() != nil && !errors.Is(err, context.Cause(ctx)):
		err = fmt.Errorf("%w: %w", context.Cause(ctx), err)
	}
	if hint != "" {
		return fmt.Errorf("pgfence: %s: %w (%s)", op, err, hint)
	}
	return fmt.Errorf("pgfence: %s: %w", op, err)
}

func advice(e *pgconn.PgError) string {
	switch e.Code {
	case "28P01", "28000":
		return "the server refused user or password: check the pool's configuration and pg_hba.conf"
	case "3D000":
		return "the database does not exist: check the pool's address"
	case "3F000", "42883", "42P01":
		return "Install creates the schema, or run what Schema returns as its owner"
	case "42501":
		return "this role lacks a right: run what Grants returns as the schema's owner; installing, forgetting and resetting are the owner's"
	case "25006":
		return "the server or the session is read-only, and a replica cannot admit, since it cannot lock: connect to the primary (target_session_attrs=read-write)"
	case "53100":
		return "the server's disk is full: nothing was written"
	case "53300":
		return "the server has no connection to spare: lower the pools' sizes or raise max_connections"
	case "57P03", "57P01", "57P02":
		return "the server starts, stops or recovers: try again"
	}
	return ""
}

// For drivers other than pgx, which show the SQLSTATE and the message only. Nothing that a user chose follows the number.
var newestIn = regexp.MustCompile(`(?s).*newest is ([0-9]+)`)

// foreign turns an error of any database/sql driver into fence's.
func foreign(ctx context.Context, t fence.Term, err error) error {
	if _, ok := errors.AsType[*pgconn.PgError](err); ok {
		return explain(ctx, "admit", err)
	}
	var state interface{ SQLState() string }
	if !errors.As(err, &state) {
		return explain(ctx, "admit", err)
	}
	d := detail{Name: t.Election, Token: json.Number(strconv.FormatInt(t.Token, 10)), Cluster: strconv.FormatUint(t.Cluster, 16)}
	if m := newestIn.FindStringSubmatch(err.Error()); m != nil {
		d.Newest, _ = strconv.ParseInt(m[1], 10, 64)
	} else if state.SQLState() == StateTokenWentBack {
		d.Newest = t.Token
	}
	text, _ := json.Marshal(map[string]any{"name": d.Name, "token": t.Token, "newest": d.Newest, "cluster": d.Cluster})
	if r := refusal(state.SQLState(), string(text), err.Error()); r != nil {
		return r
	}
	return explain(ctx, "admit", err)
}
