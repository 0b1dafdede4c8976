package main

import (
	"fmt"

	"github.com/spf13/cobra"
)

func init() { register(newLeader) }

func newLeader(o *options) *cobra.Command {
	return &cobra.Command{
		Use:     "leader NAME",
		GroupID: groupLook,
		Short:   "Print who leads an election: node and token",
		Long: `leader prints the node that leads the election and its term's token, separated by a tab.
Exit code 3 when nobody leads.`,
		Example: `  aegis leader boss/42
  node=$(aegis leader boss/42 | cut -f1)`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: o.completeNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, cancel, cluster, err := o.cluster(cmd.Context())
			if err != nil {
				return err
			}
			defer cancel()
			t, err := cluster.Leader(ctx, args[0])
			if err != nil {
				return err
			}
			if o.output == "json" {
				return printJSON(cmd.OutOrStdout(), termJSON{Election: t.Election, Node: t.Node, Token: t.Token})
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s\t%d\n", t.Node, t.Token)
			return err
		},
	}
}
