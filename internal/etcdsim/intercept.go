package etcdsim

import (
	"time"

	"google.golang.org/protobuf/proto"
)

// Call is a request that a machine is about to send.
type Call struct {
	Machine string
	Method  string        // as in [Cluster.Calls]
	Attempt int           // 1, or more when [WithResend] sends a request again; always 1 on streams
	Request proto.Message // *etcdserverpb.TxnRequest and so on; for reading only
}

// Verdict says what becomes of a request. The zero value lets it pass. A request that was sent goes its way whatever
// happens to its caller's context: one that is delayed beyond the caller's deadline is still carried out.
type Verdict struct {
	DropRequest bool // it is swallowed: no effect, the call hangs
	DropReply   bool // it takes effect and the reply is swallowed: the call hangs

	FailBefore error // the server answers with this error, a gRPC status, and does nothing
	FailAfter  error // the server carries it out and answers with this error
	Twice      bool  // it is carried out again one round trip later, whose reply is the answer; unary calls only

	DelayRequest time.Duration // how long it lies at the server before it is carried out, cuts or no cuts
	DelayReply   time.Duration // how long the reply lies at the server before it is sent

	// Acknowledge answers a LeaseKeepAlive with the lease's TTL, and does not renew it.
	Acknowledge bool

	// Applied runs right after the request was carried out, before the reply is on its way, without locks. It may
	// call the cluster's methods and must not wait for the cluster's replies.
	Applied func()
}

func (v Verdict) fail(o outcome) outcome {
	if v.FailAfter != nil {
		return outcome{err: v.FailAfter}
	}
	return o
}

// Intercept has hook decide on every request of the machine called id, nil on none. It runs in the goroutine that
// sends the request, before that, and without locks: it may call the cluster's methods, and block to hold its caller
// up. On a stream a delayed message holds up those behind it, and an error breaks the stream.
func (c *Cluster) Intercept(id string, hook func(Call) Verdict) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.link(id).hook = hook
}

// AckRenewals has the server answer every LeaseKeepAlive of the machine called id with the full TTL and renew
// nothing, even when the lease is gone.
func (c *Cluster) AckRenewals(id string, on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.link(id).liar = on
}
