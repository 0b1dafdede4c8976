package aegis_test

import (
	"context"
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"

	"aegis"
	"aegis/internal/lab"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// The least role that a node needs is readwrite on its prefix; see docs/guide.md. Against a real etcd with
// authentication switched on.
func TestLeastRole(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cluster, err := lab.Start(ctx, lab.Options{NoFsync: true})
	if err != nil {
		t.Fatal(err)
	}
	defer cluster.Close()
	root, err := cluster.Client("root")
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	must := func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(root.UserAdd(ctx, "root", "secret"))
	must(root.UserGrantRole(ctx, "root", "root"))
	must(root.RoleAdd(ctx, "aegis"))
	must(root.RoleGrantPermission(ctx, "aegis", aegis.DefaultPrefix, clientv3.GetPrefixRangeEnd(aegis.DefaultPrefix), clientv3.PermissionType(clientv3.PermReadWrite)))
	must(root.UserAdd(ctx, "scene", "pass"))
	must(root.UserGrantRole(ctx, "scene", "aegis"))
	must(root.UserAdd(ctx, "stranger", "pass"))
	must(root.AuthEnable(ctx))

	connect := func(user, password string) *clientv3.Client {
		cli, err := clientv3.New(clientv3.Config{Endpoints: cluster.Endpoints(user), Username: user, Password: password, DialTimeout: 3 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cli.Close() })
		return cli
	}
	quiet := slog.New(slog.NewTextHandler(io.Discard, nil))
	join := func(id string) *aegis.Node {
		n, err := aegis.Join(ctx, connect("scene", "pass"), aegis.Config{ID: aegis.NodeID(id), TTL: 30 * time.Second, Logger: quiet}) // each renewal authenticates anew, slowly
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	a, b := join("a"), join("b")
	led, err := a.Election("boss").Campaign(ctx)
	must(led, err)
	won := make(chan *aegis.Leadership, 1)
	go func() {
		l, err := b.Election("boss").Await(ctx)
		if err != nil {
			t.Error(err)
		}
		won <- l
	}()
	must(nil, lab.Eventually(ctx, "b waits", func(ctx context.Context) (bool, error) {
		c, err := a.Election("boss").Candidates(ctx)
		return len(c) == 1, err
	}))
	must(nil, led.Transfer(ctx, "b"))
	next := <-won
	must(next.Commit(ctx, clientv3.OpPut(aegis.DefaultPrefix+"data", "x")))
	if _, err := next.Commit(ctx, clientv3.OpPut("/outside", "x")); err == nil || !strings.Contains(err.Error(), "permission denied") {
		t.Fatalf("a write outside the prefix: %v", err)
	}
	must(aegis.Open(connect("scene", "pass"), "").Elections(ctx))
	must(nil, a.Leave(ctx))
	must(nil, b.Leave(ctx))

	// Permanent errors are returned at once and named.
	for user, want := range map[string]string{"stranger": "permission denied", "": "user name is empty"} {
		began := time.Now()
		_, err := aegis.Join(ctx, connect(user, "pass"), aegis.Config{TTL: 30 * time.Second, Logger: quiet}) // each renewal authenticates anew, slowly
		if err == nil || !strings.Contains(err.Error(), want) || time.Since(began) > 20*time.Second {
			t.Errorf("join as %q: %v after %v; want %q", user, err, time.Since(began), want)
		}
	}
}
