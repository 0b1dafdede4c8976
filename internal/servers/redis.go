package servers

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"aegis/internal/lab"
)

// RedisEnv names a running Redis, "host:port", that tests use instead of a private one. It must be theirs alone.
const RedisEnv = "AEGIS_TEST_REDIS"

// RedisConfig says which Redis [StartRedis] starts. The zero value keeps everything in memory.
type RedisConfig struct {
	Append    bool     // an append-only file, synced before every reply: a killed server forgets nothing
	Password  string   // of the default user
	ReplicaOf *Redis   // replicates that one
	Cluster   bool     // in cluster mode; slots are the caller's
	Args      []string // more of redis-server's arguments, such as "--maxmemory", "3mb"
	_         struct{}
}

// Redis is one server. Its methods may not be called at once.
type Redis struct {
	Addr string // "127.0.0.1:port"
	Dir  string // its data; "" for a given server

	argv []string
	proc *lab.Process
}

// SharedRedis returns the server that [RedisEnv] names, else starts one as StartRedis does.
func SharedRedis(ctx context.Context, cfg RedisConfig) (*Redis, error) {
	if addr := os.Getenv(RedisEnv); addr != "" {
		return &Redis{Addr: addr}, nil
	}
	return StartRedis(ctx, cfg)
}

// StartRedis starts a private server and returns when it serves, or when ctx ends.
func StartRedis(ctx context.Context, cfg RedisConfig) (*Redis, error) {
	program, err := find("redis-server")
	if err != nil {
		return nil, err
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "aegis-redis-") // redis-server does not mind being root
	if err != nil {
		return nil, err
	}
	r := &Redis{Addr: net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), Dir: dir}
	r.argv = []string{program, "--port", strconv.Itoa(port), "--bind", "127.0.0.1", "--dir", dir, "--save", "", "--daemonize", "no",
		"--logfile", "redis.log", "--repl-diskless-sync-delay", "0"}
	if cfg.Append {
		r.argv = append(r.argv, "--appendonly", "yes", "--appendfsync", "always")
	}
	if cfg.Password != "" {
		r.argv = append(r.argv, "--requirepass", cfg.Password)
	}
	if cfg.Cluster {
		r.argv = append(r.argv, "--cluster-enabled", "yes")
	}
	if m := cfg.ReplicaOf; m != nil {
		host, port, _ := net.SplitHostPort(m.Addr)
		r.argv = append(r.argv, "--replicaof", host+" "+port)
	}
	r.argv = append(r.argv, cfg.Args...)
	if err := r.Start(ctx); err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}

// Given reports that the server is not ours: it cannot be killed, stopped or started.
func (r *Redis) Given() bool { return r.argv == nil }

func (r *Redis) mustBeOurs() error {
	if r.Given() {
		return fmt.Errorf("servers: the Redis at %s was given by %s; it cannot be restarted", r.Addr, RedisEnv)
	}
	return nil
}

// Start starts the server again after Kill, on the same port and data.
func (r *Redis) Start(ctx context.Context) error {
	if err := r.mustBeOurs(); err != nil {
		return err
	}
	var err error
	if r.proc, err = lab.Run(lab.Command{Name: "redis-server", Path: r.argv[0], Args: r.argv[1:]}); err != nil {
		return err
	}
	for {
		err := r.ping(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-r.proc.Done():
			return fmt.Errorf("servers: redis-server ended at once:\n%s", r.log())
		case <-ctx.Done():
			return fmt.Errorf("servers: redis-server does not serve: %w: %w\n%s", context.Cause(ctx), err, r.log())
		case <-time.After(5 * time.Millisecond): // until the next look
		}
	}
}

// ping is nil once the server answers as one that has loaded its data.
func (r *Redis) ping(ctx context.Context) error {
	d := net.Dialer{Timeout: time.Second}
	c, err := d.DialContext(ctx, "tcp", r.Addr)
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Second))
	if _, err := c.Write([]byte("PING\r\n")); err != nil {
		return err
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		return err
	}
	for _, serves := range []string{"+PONG", "-NOAUTH", "-MASTERDOWN"} {
		if strings.HasPrefix(line, serves) {
			return nil
		}
	}
	return errors.New(strings.TrimSpace(line))
}

func (r *Redis) log() string {
	b, _ := os.ReadFile(filepath.Join(r.Dir, "redis.log"))
	return string(b[max(0, len(b)-2000):])
}

// Kill kills the server (SIGKILL) and returns when it is gone.
func (r *Redis) Kill() error {
	if err := r.mustBeOurs(); err != nil {
		return err
	}
	r.proc.Close()
	return nil
}

// Stop suspends the server, Continue resumes it.
func (r *Redis) Stop() error {
	if err := r.mustBeOurs(); err != nil {
		return err
	}
	return r.proc.Stop()
}

// Continue resumes a server that Stop has suspended.
func (r *Redis) Continue() error {
	if err := r.mustBeOurs(); err != nil {
		return err
	}
	return r.proc.Continue()
}

// Close kills the server and removes its data. A given server is left alone.
func (r *Redis) Close() {
	if r == nil || r.Given() {
		return
	}
	if r.proc != nil {
		r.proc.Close()
	}
	_ = os.RemoveAll(r.Dir)
}
