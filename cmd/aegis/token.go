package main

import (
	"bufio"
	"fmt"
	"os"
	"strings"

	"aegis"

	"github.com/spf13/cobra"
	"golang.org/x/term"
)

func init() { register(newToken) }

func newToken(o *options) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "token",
		GroupID: groupOperate,
		Short:   "Raise the tokens after a restore of etcd",
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newTokenRaise(o))
	return cmd
}

func newTokenRaise(o *options) *cobra.Command {
	var above aegis.Token
	var yes bool
	cmd := &cobra.Command{
		Use:   "raise",
		Short: "Raise the cluster's token offset, so that new tokens are above all given out before",
		Long: `raise is for after a restore of etcd from a snapshot, or its replacement by another: it counts revisions from the
past, so that fresh tokens could be smaller than those that guards have taken. Nodes notice that and stay out of
elections until this command is run; a guard says so by an error that names two tokens.

The offset becomes more than 2^30 above --above and every token that this etcd can have given out. It never gets
lower. Every term in office ends.`,
		Example: `  aegis token raise --above 483921`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if above < 0 {
				return usagef("--above is %d; it must be the greatest token that any guard has taken, or 0", above)
			}
			if !yes {
				if err := confirm("This ends every term in office under prefix " + o.prefix + ". Go on?"); err != nil {
					return err
				}
			}
			ctx, cancel, cluster, err := o.cluster(cmd.Context())
			if err != nil {
				return err
			}
			defer cancel()
			was, err := cluster.TokenOffset(ctx)
			if err != nil {
				return err
			}
			offset, err := cluster.RaiseToken(ctx, above)
			if err != nil {
				return err
			}
			if o.output == "json" {
				return printJSON(cmd.OutOrStdout(), map[string]int64{"was": was, "offset": offset})
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "token offset raised from %d to %d; every term that was in office ends\n", was, offset)
			return err
		},
	}
	cmd.Flags().Int64Var(&above, "above", 0, "the greatest `token` that any guard has taken")
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	return cmd
}

// confirm asks at the terminal; without one, only --yes will do.
func confirm(question string) error {
	if !term.IsTerminal(int(os.Stdin.Fd())) {
		return usagef("%s Nobody is at the terminal to say so; add --yes", question)
	}
	fmt.Fprintf(os.Stderr, "%s [y/N] ", question)
	answer, err := bufio.NewReader(os.Stdin).ReadString('\n')
	if err != nil || !strings.EqualFold(strings.TrimSpace(answer), "y") {
		return exitf(exitFailure, "not confirmed; nothing was done")
	}
	return nil
}
