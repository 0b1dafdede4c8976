package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
	etcd "go.etcd.io/etcd/api/v3/version"
)

func init() { register(newVersion) }

func newVersion(o *options) *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		GroupID: groupLook,
		Short:   "Print the versions of aegis, etcd and Go",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			version, commit := "unknown", ""
			if info, ok := debug.ReadBuildInfo(); ok {
				version = info.Main.Version
				for _, s := range info.Settings {
					if s.Key == "vcs.revision" {
						commit = s.Value
					}
				}
			}
			if o.output == "json" {
				return printJSON(cmd.OutOrStdout(), map[string]string{"aegis": version, "commit": commit, "etcd": etcd.Version, "go": runtime.Version()})
			}
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "aegis %s, etcd %s, %s %s/%s\n", version, etcd.Version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
			return err
		},
	}
}
