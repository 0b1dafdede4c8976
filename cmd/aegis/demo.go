package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"aegis/internal/lab/demo"

	"github.com/spf13/cobra"
	"golang.org/x/term"
)

func init() { register(newDemo) }

func newDemo(o *options) *cobra.Command {
	var cfg demo.Config
	cmd := &cobra.Command{
		Use:     "demo",
		GroupID: groupTry,
		Short:   "Play a split brain for real, without and with the fence",
		Long: `demo needs nothing but this binary. It starts an etcd of three members and two scenes, processes that may own a boss
and pay its loot into an SQLite file, and does to them what networks and pauses do: the leading scene is stopped between
its check that it leads and its writes, cut off from etcd, and continued when the other has taken over. It does so twice,
the second time with the writes going through the guard, and counts the loot. It takes about 15 s.

The exit code is 0 only if loot was paid twice without the fence, and the late writes were refused, and all else was
paid once, with it. With -o json the facts are on standard output and the time line is on standard error.`,
		Example: `  aegis demo
  aegis demo --keep split-brain && sqlite3 split-brain/without-the-fence.db 'SELECT * FROM loot WHERE kill IN (7, 8, 9)'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := context.WithCancelCause(cmd.Context())
			defer stop(nil)
			signals := make(chan os.Signal, 1)
			signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
			defer signal.Stop(signals)
			go func() {
				select {
				case s := <-signals:
					signal.Stop(signals) // a second one ends it at once
					number, _ := s.(syscall.Signal)
					stop(exitf(exitSignal+int(number), "%v: the demo's processes and files are removed", s))
				case <-ctx.Done():
				}
			}()
			out := os.Stdout
			if o.output == "json" {
				out = os.Stderr
			}
			signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // it would end this process without a chance to clean up
			cfg.Scene = []string{"demo", "scene"}
			cfg.Out = untilBroken{out, stop}
			cfg.Color = (term.IsTerminal(int(out.Fd())) || os.Getenv("FORCE_COLOR") != "") && os.Getenv("NO_COLOR") == ""
			if cfg.TTL == 0 {
				return usagef("--ttl is 0; it must be whole seconds from %v to %v", demo.MinTTL, demo.MaxTTL)
			}
			report, err := demo.Run(ctx, cfg)
			if errors.Is(err, demo.ErrConfig) {
				return usagef("%w", err)
			}
			if err != nil {
				return err
			}
			if o.output == "json" {
				if err := printJSON(cmd.OutOrStdout(), report); err != nil {
					return err
				}
			}
			if !report.OK {
				return exitf(exitFailure, "the demo did not show what it should: %s", strings.Join(report.Problems, "; "))
			}
			return nil
		},
	}
	cmd.Flags().DurationVar(&cfg.TTL, "ttl", demo.DefaultTTL, fmt.Sprintf("of the scenes' leases: whole seconds, %v to %v", demo.MinTTL, demo.MaxTTL))
	cmd.Flags().StringVar(&cfg.Keep, "keep", "", "`directory` to leave the databases and the scenes' logs in")
	cmd.AddCommand(&cobra.Command{
		Use:    "scene",
		Short:  "One process of the demo",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if code := demo.Scene(); code != 0 {
				return &exitError{code: code}
			}
			return nil
		},
	})
	return cmd
}

// untilBroken stops the demo when nobody reads it any more.
type untilBroken struct {
	w    io.Writer
	stop context.CancelCauseFunc
}

func (u untilBroken) Write(b []byte) (int, error) {
	n, err := u.w.Write(b)
	if err != nil {
		u.stop(exitf(exitSignal+int(syscall.SIGPIPE), "nobody reads the demo: %w; its processes and files are removed", err))
	}
	return n, err
}
