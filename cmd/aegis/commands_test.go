package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"strings"
	"syscall"
	"testing"

	"aegis"

	"google.golang.org/grpc"
)

func decode[T any](t *testing.T, s string) (v T) {
	t.Helper()
	if err := json.Unmarshal([]byte(s), &v); err != nil {
		t.Fatalf("%v: %s", err, s)
	}
	return v
}

func TestCampaignPrintsEachTransitionAndResignsWhenInterrupted(t *testing.T) {
	t.Parallel()
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		t.Run(sig.String(), func(t *testing.T) {
			name := "campaign/" + sig.String()
			p := start(t, "campaign", name, "--id", name, "--ttl", "2s")
			p.expect(t, "waiting")
			line := p.expect(t, "elected")
			term, err := shared.cluster.Leader(bounded(t), name)
			if err != nil || string(term.Node) != name || !strings.HasSuffix(line, fmt.Sprintf("token %d", term.Token)) {
				t.Fatalf("%q printed, %v leads (%v)", line, term, err)
			}
			p.signal(t, sig)
			p.expect(t, "released")
			if code := p.code(t); code != 0 {
				t.Fatalf("exit code %d, want 0: %s", code, p.stderr())
			}
			vacant(t, name)
		})
	}
}

func TestCampaignWaitsAgainAfterALoss(t *testing.T) {
	t.Parallel()
	const name = "campaign-again"
	p := start(t, "campaign", name, "--ttl", "2s", "-o", "json")
	first := decode[transition](t, p.expect(t, `"elected"`))
	aegisCmd(t, "evict", name, "--now").wants(t, 0, "has ended", "may work on until it notices")
	if lost := decode[transition](t, p.expect(t, `"lost"`)); lost.Reason == "" || lost.Token != first.Token {
		t.Errorf("lost: %+v", lost)
	}
	if again := decode[transition](t, p.expect(t, `"elected"`)); again.Token <= first.Token {
		t.Errorf("token %d after %d", again.Token, first.Token)
	}
}

func TestCampaignNoWait(t *testing.T) {
	t.Parallel()
	const name = "no wait/中文"
	p := start(t, "campaign", name, "--no-wait", "--id", "holder", "--ttl", "2s")
	p.expect(t, "elected")
	r := aegisCmd(t, "campaign", name, "--no-wait")
	r.wants(t, 3, "", "holder holds it")
	oneLineError(t, r)
	aegisCmd(t, "evict", name, "--now").wants(t, 0, "", "")
	p.expect(t, "lost")
	if code := p.code(t); code != 4 {
		t.Errorf("exit code %d after a loss, want 4", code)
	}
	oneLineError(t, result{stderr: p.stderr()})
}

func TestLeaderPrintsNodeAndToken(t *testing.T) {
	t.Parallel()
	n := join(t, aegis.Config{ID: "leader-1"})
	led, err := n.Election("leader").Campaign(bounded(t))
	if err != nil {
		t.Fatal(err)
	}
	aegisCmd(t, "leader", "leader").wants(t, 0, fmt.Sprintf("leader-1\t%d\n", led.Token), "")
	if got := decode[termJSON](t, aegisCmd(t, "leader", "leader", "-o", "json").stdout); got != (termJSON{"leader", "leader-1", led.Token}) {
		t.Errorf("%+v", got)
	}
}

func TestStatusShowsLeaderQueueAndLastEnd(t *testing.T) {
	t.Parallel()
	const prefix = "/status-test/"
	ctx, cancel := context.WithCancel(bounded(t))
	var nodes []*aegis.Node
	for i := range 3 {
		nodes = append(nodes, join(t, aegis.Config{ID: aegis.NodeID(fmt.Sprintf("status-%d", i)), Prefix: prefix}))
	}
	first, err := nodes[1].Election("boss").Campaign(ctx)
	if err != nil {
		t.Fatal(err)
	}
	won := make(chan *aegis.Leadership, 1)
	go func() {
		led, err := nodes[0].Election("boss").Await(ctx)
		if err != nil {
			t.Error(err)
		}
		won <- led
	}()
	eventually(t, "status-0 waits", func() bool {
		c, err := nodes[0].Election("boss").Candidates(ctx)
		return err == nil && len(c) == 1
	})
	if err := first.Resign(ctx); err != nil {
		t.Fatal(err)
	}
	led := <-won
	if led == nil {
		t.FailNow()
	}
	waited := make(chan struct{}, 2)
	for i, n := range nodes[1:] {
		go func() {
			_, _ = n.Election("boss", aegis.WithPriority(i)).Await(ctx)
			waited <- struct{}{}
		}()
	}
	defer func() {
		cancel()
		<-waited
		<-waited
	}()
	var got []electionJSON
	eventually(t, "two candidates", func() bool {
		got = decode[[]electionJSON](t, aegisCmd(t, "status", "boss", "-o", "json", "--prefix", prefix).stdout)
		return len(got) == 1 && len(got[0].Waiting) == 2
	})
	e := got[0]
	if e.Leader == nil || e.Leader.Node != "status-0" || e.Leader.Token != led.Token || e.Leader.Host == "" || e.Leader.PID == 0 || e.Leader.Since.IsZero() || e.Leader.LeaseSeconds < 5 {
		t.Errorf("leader: %+v", e.Leader)
	}
	if e.Waiting[0].Node != "status-2" || e.Waiting[1].Node != "status-1" {
		t.Errorf("waiting: %+v, want status-2, which has priority, first", e.Waiting)
	}
	if !strings.Contains(e.LastEnded, "status-1") || len(e.Faults) != 0 {
		t.Errorf("last ended %q, faults %v", e.LastEnded, e.Faults)
	}
	table := aegisCmd(t, "status", "--prefix", prefix, "--strict")
	for _, want := range []string{"boss", "status-0", fmt.Sprint(led.Token), "1. status-2 (priority 1)", "2. status-1", "LAST TERM ENDED"} {
		table.wants(t, 0, want, "")
	}
	if strings.Contains(table.stdout, "\x1b") {
		t.Errorf("colours on what is no terminal: %q", table.stdout)
	}

	members := decode[[]memberJSON](t, aegisCmd(t, "nodes", "-o", "json", "--prefix", prefix).stdout)
	if len(members) != 3 || members[0].ID != "status-0" || members[0].PID == 0 {
		t.Errorf("nodes: %+v", members)
	}
	aegisCmd(t, "nodes", "--prefix", prefix).wants(t, 0, "status-2", "")
}

