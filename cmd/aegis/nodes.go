package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"aegis"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"
)

func init() { register(newNodes) }

func newNodes(o *options) *cobra.Command {
	var strict bool
	cmd := &cobra.Command{
		Use:     "nodes",
		GroupID: groupLook,
		Short:   "List the nodes that have joined",
		Long: `nodes lists the nodes that have joined, with what they say of themselves. With --strict the exit code is 1 when one of
their keys is at fault.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel, cluster, err := o.cluster(cmd.Context())
			if err != nil {
				return err
			}
			defer cancel()
			members, err := cluster.Members(ctx)
			if err != nil {
				return err
			}
			if o.output == "json" {
				err = printJSON(cmd.OutOrStdout(), membersJSON(members))
			} else {
				o.printMembers(cmd.OutOrStdout(), members)
			}
			for _, m := range members {
				if m.Fault != "" && strict && err == nil {
					err = exitf(exitFailure, "node %s: %s", m.ID, m.Fault)
				}
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&strict, "strict", false, "exit code 1 when a fault is found")
	return cmd
}

func (o *options) printMembers(w io.Writer, members []aegis.Member) {
	if len(members) == 0 {
		fmt.Fprintf(w, "no nodes under prefix %s\n", o.prefix)
		return
	}
	var rows []table.Row
	for _, m := range members {
		var meta []string
		for _, k := range slices.Sorted(maps.Keys(m.Meta)) {
			meta = append(meta, k+"="+m.Meta[k])
		}
		on := ""
		if m.PID != 0 {
			on = fmt.Sprintf("%s, pid %d", m.Host, m.PID)
		}
		rows = append(rows, table.Row{m.ID, on, ago(m.Started), m.Program, strings.Join(m.Addresses, "\n"), strings.Join(meta, "\n")})
	}
	printTable(w, table.Row{"node", "on", "started", "program", "addresses", "meta"}, rows)
	for _, m := range members {
		if m.Fault != "" {
			fmt.Fprintf(w, "%s %s: %s\n", bad.Sprint("fault:"), m.ID, m.Fault)
		}
	}
}
