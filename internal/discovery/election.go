// Package discovery is the API that the source chapter prints, on top of package aegis: an election on etcd whose
// leader carries a fencing token. New programs use package aegis itself, which waits, runs, transfers and comes back
// by itself; this one holds the chapter's own six names to their word.
//
// Each Campaign is a node of its own: an unlisted one, with a lease and a watch that are gone when the campaign has
// failed or the leadership was resigned.
package discovery

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"aegis"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// NodeID names a node; Fencer is the guard in memory. Both are aegis's own.
type (
	NodeID = aegis.NodeID
	Fencer = aegis.Fencer
)

// The root package's own errors. Campaign and Leader return ErrNotLeader bare: == holds.
var (
	ErrNotLeader = aegis.ErrNotLeader
	ErrFenced    = aegis.ErrFenced
)

// Election is one name that at most one node leads at a time. It is safe for concurrent use.
type Election struct {
	cli          *clientv3.Client
	prefix, name string
	ttl          time.Duration
}

// NewElection returns the election called name, whose leader key is prefix + "election/" + name; the prefix is used as
// it is, "" too. The TTL is rounded up to whole seconds and brought between 2 s, the least that etcd grants, and
// 5 min, since there is no error to return. A bad name is reported by the first use.
func NewElection(cli *clientv3.Client, prefix, name string, ttl time.Duration) *Election {
	ttl = (ttl + time.Second - 1).Truncate(time.Second)
	if prefix == "" {
		prefix = aegis.NoPrefix
	}
	return &Election{cli: cli, prefix: prefix, name: name, ttl: min(max(ttl, aegis.MinTTL), aegis.MaxTTL)}
}

// Leadership is what Campaign won. Node and Token are for reading; a literal of it can be resigned and does nothing.
type Leadership struct {
	Node  NodeID
	Token int64 // ModRevision of the leader key

	election *Election
	held     *aegis.Leadership
	node     *aegis.Node
}

// Campaign tries once to win and does not wait. It returns [ErrNotLeader] itself when the election is taken. The
// leadership outlives ctx. One id may campaign in several elections, and more than once in one.
func (e *Election) Campaign(ctx context.Context, id NodeID) (*Leadership, error) {
	node, err := aegis.Join(ctx, e.cli, aegis.Config{
		ID: id, Prefix: e.prefix, TTL: e.ttl, Unlisted: true, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return nil, err
	}
	held, err := node.Election(e.name).Campaign(ctx)
	if err != nil {
		_ = node.Leave(ctx) // what it cannot delete runs out with the lease
		return nil, bare(err)
	}
	return &Leadership{Node: id, Token: held.Token, election: e, held: held, node: node}, nil
}

// Leader returns who leads and under which token, [ErrNotLeader] itself when nobody does.
func (e *Election) Leader(ctx context.Context) (NodeID, int64, error) {
	term, err := aegis.Open(e.cli, e.prefix).Leader(ctx, e.name)
	if err != nil {
		return "", 0, bare(err)
	}
	return term.Node, term.Token, nil
}

func bare(err error) error {
	if errors.Is(err, aegis.ErrNotLeader) || errors.Is(err, aegis.ErrNoLeader) {
		return ErrNotLeader
	}
	return err
}

// Resign ends the leadership and deletes its key, its lease and all that Campaign started; the key is gone when it
// returns nil. It is idempotent, may be repeated after an error, and leaves a successor's key alone.
func (l *Leadership) Resign(ctx context.Context) error {
	if l.node == nil {
		return nil
	}
	if err := l.held.Resign(ctx); err != nil {
		return err
	}
	return l.node.Leave(ctx)
}
