package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/etcdutl/v3/snapshot"
)

// Snapshot saves what a running member has to a file, which is replaced. The file is what "etcdctl snapshot save"
// writes. It takes 30 s at most, less if ctx ends.
func (c *Cluster) Snapshot(ctx context.Context, member int, file string) error {
	ctx, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	e := c.members[member].running.Load()
	if e == nil {
		return fmt.Errorf("lab: snapshot of member %d: %w", member, errStopped)
	}
	cfg := clientv3.Config{Endpoints: []string{e.Clients[0].Addr().String()}, DialTimeout: 5 * time.Second, Logger: c.log}
	if _, err := snapshot.NewV3(c.log).Save(ctx, cfg, file); err != nil {
		return fmt.Errorf("lab: snapshot of member %d: %w", member, err)
	}
	return nil
}

// RestoreOptions say how [Cluster.Restore] restores. The zero value does what an operator in a hurry does: revisions
// count on from the snapshot's, and the cluster has the same id as before.
type RestoreOptions struct {
	NewClusterID bool   // the restored cluster calls itself another
	BumpRevision uint64 // added to the snapshot's revision; what is older counts as compacted
	_            struct{}
}

// Restore replaces the cluster by one restored from a snapshot file, behind the same addresses. All members are
// stopped, the old data is removed, and Restore returns when the new members are ready. Links keep their cuts and
// delays; clients' connections are reset. After an error the cluster may be stopped in part: close it. It takes 30 s at
// most, less if ctx ends, besides the second for stopping.
func (c *Cluster) Restore(ctx context.Context, file string, opts RestoreOptions) error {
	if _, err := os.Stat(file); err != nil {
		return fmt.Errorf("lab: restore: %w", err)
	}
	c.ops.Lock()
	defer c.ops.Unlock()
	if c.isClosed() {
		return errors.New("lab: the cluster is closed")
	}
	c.stopAll()
	for _, m := range c.members {
		if err := os.RemoveAll(m.dir); err != nil {
			return fmt.Errorf("lab: restore member %d: %w", m.index, err)
		}
		cfg := snapshot.RestoreConfig{
			SnapshotPath:        file,
			Name:                m.name(),
			OutputDataDir:       m.dir,
			PeerURLs:            []string{m.peerURL()},
			InitialCluster:      c.initialCluster(),
			InitialClusterToken: token,
			RevisionBump:        opts.BumpRevision,
			MarkCompacted:       opts.BumpRevision > 0,
		}
		if opts.NewClusterID {
			cfg.InitialClusterToken = fmt.Sprintf("%s-%d", token, Now())
		}
		if err := snapshot.NewV3(c.log).Restore(cfg); err != nil {
			return fmt.Errorf("lab: restore member %d: %w", m.index, err)
		}
	}
	return c.startAll(ctx)
}
