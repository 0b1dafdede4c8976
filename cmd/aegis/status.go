package main

import (
	"fmt"
	"io"
	"strings"
	"time"

	"aegis"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/spf13/cobra"
)

func init() { register(newStatus) }

func newStatus(o *options) *cobra.Command {
	var strict bool
	cmd := &cobra.Command{
		Use:     "status [NAME]",
		GroupID: groupLook,
		Short:   "Show who leads, since when, who waits, and what is wrong",
		Long: `status shows every election that is led, waited for or was led before: leader, host and pid, since when, token,
what is left of the leader's lease, who waits in which order, and how the last term that is over ended.

What should not be (a key without a lease, one that something else wrote) is listed as a fault; with --strict
the exit code is then 1.`,
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: o.completeNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, cancel, cluster, err := o.cluster(cmd.Context())
			if err != nil {
				return err
			}
			defer cancel()
			infos, err := cluster.Elections(ctx)
			if err != nil {
				return err
			}
			if len(args) == 1 {
				if infos = only(infos, args[0]); len(infos) == 0 {
					if err := checkName(cluster, args[0]); err != nil {
						return err
					}
					return exitf(exitNotLeader, "election %q: nobody leads it, waits for it, or has led it under prefix %s; `aegis status` lists all", args[0], o.prefix)
				}
			}
			out := cmd.OutOrStdout()
			if o.output == "json" {
				err = printJSON(out, electionsJSON(infos))
			} else {
				err = o.printElections(out, infos)
			}
			if n := faults(infos); err == nil && strict && n > 0 {
				err = exitf(exitFailure, "%d fault(s) found", n)
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&strict, "strict", false, "exit code 1 when a fault is found")
	return cmd
}

func only(infos []aegis.ElectionInfo, name string) []aegis.ElectionInfo {
	for _, i := range infos {
		if i.Name == name {
			return []aegis.ElectionInfo{i}
		}
	}
	return nil
}

func faults(infos []aegis.ElectionInfo) (n int) {
	for _, i := range infos {
		n += len(i.Faults)
	}
	return n
}

func (o *options) printElections(w io.Writer, infos []aegis.ElectionInfo) error {
	if len(infos) == 0 {
		fmt.Fprintf(w, "no elections under prefix %s\n", o.prefix)
		return nil
	}
	var rows []table.Row
	for _, i := range infos {
		leader, host, token, lease := warn.Sprint("vacant"), "", "", ""
		if i.Term.Token != 0 {
			leader, token, lease = good.Sprint(i.Term.Node), fmt.Sprint(i.Term.Token), short(i.LeaseLeft)
			if i.LeaseLeft < time.Second {
				lease = "<1s"
			}
		}
		if i.PID != 0 {
			host = fmt.Sprintf("%s, pid %d", i.Host, i.PID)
		}
		rows = append(rows, table.Row{i.Name, leader, host, ago(i.Since), token, lease, waiting(i.Candidates),
			text.WrapSoft(i.LastEnd, 40)})
	}
	printTable(w, table.Row{"election", "leader", "on", "since", "token", "lease", "waiting", "last term ended"}, rows)
	for _, i := range infos {
		for _, f := range i.Faults {
			fmt.Fprintf(w, "%s %s: %s\n", bad.Sprint("fault:"), i.Name, f)
		}
	}
	return nil
}

// waiting lists candidates, a line each.
func waiting(candidates []aegis.Candidate) string {
	var lines []string
	for n, c := range candidates {
		if n == 5 && len(candidates) > 6 {
			lines = append(lines, fmt.Sprintf("… and %d more", len(candidates)-n))
			break
		}
		line := fmt.Sprintf("%d. %s", n+1, c.Node)
		if c.Priority != 0 {
			line += fmt.Sprintf(" (priority %d)", c.Priority)
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "\n")
}
