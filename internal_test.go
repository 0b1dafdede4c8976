package aegis

import (
	"os/exec"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"aegis/internal/clock"
)

func TestHeldDoesNotAllocate(t *testing.T) {
	l := newLease(1, clock.Machine, clock.Start(clock.Machine), time.Minute, time.Second, func(*lease, error) {})
	defer l.end(errResigned)
	led := &Leadership{lease: l}
	if n := testing.AllocsPerRun(1000, func() {
		if !led.Held() {
			t.Error("not held")
		}
	}); n != 0 {
		t.Fatalf("%v allocations", n)
	}
}

// silent is a clock whose alarms never ring, so that only those who look find out that trust is over.
type silent struct{ *clock.Fake }

type silentAlarm struct{}

func (silent) NewAlarm() clock.Alarm   { return silentAlarm{} }
func (silentAlarm) Set(time.Duration)  {}
func (silentAlarm) C() <-chan struct{} { return nil }
func (silentAlarm) Stop()              {}

func TestLease(t *testing.T) {
	start := func() (*lease, silent, *int) {
		c, ends := silent{&clock.Fake{}}, new(int)
		return newLease(1, c, clock.Start(c), 10*time.Second, 2*time.Second, func(*lease, error) { *ends++ }), c, ends
	}
	t.Run("RenewalAfterTrustEndedChangesNothing", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			l, c, ends := start()
			time.Sleep(8 * time.Second)
			if l.renewed(clock.Start(c), 10*time.Second) || l.trusted() || *ends != 1 {
				t.Fatalf("trusted again; ended %d times", *ends)
			}
		})
	})
	t.Run("RenewalAfterTheEndChangesNothing", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			l, c, ends := start()
			l.end(errLeaseGone)
			l.end(errTrustEnded)
			if l.trusted() || l.renewed(clock.Start(c), 10*time.Second) || l.trusted() || *ends != 1 || l.cause != errLeaseGone {
				t.Fatalf("trusted again; ended %d times, %v", *ends, l.cause)
			}
		})
	})
	t.Run("TrustCountsFromTheStartByTheGrantedTTL", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			l, c, _ := start()
			sent := clock.Start(c)
			time.Sleep(time.Second) // the answer takes its time
			if !l.renewed(sent, 20*time.Second) || l.left() != 17*time.Second {
				t.Fatalf("%v left", l.left())
			}
			time.Sleep(17*time.Second - 1)
			if !l.trusted() {
				t.Fatal("ended early")
			}
			time.Sleep(time.Nanosecond)
			if l.trusted() {
				t.Fatal("ended late")
			}
		})
	})
}

// The root package reaches etcd's client and nothing of drivers, servers, the web or the command line; see DESIGN's
// package map.
func TestArrowsGoDownOnly(t *testing.T) {
	deps := func(pkg string) []string {
		out, err := exec.Command("go", "list", "-deps", pkg).Output()
		if err != nil {
			t.Fatal(err)
		}
		return strings.Fields(string(out))
	}
	for _, d := range deps(".") {
		for _, bad := range []string{"go.etcd.io/etcd/server", "go.etcd.io/bbolt", "database/sql", "sqlite", "pgx", "redis", "spf13", "net/http/httptest", "testing"} {
			if strings.Contains(d, bad) && d != "internal/testlog" {
				t.Errorf("the root imports %s", d)
			}
		}
		if strings.HasPrefix(d, "aegis/") && d != "aegis/fence" && d != "aegis/internal/clock" {
			t.Errorf("the root imports %s", d)
		}
	}
	out, err := exec.Command("go", "list", "./fence/...", "./internal/clock").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, pkg := range strings.Fields(string(out)) {
		if pkg == "aegis/fence/etcdfence" {
			continue // the guard of data in etcd itself, for users of the root
		}
		for _, d := range deps(pkg) {
			if d == "aegis" || strings.Contains(d, "go.etcd.io") {
				t.Errorf("%s imports %s", pkg, d)
			}
		}
	}
	for _, d := range deps("./internal/lab") {
		if d == "aegis" {
			t.Errorf("internal/lab imports the root")
		}
	}
}

func TestKeysSplitAsTheyAreSpelled(t *testing.T) {
	for _, prefix := range []string{"", NoPrefix, "/p/", "odd"} {
		k := newKeyspace(prefix)
		for _, name := range []string{"a", "a/b", "a%2Fb", "公会/拍卖行", " ", "candidate/", "a/"} {
			if dir, rest := k.split([]byte(k.leader(name))); dir != dirElection || rest != name {
				t.Errorf("%s: %q, %q", k.leader(name), dir, rest)
			}
			if dir, rest := k.split([]byte(k.term(name))); dir != dirTerm || rest != name {
				t.Errorf("%s: %q, %q", k.term(name), dir, rest)
			}
			dir, rest := k.split([]byte(k.candidate(name, 0x1f)))
			if got, lease, ok := splitCandidate(rest); dir != dirCandidate || !ok || got != name || lease != 0x1f {
				t.Errorf("%s: %q, %q, %x", k.candidate(name, 0x1f), dir, got, lease)
			}
			first, end := k.watched()
			for _, key := range []string{k.leader(name), k.term(name), k.candidate(name, 1), k.request(name), k.node(NodeID(name)), k.offset(), k.cluster()} {
				if key < first || key >= end {
					t.Errorf("%s is not watched", key)
				}
			}
			if !strings.HasPrefix(k.candidate(name, 1), k.candidates(name)) {
				t.Errorf("%s is not under %s", k.candidate(name, 1), k.candidates(name))
			}
		}
		if dir, _ := k.split([]byte("elsewhere/x")); dir != "" {
			t.Errorf("elsewhere is %q", dir)
		}
	}
	if a, b := newKeyspace("").candidates("a"), newKeyspace("").candidate("a/b", 1); strings.HasPrefix(b, a) {
		t.Errorf("%s lies under %s", b, a)
	}
}
