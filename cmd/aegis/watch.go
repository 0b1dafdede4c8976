package main

import (
	"context"
	"errors"
	"os/signal"
	"syscall"

	"aegis"

	"github.com/spf13/cobra"
)

func init() { register(newWatch) }

func newWatch(o *options) *cobra.Command {
	return &cobra.Command{
		Use:     "watch NAME",
		GroupID: groupLook,
		Short:   "Print who leads, and each change, until interrupted",
		Long: `watch prints a line for who leads now, and one for each change, until it is interrupted. It shows a level, not a
log: terms that are over quickly may be skipped. It survives restarts of etcd.`,
		Example: `  aegis watch boss/42
  aegis watch boss/42 -o json | jq .node`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: o.completeNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			first, cancel, cluster, err := o.cluster(ctx)
			if err != nil {
				return err
			}
			defer cancel()
			// Observing waits for etcd without end; that it is not there at all is said at once.
			if _, err := cluster.Leader(first, args[0]); err != nil && !errors.Is(err, aegis.ErrNoLeader) {
				return interrupted(ctx, err)
			}
			for t, err := range cluster.Observe(ctx, args[0]) {
				switch {
				case errors.Is(err, context.Canceled) && ctx.Err() != nil:
					return nil
				case err != nil:
					return err
				case t.Token == 0:
					o.line(cmd.OutOrStdout(), "vacant", aegis.Term{Election: args[0]}, "")
				default:
					o.line(cmd.OutOrStdout(), "leader", t, "")
				}
			}
			return nil
		},
	}
}
