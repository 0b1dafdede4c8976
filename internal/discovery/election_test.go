package discovery

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"aegis/internal/lab"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"
)

var endpoints []string

// TestMain starts an etcd unless AEGIS_ENDPOINTS names one.
func TestMain(m *testing.M) {
	os.Exit(func() int {
		if given := os.Getenv("AEGIS_ENDPOINTS"); given != "" {
			endpoints = strings.Split(given, ",")
			return m.Run()
		}
		cluster, err := lab.Start(context.Background(), lab.Options{Members: 1, NoFsync: true})
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer cluster.Close()
		endpoints = cluster.Endpoints("test")
		return m.Run()
	}())
}

func connect(t *testing.T) (context.Context, *clientv3.Client, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	cli, err := clientv3.New(clientv3.Config{Endpoints: endpoints, DialTimeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cli.Close() })
	return ctx, cli, fmt.Sprintf("/test/%s/%d/", t.Name(), time.Now().UnixNano())
}

// TestEtcdLeaderElectionSingleLeader: several scenes campaign at once and exactly one wins; after it has resigned
// another takes over with a greater token, and the old token is fenced.
func TestEtcdLeaderElectionSingleLeader(t *testing.T) {
	ctx, cli, prefix := connect(t)
	if _, err := cli.Get(ctx, prefix); err != nil { // the connection is there
		t.Fatal(err)
	}
	leaks := goleak.IgnoreCurrent()
	election := NewElection(cli, prefix, "scene-leader", 2*time.Second)

	var mu sync.Mutex
	var winners []*Leadership
	campaign := func(id NodeID) {
		l, err := election.Campaign(ctx, id)
		mu.Lock()
		defer mu.Unlock()
		switch {
		case err == nil:
			winners = append(winners, l)
		case err != ErrNotLeader:
			t.Errorf("%s: %v", id, err)
		}
	}
	var wg sync.WaitGroup
	for i := 1; i <= 5; i++ {
		wg.Go(func() { campaign(NodeID(fmt.Sprintf("scene-%02d", i))) })
	}
	wg.Wait()
	if len(winners) != 1 {
		t.Fatalf("%d leaders", len(winners))
	}
	first := winners[0]
	if id, token, err := election.Leader(ctx); err != nil || id != first.Node || token != first.Token {
		t.Fatalf("leader is %s, %d, %v; want %+v", id, token, err, first)
	}
	t.Logf("elected leader=%s token=%d", first.Node, first.Token)
	var fence Fencer
	if err := fence.Check(first.Token); err != nil {
		t.Fatal(err)
	}

	for range 2 { // idempotent
		if err := first.Resign(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := election.Leader(ctx); err != ErrNotLeader {
		t.Fatalf("vacant: %v", err)
	}
	campaign("scene-01")
	if len(winners) != 2 {
		t.Fatal("nobody took over")
	}
	second := winners[1]
	t.Logf("takeover leader=%s token=%d (was %d)", second.Node, second.Token, first.Token)
	if second.Token != first.Token+2 {
		t.Errorf("token %d after %d on a quiet cluster", second.Token, first.Token)
	}
	if err := fence.Check(second.Token); err != nil {
		t.Fatal(err)
	}
	if err := fence.Check(first.Token); !errors.Is(err, ErrFenced) || !strings.Contains(err.Error(), fmt.Sprint(second.Token)) {
		t.Fatalf("the old token: %v", err)
	}
	if fence.LastSeen() != second.Token {
		t.Fatalf("last seen %d", fence.LastSeen())
	}
	if err := second.Resign(ctx); err != nil {
		t.Fatal(err)
	}
	goleak.VerifyNone(t, leaks)
}

// TestEtcdAssignmentIsFencedTwice: a leader commits many plans under one token; an old leader's plan is refused by the
// fence where that has seen the newer token, and by the store where it has not, and leaves the table untouched.
func TestEtcdAssignmentIsFencedTwice(t *testing.T) {
	ctx, cli, prefix := connect(t)
	election := NewElection(cli, prefix, "assigner", 2*time.Second)
	old, err := election.Campaign(ctx, "scene-01")
	if err != nil {
		t.Fatal(err)
	}
	var fence Fencer
	for i := range 3 {
		if err := old.commitAssignment(ctx, &fence, Assignment{"map-1": NodeID(fmt.Sprint("node-", i))}); err != nil {
			t.Fatal(err)
		}
	}
	// The key is taken behind its back, so that nothing but the comparisons can refuse.
	if _, err := cli.Delete(ctx, prefix+"election/assigner"); err != nil {
		t.Fatal(err)
	}
	next, err := election.Campaign(ctx, "scene-02")
	if err != nil {
		t.Fatal(err)
	}
	if err := next.commitAssignment(ctx, &fence, Assignment{"map-1": "node-9"}); err != nil {
		t.Fatal(err)
	}
	var other Fencer // one that has not seen the newer token
	for name, f := range map[string]*Fencer{"fence": &fence, "store": &other} {
		if err := old.commitAssignment(ctx, f, Assignment{"map-1": "stale"}); !errors.Is(err, ErrFenced) {
			t.Fatalf("refused by the %s: %v", name, err)
		}
	}
	if a, token, err := election.assignment(ctx); err != nil || a["map-1"] != "node-9" || token != next.Token {
		t.Fatalf("the table is %v under %d, %v", a, token, err)
	}
	if err := (&Leadership{Node: "x", Token: next.Token}).commitAssignment(ctx, &fence, nil); err == nil {
		t.Fatal("a literal committed")
	}
	if err := next.Resign(ctx); err != nil {
		t.Fatal(err)
	}
	if err := old.Resign(ctx); err != nil {
		t.Fatal(err)
	}
}
