package mysqlfence

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"aegis/fence"

	"github.com/go-sql-driver/mysql"
)

// Config tunes a Guard. The zero value is ready.
type Config struct {
	// Database holds the guard's tables. Defaults to the database of the connection. One transaction may reach tables
	// of several databases of one server, so guarded tables may be elsewhere.
	Database string

	// Advance is how [Guard.Advance] waits for the old term's last transactions. Defaults to waiting for them until
	// its context ends.
	Advance AdvanceOptions

	// Report, unless nil, has the guard admit, count and tell what it would refuse: see [fence.Report].
	Report *fence.Report

	_ struct{}
}

// AdvanceOptions is how an advance treats transactions that keep it waiting.
type AdvanceOptions struct {
	// Wait bounds the wait for running transactions of the old term, beside the context. What then still runs is named
	// in a [*BlockedError]. Defaults to no bound but the context's.
	Wait time.Duration

	// EndBlockers kills the sessions that still block after Wait, in place of giving up; their transactions cannot
	// commit any more. It needs Wait, the privilege PROCESS to see them, and, where they belong to another account,
	// CONNECTION ADMIN (SUPER on older servers). Defaults to false.
	EndBlockers bool

	_ struct{}
}

func (c Config) validate() error {
	if len(c.Database) > 64 || strings.ContainsRune(c.Database, 0) {
		return fmt.Errorf("mysqlfence: Config.Database %q is no name of a database", c.Database)
	}
	return c.Advance.validate()
}

func (o AdvanceOptions) validate() error {
	if o.Wait < 0 {
		return fmt.Errorf("mysqlfence: AdvanceOptions.Wait is %v, below 0", o.Wait)
	}
	if o.EndBlockers && o.Wait == 0 {
		return errors.New("mysqlfence: AdvanceOptions.EndBlockers needs Wait, the time that running transactions are given")
	}
	return nil
}

// Guard is a [fence.Guard] on one MySQL or MariaDB server. It is safe for concurrent use, by any number of processes.
type Guard struct {
	db     *sql.DB
	owned  bool // by the guard: Close closes it
	cfg    Config
	tables string // prefix of the tables' names: "" or "`database`."
	xids   string // prefix of this guard's transaction names
	serial atomic.Uint64

	mu    sync.Mutex // held while the server is examined
	ready atomic.Bool

	// What the connections can do, written before ready:
	multi bool // several statements in one packet
	fast  bool // with arguments, and with each statement's result
}

var _ fence.Guard = (*Guard)(nil)

// New returns a guard on the server of db, a pool of github.com/go-sql-driver/mysql. It does not connect: the server is
// examined at the first use, and everything that this package refuses is an error there.
//
// Give the data source name multiStatements=true and interpolateParams=true, as [Open] does: without them Exec, Do and
// Once are as safe, but take more round trips. Note that code that pastes input into SQL is then easier to attack;
// keep a pool of its own for the guard where that is a worry.
func New(db *sql.DB, cfg Config) (*Guard, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	g := &Guard{db: db, cfg: cfg, xids: fmt.Sprintf("aegis-%016x", rand.Uint64())}
	if cfg.Database != "" {
		g.tables = "`" + strings.ReplaceAll(cfg.Database, "`", "``") + "`."
	}
	return g, nil
}

// Open returns a guard with a pool of its own, for a data source name in the form of go-sql-driver/mysql
// ("user:password@tcp(host:3306)/database"), with the settings that make it fast. Like [New] it does not connect.
// [Guard.Close] closes the pool.
func Open(dsn string, cfg Config) (*Guard, error) {
	c, err := mysql.ParseDSN(dsn)
	if err != nil {
		return nil, fmt.Errorf("mysqlfence: data source name: %w", err) // the driver's error does not repeat it
	}
	c.MultiStatements, c.InterpolateParams = true, true
	connector, err := mysql.NewConnector(c)
	if err != nil {
		return nil, fmt.Errorf("mysqlfence: data source name: %w", err)
	}
	g, err := New(sql.OpenDB(connector), cfg)
	if err != nil {
		return nil, err
	}
	g.owned = true
	g.db.SetMaxIdleConns(16) // database/sql keeps two, and makes the others connect anew for each transaction
	return g, nil
}

// Close closes the pool if [Open] has made it, and does nothing otherwise.
func (g *Guard) Close() error {
	if !g.owned {
		return nil
	}
	return g.db.Close()
}

// DB returns the guard's pool, for plain reads and for its settings.
func (g *Guard) DB() *sql.DB { return g.db }

