package main

import (
	"errors"
	"io/fs"
	"os/exec"
	"time"

	"github.com/spf13/cobra"
)

func init() { register(newRun) }

// runFlags say what run does.
type runFlags struct {
	nodeFlags
	grace, stopGrace time.Duration
	exitOnLoss       bool
	path             string
	args             []string
}

// leastRest is what must be left of the margin after the grace: KILL, and the death of a group, take time.
const leastRest = 100 * time.Millisecond

func newRun(o *options) *cobra.Command {
	var f runFlags
	cmd := &cobra.Command{
		Use:     "run NAME [flags] -- COMMAND [ARG...]",
		GroupID: groupLead,

		DisableFlagsInUseLine: true,

		Short: "Run a command while leading an election, and only then",
		Long: `run waits to lead, then runs the command, with AEGIS_ELECTION, AEGIS_NODE and AEGIS_TOKEN in its environment.

When the command ends, run gives the election up at once and exits with the command's code. When the term is lost,
the command's whole process group gets TERM, and KILL after --grace, so that it is dead before the lease ends and
another can lead; then run waits to lead again, and starts the command anew. This holds also when run itself is
stopped or killed, since a second process of run, its watchdog, sees to it; and when the watchdog is, since run does.
It does not hold when both are stopped (SIGSTOP, a debugger) within three seconds: then the command runs on.

SIGTERM, SIGINT or SIGHUP to run stop the command likewise, with --stop-grace; a second one kills it. So does an
operator's transfer or evict, without the second. All descendants of the command end with it, those that left its
process group too, so it must stay in the foreground. It has no controlling terminal.

The command should pass AEGIS_TOKEN to whatever it writes to, which then can refuse what comes too late.`,
		Example: `  aegis run settle-boss -- ./settle --boss 42
  aegis run cron --ttl 15s --grace 2s -- sh -c 'while sleep 60; do ./sweep; done'`,
		Args: func(cmd *cobra.Command, args []string) error {
			switch dash := cmd.ArgsLenAtDash(); {
			case dash < 0:
				return errors.New("there is no -- between the election's name and the command: aegis run NAME -- COMMAND")
			case dash != 1:
				return errors.New("there must be one election name before --: aegis run NAME -- COMMAND")
			case len(args) < 2:
				return errors.New("there is no command after --: aegis run NAME -- COMMAND")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if err := f.validate(cmd); err != nil {
				return err
			}
			f.args = args[1:]
			if f.path, err = exec.LookPath(f.args[0]); err != nil {
				if errors.Is(err, fs.ErrPermission) {
					return exitf(exitCannotExec, "run: %w", err)
				}
				return exitf(exitNotFound, "run: %w", err)
			}
			r := &runner{runFlags: f, o: o, log: o.logger()}
			return r.run(cmd.Context(), args[0])
		},
	}
	f.register(cmd)
	cmd.Flags().DurationVar(&f.grace, "grace", 0, "from TERM to KILL when the term is lost; 100ms less than --margin at most (default: half of it)")
	cmd.Flags().DurationVar(&f.stopGrace, "stop-grace", 10*time.Second, "from TERM to KILL when run is told to stop, or asked to give the election up")
	cmd.Flags().BoolVar(&f.exitOnLoss, "exit-on-loss", false, "exit with code 4 when a term is lost, instead of waiting to lead again")
	return cmd
}

func (f *runFlags) validate(cmd *cobra.Command) error {
	if err := f.nodeFlags.validate(cmd.Flags()); err != nil {
		return err
	}
	if f.margin <= leastRest {
		return usagef("--margin is %v; run needs more than %v, in which to kill the command", f.margin, leastRest)
	}
	if !cmd.Flags().Changed("grace") {
		f.grace = min(f.margin/2, f.margin-leastRest)
	}
	if f.grace < 0 || f.grace > f.margin-leastRest {
		return usagef("--grace is %v; it must be from 0 to %v, which is %v less than --margin (%v): KILL must come before the lease ends",
			f.grace, f.margin-leastRest, leastRest, f.margin)
	}
	if f.stopGrace < 0 {
		return usagef("--stop-grace is %v; it must not be negative", f.stopGrace)
	}
	return nil
}
