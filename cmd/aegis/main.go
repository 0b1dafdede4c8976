// Command aegis gives singleton work in a cluster exactly one owner, from a shell: see `aegis --help`.
//
// Each subcommand is one file, which registers itself; what they share is in root.go (flags, environment, exit codes),
// client.go (the connection) and print.go (tables, colours, JSON).
package main

import (
	"fmt"
	"os"
)

func main() { os.Exit(Main(os.Args[1:])) }

// Main runs one command line and returns its exit code.
func Main(args []string) (code int) {
	defer func() {
		if p := recover(); p != nil {
			fmt.Fprintf(os.Stderr, "aegis: internal error: %v; please report it with the command line\n", p)
			code = exitFailure
		}
	}()
	if os.Args[0] == watchdogName {
		return watchdog()
	}
	o := &options{}
	root := newRoot(o)
	root.SetArgs(args)
	cmd, err := root.ExecuteC()
	return o.report(cmd, err)
}
