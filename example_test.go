package aegis_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"aegis"
	"aegis/fence/sqlitefence"
	"aegis/internal/lab"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// The main path: one boss, one owner, loot that is handed out once. SIGTERM flushes under the term and releases it.
func Example() {
	kills, endpoints, file, done := exampleWorld()
	defer done()

	cli, err := clientv3.New(clientv3.Config{Endpoints: endpoints,
		DialTimeout: 3 * time.Second, DialKeepAliveTime: 10 * time.Second, DialKeepAliveTimeout: 3 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer cli.Close()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()

	loot, err := sqlitefence.Open(file, sqlitefence.Config{}) // the store that refuses old leaders
	if err != nil {
		log.Fatal(err)
	}
	defer loot.Close()
	node, err := aegis.Join(ctx, cli, aegis.Config{ID: "scene-01"})
	if err != nil {
		log.Fatal(err)
	}
	defer node.Leave(ctx)

	err = node.Election("boss", aegis.WithGuards(loot)).Run(ctx, func(ctx context.Context, l *aegis.Leadership) error {
		for settled := 0; ; settled++ {
			select {
			case kill := <-kills: // paid in one transaction with the check of the token
				if _, err := loot.Exec(l.Context(), l.Term, `INSERT INTO loot (kill, item) VALUES (?, 'sword')`, kill); err != nil {
					return err // ErrFenced: the term is over, and Run enters again
				}
				fmt.Println("paid for kill", kill)
			case <-ctx.Done(): // stop: the term is over, or SIGTERM; in the latter case it may still write
				_, err := loot.Exec(l.Context(), l.Term, `UPDATE progress SET settled = ?`, settled)
				fmt.Println("flushed:", err == nil)
				return err
			}
		}
	})
	fmt.Println("stopped by a signal:", ctx.Err() != nil && err != nil)
	// Output:
	// paid for kill 1
	// paid for kill 2
	// flushed: true
	// stopped by a signal: true
}

// exampleWorld starts what the example takes for granted: an etcd, two tables, kills, and a SIGTERM after them.
func exampleWorld() (kills chan int, endpoints []string, file string, done func()) {
	cluster, err := lab.Start(context.Background(), lab.Options{NoFsync: true})
	if err != nil {
		log.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "aegis-example")
	if err != nil {
		log.Fatal(err)
	}
	file = filepath.Join(dir, "loot.db")
	g, err := sqlitefence.Open(file, sqlitefence.Config{})
	if err != nil {
		log.Fatal(err)
	}
	if err := g.Setup(context.Background(), `CREATE TABLE loot (kill INTEGER, item TEXT); CREATE TABLE progress (settled INTEGER); INSERT INTO progress VALUES (0)`); err != nil {
		log.Fatal(err)
	}
	_ = g.Close()
	kills = make(chan int)
	go func() {
		kills <- 1
		kills <- 2
		_ = syscall.Kill(os.Getpid(), syscall.SIGTERM)
	}()
	return kills, cluster.Endpoints("example"), file, func() {
		_ = cluster.Close()
		_ = os.RemoveAll(dir)
	}
}
