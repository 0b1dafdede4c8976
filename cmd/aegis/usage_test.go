package main

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// oneLineError asserts what every failure owes its reader: one line that names the program, no dump of usage or stack.
func oneLineError(t *testing.T, r result) {
	t.Helper()
	lines := strings.Split(strings.TrimSuffix(r.stderr, "\n"), "\n")
	last := lines[len(lines)-1]
	if !strings.HasPrefix(last, "aegis: ") || strings.Contains(r.stderr, "Usage:") || strings.Contains(r.stderr, "goroutine ") {
		t.Errorf("stderr is not one line that starts with \"aegis: \": %q", r.stderr)
	}
	for _, l := range lines[:len(lines)-1] {
		if !strings.HasPrefix(l, "time=") { // the log of run and campaign
			t.Errorf("stderr has another line: %q", l)
		}
	}
}

func TestBadInput(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	foreign := filepath.Join(dir, "foreign")
	if err := os.Mkdir(foreign, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(foreign, "thesis.doc"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()

	long := strings.Repeat("x", 256)
	for _, c := range []struct {
		claim string
		args  []string
		code  int
		want  []string
	}{
		{"UnknownCommand", []string{"frobnicate"}, 2, []string{`unknown command "frobnicate"`, "--help"}},
		{"UnknownFlag", []string{"status", "--nope"}, 2, []string{"unknown flag: --nope", "'aegis status --help'"}},
		{"UnknownOutput", []string{"status", "-o", "xml"}, 2, []string{`--output is "xml"`, "table or json"}},
		{"BadDuration", []string{"status", "--timeout", "soon"}, 2, []string{"--timeout"}},
		{"ZeroTimeout", []string{"status", "--timeout", "0"}, 2, []string{"--timeout is 0s", "more than 0"}},
		{"PasswordWithoutUser", []string{"status", "--password", "secret"}, 2, []string{"--password needs --user"}},
		{"UserWithoutPassword", []string{"status", "--user", "root"}, 2, []string{"AEGIS_PASSWORD"}},
		{"MissingCertificate", []string{"status", "--cacert", filepath.Join(dir, "no.pem")}, 2, []string{"--cacert", "no.pem"}},
		{"MissingName", []string{"leader"}, 2, []string{"accepts 1 arg"}},
		{"EmptyName", []string{"leader", ""}, 2, []string{"election name is empty"}},
		{"LongName", []string{"leader", long}, 2, []string{"256 bytes", "at most 255"}},
		{"ControlCharacterInName", []string{"leader", "a\x07b"}, 2, []string{`"a\ab"`, "control character"}},
		{"NameIsNotUTF8", []string{"leader", "a\xffb"}, 2, []string{"not valid UTF-8"}},
		{"StatusOfLongName", []string{"status", long}, 2, []string{"256 bytes"}},
		{"WatchEmptyName", []string{"watch", ""}, 2, []string{"election name is empty"}},
		{"CampaignEmptyName", []string{"campaign", ""}, 2, []string{"election name is empty"}},
		{"CampaignReservedName", []string{"campaign", "shard/x"}, 2, []string{"reserved"}},
		{"RunControlCharacter", []string{"run", "a\nb", "--", "true"}, 2, []string{"control character"}},
		{"TransferWithoutNode", []string{"transfer", "x"}, 2, []string{"accepts 2 arg"}},
		{"TTL500ms", []string{"campaign", "x", "--ttl", "500ms"}, 2, []string{"--ttl is 500ms", "whole seconds from 2s to 5m0s"}},
		{"TTL1500ms", []string{"campaign", "x", "--ttl", "1.5s"}, 2, []string{"--ttl is 1.5s", "whole seconds from 2s to 5m0s"}},
		{"TTL2500ms", []string{"campaign", "x", "--ttl", "2.5s"}, 2, []string{"--ttl is 2.5s", "whole seconds"}},
		{"TTLZero", []string{"campaign", "x", "--ttl", "0"}, 2, []string{"--ttl is 0s", "whole seconds from 2s to 5m0s"}},
		{"TTLNegative", []string{"run", "x", "--ttl", "-1s", "--", "true"}, 2, []string{"--ttl is -1s", "whole seconds from 2s to 5m0s"}},
		{"TTLTooLong", []string{"campaign", "x", "--ttl", "6m"}, 2, []string{"--ttl is 6m0s", "5m0s"}},
		{"MarginIsTTL", []string{"campaign", "x", "--ttl", "2s", "--margin", "2s"}, 2, []string{"--margin is 2s", "less than half of --ttl (2s)"}},
		{"MarginZero", []string{"campaign", "x", "--margin", "0"}, 2, []string{"--margin is 0s", "more than 0"}},
		{"MarginNegative", []string{"campaign", "x", "--margin", "-1s"}, 2, []string{"--margin is -1s"}},
		{"MarginTooSmallToKillIn", []string{"run", "x", "--margin", "100ms", "--", "true"}, 2, []string{"--margin is 100ms", "more than 100ms"}},
		{"GraceIsMargin", []string{"run", "x", "--ttl", "2s", "--grace", "400ms", "--", "true"}, 2, []string{"--grace is 400ms", "from 0 to 300ms", "--margin (400ms)"}},
		{"GraceNegative", []string{"run", "x", "--grace", "-1s", "--", "true"}, 2, []string{"--grace is -1s"}},
		{"StopGraceNegative", []string{"run", "x", "--stop-grace", "-1s", "--", "true"}, 2, []string{"--stop-grace is -1s"}},
		{"EmptyID", []string{"campaign", "x", "--id", ""}, 2, []string{"--id is empty"}},
		{"LongID", []string{"campaign", "x", "--id", long}, 2, []string{"node id has 256 bytes"}},
		{"RunWithoutDashes", []string{"run", "x", "true"}, 2, []string{"no --"}},
		{"RunWithoutCommand", []string{"run", "x", "--"}, 2, []string{"no command after --"}},
		{"RunWithoutName", []string{"run", "--", "true"}, 2, []string{"one election name before --"}},
		{"RunUnknownCommand", []string{"run", "x", "--", "no-such-command"}, 127, []string{"no-such-command", "not found"}},
		{"RunWhatIsNoProgram", []string{"run", "x", "--", file}, 126, []string{file, "permission denied"}},
		{"EvictWaitZero", []string{"evict", "x", "--wait", "0"}, 2, []string{"--wait is 0s"}},
		{"RaiseUnasked", []string{"token", "raise"}, 2, []string{"ends every term", "--yes"}},
		{"RaiseAboveNegative", []string{"token", "raise", "--yes", "--above", "-1"}, 2, []string{"--above is -1"}},
		{"FileInTheWayOfDataDir", []string{"dev", "--data-dir", file}, 2, []string{file, "is a file, not a directory"}},
		{"DataDirHoldsSomethingElse", []string{"dev", "--data-dir", foreign}, 2, []string{foreign, "thesis.doc"}},
		{"PortTaken", []string{"dev", "--data-dir", filepath.Join(dir, "d1"), "--listen", taken.Addr().String()}, 1, []string{"cannot listen on " + taken.Addr().String(), "in use"}},
		{"ListenIsNoAddress", []string{"dev", "--data-dir", filepath.Join(dir, "d2"), "--listen", "2379"}, 2, []string{"--listen 2379 is not an address"}},
		{"NobodyLeads", []string{"leader", "never-led"}, 3, []string{`no leader of "never-led"`}},
		{"TransferOfVacant", []string{"transfer", "never-led", "x"}, 3, []string{`no leader of "never-led"`}},
		{"EvictOfVacant", []string{"evict", "never-led"}, 3, []string{`no leader of "never-led"`}},
		{"StatusOfUnknown", []string{"status", "never-led"}, 3, []string{`election "never-led"`}},
	} {
		t.Run(c.claim, func(t *testing.T) {
			r := aegisCmd(t, c.args...)
			if r.code != c.code {
				t.Errorf("exit code %d, want %d", r.code, c.code)
			}
			for _, want := range c.want {
				if !strings.Contains(r.stderr, want) {
					t.Errorf("stderr lacks %q: %s", want, r.stderr)
				}
			}
			if strings.Contains(r.stderr, "secret") {
				t.Errorf("stderr shows the password: %s", r.stderr)
			}
			oneLineError(t, r)
		})
	}
}

func TestBadVariableIsNamed(t *testing.T) {
	t.Parallel()
	r := aegisEnv(t, []string{"AEGIS_DIAL_TIMEOUT=never"}, "status")
	r.wants(t, 2, "", "AEGIS_DIAL_TIMEOUT")
	oneLineError(t, r)
}

func TestFlagWinsOverVariable(t *testing.T) {
	t.Parallel()
	aegisEnv(t, []string{"AEGIS_OUTPUT=xml"}, "version", "-o", "json").wants(t, 0, `"etcd"`, "")
}

// Every command that talks to etcd says that it is not there, within its bound.
func TestUnreachableEtcd(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"status"}, {"status", "x"}, {"leader", "x"}, {"watch", "x"}, {"nodes"}, {"prune"}, {"token", "raise", "--yes"},
		{"transfer", "x", "y"}, {"evict", "x"}, {"evict", "x", "--now"}, {"campaign", "x"}, {"campaign", "x", "--no-wait"}, {"run", "x", "--", "true"},
		{"status", "--user", "root:secret"},
	} {
		t.Run(strings.Join(args, "_"), func(t *testing.T) {
			t.Parallel()
			const bound = time.Second
			r := aegisCmd(t, append([]string{"--endpoints", "127.0.0.1:1", "--timeout", bound.String()}, args...)...)
			r.wants(t, 6, "", "etcd at 127.0.0.1:1 cannot be reached")
			if !strings.Contains(r.stderr, "connection refused") || strings.Contains(r.stderr, "secret") {
				t.Errorf("stderr: %s", r.stderr)
			}
			oneLineError(t, r)
			if r.took > bound+5*time.Second {
				t.Errorf("took %v with --timeout %v", r.took, bound)
			}
		})
	}
}
