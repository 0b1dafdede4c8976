package lab

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// RoleEnv is the environment variable that carries [Command.Role] to the process.
const RoleEnv = "AEGIS_LAB_ROLE"

// Role returns the role in which this process was started by [Run], "" for none. A test's TestMain that starts its own
// executable looks at it first.
func Role() string { return os.Getenv(RoleEnv) }

// Command says which process [Run] starts.
type Command struct {
	Name string   // for errors; defaults to the role or the path
	Role string   // sets RoleEnv
	Path string   // defaults to this process's own executable
	Args []string // without the path
	Env  []string // added to this process's own environment
	Dir  string   // defaults to this process's own
	_    struct{}
}

// Line is one line that a process has written to its standard output.
type Line struct {
	At      int64 // when it was read, by [Now]
	Text    string
	Dropped int // lines lost just before this one, because nobody took them
}

const (
	keptLines  = 1 << 16
	keptStderr = 16 << 10
	longest    = 1 << 20 // of a line; a longer one is split
	sendWithin = 5 * time.Second
)

// Process is a process beside this one, in a process group of its own. Its methods may be called from any goroutine.
//
// It ends with this process, however that ends: on Linux the kernel kills it (but not its children), and everywhere its
// standard input reaches its end, which a child is well advised to take as the order to exit. When it exits, what is
// left of its process group is killed; a child that must outlive it starts a group or session of its own, and is not
// waited for beyond a second, even where it holds this process's output open.
type Process struct {
	name   string
	cmd    *exec.Cmd
	stdin  *os.File
	stderr *tail

	done chan struct{} // closed when it has been reaped and its output is read
	err  error         // valid after done

	mu     sync.Mutex
	reaped bool // its pid may belong to somebody else

	lines struct {
		sync.Mutex
		kept    []Line
		dropped int // since the last kept line
		closed  bool
		more    chan struct{} // holds one token while there may be something new
	}
}

// Run starts a process. Its error names the command. The caller ends the process by [Process.Close], or by
// [Process.Kill] or its own exit followed by [Process.Wait].
func Run(command Command) (*Process, error) {
	p := &Process{name: command.Name, stderr: &tail{}, done: make(chan struct{})}
	p.lines.more = make(chan struct{}, 1)
	path := command.Path
	if path == "" {
		self, err := os.Executable()
		if err != nil {
			return nil, fmt.Errorf("lab: own executable: %w", err)
		}
		path = self
	}
	for _, name := range []string{command.Role, path} {
		if p.name == "" {
			p.name = name
		}
	}
	fail := func(err error) (*Process, error) { return nil, fmt.Errorf("lab: start %s: %w", p.name, err) }

	p.cmd = exec.Command(path, command.Args...)
	p.cmd.Env = append(append(os.Environ(), RoleEnv+"="+command.Role), command.Env...)
	p.cmd.Dir = command.Dir
	p.cmd.Stderr = p.stderr
	p.cmd.WaitDelay = time.Second // for grandchildren that hold stderr open
	in, stdin, err := os.Pipe()
	if err != nil {
		return fail(err)
	}
	defer in.Close()
	stdout, out, err := os.Pipe()
	if err != nil {
		_ = stdin.Close()
		return fail(err)
	}
	defer out.Close()
	p.cmd.Stdin, p.cmd.Stdout, p.stdin = in, out, stdin

	started := make(chan error)
	go p.live(stdout, started)
	if err := <-started; err != nil {
		_, _ = stdin.Close(), stdout.Close()
		return fail(err)
	}
	return p, nil
}

// live starts the process, and waits until it has ended.
func (p *Process) live(stdout *os.File, started chan<- error) {
	release := prepare(p.cmd)
	defer release()
	err := p.cmd.Start()
	started <- err
	if err != nil {
		return
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		p.read(stdout)
	}()
	if awaitExit(p.cmd.Process.Pid) {
		p.mu.Lock()
		// Not reaped yet, the process still holds its group's number: this cannot hit anybody else's.
		_ = signalGroup(p.cmd.Process, syscall.SIGKILL)
		p.err = p.cmd.Wait()
	} else {
		err := p.cmd.Wait()
		p.mu.Lock()
		p.err = err
	}
	if errors.Is(p.err, exec.ErrWaitDelay) {
		p.err = nil // it exited well; only its stderr is still held open
	}
	p.reaped = true
	p.mu.Unlock()
	// A grandchild in a group of its own may hold the output open; it is not waited for.
	_ = stdout.SetReadDeadline(time.Now().Add(p.cmd.WaitDelay))
	<-read
	_, _ = stdout.Close(), p.stdin.Close()
	close(p.done)
}

// read takes the standard output, and never keeps the process waiting.
func (p *Process) read(stdout io.Reader) {
	r := bufio.NewReaderSize(stdout, longest)
	for {
		text, err := r.ReadSlice('\n')
		if len(text) > 0 {
			p.keep(Line{At: Now(), Text: strings.TrimRight(string(text), "\r\n")})
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			break
		}
	}
	l := &p.lines
	l.Lock()
	l.closed = true
	l.Unlock()
	p.wake()
}

