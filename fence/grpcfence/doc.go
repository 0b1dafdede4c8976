// Package grpcfence makes a gRPC service a guard: calls carry the term of the leader that makes them, and the service
// refuses those whose term is over.
//
// This process's memory is what is guarded, and its record of the newest token per election is authoritative:
//
//	leader of 7 ── Settle()          ──▶ ┌────────────────────────┐ 7 = 7: the handler runs and holds "boss" shared
//	               aegis-term: …7        │ server: "boss" is at 7 │
//	leader of 8 ── Remote.Advance(8) ──▶ │         7 → 8          │ ends the context of that handler, waits for it,
//	                                     │                        │ then answers
//	leader of 7 ── Settle()          ──▶ │         "boss" is at 8 │ 7 < 8: FAILED_PRECONDITION, *fence.FencedError{7, 8}
//	leader of 8 ── Settle()          ──▶ └────────────────────────┘ 8 = 8: the handler runs
//
// The server installs [Guard.UnaryServerInterceptor] and [Guard.StreamServerInterceptor], and registers the service
// that advances it ([Guard.Register]). The client installs [UnaryClientInterceptor] and [StreamClientInterceptor],
// which take the term from the call's option [UnderTerm] or from its context ([WithTerm]), and hands a [Remote] to
// its election (WithGuards), so that nobody leads whom the service has not taken. The handler finds the term in its
// context ([TermFromContext]) and passes it to the guard of its own store: what it writes there is fenced there, in
// the store's own transaction.
//
// # Metadata and errors
//
// One value of aegis-term, exactly, in httpfence's form of a query string: election=boss%2F1&token=451&node=…; see
// there. Refusals are statuses with a google.rpc.ErrorInfo, domain "aegis", whose metadata holds kind, election,
// token and newest. They need no trailers beyond gRPC's own, and are errors of package fence in the client, with
// their status beside ([google.golang.org/grpc/status.Code] works on them):
//
//	INVALID_ARGUMENT     the term is missing, doubled or malformed, its token out of range, or the election not this service's
//	FAILED_PRECONDITION  fenced, token-went-back or foreign-cluster: nothing was done
//	ABORTED              unknown: a newer term interrupted the handler, which did not say what it had done
//	UNAVAILABLE          handlers of an older term do not end, or the guard behind cannot be asked
//	RESOURCE_EXHAUSTED   there are too many names
//
// # Streams
//
// A stream is admitted when it opens and again with every message that it receives. Its handler holds the name from
// its start, but not while it waits in RecvMsg: an idle stream keeps nobody waiting. When a newer term is taken, the
// handler's context ends. A stream that waits for its client ends at once, with the refusal; what it received before
// was done. One that works on a message may finish and answer it, and is refused the next. If it is stuck in SendMsg,
// since its client reads nothing, the stream is cut after half of Config.Drain, with ErrUnknown.
//
// # Advance first, then read
//
// [Remote.Advance] must have returned before the new leader reads from the service what it is about to change; then no
// handler of an older term runs any more. A handler of the new term waits for those of older ones, too.
//
// Only a token equal to the newest is admitted; a greater one must be advanced first, unless Config.Learn says
// otherwise. Package httpfence tells why, and what Config.Durable is for: both share these rules, and one gate.
//
// # What is not covered
//
// Goroutines that a handler leaves behind, and in a stream those that work while another one waits in RecvMsg: have
// them work inside [Guard.Do]. A handler that ignores its context is waited for, but only for Config.Drain: then
// Advance fails and names it. Several replicas: each guards its own memory, so advance each of them. Who can reach
// aegis.fence.v1.Guard can shut out a leader; authenticate its calls like the others. A restart without a durable
// guard forgets who was newest, and refuses everybody until somebody advances.
package grpcfence
