package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"aegis/internal/lab/demo"
)

// demoRun is `aegis demo` with a directory of its own for temporary files, and a mark by which its processes are found.
type demoRun struct {
	*exec.Cmd
	tmp, mark   string
	out, errors bytes.Buffer
}

func newDemoRun(t *testing.T, args ...string) *demoRun {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	r := &demoRun{Cmd: exec.CommandContext(ctx, self, append([]string{"demo", "--ttl", "2s"}, args...)...), tmp: t.TempDir()}
	r.mark = fmt.Sprintf("AEGIS_DEMO_MARK=%x", rand.Uint64())
	r.Env = append(os.Environ(), roleEnv+"=cli", "TMPDIR="+r.tmp, r.mark)
	r.Stdout, r.Stderr = &r.out, &r.errors
	return r
}

// leftNothing fails the test if a file or a process is left.
func (r *demoRun) leftNothing(t *testing.T) {
	t.Helper()
	entries, err := os.ReadDir(r.tmp)
	if err != nil || len(entries) > 0 {
		t.Errorf("files are left in TMPDIR: %v, %v", entries, err)
	}
	environments, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, file := range environments {
		if b, err := os.ReadFile(file); err == nil && bytes.Contains(b, []byte(r.mark)) {
			t.Errorf("a process is left: %s", filepath.Dir(file))
		}
	}
}

func TestDemoShowsTheDamageAndTheFence(t *testing.T) {
	r := newDemoRun(t, "-o", "json")
	if err := r.Run(); err != nil {
		t.Fatalf("%v\n%s", err, &r.errors)
	}
	r.leftNothing(t)
	t.Logf("\n%s", &r.errors)
	if strings.Contains(r.errors.String(), "\x1b") {
		t.Error("the time line has colours where there is no terminal")
	}
	for line := range strings.Lines(r.errors.String()) {
		if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > 100 {
			t.Errorf("%d columns: %s", n, line)
		}
	}
	for _, name := range []string{"t0", "t1", "t2", "t3", "t4"} {
		if n := strings.Count(r.errors.String(), " "+name+" "); n != 2 {
			t.Errorf("%s stands %d times in the time line, expected one in each run", name, n)
		}
	}
	var report demo.Report
	if err := json.Unmarshal(r.out.Bytes(), &report); err != nil {
		t.Fatalf("%v in %s", err, &r.out)
	}
	bad, good := report.Unfenced, report.Fenced
	if !report.OK || len(bad.PaidTwice) == 0 || bad.Refused != 0 || bad.Tried != bad.Admitted || bad.GoldPaid <= bad.GoldOwed {
		t.Errorf("without the fence: %+v", bad)
	}
	if len(good.PaidTwice) != 0 || good.Refused == 0 || good.Tried != good.Admitted+good.Refused || good.Settled != good.Kills || good.GoldPaid != good.GoldOwed {
		t.Errorf("with the fence: %+v", good)
	}
	for _, f := range []demo.Facts{bad, good} {
		if len(f.Terms) != 2 || f.Terms[0].Token >= f.Terms[1].Token || f.HeldAfter || len(f.Timeline) != 5 {
			t.Errorf("terms %+v, held after waking %v, time line %+v", f.Terms, f.HeldAfter, f.Timeline)
		}
	}
	refused := 0
	for _, c := range good.Contested {
		for _, try := range c.Tries {
			if try.Outcome != "refused" {
				continue
			}
			refused++
			if try.Token != good.Terms[0].Token || try.Newest != good.Terms[1].Token || try.Token >= try.Newest {
				t.Errorf("refused with tokens %d and %d, the terms were %+v", try.Token, try.Newest, good.Terms)
			}
		}
	}
	if refused != good.Refused {
		t.Errorf("%d refusals have their tokens, of %d", refused, good.Refused)
	}
}

func TestDemoCleansUpWhenInterrupted(t *testing.T) {
	r := newDemoRun(t)
	r.Stdout = nil
	out, err := r.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Start(); err != nil {
		t.Fatal(err)
	}
	stopped := false
	for lines := bufio.NewScanner(out); lines.Scan(); {
		if strings.Contains(lines.Text(), " t1 ") { // one scene is stopped now, the other waits
			stopped = true
			if err := r.Process.Signal(os.Interrupt); err != nil {
				t.Fatal(err)
			}
		}
	}
	_ = r.Wait()
	if code := r.ProcessState.ExitCode(); !stopped || code != exitSignal+int(syscall.SIGINT) {
		t.Errorf("exit code %d, stopped %v: %s", code, stopped, &r.errors)
	}
	r.leftNothing(t)
}

func TestDemoRefusesBadFlags(t *testing.T) {
	for _, args := range [][]string{{"--ttl", "0"}, {"--ttl", "1500ms"}, {"--ttl", "1h"}, {"extra"}} {
		r := newDemoRun(t, args...)
		_ = r.Run()
		if code := r.ProcessState.ExitCode(); code != exitUsage {
			t.Errorf("%v: exit code %d: %s", args, code, &r.errors)
		}
	}
}

func TestDemoCleansUpWhenNobodyReadsIt(t *testing.T) {
	r := newDemoRun(t)
	r.Stdout = nil
	out, err := r.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Start(); err != nil {
		t.Fatal(err)
	}
	for lines := bufio.NewScanner(out); lines.Scan() && !strings.Contains(lines.Text(), " t0 "); {
	}
	_ = out.Close()
	_ = r.Wait()
	if code := r.ProcessState.ExitCode(); code != exitSignal+int(syscall.SIGPIPE) {
		t.Errorf("exit code %d: %s", code, &r.errors)
	}
	r.leftNothing(t)
}