// examine looks once at the server: is it one whose locks mean something to every writer, are the tables there, what
// can the connections do.
func (g *Guard) examine(ctx context.Context) error {
	if g.ready.Load() {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ready.Load() {
		return nil
	}
	if err := g.checkServer(ctx); err != nil {
		return err
	}
	if err := g.checkTables(ctx); err != nil {
		return err
	}
	if err := g.probe(ctx); err != nil {
		return err
	}
	g.ready.Store(true)
	return nil
}

// checkServer refuses servers on which a shared lock does not keep a writer elsewhere out.
func (g *Guard) checkServer(ctx context.Context) error {
	rows, err := g.db.QueryContext(ctx, `SHOW GLOBAL VARIABLES WHERE Variable_name IN ('read_only', 'super_read_only',
		'innodb_read_only', 'wsrep_on', 'group_replication_group_name', 'group_replication_single_primary_mode')`)
	if err != nil {
		return g.explain(ctx, "connect", err)
	}
	defer rows.Close()
	vars := map[string]string{}
	for rows.Next() {
		var name, value string
		if err := rows.Scan(&name, &value); err != nil {
			return err
		}
		vars[strings.ToLower(name)] = value
	}
	if err := rows.Err(); err != nil {
		return g.explain(ctx, "connect", err)
	}
	return unfit(vars)
}

// unfit says why a server with these variables cannot hold a fence; nil if it can.
func unfit(vars map[string]string) error {
	on := func(name string) bool { v := vars[name]; return v != "" && v != "0" && !strings.EqualFold(v, "OFF") }
	switch {
	case on("wsrep_on"):
		return errors.New("mysqlfence: the server is part of a Galera cluster (wsrep_on): it certifies no shared locks, so a stale write on " +
			"another node would commit beside an advance; use a single server or a primary with replicas")
	case vars["group_replication_group_name"] != "" && !on("group_replication_single_primary_mode"):
		return errors.New("mysqlfence: the server is in a multi-primary replication group: it certifies no shared locks, so a stale write on " +
			"another member would commit beside an advance; switch the group to single-primary mode")
	case on("read_only"), on("super_read_only"), on("innodb_read_only"):
		return errors.New("mysqlfence: the server is read-only (a replica?): a fence must be taken and read where the writes are; connect to the primary")
	}
	return nil
}

// probe finds out how many round trips the connections need.
func (g *Guard) probe(ctx context.Context) error {
	conn, err := g.db.Conn(ctx)
	if err != nil {
		return g.explain(ctx, "connect", err)
	}
	defer conn.Close()
	res, err := execRaw(ctx, conn, "DO 0; DO ?", []any{1})
	all, ok := res.(mysql.Result)
	if err == nil && ok && len(all.AllRowsAffected()) == 2 {
		g.fast, g.multi = true, true
		return nil
	}
	var refused *mysql.MySQLError
	if err != nil && !errors.Is(err, driver.ErrSkip) && !errors.Is(err, errNotRaw) && !errors.As(err, &refused) {
		return g.explain(ctx, "connect", err)
	}
	g.fast = false
	_, err = conn.ExecContext(ctx, "DO 0; DO 0")
	g.multi = err == nil
	if err != nil && !errors.As(err, &refused) {
		return g.explain(ctx, "connect", err)
	}
	return nil
}

var (
	errNotRaw   = errors.New("mysqlfence: the connections are not those of go-sql-driver/mysql itself")
	errArgument = errors.New("mysqlfence: argument")
)

// execRaw executes in one round trip or not at all (driver.ErrSkip, errNotRaw), and keeps what database/sql hides:
// the result of each statement.
func execRaw(ctx context.Context, conn *sql.Conn, query string, args []any) (res driver.Result, err error) {
	err = conn.Raw(func(c any) error {
		execer, ok1 := c.(driver.ExecerContext)
		checker, ok2 := c.(driver.NamedValueChecker)
		if !ok1 || !ok2 {
			return errNotRaw
		}
		named := make([]driver.NamedValue, len(args))
		for i, arg := range args {
			named[i] = driver.NamedValue{Ordinal: i + 1, Value: arg}
			if n, ok := arg.(sql.NamedArg); ok {
				return fmt.Errorf("%w %q: MySQL knows no named arguments", errArgument, n.Name)
			}
			if err := checker.CheckNamedValue(&named[i]); err != nil {
				return fmt.Errorf("%w %d: %w", errArgument, i+1, err)
			}
		}
		res, err = execer.ExecContext(ctx, query, named)
		return err
	})
	return res, err
}

// literal is a name as an SQL literal that means the same whatever the connection's character set and sql_mode.
func literal(name string) string {
	if name == "" {
		return "X''"
	}
	return "X'" + hex.EncodeToString([]byte(name)) + "'"
}
