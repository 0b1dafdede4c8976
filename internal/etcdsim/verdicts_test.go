package etcdsim_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"aegis/internal/etcdsim"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestVerdicts(t *testing.T) {
	canceled := status.Error(codes.Canceled, "a proxy gave up")
	for name, tc := range map[string]struct {
		v       etcdsim.Verdict
		err     error
		took    time.Duration
		version int64 // of the key, at once
		later   int64 // a minute later
	}{
		"ADroppedRequestHasNoEffect":      {etcdsim.Verdict{DropRequest: true}, context.DeadlineExceeded, time.Second, 0, 0},
		"ADroppedReplyHasItsEffect":       {etcdsim.Verdict{DropReply: true}, context.DeadlineExceeded, time.Second, 1, 1},
		"FailBeforeHasNoEffect":           {etcdsim.Verdict{FailBefore: canceled}, canceled, time.Millisecond, 0, 0},
		"FailAfterHasItsEffect":           {etcdsim.Verdict{FailAfter: canceled}, canceled, time.Millisecond, 1, 1},
		"TwiceIsDoneTwice":                {etcdsim.Verdict{Twice: true}, nil, 2 * time.Millisecond, 2, 2},
		"ADelayedRequestIsLate":           {etcdsim.Verdict{DelayRequest: 300 * time.Millisecond}, nil, 301 * time.Millisecond, 1, 1},
		"ADelayedReplyIsLate":             {etcdsim.Verdict{DelayReply: 300 * time.Millisecond}, nil, 301 * time.Millisecond, 1, 1},
		"AHeldRequestIsDoneAfterItsCall":  {etcdsim.Verdict{DelayRequest: 10 * time.Second}, context.DeadlineExceeded, time.Second, 0, 1},
		"AHeldRequestMayBeDoneTwiceLater": {etcdsim.Verdict{DelayRequest: 10 * time.Second, Twice: true}, context.DeadlineExceeded, time.Second, 0, 2},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *T, c *Cluster, cli *Client) {
				on(c, "a", "Put", tc.v)
				start := time.Now()
				_, err := cli.Put(within(time.Second), "k", "v")
				if !errors.Is(err, tc.err) && status.Code(err) != status.Code(tc.err) {
					t.Errorf("error %v, want %v", err, tc.err)
				}
				if d := time.Since(start); d != tc.took {
					t.Errorf("took %v, want %v", d, tc.took)
				}
				if v := versionOf(c, "k"); v != tc.version {
					t.Errorf("version %d, want %d", v, tc.version)
				}
				c.Cut("a", etcdsim.Both) // which is nothing to a request that lies at the server
				time.Sleep(time.Minute)
				if v := versionOf(c, "k"); v != tc.later {
					t.Errorf("version %d after a minute, want %d", v, tc.later)
				}
			})
		})
	}
}

func TestAppliedRunsBetweenEffectAndReply(t *testing.T) {
	bubble(t, func(t *T, c *Cluster, cli *Client) {
		on(c, "a", "Put", etcdsim.Verdict{Applied: func() {
			if v := versionOf(c, "k"); v != 1 {
				t.Errorf("version %d", v)
			}
			c.Cut("a", etcdsim.FromServer)
		}})
		_, err := cli.Put(within(time.Second), "k", "v")
		isTimeout(t, err)
	})
}

func TestTheHookSeesTheRequestAndMayHoldTheCallerUp(t *testing.T) {
	bubble(t, func(t *T, c *Cluster, cli *Client) {
		c.Intercept("a", func(call etcdsim.Call) etcdsim.Verdict {
			txn, ok := call.Request.(*pb.TxnRequest)
			if !ok || string(txn.Success[0].GetRequestPut().GetKey()) != "k" || call.Machine != "a" || call.Attempt != 1 {
				t.Errorf("call %+v", call)
			}
			time.Sleep(time.Hour) // a pause between check and write
			return etcdsim.Verdict{}
		})
		start := time.Now()
		must(cli.Txn(t.Context()).Then(clientv3.OpPut("k", "v")).Commit())(t)
		if d := time.Since(start); d != time.Hour+time.Millisecond {
			t.Errorf("took %v", d)
		}
	})
}

func TestResendDoesATxnTwiceWhenItsReplySaysCanceled(t *testing.T) {
	bubble(t, func(t *T, c *Cluster, cli *Client) {
		on(c, "a", "Txn", etcdsim.Verdict{FailAfter: status.Error(codes.Canceled, "a proxy gave up")})
		resp := must(cli.Txn(t.Context()).Then(clientv3.OpPut("k", "v", clientv3.WithPrevKV())).Commit())(t)
		if prev := resp.Responses[0].GetResponsePut().PrevKv; prev == nil || c.Calls("a")["Txn"] != 2 {
			t.Errorf("previous %v, calls %v", prev, c.Calls("a"))
		}
		on(c, "a", "Txn", etcdsim.Verdict{FailAfter: status.Error(codes.Unavailable, "gone")})
		_, err := cli.Txn(t.Context()).Then(clientv3.OpPut("k", "v")).Commit()
		if status.Code(err) != codes.Unavailable || versionOf(c, "k") != 3 {
			t.Errorf("error %v, version %d: a Txn that was answered Unavailable is not sent again", err, versionOf(c, "k"))
		}
		c.Stop()
		go func() { time.Sleep(time.Second); c.Start() }()
		must(cli.Get(t.Context(), "k"))(t) // a read is
	}, etcdsim.WithResend())
}

