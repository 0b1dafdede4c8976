package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"aegis"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// The tests run this test binary as the command: roleEnv says so. The etcd that they share is an `aegis dev`.
const roleEnv = "AEGIS_TEST_ROLE"

// within bounds whatever a test waits for.
const within = 20 * time.Second

var shared struct {
	endpoint string
	cli      *clientv3.Client
	cluster  *aegis.Cluster
	node     *aegis.Node // to look at queues
}

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == childArg {
		childMain(os.Args[2:])
		return
	}
	if os.Args[0] == watchdogName || os.Getenv(roleEnv) == "cli" {
		main()
		return
	}
	// Under nohup hangups are ignored, and children would inherit that; what is caught is theirs to decide again.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	os.Exit(withEtcd(m))
}

func withEtcd(m *testing.M) int {
	dir, err := os.MkdirTemp("", "aegis-cli-test")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	dev, err := launch(nil, "dev", "--listen", "127.0.0.1:0", "--data-dir", filepath.Join(dir, "etcd"))
	if err != nil {
		panic(err)
	}
	defer dev.end(syscall.SIGKILL)
	if shared.endpoint, err = readyEndpoint(dev); err != nil {
		panic(err)
	}
	shared.cli, err = clientv3.New(clientv3.Config{Endpoints: []string{shared.endpoint}, Logger: zap.NewNop()})
	if err != nil {
		panic(err)
	}
	defer shared.cli.Close()
	shared.cluster = aegis.Open(shared.cli, "")
	shared.node, err = aegis.Join(context.Background(), shared.cli, aegis.Config{Unlisted: true, Logger: discard})
	if err != nil {
		panic(err)
	}
	defer func() { _ = shared.node.Leave(context.Background()) }()
	return m.Run()
}

// readyEndpoint reads what `aegis dev` prints to be copied.
func readyEndpoint(dev *process) (string, error) {
	for {
		line, err := dev.next(within)
		if err != nil {
			return "", fmt.Errorf("aegis dev is not ready: %w\n%s", err, dev.stderr())
		}
		if _, endpoint, ok := strings.Cut(line, "export AEGIS_ENDPOINTS="); ok {
			return endpoint, nil
		}
	}
}

// process is a running command.
type process struct {
	cmd   *exec.Cmd
	lines chan string // of standard output; closed at its end, when nobody holds it open any more
	done  chan struct{}
	mu    sync.Mutex
	errs  bytes.Buffer // standard error

	errsEnd chan struct{} // closed when nobody holds it open any more
}

// launch starts `aegis args…` on the shared etcd, with variables added to its environment.
func launch(env []string, args ...string) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return launchAs(env, self, args...)
}

func launchAs(env []string, path string, args ...string) (*process, error) {
	p := &process{cmd: exec.Command(path, args...), lines: make(chan string, 1024), done: make(chan struct{}), errsEnd: make(chan struct{})}
	p.cmd.Env = append(append(os.Environ(), roleEnv+"=cli", "AEGIS_ENDPOINTS="+shared.endpoint, "GORACE=atexit_sleep_ms=0"), env...)
	stdout, out, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer out.Close()
	stderr, errOut, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer errOut.Close()
	p.cmd.Stdout, p.cmd.Stderr = out, errOut // as files, so that Wait waits for the process, not for who inherits them
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(p.errsEnd)
		defer stderr.Close()
		_, _ = io.Copy(p, stderr)
	}()
	go func() {
		defer close(p.lines)
		defer stdout.Close()
		for s := bufio.NewScanner(stdout); s.Scan(); {
			p.lines <- s.Text()
		}
	}()
	go func() {
		defer close(p.done)
		_ = p.cmd.Wait()
	}()
	return p, nil
}

func (p *process) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.errs.Write(b)
}

func (p *process) stderr() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.errs.String()
}

// next returns the next line of standard output, io.EOF after the last.
func (p *process) next(bound time.Duration) (string, error) {
	select {
	case line, ok := <-p.lines:
		if !ok {
			return "", io.EOF
		}
		return line, nil
	case <-time.After(bound):
		return "", fmt.Errorf("no line within %v", bound)
	}
}

