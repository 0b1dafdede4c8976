package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/signal"
	"syscall"

	"aegis"

	"github.com/spf13/cobra"
)

func init() { register(newCampaign) }

func newCampaign(o *options) *cobra.Command {
	var node nodeFlags
	var noWait bool
	cmd := &cobra.Command{
		Use:     "campaign NAME",
		GroupID: groupLead,
		Short:   "Lead an election until interrupted, printing each transition",
		Long: `campaign waits to lead, prints one line per transition, and holds the election until SIGINT or SIGTERM, when it
resigns and exits with 0. A term that is lost is followed by waiting again.

With --no-wait it tries once: exit code 3 when another leads, 4 when the term is lost.`,
		Example: `  aegis campaign boss/42 --id scene-01
  aegis campaign boss/42 --no-wait -o json`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: o.completeNames,
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if err := node.validate(cmd.Flags()); err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
			defer stop()
			n, holder, err := o.join(ctx, &node, args[0], o.quietLogger())
			if err != nil {
				return interrupted(ctx, err)
			}
			defer func() {
				if lerr := n.Leave(context.WithoutCancel(ctx)); err == nil {
					err = lerr
				}
			}()
			e := n.Election(args[0], aegis.WithPriority(node.priority))
			if noWait {
				return o.campaignOnce(ctx, cmd.OutOrStdout(), e)
			}
			as := "as " + string(n.ID())
			if holder.Token != 0 {
				as += fmt.Sprintf("; %s leads with token %d", holder.Node, holder.Token)
			}
			return o.campaign(ctx, cmd.OutOrStdout(), e, as)
		},
	}
	node.register(cmd)
	cmd.Flags().BoolVar(&noWait, "no-wait", false, "try once instead of waiting")
	return cmd
}

// campaign leads term after term until ctx ends.
func (o *options) campaign(ctx context.Context, w io.Writer, e *aegis.Election, as string) error {
	o.line(w, "waiting", aegis.Term{Election: e.Name()}, as)
	err := e.Run(ctx, func(ctx context.Context, led *aegis.Leadership) error {
		o.line(w, "elected", led.Term, "")
		<-ctx.Done()
		if led.Held() {
			o.line(w, "released", led.Term, "interrupted")
			return nil
		}
		o.line(w, "lost", led.Term, lossReason(led))
		return nil
	})
	return interrupted(ctx, err)
}

// campaignOnce tries once, and holds the term until ctx ends or it is lost.
func (o *options) campaignOnce(ctx context.Context, w io.Writer, e *aegis.Election) error {
	led, err := e.Campaign(ctx)
	if err != nil {
		return interrupted(ctx, err)
	}
	o.line(w, "elected", led.Term, "")
	select {
	case <-led.Context().Done():
		o.line(w, "lost", led.Term, lossReason(led))
		return context.Cause(led.Context())
	case <-ctx.Done():
		o.line(w, "released", led.Term, "interrupted")
		return led.Resign(context.WithoutCancel(ctx))
	}
}

// interrupted makes the end of ctx, which is the user's wish, no error.
func interrupted(ctx context.Context, err error) error {
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// lossReason says why a term ended.
func lossReason(led *aegis.Leadership) string {
	var loss *aegis.LossError
	if errors.As(context.Cause(led.Context()), &loss) && loss.Reason != nil {
		return loss.Reason.Error()
	}
	return "unknown"
}
