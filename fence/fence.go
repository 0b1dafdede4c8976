// Package fence makes a resource refuse a leader whose term is over.
//
// The resource is authoritative, not the leader: whatever a process believes about its own leadership, its write
// commits only if the token that it carries is still the newest that the resource has taken.
//
//	leader of term 7 ──── write(7) ───▶ ┌────────────────────┐
//	   │ pause, partition …             │ guard: newest = 7  │  7 = 7: admitted
//	leader of term 8 ──── Advance(8) ─▶ │ guard: newest = 8  │
//	   │                                │                    │
//	old leader wakes ──── write(7) ───▶ │ guard: newest = 8  │  7 < 8: refused, [FencedError]{7, 8}
//	                                    └────────────────────┘
//
// A [Guard] takes the token of a new term before that term's first read ([Guard.Advance]), and from then on admits
// only writes that carry exactly this token. The comparison and the write are one atomic step; a comparison that is
// merely followed by a write protects nothing, since the advance fits in between. [Fencer] is the guard in memory;
// the packages below this one are guards in stores and services.
//
// The package imports the standard library only and knows nothing of etcd: any counter that grows with each change
// of owner will do as a token. The idea of the fencing token is from Martin Kleppmann, "How to do distributed
// locking" (2016), and, as "sequencer", from Mike Burrows, "The Chubby lock service" (OSDI 2006).
package fence

import (
	"context"
	"fmt"
)

// NodeID names one process of the cluster.
type NodeID string

// Token grows with every term over the whole cluster. Valid tokens are 1 … [MaxToken].
type Token = int64

// MaxToken is the largest valid token, 2^53 − 1: the largest integer up to which JSON numbers and Lua's (and so
// Redis') doubles carry every integer exactly.
const MaxToken Token = 1<<53 - 1

// Term is one reign: who leads what, under which token. It is a plain value and may be copied and compared.
type Term struct {
	Election string // what is led; also the name under which guards keep the token
	Node     NodeID // who leads it
	Token    Token  // grows with each term
	Nonce    uint64 // of the winning attempt, 0 where unknown: tells two terms of equal token apart
	Cluster  uint64 // of the etcd cluster that gave the token, 0 where unknown
}

// String returns the term in the form used in logs and errors.
func (t Term) String() string {
	return fmt.Sprintf("%s (token %d, node %s)", t.Election, t.Token, t.Node)
}

// Guard is a resource that refuses stale tokens.
type Guard interface {
	// Advance makes the guard take the terms' tokens: when it has returned nil, no write under a smaller token of
	// the same election commits any more. It must be called, and have returned, before the new term's first read:
	// a read that shares a transaction or a statement with the advance may see a state from before the old term's
	// last write. It is idempotent for one term; all terms are taken or none where the resource can do that.
	//
	// It blocks until ctx ends at the latest. Errors: [ErrFenced] when a newer token was taken already,
	// [ErrTokenWentBack], [ErrForeignCluster], [ErrInvalidToken], or the resource's own.
	Advance(ctx context.Context, terms ...Term) error
}

// Record is what a guard keeps for each name: the newest token that it has taken, and whose. The zero Record stands
// for a name that has never been advanced. Its two methods are the one home of the rules by which every guard that
// can run Go decides; guards in other languages (SQL, Lua) follow them, and fencetest holds them to it.
type Record struct {
	Token          Token
	Nonce, Cluster uint64
}

// Advance returns the record after t has been taken, or the reason why it is refused: [ErrInvalidToken],
// [ErrForeignCluster], [ErrFenced] when a newer token was taken, [ErrTokenWentBack] when the same token was given
// out twice.
func (r Record) Advance(t Term) (Record, error) {
	if err := ValidToken(t.Token); err != nil {
		return r, fmt.Errorf("fence: advance %q: %w", t.Election, err)
	}
	if err := r.sameCluster(t); err != nil {
		return r, err
	}
	switch {
	case t.Token < r.Token:
		return r, &FencedError{Name: t.Election, Token: t.Token, Newest: r.Token}
	case t.Token == r.Token:
		if !r.sameNonce(t) {
			return r, &TokenWentBackError{Name: t.Election, Token: t.Token, Newest: r.Token}
		}
		return r, nil
	}
	return Record{Token: t.Token, Nonce: t.Nonce, Cluster: or(t.Cluster, r.Cluster)}, nil
}

// Admit returns nil if a write under t may commit: t's token equals the newest taken and is the same term's.
// A smaller token is refused with a [FencedError]. So is a greater one, and any token where there is no record: if
// writes could raise the token, a stale writer could create a lost record anew and a typo could brick a name.
func (r Record) Admit(t Term) error {
	if err := ValidToken(t.Token); err != nil {
		return fmt.Errorf("fence: admit %q: %w", t.Election, err)
	}
	if err := r.sameCluster(t); err != nil {
		return err
	}
	if t.Token != r.Token {
		return &FencedError{Name: t.Election, Token: t.Token, Newest: r.Token}
	}
	if !r.sameNonce(t) {
		return &TokenWentBackError{Name: t.Election, Token: t.Token, Newest: r.Token}
	}
	return nil
}

func (r Record) sameCluster(t Term) error {
	if r.Token > 0 && r.Cluster != 0 && t.Cluster != 0 && r.Cluster != t.Cluster {
		return &ForeignClusterError{Name: t.Election, Cluster: t.Cluster, Known: r.Cluster}
	}
	return nil
}

// sameNonce treats an unknown nonce as equal: tokens that do not come from aegis have none.
func (r Record) sameNonce(t Term) bool {
	return r.Nonce == 0 || t.Nonce == 0 || r.Nonce == t.Nonce
}

func or(a, b uint64) uint64 {
	if a != 0 {
		return a
	}
	return b
}

// ValidToken returns an error that wraps [ErrInvalidToken] and [ErrFenced] unless 1 ≤ t ≤ [MaxToken].
func ValidToken(t Token) error {
	if t >= 1 && t <= MaxToken {
		return nil
	}
	return fmt.Errorf("%w: %w: %d is outside 1 … %d", ErrFenced, ErrInvalidToken, t, MaxToken)
}