func TestFaultsAreNamed(t *testing.T) {
	t.Parallel()
	const prefix = "/fault-test/"
	if _, err := shared.cli.Put(bounded(t), prefix+"election/boss", "somebody"); err != nil {
		t.Fatal(err)
	}
	if _, err := shared.cli.Put(bounded(t), prefix+"node/ghost", "{}"); err != nil {
		t.Fatal(err)
	}
	aegisCmd(t, "status", "--prefix", prefix).wants(t, 0, "fault: boss: /fault-test/election/boss has no lease", "")
	aegisCmd(t, "status", "--prefix", prefix, "--strict").wants(t, 1, "has no lease", "1 fault(s) found")
	aegisCmd(t, "nodes", "--prefix", prefix).wants(t, 0, "fault: ghost: ", "")
	aegisCmd(t, "nodes", "--prefix", prefix, "--strict").wants(t, 1, "", "ghost")
}

func TestEmptyPrefix(t *testing.T) {
	t.Parallel()
	aegisCmd(t, "status", "--prefix", "/nothing-here/").wants(t, 0, "no elections under prefix /nothing-here/", "")
	aegisCmd(t, "nodes", "--prefix", "/nothing-here/").wants(t, 0, "no nodes under prefix /nothing-here/", "")
	if r := aegisCmd(t, "status", "-o", "json", "--prefix", "/nothing-here/"); r.stdout != "[]\n" {
		t.Errorf("stdout %q, want []", r.stdout)
	}
}

func TestWatchPrintsALineForEachChange(t *testing.T) {
	t.Parallel()
	const name = "watched"
	n := join(t, aegis.Config{ID: "watch-1"})
	w, j := start(t, "watch", name), start(t, "watch", name, "-o", "json")
	w.expect(t, "vacant")
	j.expect(t, `"vacant"`)
	led, err := n.Election(name).Campaign(bounded(t))
	if err != nil {
		t.Fatal(err)
	}
	w.expect(t, fmt.Sprintf("watch-1  token %d", led.Token))
	if got := decode[transition](t, j.expect(t, `"leader"`)); got.Node != "watch-1" || got.Token != led.Token || got.Election != name || got.Time.IsZero() {
		t.Errorf("%+v", got)
	}
	if err := led.Resign(bounded(t)); err != nil {
		t.Fatal(err)
	}
	w.expect(t, "vacant")
	w.signal(t, syscall.SIGINT)
	if code := w.code(t); code != 0 {
		t.Errorf("exit code %d, want 0: %s", code, w.stderr())
	}
}

func TestTransferAndEvict(t *testing.T) {
	t.Parallel()
	const name = "moved"
	a := start(t, "campaign", name, "--id", "move-a")
	a.expect(t, "elected")
	b := start(t, "campaign", name, "--id", "move-b")
	eventually(t, "move-b waits", func() bool { return len(candidates(t, name)) == 1 })

	r := aegisCmd(t, "transfer", name, "move-c")
	r.wants(t, 1, "", "move-c: it does not wait for the election; waiting: move-b")
	oneLineError(t, r)
	aegisCmd(t, "transfer", name, "move-a").wants(t, 0, "move-a leads", "")
	r = aegisCmd(t, "transfer", name, "move-b", "-o", "json")
	r.wants(t, 0, "", "")
	got := decode[struct{ Was, Now termJSON }](t, r.stdout)
	if got.Was.Node != "move-a" || got.Now.Node != "move-b" || got.Now.Token <= got.Was.Token {
		t.Errorf("%+v", got)
	}
	b.expect(t, "elected")
	a.expect(t, "lost")

	eventually(t, "move-a waits", func() bool { return len(candidates(t, name)) == 1 })
	aegisCmd(t, "evict", name).wants(t, 0, fmt.Sprintf("token %d", got.Now.Token), "")
	a.expect(t, "elected")
}

