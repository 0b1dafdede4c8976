package main

import (
	"fmt"
	"os"
	"strings"
	"time"

	"aegis"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// options are the flags that every command has.
type options struct {
	endpoints          []string
	prefix             string
	timeout            time.Duration
	output             string
	cacert, cert, key  string
	insecureSkipVerify bool
	insecureTransport  bool
	user, password     string
	dialTimeout        time.Duration
	keepaliveTime      time.Duration
	keepaliveTimeout   time.Duration

	running bool    // the command line was good: errors are not about usage any more
	cli     *client // once connected
}

// Groups of commands in the help.
const (
	groupTry     = "try"
	groupLead    = "lead"
	groupLook    = "look"
	groupOperate = "operate"
)

var commands []func(*options) *cobra.Command

// register adds a subcommand; its file calls it from init.
func register(command func(*options) *cobra.Command) { commands = append(commands, command) }

const rootHelp = `aegis gives singleton work in a cluster exactly one owner, on etcd.

Every global flag has an environment variable: --endpoints is AEGIS_ENDPOINTS, --insecure-skip-tls-verify is
AEGIS_INSECURE_SKIP_TLS_VERIFY, and so on. A flag wins over its variable. NO_COLOR switches colours off.

Exit codes:
  0        done; for run: the child's own code, 128+n when signal n killed it
  1        failed otherwise; status --strict and nodes --strict: a fault was found
  2        usage: unknown flag, bad name, value out of its bounds
  3        not the leader, or nobody leads
  4        a term that was held was lost (campaign --no-wait, run --exit-on-loss)
  5        no answer, or no result, in time
  6        etcd cannot be reached, or refuses user, password or permission
  126, 127 run: the command cannot be executed, or was not found`

func newRoot(o *options) *cobra.Command {
	root := &cobra.Command{
		Use:           "aegis",
		Short:         "One owner for singleton work in a cluster, on etcd",
		Long:          rootHelp,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.NoArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			if err := fromEnvironment(cmd.Root().PersistentFlags()); err != nil {
				return err
			}
			if err := o.validate(); err != nil {
				return err
			}
			o.running = true
			return nil
		},
	}
	root.AddGroup(
		&cobra.Group{ID: groupTry, Title: "To try it out:"},
		&cobra.Group{ID: groupLead, Title: "To lead:"},
		&cobra.Group{ID: groupLook, Title: "To look:"},
		&cobra.Group{ID: groupOperate, Title: "To operate:"},
	)
	f := root.PersistentFlags()
	f.SortFlags = false
	f.StringSliceVar(&o.endpoints, "endpoints", []string{"127.0.0.1:2379"}, "etcd's client `addresses`, separated by commas")
	f.StringVar(&o.prefix, "prefix", aegis.DefaultPrefix, "of all keys in etcd")
	f.DurationVar(&o.timeout, "timeout", 5*time.Second, "bound of commands that ask once; for the others, of their first contact")
	f.StringVarP(&o.output, "output", "o", "table", "`format` of the output: table or json")
	f.StringVar(&o.cacert, "cacert", "", "verify etcd's certificate with this CA `file`")
	f.StringVar(&o.cert, "cert", "", "identify with this TLS certificate `file`")
	f.StringVar(&o.key, "key", "", "identify with this TLS key `file`")
	f.BoolVar(&o.insecureSkipVerify, "insecure-skip-tls-verify", false, "do not verify etcd's certificate")
	f.BoolVar(&o.insecureTransport, "insecure-transport", true, "plain text unless an endpoint or a TLS flag says otherwise")
	f.StringVar(&o.user, "user", "", "`name[:password]` for etcd; asks for the password at a terminal")
	f.StringVar(&o.password, "password", "", "for --user; AEGIS_PASSWORD keeps it out of the process list")
	f.DurationVar(&o.dialTimeout, "dial-timeout", 2*time.Second, "of one attempt to connect")
	f.DurationVar(&o.keepaliveTime, "keepalive-time", 10*time.Second, "how often an idle connection is probed, 10s at least")
	f.DurationVar(&o.keepaliveTimeout, "keepalive-timeout", 3*time.Second, "after which a silent connection is given up")
	for _, command := range commands {
		root.AddCommand(command(o))
	}
	// The global flags are shown once, by the root's help.
	root.SetUsageTemplate(strings.Replace(root.UsageTemplate(), "Global Flags:\n{{.InheritedFlags.FlagUsages | trimTrailingWhitespaces}}",
		"Global flags (--endpoints, --output, ...) and exit codes: aegis --help", 1))
	root.Flags().SortFlags = false
	return root
}

// fromEnvironment sets the flags that were not given from their variables.
func fromEnvironment(flags *pflag.FlagSet) (err error) {
	flags.VisitAll(func(f *pflag.Flag) {
		name := "AEGIS_" + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
		value, ok := os.LookupEnv(name)
		if !ok || value == "" || f.Changed || err != nil {
			return
		}
		if serr := flags.Set(f.Name, value); serr != nil {
			err = fmt.Errorf("environment variable %s: %w", name, serr)
		}
	})
	return err
}

func (o *options) validate() error {
	if o.output != "table" && o.output != "json" {
		return fmt.Errorf("--output is %q; it must be table or json", o.output)
	}
	for _, d := range []struct {
		flag  string
		value time.Duration
	}{{"timeout", o.timeout}, {"dial-timeout", o.dialTimeout}, {"keepalive-time", o.keepaliveTime}, {"keepalive-timeout", o.keepaliveTimeout}} {
		if d.value <= 0 {
			return fmt.Errorf("--%s is %v; it must be more than 0", d.flag, d.value)
		}
	}
	if len(o.endpoints) == 0 {
		return fmt.Errorf("--endpoints is empty; it must name an address of etcd, such as 127.0.0.1:2379")
	}
	if o.password != "" && o.user == "" {
		return fmt.Errorf("--password needs --user")
	}
	return nil
}
