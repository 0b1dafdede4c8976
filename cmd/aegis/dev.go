package main

import (
	"fmt"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	etcd "go.etcd.io/etcd/api/v3/version"
)

func init() { register(newDev) }

func newDev(o *options) *cobra.Command {
	var dir, listen string
	cmd := &cobra.Command{
		Use:     "dev",
		GroupID: groupTry,
		Short:   "Run an etcd of one member in this process, to develop with",
		Long: `dev runs an etcd of a single member inside this process, without TLS or authentication, until it is interrupted.
It prints the endpoint when it is ready and nothing else. Its data outlives it: delete the directory to start anew.`,
		Example: `  aegis dev
  aegis dev --listen 127.0.0.1:0 --data-dir try.etcd`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			unlock, err := prepareDataDir(dir)
			if err != nil {
				return err
			}
			defer unlock()
			e, err := startEtcd(ctx, dir, listen)
			if err != nil || e == nil {
				return err
			}
			defer func() {
				e.Server.HardStop() // an orderly stop waits for clients; what is acknowledged is on the disk
				e.Close()
			}()
			endpoint := clientAddress(e.Clients[0].Addr())
			if o.output == "json" {
				_ = printJSON(cmd.OutOrStdout(), map[string]string{"endpoint": endpoint, "dataDir": dir})
			} else {
				fmt.Fprintf(cmd.OutOrStdout(), "etcd %s is ready, data in %s; Ctrl-C stops it\n\n  export AEGIS_ENDPOINTS=%s\n\n", etcd.Version, dir, endpoint)
			}
			select {
			case <-ctx.Done():
				return nil
			case err := <-e.Err():
				return fmt.Errorf("etcd stopped: %w", err)
			}
		},
	}
	cmd.Flags().StringVar(&dir, "data-dir", "aegis-dev.etcd", "`directory` of the data; created if absent")
	cmd.Flags().StringVar(&listen, "listen", "127.0.0.1:2379", "`address` for clients; port 0 takes a free one")
	return cmd
}