func (p *Process) keep(line Line) {
	l := &p.lines
	l.Lock()
	if len(l.kept) >= keptLines {
		l.dropped++
	} else {
		line.Dropped, l.dropped = l.dropped, 0
		l.kept = append(l.kept, line)
	}
	l.Unlock()
	p.wake()
}

func (p *Process) wake() {
	select {
	case p.lines.more <- struct{}{}:
	default:
	}
}

// Next returns the next line of the standard output, in order, waiting for it until ctx ends. After the last line it
// is io.EOF. The 65,536 oldest lines that nobody has taken are kept, later ones are dropped and counted. An error
// that is not io.EOF shows what the process wrote to its standard error.
func (p *Process) Next(ctx context.Context) (Line, error) {
	l := &p.lines
	for {
		l.Lock()
		if len(l.kept) > 0 {
			line := l.kept[0]
			l.kept = l.kept[1:]
			l.Unlock()
			p.wake() // another caller of Next may wait for what is left
			return line, nil
		}
		closed := l.closed
		l.Unlock()
		if closed {
			p.wake()
			return Line{}, io.EOF
		}
		select {
		case <-l.more:
		case <-ctx.Done():
			return Line{}, p.errorf("no line: %w", context.Cause(ctx))
		}
	}
}

// Expect returns the next line that starts with prefix and drops those before it. Its error tells how many came
// instead and the last of them; it is an io.ErrUnexpectedEOF when the process ended its output first.
func (p *Process) Expect(ctx context.Context, prefix string) (Line, error) {
	var last string
	for n := 0; ; n++ {
		line, err := p.Next(ctx)
		if err == nil && strings.HasPrefix(line.Text, prefix) {
			return line, nil
		}
		if errors.Is(err, io.EOF) {
			err = p.errorf("%w", io.ErrUnexpectedEOF)
		}
		if err != nil {
			return Line{}, fmt.Errorf("waiting for a line %q…, after %d others (the last: %q): %w", prefix, n, last, err)
		}
		last = line.Text
	}
}

// Send writes a line to the process's standard input. A process that does not read (a stopped one, say) makes it fail
// after 5 s, once the pipe is full.
func (p *Process) Send(line string) error {
	_ = p.stdin.SetWriteDeadline(time.Now().Add(sendWithin))
	if _, err := io.WriteString(p.stdin, line+"\n"); err != nil {
		return p.errorf("send %q: %w", line, err)
	}
	return nil
}

// CloseInput ends the process's standard input.
func (p *Process) CloseInput() { _ = p.stdin.Close() }

// Pid returns the process's number, which is its group's too.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Kill kills the process and its group (SIGKILL), stopped or not. Killing one that has ended is no error.
func (p *Process) Kill() error { return p.group(syscall.SIGKILL) }

// Stop suspends the process and its group (SIGSTOP). os.ErrProcessDone when it has ended.
func (p *Process) Stop() error { return p.group(sigstop) }

// Continue resumes the process and its group (SIGCONT). os.ErrProcessDone when it has ended.
func (p *Process) Continue() error { return p.group(sigcont) }

// Signal sends a signal to the process alone, not to its group. os.ErrProcessDone when it has ended.
func (p *Process) Signal(sig os.Signal) error {
	if err := p.cmd.Process.Signal(sig); err != nil {
		return p.errorf("signal %v: %w", sig, err)
	}
	return nil
}

func (p *Process) group(sig syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	err := os.ErrProcessDone
	if !p.reaped {
		err = signalGroup(p.cmd.Process, sig)
	}
	if err == nil || sig == syscall.SIGKILL && errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return p.errorf("signal %v: %w", sig, err)
}

// Done returns a channel that is closed when the process has ended and its output has been read.
func (p *Process) Done() <-chan struct{} { return p.done }

// Wait waits until the process has ended or ctx ends. It returns nil for exit status 0; otherwise the error wraps an
// *exec.ExitError, or ctx's cause, and shows what the process wrote to its standard error.
func (p *Process) Wait(ctx context.Context) error {
	select {
	case <-p.done:
	case <-ctx.Done():
		return p.errorf("still runs: %w", context.Cause(ctx))
	}
	if p.err != nil {
		return p.errorf("%w", p.err)
	}
	return nil
}

// Close kills the process and its group and waits until they are gone, at most about a second. It may be called more than
// once.
func (p *Process) Close() {
	_ = p.Kill()
	<-p.done
}

// Stderr returns the last 16 KiB that the process wrote to its standard error.
func (p *Process) Stderr() string { return p.stderr.String() }

func (p *Process) errorf(format string, args ...any) error {
	err := fmt.Errorf("%s (pid %d): "+format, append([]any{p.name, p.Pid()}, args...)...)
	if text := strings.TrimSpace(p.Stderr()); text != "" {
		err = fmt.Errorf("%w\nits stderr ends with:\n%s", err, text)
	}
	return err
}

// tail keeps the last keptStderr bytes that are written to it.
type tail struct {
	mu sync.Mutex
	b  []byte
}

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, b...)
	if over := len(t.b) - keptStderr; over > 0 {
		t.b = append(t.b[:0], t.b[over:]...)
	}
	return len(b), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.b)
}
