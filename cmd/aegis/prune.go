package main

import (
	"fmt"

	"github.com/spf13/cobra"
)

func init() { register(newPrune) }

func newPrune(o *options) *cobra.Command {
	return &cobra.Command{
		Use:     "prune",
		GroupID: groupOperate,
		Short:   "Remove what is remembered of elections that nobody leads or waits for",
		Long: `prune removes the records of vacant elections for which nobody waits, and prints their names. Nothing rests on those
records but the memory of how the last term ended; tokens go on growing without them.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel, cluster, err := o.cluster(cmd.Context())
			if err != nil {
				return err
			}
			defer cancel()
			names, err := cluster.Prune(ctx)
			if o.output == "json" {
				if jerr := printJSON(cmd.OutOrStdout(), append([]string{}, names...)); err == nil {
					err = jerr
				}
				return err
			}
			for _, n := range names {
				fmt.Fprintln(cmd.OutOrStdout(), n)
			}
			return err
		},
	}
}
