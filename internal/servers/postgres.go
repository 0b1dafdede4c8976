//go:build unix

package servers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

// PostgresEnv names the variable that gives a running server to the tests: a URL of a superuser, such as
// postgres://postgres@127.0.0.1:5432/postgres.
const PostgresEnv = "AEGIS_TEST_POSTGRES"

// PostgresConfig says which server [StartPostgres] starts.
type PostgresConfig struct {
	// Fsync makes commits durable, as in production. Off, conformance tests are quick; a killed server still loses
	// nothing, only a killed machine would.
	Fsync bool

	// Settings are added to the server's, such as "max_prepared_transactions=8".
	Settings []string

	_ struct{}
}

// Postgres is a PostgreSQL server for tests. Its methods are not safe for concurrent use, but for Database.
type Postgres struct {
	Dir  string // its directory, "" where the server was given by a variable; the socket is in it
	Port int

	url      *url.URL // of the superuser, at the database postgres
	program  string
	cfg      PostgresConfig
	settings []string
	daemon   *daemon
	bases    atomic.Int64
}

// StartPostgres starts a server that trusts everybody on the loopback and on its unix socket, and waits for it, 60 s at
// most. Where the variable [PostgresEnv] is set, it returns that server instead.
func StartPostgres(cfg PostgresConfig) (*Postgres, error) {
	if given := os.Getenv(PostgresEnv); given != "" {
		u, err := url.Parse(given)
		if err != nil {
			return nil, fmt.Errorf("servers: %s: %w", PostgresEnv, err)
		}
		return &Postgres{url: u}, nil
	}
	p, err := newPostgres(cfg)
	if err != nil {
		return nil, err
	}
	initdb, err := find("initdb", "/usr/lib/postgresql/*/bin/initdb")
	if err == nil {
		// ICU and locales cost time and change nothing here.
		err = command("postgres", initdb, "--pgdata="+p.data(), "--auth=trust", "--username=postgres", "--encoding=UTF8", "--no-locale", "--no-sync")
	}
	if err == nil {
		// For tests of wrong passwords: roles of this name need theirs.
		hba := "host all with_password all scram-sha-256\nlocal all all trust\nhost all all 127.0.0.1/32 trust\nhost replication all 127.0.0.1/32 trust\n"
		err = os.WriteFile(filepath.Join(p.data(), "pg_hba.conf"), []byte(hba), 0o644) // keeps the file's owner
	}
	if err == nil {
		err = p.Start()
	}
	if err != nil {
		_ = os.RemoveAll(p.Dir)
		return nil, err
	}
	return p, nil
}

func newPostgres(cfg PostgresConfig) (*Postgres, error) {
	program, err := find("postgres", "/usr/lib/postgresql/*/bin/postgres")
	if err != nil {
		return nil, err
	}
	p := &Postgres{program: program, cfg: cfg}
	if p.Port, err = freePort(); err != nil {
		return nil, err
	}
	if p.Dir, err = tempDir("postgres"); err != nil {
		return nil, err
	}
	fsync := "off"
	if cfg.Fsync {
		fsync = "on"
	}
	p.settings = append([]string{"fsync=" + fsync, "max_connections=200", "shared_buffers=64MB", "listen_addresses=127.0.0.1",
		"unix_socket_directories=" + p.Dir, "log_min_messages=warning", "max_wal_senders=4"}, cfg.Settings...)
	p.url = &url.URL{Scheme: "postgres", User: url.User("postgres"), Host: fmt.Sprintf("127.0.0.1:%d", p.Port), Path: "/postgres"}
	return p, nil
}

func (p *Postgres) data() string { return filepath.Join(p.Dir, "data") }

// Given reports that the server was given by a variable and cannot be stopped.
func (p *Postgres) Given() bool { return p.daemon == nil && p.program == "" }

// Start starts the server again after [Postgres.Stop].
func (p *Postgres) Start() error {
	argv := []string{p.program, "-D", p.data(), "-p", fmt.Sprint(p.Port)}
	for _, s := range p.settings {
		argv = append(argv, "-c", s)
	}
	var err error
	if p.daemon, err = startDaemon("postgres", p.Dir, "QUIT", argv...); err != nil {
		return err
	}
	err = p.daemon.await(func(ctx context.Context) error {
		conn, err := pgx.Connect(ctx, p.URL("postgres", "postgres"))
		if err != nil {
			return err
		}
		return conn.Close(ctx)
	})
	if err != nil {
		p.daemon.stop(false)
	}
	return err
}

// Stop kills every session and stops the server as a crash would, without a checkpoint; its data stay.
func (p *Postgres) Stop() {
	if p.daemon != nil {
		p.daemon.stop(true)
	}
}

// Close stops the server and removes its data.
func (p *Postgres) Close() {
	if p.daemon != nil {
		p.daemon.stop(false)
		_ = os.RemoveAll(p.Dir)
	}
}

// URL returns the address of a database for a role, by TCP on the loopback.
func (p *Postgres) URL(database, role string) string {
	u := *p.url
	u.Path = "/" + database
	if role != u.User.Username() {
		u.User = url.User(role)
	}
	return u.String()
}

