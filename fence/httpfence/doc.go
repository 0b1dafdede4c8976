// Package httpfence makes a service behind HTTP a guard: requests carry the term of the leader that sends them, and
// the service refuses those whose term is over.
//
// This process's memory is what is guarded, and its record of the newest token per election is authoritative:
//
//	leader of 7 ── POST /loot        ──▶ ┌─────────────────────────┐ 7 = 7: the handler runs and holds "boss" shared
//	               Aegis-Term: …7        │ Handler: "boss" is at 7 │
//	leader of 8 ── Remote.Advance(8) ──▶ │          7 → 8          │ ends the context of that handler, waits for it,
//	               POST /aegis/advance   │                         │ then answers
//	leader of 7 ── POST /loot        ──▶ │          "boss" is at 8 │ 7 < 8: 412, *fence.FencedError{7, 8} in the client
//	leader of 8 ── POST /loot        ──▶ └─────────────────────────┘ 8 = 8: the handler runs
//
// The server wraps its handlers in [Guard.Handler] and offers [Guard.AdvanceHandler] at some path. The client sends
// through a [Transport], which takes the term from the request's context ([WithTerm]), and hands a [Remote] to its
// election (WithGuards), so that nobody leads whom the service has not taken. The handler finds the term in its context
// ([TermFromContext]) and passes it to the guard of its own store: what it writes there is fenced there, in the
// store's own transaction.
//
// # The header
//
// One header, Aegis-Term, exactly once, at most 2 KiB, in the form of a query string, so that each language has a
// parser for it and names may be any UTF-8:
//
//	Aegis-Term: election=boss%2F%E5%8C%97&token=451&node=scene-01&nonce=9f3a&cluster=cdf818194e3a8c32
//
// election (1 to 255 bytes without control characters) and token (decimal, 1 to 2^53−1) must be there; node, nonce and
// cluster (hexadecimal, 64 bits) may be left out where they are not known; other keys are ignored, a key that comes
// twice is refused. A refusal is answered with header Aegis-Fenced in the same form (kind, election, token, newest …)
// and a body for people:
//
//	400  the header is missing, doubled or malformed, the token out of range, or the election not this service's
//	412  fenced, token-went-back or foreign-cluster: nothing was done
//	409  unknown: a newer term interrupted the handler, which did not say what it had done
//	503  handlers of an older term do not end, the guard behind cannot be asked, or there are too many names
//
// # Advance first, then read
//
// [Remote.Advance] must have returned before the new leader reads from the service what it is about to change; then no
// handler of an older term runs any more. A handler of the new term waits for those of older ones, too.
//
// By default a request is admitted only if its token equals the newest, as with every guard of aegis; a greater one
// must be advanced first. A service in memory could as well learn the token from the first request that carries it,
// and would then need no advance at all: [Config].Learn does that. It is not the default, since a request is what
// stale leaders and faulty programs send: after a restart the first one to write, not the newest, would set the token,
// and one request with a wrong, large token would shut out the leader for good. Advance is called only by who has just
// won. After a restart without a durable guard the default therefore refuses everybody ("advance first"), which ends the
// term of the leader inside Run; its next term advances, and goes on.
//
// [Config].Durable keeps the record in a store, such as sqlitefence's: then a restart forgets nothing, and a term that
// was advanced there, through this process or another one, is admitted without more.
//
// # What is not covered
//
// Goroutines that a handler leaves behind. A handler that ignores its context is waited for, but only for
// [Config].Drain: then Advance fails and names it. Several replicas: each guards its own memory, so advance each of
// them (WithGuards takes several guards), and let stores that they share be guarded by a guard of their own. Who can
// reach the AdvanceHandler can shut out a leader; protect it like the handlers themselves. Tokens in headers are no
// authentication. A restart without a durable guard forgets who was newest: an old leader that has not yet advanced,
// or advances again, is then taken until the new one comes.
package httpfence
