package aegis

import (
	"context"
	"errors"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// etcd is the client as this package uses it. Every call asks for a member that knows a leader: one that is cut off from
// the others, but not from us, would hold it until it times out; now it refuses, and the call, which etcd has not
// executed, goes to another member.
type etcd struct{ *clientv3.Client }

const (
	otherMemberTries = 10
	otherMemberPause = 20 * time.Millisecond
)

// elsewhere repeats a call that a member without a leader refused; the client takes the members in turn.
func elsewhere[T any](ctx context.Context, call func(context.Context) (T, error)) (T, error) {
	ctx = clientv3.WithRequireLeader(ctx)
	for try := 1; ; try++ {
		v, err := call(ctx)
		if !errors.Is(err, rpctypes.ErrNoLeader) || try == otherMemberTries || ctx.Err() != nil {
			return v, err
		}
		sleep(ctx, otherMemberPause)
	}
}

func (c etcd) Get(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	return elsewhere(ctx, func(ctx context.Context) (*clientv3.GetResponse, error) { return c.Client.Get(ctx, key, opts...) })
}

func (c etcd) Delete(ctx context.Context, key string) (*clientv3.DeleteResponse, error) {
	return elsewhere(ctx, func(ctx context.Context) (*clientv3.DeleteResponse, error) { return c.Client.Delete(ctx, key) })
}

func (c etcd) Grant(ctx context.Context, seconds int64) (*clientv3.LeaseGrantResponse, error) {
	return elsewhere(ctx, func(ctx context.Context) (*clientv3.LeaseGrantResponse, error) { return c.Client.Grant(ctx, seconds) })
}

func (c etcd) Revoke(ctx context.Context, id clientv3.LeaseID) (*clientv3.LeaseRevokeResponse, error) {
	return elsewhere(ctx, func(ctx context.Context) (*clientv3.LeaseRevokeResponse, error) { return c.Client.Revoke(ctx, id) })
}

func (c etcd) TimeToLive(ctx context.Context, id clientv3.LeaseID) (*clientv3.LeaseTimeToLiveResponse, error) {
	return elsewhere(ctx, func(ctx context.Context) (*clientv3.LeaseTimeToLiveResponse, error) {
		return c.Client.TimeToLive(ctx, id)
	})
}

func (c etcd) KeepAliveOnce(ctx context.Context, id clientv3.LeaseID) (*clientv3.LeaseKeepAliveResponse, error) {
	return elsewhere(ctx, func(ctx context.Context) (*clientv3.LeaseKeepAliveResponse, error) {
		return c.Client.KeepAliveOnce(ctx, id)
	})
}

func (c etcd) Watch(ctx context.Context, key string, opts ...clientv3.OpOption) clientv3.WatchChan {
	return c.Client.Watch(clientv3.WithRequireLeader(ctx), key, opts...)
}

// RequestProgress takes the ctx that was given to Watch: the client knows the stream by its metadata.
func (c etcd) RequestProgress(ctx context.Context) error {
	return c.Client.RequestProgress(clientv3.WithRequireLeader(ctx))
}

func (c etcd) Txn(ctx context.Context) *transaction { return &transaction{c: c, ctx: ctx} }

// transaction collects what clientv3.Txn does, so that it can be sent again.
type transaction struct {
	c             etcd
	ctx           context.Context
	cmps          []clientv3.Cmp
	then, instead []clientv3.Op
}

func (t *transaction) If(cmps ...clientv3.Cmp) *transaction { t.cmps = cmps; return t }
func (t *transaction) Then(ops ...clientv3.Op) *transaction { t.then = ops; return t }
func (t *transaction) Else(ops ...clientv3.Op) *transaction { t.instead = ops; return t }
func (t *transaction) Commit() (*clientv3.TxnResponse, error) {
	return elsewhere(t.ctx, func(ctx context.Context) (*clientv3.TxnResponse, error) {
		return t.c.Client.Txn(ctx).If(t.cmps...).Then(t.then...).Else(t.instead...).Commit()
	})
}

// sleep waits for d or until ctx ends.
func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
