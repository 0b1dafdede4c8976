package etcdsim_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"aegis/internal/etcdsim"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// TestFollowsEtcdThroughAScript compares what a random sequence reaches badly: answers that depend on time, watches
// that are refused, told of progress or compacted away, and what a client's own end looks like.
func TestFollowsEtcdThroughAScript(t *testing.T) {
	t.Parallel()
	dial := embedded(t)
	real := script(t, dial)
	var sim []string
	synctest.Test(t, func(t *testing.T) {
		c := etcdsim.New()
		defer c.Close()
		sim = script(t, func() *clientv3.Client { return c.Client("a") })
	})
	if a, b := strings.Join(real, "\n"), strings.Join(sim, "\n"); a != b {
		t.Fatal(difference(a, b))
	}
}

func script(t *testing.T, dial func() *clientv3.Client) []string {
	cli, ctx := dial(), context.Background()
	r := newRun(cli, 0)
	say := func(format string, args ...any) { r.log = append(r.log, fmt.Sprintf(format, args...)) }
	kind := func(err error) string {
		return fmt.Sprintf("%T %v deadline %t canceled %t", err, err,
			errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled))
	}
	// hear says what a watch says within d.
	hear := func(what string, w clientv3.WatchChan, d time.Duration) {
		say("%s:", what)
		timeout := time.After(d)
		for {
			select {
			case resp, ok := <-w:
				if !ok {
					say("  closed")
					return
				}
				say("  at %d, created %t, canceled %t, progress %t, compacted %d, %v", resp.Header.GetRevision(),
					resp.Created, resp.Canceled, resp.IsProgressNotify(), resp.CompactRevision, resp.Err())
				for _, e := range resp.Events {
					say("    %s", r.text(e))
				}
			case <-timeout:
				return
			}
		}
	}
	watch := func(key string, opts ...clientv3.OpOption) clientv3.WatchChan {
		return cli.Watch(ctx, key, append(opts, clientv3.WithCreatedNotify())...)
	}
	const while = 300 * time.Millisecond

	for i := range 5 {
		must(cli.Put(ctx, "k", fmt.Sprint(i)))(t) // revisions 2 to 6
	}
	must(cli.Delete(ctx, "k"))(t)   // 7
	must(cli.Put(ctx, "l", "0"))(t) // 8

	hear("empty range", watch("b", clientv3.WithRange("a")), while)
	hear("before time", watch("b", clientv3.WithRev(-1)), while)
	hear("the past", watch("k", clientv3.WithRev(3), clientv3.WithPrevKV()), while)
	future := watch("l", clientv3.WithRev(11))
	hear("a future revision", future, while)
	_ = cli.RequestProgress(ctx)
	hear("progress of a future revision", future, while)
	must(cli.Put(ctx, "l", "1"))(t) // 9
	must(cli.Put(ctx, "l", "2"))(t) // 10
	_ = cli.RequestProgress(ctx)
	hear("still the future", future, while)
	must(cli.Put(ctx, "l", "3"))(t) // 11
	hear("the future has come", future, while)
	_ = cli.RequestProgress(ctx)
	hear("progress", future, while)

	_, err := cli.Compact(ctx, 7)
	say("compact: %v", err)
	_, err = cli.Compact(ctx, 7)
	say("compact again: %s", kind(err))
	_, err = cli.Compact(ctx, 100)
	say("compact the future: %s", kind(err))
	hear("compacted", watch("k", clientv3.WithRev(6)), while)
	hear("from the compacted revision, a deletion", watch("k", clientv3.WithRev(7), clientv3.WithPrevKV()), while)
	hear("progress after it", future, while)

	keys := watch("m", clientv3.WithPrefix(), clientv3.WithPrevKV())
	g := must(cli.Grant(ctx, 1))(t)
	start := time.Now()
	say("granted %d", g.TTL)
	for _, k := range []string{"m3", "m1", "m2"} {
		must(cli.Put(ctx, k, k, clientv3.WithLease(g.ID)))(t)
	}
	hear("leased", keys, while)
	hear("nothing", keys, time.Until(start.Add(1500*time.Millisecond)))
	ttl := must(cli.TimeToLive(ctx, g.ID))(t)
	say("time to live %d of %d", ttl.TTL, ttl.GrantedTTL)
	hear("before its end", keys, time.Until(start.Add(1990*time.Millisecond)))
	hear("its end", keys, time.Until(start.Add(2700*time.Millisecond)))
	ttl = must(cli.TimeToLive(ctx, g.ID, clientv3.WithAttachedKeys()))(t)
	say("time to live %d of %d, %q", ttl.TTL, ttl.GrantedTTL, ttl.Keys)
	_, err = cli.KeepAliveOnce(ctx, g.ID)
	say("renewal: %s", kind(err))
	_, err = cli.Put(ctx, "m", "", clientv3.WithLease(g.ID))
	say("put: %s", kind(err))

	_, err = cli.Put(ctx, "big", strings.Repeat("x", 1600*1024))
	say("a big put: %s", kind(err))
	gets := func(n int) (ops []clientv3.Op) {
		for range n {
			ops = append(ops, clientv3.OpGet("k"))
		}
		return ops
	}
	for _, n := range []int{27, 28, 29} {
		_, err = cli.Txn(ctx).Then(append(gets(100), clientv3.OpTxn(nil, gets(n-1), nil))...).Commit()
		say("101 operations, %d of them nested: %s", n, kind(err))
	}

	over, cancel := context.WithCancel(ctx)
	cancel()
	_, err = cli.Get(over, "k")
	say("get, canceled: %s", kind(err))
	_, err = cli.KeepAliveOnce(over, g.ID)
	say("renewal, canceled: %s", kind(err))
	over, cancel = context.WithTimeout(ctx, -1)
	_, err = cli.Get(over, "k")
	say("get, too late: %s", kind(err))
	_, err = cli.KeepAliveOnce(over, g.ID)
	say("renewal, too late: %s", kind(err))
	cancel()

	other := dial()
	w := other.Watch(ctx, "k", clientv3.WithCreatedNotify())
	<-w
	_ = other.Close()
	for range w { // it ends, with an error or without: clientv3 leaves that to chance
	}
	_, err = other.Get(ctx, "k")
	say("get of a closed client: %s", kind(err))
	_, err = other.KeepAliveOnce(ctx, g.ID)
	say("renewal of a closed client: %s", kind(err))
	hear("new watch of a closed client", other.Watch(ctx, "k"), while)

	return r.log
}
