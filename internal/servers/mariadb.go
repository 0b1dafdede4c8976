package servers

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"aegis/internal/lab"

	"github.com/go-sql-driver/mysql"
)

// MariaDBVar names the variable that gives a running MySQL or MariaDB server in place of a private one: a data source
// name of go-sql-driver/mysql for an account that may do everything. Tests create databases of their own there.
const MariaDBVar = "AEGIS_TEST_MYSQL"

// MariaDB is a MySQL or MariaDB server for tests.
type MariaDB struct {
	config  *mysql.Config // of its administrator
	dir     string        // "" where the server is not ours
	args    []string
	process *lab.Process
	log     string

	databases atomic.Int64
}

// StartMariaDB starts a private MariaDB with the given additional options ("--innodb-lock-wait-timeout=1"), or takes
// the one that AEGIS_TEST_MYSQL names. Commits reach the disk as in production unless an option says otherwise. It
// blocks until the server answers, for a minute at most. The caller ends it by Close.
func StartMariaDB(options ...string) (*MariaDB, error) {
	if dsn := os.Getenv(MariaDBVar); dsn != "" {
		c, err := mysql.ParseDSN(dsn)
		if err != nil {
			return nil, fmt.Errorf("servers: %s: %w", MariaDBVar, err)
		}
		m := &MariaDB{config: c}
		return m, m.ready(nil)
	}
	daemon, err := find("mariadbd")
	if err != nil {
		return nil, err
	}
	installer, err := find("mariadb-install-db")
	if err != nil {
		return nil, err
	}
	dir, err := tempDir("mysql")
	if err != nil {
		return nil, err
	}
	m := &MariaDB{dir: dir, log: filepath.Join(dir, "log")}
	data := filepath.Join(dir, "data")
	install := as("mysql", installer, "--no-defaults", "--datadir="+data, "--auth-root-authentication-method=normal", "--skip-test-db")
	if out, err := exec.Command(install[0], install[1:]...).CombinedOutput(); err != nil {
		m.Close()
		return nil, fmt.Errorf("servers: %s: %w\n%s", installer, err, out)
	}
	port, err := freePort()
	if err != nil {
		m.Close()
		return nil, err
	}
	m.args = as("mysql", append([]string{daemon, "--no-defaults", "--datadir=" + data, "--socket=" + filepath.Join(dir, "sock"),
		fmt.Sprint("--port=", port), "--bind-address=127.0.0.1", "--pid-file=" + filepath.Join(dir, "pid"), "--log-error=" + m.log,
		"--skip-name-resolve", "--max-connections=400", "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=32M"}, options...)...)
	if m.args[0] == "setpriv" { // the change of account has cost the process its order to die with its parent
		m.args = slices.Insert(m.args, 1, "--pdeathsig", "KILL")
	}
	m.config = mysql.NewConfig()
	m.config.User, m.config.Net, m.config.Addr = "root", "tcp", fmt.Sprint("127.0.0.1:", port)
	if err := m.Start(); err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

// Private reports whether the server is ours, so that it may be stopped, killed and told what to be.
func (m *MariaDB) Private() bool { return m.dir != "" }

// Addr returns host and port.
func (m *MariaDB) Addr() string { return m.config.Addr }

// Config returns the administrator's settings for a connection to the database, a copy.
func (m *MariaDB) Config(database string) *mysql.Config {
	c := m.config.Clone()
	c.DBName = database
	return c
}

// DSN returns the administrator's data source name for the database, "" for none.
func (m *MariaDB) DSN(database string) string { return m.Config(database).FormatDSN() }

// Database creates an empty database, with a name that no other has.
func (m *MariaDB) Database() (name string, err error) {
	name = fmt.Sprintf("aegis_%d_%d", os.Getpid(), m.databases.Add(1))
	return name, m.admin(func(db *sql.DB) error {
		_, err := db.Exec("CREATE DATABASE " + name + " CHARACTER SET utf8mb4")
		return err
	})
}

// Drop removes a database.
func (m *MariaDB) Drop(name string) error {
	return m.admin(func(db *sql.DB) error {
		_, err := db.Exec("DROP DATABASE " + name)
		return err
	})
}

func (m *MariaDB) admin(fn func(db *sql.DB) error) error {
	db, err := sql.Open("mysql", m.DSN(""))
	if err != nil {
		return err
	}
	defer db.Close()
	return fn(db)
}

// Start starts a private server that was stopped or killed, on its data and its port, and waits until it answers.
func (m *MariaDB) Start() error {
	if !m.Private() {
		return fmt.Errorf("servers: the server is %s's, it is not ours to start", MariaDBVar)
	}
	p, err := lab.Run(lab.Command{Name: "mariadbd", Path: m.args[0], Args: m.args[1:]})
	if err != nil {
		return err
	}
	m.process = p
	return m.ready(p)
}

// ready waits until the server answers, its process has ended, or a minute has passed.
func (m *MariaDB) ready(p *lab.Process) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var ended <-chan struct{}
	if p != nil {
		ended = p.Done()
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := m.admin(func(db *sql.DB) error { return db.PingContext(ctx) })
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ended:
			return fmt.Errorf("servers: MariaDB has exited at its start:\n%s", m.Log())
		case <-ctx.Done():
			return fmt.Errorf("servers: MariaDB does not answer: %w\n%s", err, m.Log())
		}
	}
}

// Log returns the end of a private server's log.
func (m *MariaDB) Log() string {
	log, _ := os.ReadFile(m.log)
	if len(log) > 4096 {
		log = log[len(log)-4096:]
	}
	return strings.TrimSpace(string(log))
}

// Kill kills a private server as a crash would.
func (m *MariaDB) Kill() error { return m.stop(syscall.SIGKILL) }

func (m *MariaDB) stop(sig syscall.Signal) error {
	if m.process == nil {
		return fmt.Errorf("servers: no private MariaDB runs")
	}
	if err := m.process.Signal(sig); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	err := m.process.Wait(ctx)
	if ctx.Err() != nil {
		return err
	}
	m.process = nil // however it has ended: it has
	return nil
}

// Close ends a private server and removes its data.
func (m *MariaDB) Close() error {
	if !m.Private() {
		return nil
	}
	var err error
	if m.process != nil {
		err = m.Kill()
	}
	return errors.Join(err, os.RemoveAll(m.dir))
}