// SocketURL is URL by the unix socket; by TCP where the server was given by a variable.
func (p *Postgres) SocketURL(database, role string) string {
	if p.Given() {
		return p.URL(database, role)
	}
	return fmt.Sprintf("postgres:///%s?user=%s&host=%s&port=%d", database, url.QueryEscape(role), url.QueryEscape(p.Dir), p.Port)
}

// Database creates a database of its own for a test, as a copy of template ("" for an empty one), and returns its name.
func (p *Postgres) Database(ctx context.Context, template string) (string, error) {
	conn, err := pgx.Connect(ctx, p.URL("postgres", "postgres"))
	if err != nil {
		return "", fmt.Errorf("servers: %w", err)
	}
	defer conn.Close(ctx)
	if template == "" {
		template = "template0"
	}
	name := fmt.Sprintf("aegis_%d_%d", os.Getpid(), p.bases.Add(1))
	_, err = conn.Exec(ctx, "CREATE DATABASE "+name+" TEMPLATE "+template)
	return name, err
}

// Drop removes a database and ends its sessions.
func (p *Postgres) Drop(ctx context.Context, name string) error {
	conn, err := pgx.Connect(ctx, p.URL("postgres", "postgres"))
	if err != nil {
		return fmt.Errorf("servers: %w", err)
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, "DROP DATABASE IF EXISTS "+name+" WITH (FORCE)")
	return err
}

// Standby starts a read replica that streams from p. The caller closes it.
func (p *Postgres) Standby() (*Postgres, error) {
	s, err := newPostgres(p.cfg)
	if err != nil {
		return nil, err
	}
	backup, err := find("pg_basebackup", "/usr/lib/postgresql/*/bin/pg_basebackup")
	if err == nil {
		err = command("postgres", backup, "--pgdata="+s.data(), "--write-recovery-conf", "--checkpoint=fast", "--no-sync",
			"--dbname="+p.URL("postgres", "postgres"))
	}
	if err == nil {
		err = s.Start()
	}
	if err != nil {
		_ = os.RemoveAll(s.Dir)
		return nil, err
	}
	return s, nil
}

// command runs a program as account and shows its output where it fails.
func command(account string, argv ...string) error {
	argv = as(account, argv...)
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("servers: %s: %w\n%s", argv[len(argv)-1], err, out)
	}
	return nil
}

// daemon is a server under a shell that outlives nobody: when its standard input ends, because this process closed it
// or died, the shell stops the server and, if not told to keep it, removes the directory.
type daemon struct {
	name  string
	cmd   *exec.Cmd
	stdin io.WriteCloser
	log   string
	done  chan struct{}
}

const nanny = `exec 3<&0 </dev/null
dir=$1; log=$2; signal=$3; shift 3
"$@" >>"$log" 2>&1 3<&- &
pid=$!
{ read word <&3; [ "$word" = keep ] || : >"$dir/.gone"; kill -"$signal" $pid; } 2>/dev/null &
wait $pid
[ ! -e "$dir/.gone" ] || rm -rf "$dir"`

// startDaemon starts argv as account; signal is the one that makes it stop at once.
func startDaemon(account, dir, signal string, argv ...string) (*daemon, error) {
	d := &daemon{name: filepath.Base(argv[0]), log: filepath.Join(dir, "log"), done: make(chan struct{})}
	line := as(account, append([]string{"/bin/sh", "-c", nanny, "sh", dir, d.log, signal}, argv...)...)
	d.cmd = exec.Command(line[0], line[1:]...)
	d.cmd.Dir = "/"
	d.cmd.SysProcAttr = ownGroup() // an interrupt from the keyboard is for the tests, which then close it
	var err error
	if d.stdin, err = d.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := d.cmd.Start(); err != nil {
		return nil, fmt.Errorf("servers: start %s: %w", d.name, err)
	}
	go func() {
		_ = d.cmd.Wait()
		close(d.done)
	}()
	return d, nil
}

// await calls ready until it succeeds, for 60 s at most or until the server has ended.
func (d *daemon) await(ready func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	pause := time.NewTicker(10 * time.Millisecond)
	defer pause.Stop()
	for {
		err := ready(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-d.done:
			err = errors.New("it has ended")
		case <-ctx.Done():
		case <-pause.C:
			continue
		}
		return fmt.Errorf("servers: %s did not become ready: %w\n%s", d.name, err, d.tail())
	}
}

// tail returns the end of the server's log.
func (d *daemon) tail() string {
	text, _ := os.ReadFile(d.log)
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(lines[max(0, len(lines)-20):], "\n")
}

func (d *daemon) stop(keep bool) {
	if keep {
		_, _ = io.WriteString(d.stdin, "keep\n")
	}
	_ = d.stdin.Close()
	<-d.done
}

// dialable reports whether somebody listens at a port of the loopback.
func dialable(ctx context.Context, port int) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return err
	}
	return conn.Close()
}
