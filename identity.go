package aegis

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// register writes the node key under l: created if absent, replaced if it is this process's own of an earlier lease.
// Each registration is a new incarnation. Another process's node key is returned and left alone. It also checks that
// etcd is the cluster that wrote the other keys.
func (n *Node) register(ctx context.Context, l *lease, cluster uint64) (other *mvccpb.KeyValue, err error) {
	key := n.keys.node(n.cfg.ID)
	n.mu.Lock()
	expected := n.incarnation
	n.mu.Unlock()
	record := encode(nodeRecord{Version: recordVersion, Host: n.host, PID: os.Getpid(), Started: n.started,
		Program: program(), Meta: n.cfg.Meta, Addrs: n.cfg.Addresses})
	clusterID := strconv.FormatUint(cluster, 16)
	for {
		sent := n.past.mark()
		tctx, cancel := context.WithTimeout(ctx, n.callTimeout())
		var resp *clientv3.TxnResponse
		var err error
		if n.cfg.Unlisted {
			resp, err = n.cli.Txn(tctx).Then(clientv3.OpGet(n.keys.cluster())).Commit()
		} else {
			known := clientv3.OpTxn([]clientv3.Cmp{clientv3.Compare(clientv3.CreateRevision(n.keys.cluster()), "=", 0)},
				[]clientv3.Op{clientv3.OpPut(n.keys.cluster(), clusterID)}, []clientv3.Op{clientv3.OpGet(n.keys.cluster())})
			resp, err = n.cli.Txn(tctx).
				If(clientv3.Compare(clientv3.ModRevision(key), "=", expected)).
				Then(clientv3.OpPut(key, record, clientv3.WithLease(l.id)), known).
				Else(clientv3.OpGet(key)).Commit()
		}
		cancel()
		if err != nil {
			return nil, fmt.Errorf("register %s: %w", key, err)
		}
		if err := n.sameEtcd(sent, resp.Header); err != nil {
			return nil, err
		}
		n.past.joined(cluster)
		switch {
		case n.cfg.Unlisted:
			return nil, n.checkCluster(resp.Responses[0].GetResponseRange().GetKvs(), clusterID)
		case resp.Succeeded:
			if err := n.checkCluster(resp.Responses[1].GetResponseTxn().GetResponses()[0].GetResponseRange().GetKvs(), clusterID); err != nil {
				return nil, err
			}
			l.incarnation = resp.Header.Revision
			n.mu.Lock()
			n.incarnation = l.incarnation
			n.mu.Unlock()
			return nil, nil
		}
		kvs := resp.Responses[0].GetResponseRange().Kvs
		switch {
		case len(kvs) == 0:
			expected = 0
		case n.ownLease(clientv3.LeaseID(kvs[0].Lease)) || clientv3.LeaseID(kvs[0].Lease) == l.id:
			expected = kvs[0].ModRevision // of an attempt of ours whose answer was lost
		default:
			return kvs[0], nil
		}
	}
}

func (n *Node) checkCluster(kvs []*mvccpb.KeyValue, cluster string) error {
	if len(kvs) == 0 || string(kvs[0].Value) == cluster {
		return nil
	}
	return fmt.Errorf("%w: the keys under %s were written by etcd cluster %s, this is cluster %s: "+
		"it was restored or replaced; stop the writers and run `aegis token raise --above N`, N being the greatest token that any guard has taken", ErrTokenWentBack, n.keys, kvs[0].Value, cluster)
}

func (n *Node) ownLease(id clientv3.LeaseID) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.leases[id] != nil
}

// waitOut waits until another process's node key is gone, or has proven to be alive: renewed twice. (Once is what a
// change of etcd's own leader looks like.)
func (n *Node) waitOut(ctx context.Context, kv *mvccpb.KeyValue) error {
	var other nodeRecord
	_ = json.Unmarshal(kv.Value, &other)
	id := clientv3.LeaseID(kv.Lease)
	key := n.keys.node(n.cfg.ID)
	if id == clientv3.NoLease {
		return fmt.Errorf("%w: %s has no lease, so nothing will ever remove it: delete it by hand if %s is not running", ErrNodeIDTaken, key, n.cfg.ID)
	}
	taken := fmt.Errorf("%w: %s is used by a living process on host %s, pid %d, since %s; give this one another ID",
		ErrNodeIDTaken, n.cfg.ID, other.Host, other.PID, other.Started.Format(time.RFC3339))
	waiting := fmt.Sprintf("the lease of the former %s (host %s, pid %d) to run out", n.cfg.ID, other.Host, other.PID)
	n.failed(waiting, nil)
	n.cfg.Logger.Info("aegis: waiting for " + waiting)

	var deadline time.Time // by which the key goes if nobody renews its lease
	for renewals := 0; ; {
		tctx, cancel := context.WithTimeout(ctx, n.callTimeout())
		sent := time.Now()
		ttl, err := n.cli.TimeToLive(tctx, id)
		cancel()
		if err != nil {
			return fmt.Errorf("look at the lease of %s: %w", key, err)
		}
		if ttl.TTL < 0 {
			return nil
		}
		// The answer is rounded down to seconds, and etcd looks for expired leases every half second.
		now, rest := time.Now(), time.Duration(ttl.TTL)*time.Second
		switch {
		case deadline.IsZero():
			deadline = now.Add(rest + 2*time.Second)
		case sent.After(deadline), sent.Add(rest).After(deadline):
			if renewals++; renewals >= 2 {
				return taken
			}
			deadline = now.Add(rest + 2*time.Second)
		}
		if sleep(ctx, 250*time.Millisecond); ctx.Err() != nil {
			return fmt.Errorf("%w while waiting for %s", context.Cause(ctx), waiting)
		}
	}
}

// program names the main module's version, as far as the build knows it.
func program() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	return info.Main.Path + " " + info.Main.Version
}
