package main

import (
	"context"
	"errors"
	"fmt"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"aegis"

	"github.com/spf13/cobra"
)

func init() { register(newTransfer) }

func newTransfer(o *options) *cobra.Command {
	var wait time.Duration
	cmd := &cobra.Command{
		Use:     "transfer NAME NODE",
		GroupID: groupOperate,
		Short:   "Ask the leader to hand an election to a waiting node",
		Long: `transfer asks the leader of the present term to stop, wait for its work, and hand the election to NODE, which must
be waiting for it; then it waits until that has happened, --wait at most (exit code 5).`,
		Example:           `  aegis transfer boss/42 scene-02`,
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: o.completeNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			name, to := args[0], aegis.NodeID(args[1])
			if wait <= 0 {
				return usagef("--wait is %v; it must be more than 0", wait)
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			first, cancel, cluster, err := o.cluster(ctx)
			if err != nil {
				return err
			}
			defer cancel()
			old, err := cluster.Leader(first, name)
			if err != nil {
				return err
			}
			if old.Node == to {
				fmt.Fprintf(cmd.OutOrStdout(), "%s leads %q already, token %d\n", to, name, old.Token)
				return nil
			}
			queue, err := cluster.Candidates(first, name)
			if err != nil {
				return err
			}
			if err := waits(queue, name, to); err != nil {
				return err
			}
			if err := cluster.Request(first, old, to); err != nil {
				return err
			}
			next, err := after(ctx, cluster, old, wait, true)
			if err != nil {
				return err
			}
			if next.Node != to {
				return exitf(exitFailure, "%q went to %s (token %d), not to %s, which was not waiting any more or not in time", name, next.Node, next.Token, to)
			}
			return o.printHandover(cmd.OutOrStdout(), old, next)
		},
	}
	cmd.Flags().DurationVar(&wait, "wait", 30*time.Second, "for the handover: the leader's work must stop first")
	return cmd
}

// waits reports an error when the node is not among the candidates, naming those who are.
func waits(queue []aegis.Candidate, name string, to aegis.NodeID) error {
	var names []string
	for _, c := range queue {
		if c.Node == to {
			return nil
		}
		names = append(names, string(c.Node))
	}
	who := "nobody does"
	if len(names) > 0 {
		who = "waiting: " + strings.Join(names, ", ")
	}
	return exitf(exitFailure, "transfer %q to %s: it does not wait for the election; %s", name, to, who)
}

func stillLed(old aegis.Term, wait time.Duration) error {
	return exitf(exitTimeout, "%s still leads %q (token %d) after %v: its work has not stopped; the request stands, `aegis evict --now` does not wait for it",
		old.Node, old.Election, old.Token, wait)
}

// after waits until the old term is over and, with follow, another leads; the zero token stands for vacant.
func after(ctx context.Context, cluster *aegis.Cluster, old aegis.Term, wait time.Duration, follow bool) (aegis.Term, error) {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	over := false
	for t, err := range cluster.Observe(ctx, old.Election) {
		switch {
		case errors.Is(err, context.DeadlineExceeded) && over:
			return t, exitf(exitTimeout, "%s has given %q up (token %d), but nobody has followed within %v; `aegis status` shows who waits", old.Node, old.Election, old.Token, wait)
		case errors.Is(err, context.DeadlineExceeded):
			return t, stillLed(old, wait)
		case err != nil:
			return t, err
		case t.Token == old.Token:
		case t.Token != 0 || !follow:
			return t, nil
		default:
			over = true
		}
	}
	return aegis.Term{}, stillLed(old, wait)
}
