package demo

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"aegis/internal/lab"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if lab.Role() == Role {
		os.Exit(Scene())
	}
	goleak.VerifyTestMain(m)
}

// The harness must see what it looks for: with the guard advanced as ever but the writes going around it, the run "with
// the fence" has the damage of the one without, and the demo says so.
func TestDemoFailsWhenWritesGoAroundTheGuard(t *testing.T) {
	tmp, keep := t.TempDir(), t.TempDir()
	t.Setenv("TMPDIR", tmp)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var out bytes.Buffer
	r, err := Run(ctx, Config{TTL: MinTTL, Keep: keep, Out: &out, bypass: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("\n%s", &out)
	if r.OK || len(r.Fenced.PaidTwice) == 0 || r.Fenced.Refused != 0 {
		t.Errorf("ok: %v, paid twice %v, refused %d; expected a failed verdict", r.OK, r.Fenced.PaidTwice, r.Fenced.Refused)
	}
	for _, want := range []string{"with the fence: paid twice: 7 8 9", "with the fence: no write was refused"} {
		if !slices.ContainsFunc(r.Problems, func(p string) bool { return strings.HasPrefix(p, want) }) {
			t.Errorf("no problem begins with %q in %q", want, r.Problems)
		}
	}
	// What was kept, and nothing else, is left.
	var kept []string
	for _, dir := range []string{tmp, keep} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			kept = append(kept, e.Name())
		}
	}
	want := []string{
		"with-the-fence-scene-01.log", "with-the-fence-scene-02.log", "with-the-fence.db",
		"without-the-fence-scene-01.log", "without-the-fence-scene-02.log", "without-the-fence.db",
	}
	if !slices.Equal(kept, want) {
		t.Errorf("left behind: %v\nwant: %v", kept, want)
	}
	if _, err := Run(ctx, Config{Keep: keep}); err == nil || !strings.Contains(err.Error(), "another demo") {
		t.Errorf("a second demo in the same directory: %v", err)
	}
}

func TestRunRefusesATTLOutOfItsBounds(t *testing.T) {
	for _, ttl := range []time.Duration{-1, time.Second, 2500 * time.Millisecond, MaxTTL + time.Second} {
		if _, err := Run(t.Context(), Config{TTL: ttl}); err == nil || !strings.Contains(err.Error(), "from 2s to 30s") {
			t.Errorf("%v: %v", ttl, err)
		}
	}
}

func TestRunLeavesNothingWhenItFails(t *testing.T) {
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	// A directory lies where the log of the first scene belongs.
	keep := t.TempDir()
	if err := os.Mkdir(filepath.Join(keep, "without-the-fence-scene-01.log"), 0o755); err != nil {
		t.Fatal(err)
	}
	_, err := Run(t.Context(), Config{TTL: MinTTL, Keep: keep})
	if err == nil || !strings.Contains(err.Error(), "scene-01.log") {
		t.Errorf("%v", err)
	}
	if entries, _ := os.ReadDir(tmp); len(entries) > 0 {
		t.Errorf("left behind: %v", entries)
	}
}

// Each fact that the verdict rests on decides it.
func TestVerdict(t *testing.T) {
	good := func() *Report {
		r := &Report{}
		reign := []Reign{{Scene: "scene-01", Token: 3}, {Scene: "scene-02", Token: 7}}
		old := Try{Kill: 1, Scene: "scene-01", Token: 3, Outcome: paid}
		next := Try{Kill: 1, Scene: "scene-02", Token: 7, Outcome: paid}
		late := old
		late.Outcome, late.Newest = refused, 7
		pay := func(t Try) Payment {
			return Payment{Kill: t.Kill, Item: item(t.Kill), Player: "Ayla", Scene: t.Scene, Token: t.Token}
		}
		r.Unfenced = Facts{Terms: reign}
		r.Unfenced.count([]Try{next, old}, ledger{kills: []int{1}, payments: []Payment{pay(next), pay(old)}, gold: 2 * gold})
		r.Fenced = Facts{Terms: slices.Clone(reign)}
		r.Fenced.count([]Try{next, late}, ledger{kills: []int{1}, payments: []Payment{pay(next)}, gold: gold})
		return r
	}
	if r := good(); true {
		if r.judge(); !r.OK {
			t.Fatal(r.Problems)
		}
	}
	for _, c := range []struct {
		name, want string
		spoil      func(r *Report)
	}{
		{"NoDamageWithoutTheFence", "without the fence: no kill was paid twice", func(r *Report) { r.Unfenced.PaidTwice = nil }},
		{"AGuardWithoutTheFence", "a guard is at work", func(r *Report) { r.Unfenced.Refused = 1 }},
		{"PaidTwiceWithTheFence", "with the fence: paid twice: 1", func(r *Report) { r.Fenced.PaidTwice = []int{1} }},
		{"NothingRefused", "no write was refused", func(r *Report) { r.Fenced.Refused = 0 }},
		{"RefusedTheLeader", "it was not an old leader's", func(r *Report) { r.Fenced.tries[1].Scene = "scene-02" }},
		{"RefusedByAnOlderToken", "it was not an old leader's", func(r *Report) { r.Fenced.tries[1].Newest = 3 }},
		{"KillsWithoutLoot", "with the fence: 1 of 2 kills", func(r *Report) { r.Fenced.Kills = 2 }},
		{"GoldWithoutLoot", "with the fence: 300 gold", func(r *Report) { r.Fenced.GoldPaid = 300 }},
		{"LogAndTableDiffer", "the scenes logged", func(r *Report) { r.Unfenced.payments = r.Unfenced.payments[:1] }},
		{"HeldAfterTheStop", "without the fence: Held was true", func(r *Report) { r.Unfenced.HeldAfter = true }},
		{"NoSecondTerm", "with the fence: the terms were", func(r *Report) { r.Fenced.Terms = r.Fenced.Terms[:1] }},
		{"TokenDoesNotGrow", "with the fence: the terms were", func(r *Report) { r.Fenced.Terms[1].Token = 3 }},
		{"AWriteFailed", "failed to pay kill 5", func(r *Report) { r.Fenced.failures = []Try{{Kill: 5}} }},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := good()
			c.spoil(r)
			if r.judge(); r.OK || !strings.Contains(strings.Join(r.Problems, "\n"), c.want) {
				t.Errorf("problems: %q; expected one with %q", r.Problems, c.want)
			}
		})
	}
}
