package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestDev(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "data")
	var endpoint string
	for _, c := range []struct {
		claim string
		sig   syscall.Signal
		check func(t *testing.T, at string)
	}{
		{"StopsCleanlyOnSIGINT", syscall.SIGINT, func(t *testing.T, at string) {
			info, err := os.Stat(dir)
			if err != nil || info.Mode().Perm() != 0o700 {
				t.Errorf("data directory: %v, %v; want mode 0700", info.Mode(), err)
			}
			aegisCmd(t, "run", "kept", "--endpoints", at, "--", "true").wants(t, 0, "", "")
			r := aegisCmd(t, "dev", "--data-dir", dir, "--listen", "127.0.0.1:0")
			r.wants(t, 1, "", "in use by another `aegis dev`")
			oneLineError(t, r)
			r = aegisCmd(t, "dev", "--data-dir", dir+"2", "--listen", at)
			r.wants(t, 1, "", "cannot listen on "+at)
			oneLineError(t, r)
		}},
		{"KeepsItsDataAndStopsOnSIGTERM", syscall.SIGTERM, func(t *testing.T, at string) {
			aegisCmd(t, "status", "--endpoints", at).wants(t, 0, "kept", "")
		}},
	} {
		t.Run(c.claim, func(t *testing.T) {
			dev := start(t, "dev", "--data-dir", dir, "--listen", "127.0.0.1:0")
			at, err := readyEndpoint(dev)
			if err != nil {
				t.Fatal(err)
			}
			endpoint = at
			c.check(t, endpoint)
			dev.signal(t, c.sig)
			if code := dev.code(t); code != 0 {
				t.Errorf("exit code %d, want 0", code)
			}
			if rest := strings.TrimSpace(dev.rest(t)); rest != "" || dev.stderr() != "" {
				t.Errorf("it was not silent: %q, %q", rest, dev.stderr())
			}
		})
	}
}

func TestDevWithDamagedDataSaysSo(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for path, size := range map[string]int{"member/wal/0000000000000000-0000000000000000.wal": 1 << 10, "member/snap/db": 1 << 16} {
		path = filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, bytes.Repeat([]byte{7}, size), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r := aegisCmd(t, "dev", "--data-dir", dir, "--listen", "127.0.0.1:0")
	r.wants(t, 1, "", dir)
	oneLineError(t, r)
}
