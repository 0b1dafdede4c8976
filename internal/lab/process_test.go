package lab

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
)

func run(t *testing.T, command Command) *Process {
	t.Helper()
	p, err := Run(command)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

func expect(t *testing.T, p *Process, prefix string) Line {
	t.Helper()
	line, err := p.Expect(within(t, 10*time.Second), prefix)
	if err != nil {
		t.Fatal(err)
	}
	return line
}

func send(t *testing.T, p *Process, line string) {
	t.Helper()
	if err := p.Send(line); err != nil {
		t.Fatal(err)
	}
}

func TestProcess(t *testing.T) {
	t.Run("ComparesInstantsOnOneClock", func(t *testing.T) {
		before := Now()
		p := run(t, Command{Role: "echo"})
		line := expect(t, p, "started ")
		child, err := strconv.ParseInt(strings.TrimPrefix(line.Text, "started "), 10, 64)
		if err != nil || child < before || line.At < child || Now() < line.At {
			t.Fatalf("before %d, child %d, read %d, %v", before, child, line.At, err)
		}
	})
	t.Run("TakesLinesAndEndsWithItsInput", func(t *testing.T) {
		p := run(t, Command{Role: "echo"})
		send(t, p, "one")
		send(t, p, "two")
		expect(t, p, "echo one")
		if line, err := p.Next(within(t, 10*time.Second)); err != nil || line.Text != "echo two" {
			t.Fatalf("%+v, %v", line, err)
		}
		p.CloseInput()
		if err := p.Wait(within(t, 10*time.Second)); err != nil {
			t.Fatal(err)
		}
		if _, err := p.Next(t.Context()); err != io.EOF {
			t.Fatalf("after the last line: %v", err)
		}
	})
	t.Run("ShowsStatusAndStderrInItsError", func(t *testing.T) {
		p := run(t, Command{Role: "echo", Name: "node-a"})
		send(t, p, "exit because")
		err := p.Wait(within(t, 10*time.Second))
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != 3 || !strings.Contains(err.Error(), "told to fail: because") ||
			!strings.Contains(err.Error(), "node-a") {
			t.Fatal(err)
		}
		if _, err := p.Expect(t.Context(), "never"); !errors.Is(err, io.ErrUnexpectedEOF) || !strings.Contains(err.Error(), "started") {
			t.Fatal(err)
		}
	})
	t.Run("StandsStillWhileStopped", func(t *testing.T) {
		p := run(t, Command{Role: "echo"})
		send(t, p, "tick")
		expect(t, p, "tick")
		if err := p.Stop(); err != nil {
			t.Fatal(err)
		}
		err := Eventually(within(t, 10*time.Second), "the process to stand still", func(ctx context.Context) (bool, error) {
			brief, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
			defer cancel()
			_, err := p.Next(brief)
			return errors.Is(err, context.DeadlineExceeded), nil
		})
		if err != nil {
			t.Fatal(err)
		}
		stopped := Now()
		if err := p.Continue(); err != nil {
			t.Fatal(err)
		}
		if line := expect(t, p, "tick"); line.At < stopped {
			t.Fatalf("a line of %d came while stopped at %d", line.At, stopped)
		}
	})
	t.Run("IsKilledThoughStoppedAndItsGroupWithIt", func(t *testing.T) {
		p := run(t, Command{Path: "/bin/sh", Args: []string{"-c", "sleep 1000 & echo child $!; wait"}})
		child, err := strconv.Atoi(strings.TrimPrefix(expect(t, p, "child ").Text, "child "))
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Stop(); err != nil {
			t.Fatal(err)
		}
		if err := p.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := p.Wait(within(t, 10*time.Second)); err == nil || !strings.Contains(err.Error(), "killed") {
			t.Fatal(err)
		}
		err = Eventually(within(t, 10*time.Second), "the grandchild's end", func(context.Context) (bool, error) {
			return !alive(child), nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Kill(); err != nil {
			t.Fatalf("killing the dead: %v", err)
		}
		if err := p.Stop(); !errors.Is(err, os.ErrProcessDone) {
			t.Fatalf("stopping the dead: %v", err)
		}
	})
	t.Run("EndsWithTheProcessThatStartedIt", func(t *testing.T) {
		p := run(t, Command{Role: "parent"})
		child, err := strconv.Atoi(strings.TrimPrefix(expect(t, p, "child ").Text, "child "))
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Signal(os.Kill); err != nil {
			t.Fatal(err)
		}
		err = Eventually(within(t, 10*time.Second), "the child's end", func(context.Context) (bool, error) {
			return !alive(child), nil
		})
		if err != nil {
			t.Fatal(err)
		}
	})
	t.Run("KeepsABoundedNumberOfLinesAndCountsTheRest", func(t *testing.T) {
		p := run(t, Command{Path: "/bin/sh", Args: []string{"-c", "seq 70000; read x; echo end"}})
		err := Eventually(within(t, 20*time.Second), "a full queue", func(context.Context) (bool, error) {
			p.lines.Lock()
			defer p.lines.Unlock()
			return p.lines.dropped == 70000-keptLines, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		for i := range keptLines {
			if line, err := p.Next(t.Context()); err != nil || line.Text != strconv.Itoa(i+1) {
				t.Fatalf("line %d is %+v, %v", i, line, err)
			}
		}
		send(t, p, "go on")
		if line := expect(t, p, "end"); line.Dropped != 70000-keptLines {
			t.Fatalf("%+v", line)
		}
	})
	t.Run("ExitsWellThoughAnotherSessionHoldsItsOutputOpen", func(t *testing.T) {
		p := run(t, Command{Path: "/bin/sh", Args: []string{"-c", "setsid sh -c 'echo holding; exec sleep 3' & read x; exit 0"}})
		expect(t, p, "holding")
		send(t, p, "go")
		began := time.Now()
		if err := p.Wait(within(t, 10*time.Second)); err != nil || time.Since(began) > 2500*time.Millisecond {
			t.Fatalf("after %v: %v", time.Since(began), err)
		}
	})
	t.Run("WhichCannotBeStartedIsNamed", func(t *testing.T) {
		if _, err := Run(Command{Path: "/nonexistent/node"}); err == nil || !strings.Contains(err.Error(), "/nonexistent/node") {
			t.Fatal(err)
		}
	})
}

// alive tells whether a process runs; a zombie, which nobody may reap here, does not.
func alive(pid int) bool {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return false
	}
	_, after, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(after, "Z")
}
