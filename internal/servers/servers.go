// Package servers starts real database servers for tests: private ones, on free ports of the loopback, with their data
// in a temporary directory, gone when they are closed or the test process dies. A server that runs already can be given
// by a variable instead; it is then neither started nor stopped, and tests that must restart it say that they cannot.
//
// The programs come from Debian's packages; `make servers` installs what is missing. A missing program is an error,
// never a skipped test.
package servers

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
)

// find returns the path of a server's program: in PATH, or where Debian hides it.
func find(program string, elsewhere ...string) (string, error) {
	if path, err := exec.LookPath(program); err == nil {
		return path, nil
	}
	for _, pattern := range append(elsewhere, "/usr/sbin/"+program) {
		if found, _ := filepath.Glob(pattern); len(found) > 0 {
			return found[len(found)-1], nil // the newest version
		}
	}
	return "", fmt.Errorf("servers: %s is not installed: `make servers` installs it (Debian, as root)", program)
}

// freePort returns a TCP port of the loopback that is free at the moment.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

// tempDir makes a directory that belongs to account, when this process is root and servers refuse to be; otherwise to
// the present user.
func tempDir(account string) (string, error) {
	dir, err := os.MkdirTemp("", "aegis-"+account+"-")
	if err != nil {
		return "", err
	}
	if os.Geteuid() != 0 {
		return dir, nil
	}
	u, err := user.Lookup(account)
	if err != nil {
		return "", fmt.Errorf("servers: no account for the server: %w", err)
	}
	uid, _ := strconv.Atoi(u.Uid)
	gid, _ := strconv.Atoi(u.Gid)
	return dir, os.Chown(dir, uid, gid)
}

// as prefixes a command line so that it runs under account when this process is root.
func as(account string, argv ...string) []string {
	if os.Geteuid() != 0 {
		return argv
	}
	return append([]string{"setpriv", "--reuid", account, "--regid", account, "--clear-groups", "--"}, argv...)
}