func (p *process) end(sig syscall.Signal) {
	_ = p.cmd.Process.Signal(sig)
	<-p.done
}

// start is launch for a test: what still runs at its end is killed.
func start(t *testing.T, args ...string) *process {
	t.Helper()
	return startEnv(t, nil, args...)
}

func startEnv(t *testing.T, env []string, args ...string) *process {
	t.Helper()
	p, err := launch(env, args...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.end(syscall.SIGKILL) })
	return p
}

// expect returns the first line that contains want.
func (p *process) expect(t *testing.T, want string) string {
	t.Helper()
	var seen []string
	for {
		line, err := p.next(within)
		if err != nil {
			t.Fatalf("no line with %q: %v\nstdout: %s\nstderr: %s", want, err, strings.Join(seen, "\n"), p.stderr())
		}
		if strings.Contains(line, want) {
			return line
		}
		seen = append(seen, line)
	}
}

func (p *process) signal(t *testing.T, sig syscall.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(sig); err != nil {
		t.Fatalf("signal %v: %v", sig, err)
	}
}

// code waits for the exit, and returns the shell's exit code.
func (p *process) code(t *testing.T) int {
	t.Helper()
	select {
	case <-p.done:
	case <-time.After(within):
		t.Fatalf("%v still runs after %v\nstderr: %s", p.cmd.Args, within, p.stderr())
	}
	status := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	if status.Signaled() {
		return 128 + int(status.Signal())
	}
	return status.ExitStatus()
}

// rest waits until nobody holds standard output and error open, and returns what came of output.
func (p *process) rest(t *testing.T) string {
	t.Helper()
	var out strings.Builder
	for {
		line, err := p.next(within)
		if errors.Is(err, io.EOF) {
			select {
			case <-p.errsEnd:
				return out.String()
			case <-time.After(within):
				t.Fatalf("%v: something still holds its standard error\n%s", p.cmd.Args, p.stderr())
			}
		}
		if err != nil {
			t.Fatalf("%v: something still holds its standard output: %v\nstderr: %s", p.cmd.Args, err, p.stderr())
		}
		out.WriteString(line + "\n")
	}
}

// result is a command that has ended.
type result struct {
	code           int
	stdout, stderr string
	took           time.Duration
}

func aegisCmd(t *testing.T, args ...string) result { t.Helper(); return aegisEnv(t, nil, args...) }

func aegisEnv(t *testing.T, env []string, args ...string) result {
	t.Helper()
	began := time.Now()
	p := startEnv(t, env, args...)
	r := result{code: p.code(t), took: time.Since(began)}
	r.stdout, r.stderr = p.rest(t), p.stderr()
	return r
}

func (r result) wants(t *testing.T, code int, stdout, stderr string) {
	t.Helper()
	if r.code != code || !strings.Contains(r.stdout, stdout) || !strings.Contains(r.stderr, stderr) {
		t.Fatalf("exit code %d, want %d\nstdout (want %q): %s\nstderr (want %q): %s", r.code, code, stdout, r.stdout, stderr, r.stderr)
	}
}

// eventually waits until f says yes.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	late := time.After(within)
	for !f() {
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("not within %v: %s", within, what)
		}
	}
}

func bounded(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), within)
	t.Cleanup(cancel)
	return ctx
}

// join makes the test a node, which takes part in elections as a rival.
func join(t *testing.T, cfg aegis.Config) *aegis.Node {
	t.Helper()
	cfg.Logger = discard
	n, err := aegis.Join(bounded(t), shared.cli, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.Leave(context.Background()) })
	return n
}

// candidates returns who waits for the election.
func candidates(t *testing.T, name string) []aegis.Candidate {
	t.Helper()
	c, err := shared.node.Election(name).Candidates(bounded(t))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// vacant asserts that nobody leads the election or waits for it.
func vacant(t *testing.T, name string) {
	t.Helper()
	if term, err := shared.cluster.Leader(bounded(t), name); !errors.Is(err, aegis.ErrNoLeader) {
		t.Errorf("%s is led by %v (%v), want nobody", name, term, err)
	}
	if c := candidates(t, name); len(c) > 0 {
		t.Errorf("%v wait for %s, want nobody", c, name)
	}
}
