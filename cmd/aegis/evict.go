package main

import (
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"aegis"

	"github.com/spf13/cobra"
)

func init() { register(newEvict) }

func newEvict(o *options) *cobra.Command {
	var now bool
	var wait time.Duration
	cmd := &cobra.Command{
		Use:     "evict NAME",
		GroupID: groupOperate,
		Short:   "Ask the leader to resign, or take the election away from it",
		Long: `evict asks the leader of the present term to stop, wait for its work, and resign; then it waits for that, --wait at
most (exit code 5). The node stays a candidate, and leads again if nobody else waits.

With --now it deletes the leader's key without asking. The leader learns of it by its watch, if etcd can reach it;
until then it works on, beside the next leader. Only guards that have taken the next leader's token keep them apart.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: o.completeNames,
		RunE: func(cmd *cobra.Command, args []string) error {
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
			old, err := cluster.Leader(first, args[0])
			if err != nil {
				return err
			}
			if now {
				if err := cluster.Evict(first, old); err != nil {
					return err
				}
				fmt.Fprintf(os.Stderr, "aegis: warning: %s was not asked and may work on until it notices; only guards refuse its token %d\n", old.Node, old.Token)
				return o.printHandover(cmd.OutOrStdout(), old, aegis.Term{})
			}
			if err := cluster.Request(first, old, ""); err != nil {
				return err
			}
			next, err := after(ctx, cluster, old, wait, false)
			if err != nil {
				return err
			}
			return o.printHandover(cmd.OutOrStdout(), old, next)
		},
	}
	cmd.Flags().BoolVar(&now, "now", false, "delete the leader's key instead of asking it to resign")
	cmd.Flags().DurationVar(&wait, "wait", 30*time.Second, "for the leader to resign: its work must stop first")
	return cmd
}

// printHandover says who led and who leads.
func (o *options) printHandover(w io.Writer, old, next aegis.Term) error {
	if o.output == "json" {
		v := struct {
			Was termJSON  `json:"was"`
			Now *termJSON `json:"now"` // null when vacant
		}{Was: termJSON{old.Election, old.Node, old.Token}}
		if next.Token != 0 {
			v.Now = &termJSON{next.Election, next.Node, next.Token}
		}
		return printJSON(w, v)
	}
	if next.Token == 0 {
		_, err := fmt.Fprintf(w, "%s: the term of %s (token %d) has ended\n", old.Election, old.Node, old.Token)
		return err
	}
	_, err := fmt.Fprintf(w, "%s: %s leads with token %d (was %s, token %d)\n", next.Election, next.Node, next.Token, old.Node, old.Token)
	return err
}
