package main

import (
	"strings"

	"github.com/spf13/cobra"
)

// completeNames completes the first argument by the elections that etcd knows.
func (o *options) completeNames(cmd *cobra.Command, args []string, toComplete string) ([]string, cobra.ShellCompDirective) {
	const none = cobra.ShellCompDirectiveNoFileComp
	if len(args) > 0 || fromEnvironment(cmd.Root().PersistentFlags()) != nil {
		return nil, none
	}
	ctx, cancel, cluster, err := o.cluster(cmd.Context())
	if err != nil {
		return nil, none
	}
	defer cancel()
	infos, err := cluster.Elections(ctx)
	if err != nil {
		return nil, none
	}
	var names []string
	for _, i := range infos {
		if strings.HasPrefix(i.Name, toComplete) {
			names = append(names, i.Name)
		}
	}
	return names, none
}