func TestALiarAcknowledgesRenewalsOfALeaseThatRunsOut(t *testing.T) {
	bubble(t, func(t *T, c *Cluster, cli *Client) {
		g := must(cli.Grant(t.Context(), 10))(t)
		c.AckRenewals("a", true)
		for range 10 {
			time.Sleep(3 * time.Second)
			if r := must(cli.KeepAliveOnce(t.Context(), g.ID))(t); r.TTL != 10 {
				t.Fatalf("TTL %d", r.TTL)
			}
		}
		if n := len(c.Leases()); n != 0 {
			t.Errorf("%d leases live", n)
		}
		c.AckRenewals("a", false)
		if _, err := cli.KeepAliveOnce(t.Context(), g.ID); !errors.Is(err, rpctypes.ErrLeaseNotFound) {
			t.Errorf("renewal: %v", err)
		}
	})
}

func TestARenewalOfALeaseThatHasRunOutWaitsForItsEnd(t *testing.T) {
	bubble(t, func(t *T, c *Cluster, cli *Client) {
		g := must(cli.Grant(t.Context(), 2))(t) // starts half a millisecond before its reply
		time.Sleep(2*time.Second + 100*time.Millisecond)
		if left, ok := c.Leases()[g.ID]; !ok || left > 0 {
			t.Fatalf("it has %v left, is there: %t", left, ok)
		}
		start := time.Now()
		if _, err := cli.KeepAliveOnce(t.Context(), g.ID); !errors.Is(err, rpctypes.ErrLeaseNotFound) {
			t.Errorf("renewal: %v", err)
		}
		if d := time.Since(start); d < 10*time.Millisecond || d > 400*time.Millisecond {
			t.Errorf("took %v", d)
		}
	})
}

func TestVerdictsOnStreams(t *testing.T) {
	gone := status.Error(codes.Unavailable, "gone")
	for name, tc := range map[string]struct {
		v     etcdsim.Verdict
		err   error
		sent  int
		lives time.Duration // what the lease has left, seven seconds after its grant
	}{
		"Pass":                     {etcdsim.Verdict{}, nil, 1, 10 * time.Second},
		"AnErrorBeforeIsSentAgain": {etcdsim.Verdict{FailBefore: gone}, nil, 2, 10 * time.Second},
		"AnErrorAfterIsSentAgain":  {etcdsim.Verdict{FailAfter: gone}, nil, 2, 10 * time.Second},
		"ADroppedRequestHangs":     {etcdsim.Verdict{DropRequest: true}, context.DeadlineExceeded, 1, 3 * time.Second},
		"ADroppedReplyHangs":       {etcdsim.Verdict{DropReply: true}, context.DeadlineExceeded, 1, 10 * time.Second},
		"AnAcknowledgedOneIsALie":  {etcdsim.Verdict{Acknowledge: true}, nil, 1, 3 * time.Second},
		"AHeldOneRenewsLate":       {etcdsim.Verdict{DelayRequest: 2 * time.Second}, context.DeadlineExceeded, 1, 3 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *T, c *Cluster, cli *Client) {
				g := must(cli.Grant(t.Context(), 10))(t)
				time.Sleep(7*time.Second - 500*time.Microsecond)
				on(c, "a", "LeaseKeepAlive", tc.v)
				start := time.Now()
				if _, err := cli.KeepAliveOnce(within(time.Second), g.ID); !errors.Is(err, tc.err) {
					t.Errorf("error %v, want %v", err, tc.err)
				}
				passed := time.Since(start)
				if left := c.Leases()[g.ID] + passed; left < tc.lives || left > tc.lives+10*time.Millisecond {
					t.Errorf("%v were left, want %v", left, tc.lives)
				}
				if n := c.Calls("a")["LeaseKeepAlive"]; n != tc.sent {
					t.Errorf("sent %d times, want %d", n, tc.sent)
				}
			})
		})
	}
}

func TestAMessageThatIsDelayedOnAStreamHoldsUpTheNext(t *testing.T) {
	bubble(t, func(t *T, c *Cluster, cli *Client) {
		on(c, "a", "WatchCreate", etcdsim.Verdict{DelayReply: time.Second})
		created := make(chan clientv3.WatchChan)
		go func() { created <- cli.Watch(cli.Ctx(), "k", clientv3.WithCreatedNotify()) }()
		time.Sleep(10 * time.Millisecond)
		must(cli.Put(t.Context(), "k", "v"))(t) // its event waits behind the delayed reply
		w := <-created
		if r := next(t, w); !r.Created {
			t.Errorf("got %+v", r)
		}
		if r := next(t, w); len(r.Events) != 1 {
			t.Errorf("got %+v", r)
		}
	})
}
