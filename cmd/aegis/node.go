package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"strings"
	"time"

	"aegis"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// nodeFlags are those of the commands that lead.
type nodeFlags struct {
	id       string
	ttl      time.Duration
	margin   time.Duration
	priority int
}

func (n *nodeFlags) register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&n.id, "id", "", "this node's `name`; default: host, pid and a random part")
	f.DurationVar(&n.ttl, "ttl", 10*time.Second, "of the lease: how long after a leader's death another follows; whole seconds, 2s to 5m")
	f.DurationVar(&n.margin, "margin", 0, "how long before the lease's end work stops; less than half of --ttl (default: a fifth of it)")
	f.IntVar(&n.priority, "priority", 0, "place in the queue: greater ones come first")
}

// validate names the flag and its bound: zero is a value that somebody typed here, not a default.
func (n *nodeFlags) validate(f *pflag.FlagSet) error {
	if n.ttl < aegis.MinTTL || n.ttl > aegis.MaxTTL || n.ttl%time.Second != 0 {
		return usagef("--ttl is %v; it must be whole seconds from %v to %v", n.ttl, aegis.MinTTL, aegis.MaxTTL)
	}
	if !f.Changed("margin") {
		n.margin = n.ttl / 5
	}
	if n.margin <= 0 || n.margin >= n.ttl/2 {
		return usagef("--margin is %v; it must be more than 0 and less than half of --ttl (%v)", n.margin, n.ttl)
	}
	if f.Changed("id") && n.id == "" {
		return usagef("--id is empty; it must name this node, or be left out")
	}
	return nil
}

// join looks whether etcd answers, the name is good and somebody leads, and makes this process a node.
func (o *options) join(ctx context.Context, n *nodeFlags, name string, log *slog.Logger) (_ *aegis.Node, holder aegis.Term, err error) {
	cli, err := o.connect()
	if err != nil {
		return nil, holder, err
	}
	cluster := aegis.Open(cli.Client, o.prefixOrNone())
	if err := checkName(cluster, name); err != nil {
		return nil, holder, err
	}
	first, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	if holder, err = cluster.Leader(first, name); err != nil && !errors.Is(err, aegis.ErrNoLeader) {
		return nil, holder, err
	}
	node, err := aegis.Join(ctx, cli.Client, aegis.Config{ID: aegis.NodeID(n.id), Prefix: o.prefixOrNone(), TTL: n.ttl, Margin: n.margin, Logger: log})
	return node, holder, err
}

// checkName reports a bad name without asking etcd: a call whose context is over already does that much.
func checkName(cluster *aegis.Cluster, name string) error {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := cluster.Leader(ctx, name); errors.Is(err, aegis.ErrInvalidName) {
		return err
	}
	return nil
}

// logger writes to standard error: standard output belongs to the command, or to run's child.
func (o *options) logger() *slog.Logger {
	if o.output == "json" {
		return slog.New(slog.NewJSONHandler(os.Stderr, nil))
	}
	return slog.New(slog.NewTextHandler(os.Stderr, nil))
}

// quietLogger leaves out what campaign prints itself.
func (o *options) quietLogger() *slog.Logger {
	return slog.New(unprinted{o.logger().Handler()})
}

// unprinted drops the records of transitions.
type unprinted struct{ slog.Handler }

func (u unprinted) Handle(ctx context.Context, r slog.Record) error {
	switch kind, _ := strings.CutPrefix(r.Message, "aegis: "); aegis.EventKind(kind) {
	case aegis.EventElected, aegis.EventLost, aegis.EventReleased, aegis.EventJoined:
		return nil
	}
	return u.Handler.Handle(ctx, r)
}