// A leader whose work does not stop is not handed over from, and the one who asked is told.
func TestTransferAndEvictWaitForTheWorkWithinABound(t *testing.T) {
	t.Parallel()
	const name = "stuck"
	ctx, cancel := context.WithCancel(bounded(t))
	n, other := join(t, aegis.Config{ID: "stuck-a"}), join(t, aegis.Config{ID: "stuck-b"})
	working, done, ran := make(chan struct{}), make(chan struct{}), make(chan error, 2)
	go func() {
		ran <- n.Election(name).Run(ctx, func(context.Context, *aegis.Leadership) error {
			close(working)
			<-done
			return nil
		})
	}()
	<-working
	go func() {
		_, err := other.Election(name).Await(ctx)
		ran <- err
	}()
	defer func() {
		close(done)
		cancel()
		<-ran
		<-ran
	}()
	eventually(t, "stuck-b waits", func() bool { return len(candidates(t, name)) == 1 })
	for _, args := range [][]string{{"transfer", name, "stuck-b"}, {"evict", name}} {
		r := aegisCmd(t, append(args, "--wait", "300ms")...)
		r.wants(t, 5, "", `stuck-a still leads "stuck"`)
		oneLineError(t, r)
	}
}

func TestPrune(t *testing.T) {
	t.Parallel()
	const prefix = "/prune-test/"
	n := join(t, aegis.Config{Prefix: prefix})
	for _, name := range []string{"over", "over too"} {
		led, err := n.Election(name).Campaign(bounded(t))
		if err != nil {
			t.Fatal(err)
		}
		if err := led.Resign(bounded(t)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := n.Election("led").Campaign(bounded(t)); err != nil {
		t.Fatal(err)
	}
	if r := aegisCmd(t, "prune", "--prefix", prefix); r.code != 0 || r.stdout != "over\nover too\n" {
		t.Errorf("%+v", r)
	}
	if r := aegisCmd(t, "prune", "--prefix", prefix, "-o", "json"); r.code != 0 || r.stdout != "[]\n" {
		t.Errorf("%+v", r)
	}
	r := aegisCmd(t, "status", "--prefix", prefix)
	if r.wants(t, 0, "led", ""); strings.Contains(r.stdout, "over") {
		t.Errorf("pruned, but shown: %s", r.stdout)
	}
}

func TestTokenRaise(t *testing.T) {
	t.Parallel()
	const prefix = "/raise-test/"
	p := start(t, "campaign", "x", "--prefix", prefix)
	before := p.expect(t, "elected")
	const above = 7_000_000_000
	r := aegisCmd(t, "token", "raise", "--yes", "--above", fmt.Sprint(above), "--prefix", prefix, "-o", "json")
	r.wants(t, 0, "", "")
	first := decode[map[string]int64](t, r.stdout)
	if first["was"] != 0 || first["offset"] <= above+1<<30-1 {
		t.Errorf("%v", first)
	}
	p.expect(t, "lost")
	after := p.expect(t, "elected")
	var old, token int64
	if _, err := fmt.Sscanf(before[strings.Index(before, "token"):], "token %d", &old); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscanf(after[strings.Index(after, "token"):], "token %d", &token); err != nil || token <= above {
		t.Errorf("token %d (%v) after %d, want more than %d", token, err, old, above)
	}
	aegisCmd(t, "token", "raise", "-y", "--prefix", prefix).wants(t, 0, fmt.Sprintf("from %d to ", first["offset"]), "")
}

func TestVersionAndHelp(t *testing.T) {
	t.Parallel()
	aegisCmd(t, "version").wants(t, 0, "etcd 3.", "")
	help := aegisCmd(t, "--help")
	for _, want := range []string{"Exit codes:", "AEGIS_ENDPOINTS", "NO_COLOR", "run ", "campaign ", "--cacert", "completion"} {
		help.wants(t, 0, want, "")
	}
	aegisCmd(t).wants(t, 0, "Exit codes:", "")
	aegisCmd(t, "completion", "bash").wants(t, 0, "complete", "")
}

func TestElectionNamesAreCompleted(t *testing.T) {
	t.Parallel()
	n := join(t, aegis.Config{})
	if _, err := n.Election("completed/42").Campaign(bounded(t)); err != nil {
		t.Fatal(err)
	}
	aegisCmd(t, "__complete", "status", "compl").wants(t, 0, "completed/42\n", "")
}

func TestConnectedEtcdThatDoesNotAnswerIsATimeout(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	mute := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, s grpc.ServerStream) error {
		<-s.Context().Done()
		return s.Context().Err()
	}))
	go func() { _ = mute.Serve(l) }()
	defer mute.Stop()
	r := aegisCmd(t, "leader", "x", "--endpoints", l.Addr().String(), "--timeout", "1s")
	r.wants(t, 5, "", "no answer within 1s")
	oneLineError(t, r)
}
