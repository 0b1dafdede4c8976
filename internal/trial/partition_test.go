package trial

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"aegis/internal/lab"

	"go.etcd.io/etcd/api/v3/mvccpb"
)

type kv = mvccpb.KeyValue

// rounds returns how often the leader is cut off, under aegis and under etcd's own package.
func rounds(t *testing.T) (ours, theirs int) {
	ours, theirs = 30, 12
	if testing.Short() {
		ours, theirs = 5, 3
	}
	if s := os.Getenv("AEGIS_TRIAL_ROUNDS"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 {
			t.Fatalf("AEGIS_TRIAL_ROUNDS is %q; must be a positive number", s)
		}
		ours, theirs = n, (2*n+4)/5
	}
	return ours, theirs
}

// tally is what came of one system's rounds.
type tally struct {
	system   string
	rounds   int
	overlaps []overlap
	gap      time.Duration // the least from an old leader's last yes to the next one's first where its lease ran out
	late     int           // rounds in which the next leader came later than TTL + 1 s
	worst    time.Duration // the longest time until the next leader, from where it counts
	fromCut  time.Duration // the same, from the cut
}

// TestPartitionNeverShowsTwoLeaders cuts the leader off again and again, in turn in both directions, so that its
// requests are lost, and so that only the replies are.
//
// Where only replies are lost the old leader's renewals still reach etcd, and the lease with them lasts longer, until
// trust ends and it stops renewing: there the next leader's TTL + 1 s counts from the old one's last yes, which no
// renewal follows. In the other rounds it counts from the cut.
func TestPartitionNeverShowsTwoLeaders(t *testing.T) {
	ours, theirs := rounds(t)
	random := rand.New(rand.NewPCG(lab.Seed(t), 0)) // of the cuts' instants
	cluster := newTrial(t, lab.Options{}).cluster

	a := partition(t, cluster, systemAegis, ours, random)
	e := partition(t, cluster, systemConcurrency, theirs, random)
	t.Logf("\n%s", table(a, e))

	if allowed := ours * 2 / 30; a.late > allowed {
		t.Errorf("in %d of %d rounds the next leader came later than TTL + 1 s; allowed are %d", a.late, ours, allowed)
	}
}

func table(tallies ...tally) string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	row := func(name string, cell func(tally) any) {
		fmt.Fprint(w, name, "\t")
		for _, t := range tallies {
			fmt.Fprint(w, cell(t), "\t")
		}
		fmt.Fprintln(w)
	}
	ms := func(d time.Duration) string { return fmt.Sprintf("%d ms", d.Milliseconds()) }
	row("partition of the leader, TTL 2 s", func(t tally) any { return t.system })
	row("rounds", func(t tally) any { return t.rounds })
	row("rounds with two leaders at one time", func(t tally) any { return len(t.overlaps) })
	row("longest time with two", func(t tally) any {
		var longest time.Duration
		for _, o := range t.overlaps {
			longest = max(longest, o.Duration)
		}
		return ms(longest)
	})
	row("least time from the last yes to the next one's first, lease run out", func(t tally) any { return ms(t.gap) })
	row("next leader later than TTL + 1 s", func(t tally) any { return t.late })
	row("worst time to the next leader", func(t tally) any { return ms(t.worst) })
	row("the same from the cut, even where renewals went on", func(t tally) any { return ms(t.fromCut) })
	_ = w.Flush()
	return b.String()
}

// partition plays the rounds under one system.
func partition(t *testing.T, cluster *lab.Cluster, system string, rounds int, random *rand.Rand) tally {
	x := onCluster(t, cluster)
	x.system = system
	result := tally{system: system, rounds: rounds, gap: time.Hour}
	leader := x.start("scene-01")
	won := leader.wins(10*time.Second, 0)
	follower := x.start("scene-02")
	for i := range rounds {
		dir := []lab.Direction{lab.Both, lab.ToServer, lab.FromServer}[i%3]
		x.queued(15*time.Second, follower.id)
		// Not a wait for anything: cuts come at any instant between two renewals.
		time.Sleep(time.Duration(random.Int64N(int64(ttl / 3))))

		cut := lab.Now()
		cluster.Cut(leader.id, dir)
		next := follower.wins(20*time.Second, won.Token)
		old := leader.ends(20*time.Second, won.Token)
		cluster.Heal(leader.id)

		counts := cut
		if dir == lab.FromServer {
			counts = old.Last.After
		}
		took := time.Duration(next.First.After - counts)
		result.worst = max(result.worst, took)
		result.fromCut = max(result.fromCut, time.Duration(next.First.After-cut))
		if dir != lab.FromServer { // else the old leader, once it has stopped, gives its key back, and the next one follows at once
			result.gap = min(result.gap, time.Duration(next.First.Before-old.Last.After))
		}
		if took > ttl+time.Second {
			result.late++
			t.Logf("%s round %d, cut %v: the next leader came after %v", system, i, dir, took)
		}
		leader, follower, won = follower, leader, next
	}
	result.overlaps = overlaps(x.reigns())
	if system == systemAegis {
		x.noOverlap()
	}
	for _, n := range x.nodes {
		n.Close()
	}
	return result
}
