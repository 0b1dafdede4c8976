//go:build unix

package servers

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// PgBouncer is a pooler in transaction mode before a Postgres.
type PgBouncer struct {
	Dir  string
	Port int

	daemon *daemon
}

// StartPgBouncer starts a pooler before p: transaction mode, a pool of size server connections per database and role,
// each replaced after 5 s. The caller closes it, before p. It waits for it, 60 s at most.
func StartPgBouncer(p *Postgres, size int) (*PgBouncer, error) {
	program, err := find("pgbouncer")
	if err != nil {
		return nil, err
	}
	b := &PgBouncer{}
	if b.Port, err = freePort(); err != nil {
		return nil, err
	}
	if b.Dir, err = tempDir("postgres"); err != nil {
		return nil, err
	}
	ini := filepath.Join(b.Dir, "pgbouncer.ini")
	settings := []string{"[databases]", fmt.Sprintf("* = host=%s port=%s", p.url.Hostname(), p.url.Port()), "[pgbouncer]",
		"listen_addr = 127.0.0.1", fmt.Sprintf("listen_port = %d", b.Port), "unix_socket_dir =", "auth_type = any",
		"pool_mode = transaction", "server_lifetime = 5", fmt.Sprintf("default_pool_size = %d", size), "max_client_conn = 200",
		"server_reset_query =", // none is run in transaction mode; this says that none is needed
	}
	settings[1] += " user=" + p.url.User.Username()
	if err := os.WriteFile(ini, []byte(strings.Join(settings, "\n")+"\n"), 0o644); err != nil {
		return nil, err
	}
	if b.daemon, err = startDaemon("postgres", b.Dir, "TERM", program, ini); err != nil {
		return nil, err
	}
	err = b.daemon.await(func(ctx context.Context) error { return dialable(ctx, b.Port) })
	if err != nil {
		b.Close()
		return nil, err
	}
	return b, nil
}

// URL returns the address of a database through the pooler.
func (b *PgBouncer) URL(database string) string {
	return (&url.URL{Scheme: "postgres", User: url.User("postgres"), Host: fmt.Sprintf("127.0.0.1:%d", b.Port), Path: "/" + database}).String()
}

// Close stops the pooler.
func (b *PgBouncer) Close() {
	b.daemon.stop(false)
	_ = os.RemoveAll(b.Dir)
}

func ownGroup() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
