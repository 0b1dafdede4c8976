package lab

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	switch Role() {
	case "echo":
		echo()
		return
	case "parent":
		parent()
		return
	}
	goleak.VerifyTestMain(m)
}

// echo says at which instant it started, repeats what it is told, ticks when asked to, and exits at the input's end.
func echo() {
	fmt.Println("started", Now())
	fmt.Fprintln(os.Stderr, "echo has started")
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		switch word, rest, _ := strings.Cut(in.Text(), " "); word {
		case "tick":
			go func() {
				for range time.Tick(5 * time.Millisecond) {
					fmt.Println("tick", Now())
				}
			}()
		case "exit":
			fmt.Fprintln(os.Stderr, "told to fail:", rest)
			os.Exit(3)
		default:
			fmt.Println("echo", in.Text())
		}
	}
}

// parent starts a child that neither reads its input nor ends by itself, and waits for its own death.
func parent() {
	p, err := Run(Command{Path: "/bin/sleep", Args: []string{"1000"}})
	if err != nil {
		panic(err)
	}
	fmt.Println("child", p.Pid())
	_ = p.Wait(context.Background())
}

func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func start(t *testing.T, members int) *Cluster {
	t.Helper()
	c, err := Start(within(t, 30*time.Second), Options{Members: members, Fast: true, NoFsync: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		began := time.Now()
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if took := time.Since(began); took > 4*time.Second {
			t.Errorf("closing took %v", took)
		}
	})
	return c
}

func client(t *testing.T, c *Cluster, node string) *clientv3.Client {
	t.Helper()
	cli, err := c.Client(node)
	if err != nil {
		t.Fatal(err)
	}
	return cli
}

func put(t *testing.T, cli *clientv3.Client, key, value string) {
	t.Helper()
	if _, err := cli.Put(within(t, 10*time.Second), key, value); err != nil {
		t.Fatalf("put %s: %v", key, err)
	}
}

// sees waits until a client reads the value.
func sees(t *testing.T, cli *clientv3.Client, key, value string) {
	t.Helper()
	err := Eventually(within(t, 10*time.Second), key+" to be "+value, func(ctx context.Context) (bool, error) {
		resp, err := cli.Get(ctx, key)
		return err == nil && len(resp.Kvs) == 1 && string(resp.Kvs[0].Value) == value, err
	})
	if err != nil {
		t.Fatal(err)
	}
}
