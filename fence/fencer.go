package fence

import "sync/atomic"

// Fencer is the guard in memory, for one name. The zero value is ready; it is safe for concurrent use and must not
// be copied after its first use. It forgets with the process: where a restart must not forget, use a durable guard.
//
// It has two rules. [Fencer.Check] passes each token once and is for tokens that are drawn anew for every write.
// [Fencer.Admit] passes a token any number of times until a greater one was seen and is for terms of many writes.
// Both raise the newest token seen; unlike durable guards, which must be advanced first, a Fencer learns the token
// from the write itself.
type Fencer struct{ newest atomic.Int64 }

// Check passes only a token greater than all seen so far, by Check or by Admit; others get a [*FencedError] with both
// numbers, and tokens outside 1 … [MaxToken] an [ErrInvalidToken], which is [ErrFenced] too. A leader that writes twice
// under one token is therefore refused the second time: right where each write draws its own token, wrong for a term of
// many writes, which wants [Fencer.Admit]. It does not block.
func (f *Fencer) Check(token Token) error { return f.raise(token, false) }

// Admit passes a token that is not smaller than the greatest seen, by Check or by Admit; others get the errors of
// Check. It is the rule for terms of many writes; [Fencer.Check] is the one for tokens drawn per write. It does not
// block. It orders nothing that follows: an effect that must not overtake a newer term's belongs under the same lock
// as the Admit.
func (f *Fencer) Admit(token Token) error {
	if token == f.newest.Load() && token > 0 {
		return nil // the common case: one load
	}
	return f.raise(token, true)
}

// LastSeen returns the greatest token passed so far, 0 if none was.
func (f *Fencer) LastSeen() Token { return f.newest.Load() }

func (f *Fencer) raise(token Token, equalPasses bool) error {
	if err := ValidToken(token); err != nil {
		return err
	}
	for {
		newest := f.newest.Load()
		if token < newest || token == newest && !equalPasses {
			return &FencedError{Token: token, Newest: newest}
		}
		if token == newest || f.newest.CompareAndSwap(newest, token) {
			return nil
		}
	}
}
