package fence

import (
	"errors"
	"fmt"
)

// A guarded write ends in one of four ways: done (nil), refused ([ErrFenced]), failed with nothing done (the store's
// own error), or unknown ([ErrUnknown]). Test for these with [errors.Is].
var (
	// ErrFenced: the guard refused, and nothing was done. The term is over, or the guard was never advanced to it.
	ErrFenced = errors.New("fenced")

	// ErrUnknown: the reply to the commit was lost; the write is done or not, and repeating it may do it twice.
	// A guard's Once makes the repetition safe.
	ErrUnknown = errors.New("outcome unknown: the reply to the commit was lost")

	// ErrTokenWentBack: the guard has already taken this token from another term, or a greater one from a term that
	// the cluster no longer knows: etcd was restored from a snapshot and counts from the past.
	ErrTokenWentBack = errors.New("token went back")

	// ErrForeignCluster: the guard belongs to the tokens of another etcd cluster (staging pointed at production?).
	ErrForeignCluster = errors.New("token of a foreign cluster")

	// ErrInvalidToken: the token is outside 1 … MaxToken. Such errors are ErrFenced as well: they were refused.
	ErrInvalidToken = errors.New("invalid token")
)

// FencedError is a refusal with both tokens. errors.Is(err, ErrFenced) holds.
type FencedError struct {
	Name   string // of the election or shard; "" where the guard has but one
	Token  Token  // that the write carried
	Newest Token  // that the guard has taken; 0 where there is no record of the name or it is not known
}

func (e *FencedError) Error() string {
	name := ""
	if e.Name != "" {
		name = fmt.Sprintf(" %q", e.Name)
	}
	switch {
	case e.Newest == 0:
		return fmt.Sprintf("fenced:%s token %d refused: the guard has taken no token yet; advance it before the first write", name, e.Token)
	case e.Token > e.Newest:
		return fmt.Sprintf("fenced:%s token %d refused: the guard's newest is %d; advance it before the first write", name, e.Token, e.Newest)
	default:
		return fmt.Sprintf("fenced:%s token %d refused: the guard's newest is %d; the term is over, stop its work", name, e.Token, e.Newest)
	}
}

// Is reports that every FencedError is ErrFenced.
func (e *FencedError) Is(target error) bool { return target == ErrFenced }

// TokenWentBackError is a token at or below one that the guard took from another history of the cluster.
// errors.Is(err, ErrTokenWentBack) holds.
type TokenWentBackError struct {
	Name          string
	Token, Newest Token
}

func (e *TokenWentBackError) Error() string {
	return fmt.Sprintf("token went back: %q was given token %d, but the guard has already taken %d from another term; "+
		"etcd seems restored from a snapshot: stop the writers and run `aegis token raise --above %d`", e.Name, e.Token, e.Newest, e.Newest)
}

// Is reports that every TokenWentBackError is ErrTokenWentBack.
func (e *TokenWentBackError) Is(target error) bool { return target == ErrTokenWentBack }

// ForeignClusterError names both clusters. errors.Is(err, ErrForeignCluster) holds.
type ForeignClusterError struct {
	Name           string
	Cluster, Known uint64 // the term's; the guard's
}

func (e *ForeignClusterError) Error() string {
	return fmt.Sprintf("token of a foreign cluster: %q belongs to etcd cluster %x at this guard, the token comes from cluster %x; "+
		"check the endpoints; docs/guide.md says how to move a guard to another cluster", e.Name, e.Known, e.Cluster)
}

// Is reports that every ForeignClusterError is ErrForeignCluster.
func (e *ForeignClusterError) Is(target error) bool { return target == ErrForeignCluster }
