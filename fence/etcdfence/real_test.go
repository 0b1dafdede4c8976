package etcdfence_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"aegis"
	"aegis/fence"
	"aegis/fence/etcdfence"
	"aegis/fence/fencetest"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
)

// dial makes a client of one embedded etcd, which is started by the first call.
func dial(t testing.TB) *clientv3.Client {
	t.Helper()
	socket, err := endpoint()
	if err != nil {
		t.Fatal(err)
	}
	cli, err := clientv3.New(clientv3.Config{Endpoints: []string{socket}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cli.Close() })
	return cli
}

var stop = func() {}

var endpoint = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "etcdfence")
	if err != nil {
		return "", err
	}
	cfg := embed.NewConfig()
	cfg.Dir, cfg.LogLevel = dir, "fatal"
	client, peer := url.URL{Scheme: "unix", Path: dir + "/c"}, url.URL{Scheme: "unix", Path: dir + "/p"}
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		return "", err
	}
	stop = func() { e.Close(); _ = os.RemoveAll(dir) }
	<-e.Server.ReadyNotify()
	return client.String(), nil
})

func TestMain(m *testing.M) {
	code := m.Run()
	stop()
	os.Exit(code)
}

func join(t testing.TB, ctx context.Context) *aegis.Node {
	t.Helper()
	n, err := aegis.Join(ctx, dial(t), aegis.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = n.Leave(ctx)
	})
	return n
}

// TestConformanceOfOnce maps the tokens that the suite makes up to terms that etcd has given out: the token of each new
// term is greater, and that is all that the suite's numbers say.
func TestConformanceOfOnce(t *testing.T) {
	fencetest.TestOnce(t, func(t *testing.T) fencetest.Subject {
		s := &terms{t: t, cli: dial(t), name: t.Name() + "/", led: map[string]map[fence.Token]*aegis.Leadership{}, newest: map[string]fence.Token{}}
		return fencetest.Subject{Guard: s, Once: s.once, Read: func(ctx context.Context, key string) (string, error) {
			resp, err := s.cli.Get(ctx, s.name+key)
			if err != nil || len(resp.Kvs) == 0 {
				return "", err
			}
			return string(resp.Kvs[0].Value), nil
		}}
	})
}

type terms struct {
	t      *testing.T
	cli    *clientv3.Client
	name   string
	led    map[string]map[fence.Token]*aegis.Leadership
	newest map[string]fence.Token
}

// Advance has a new node win the election, while the one before is not asked.
func (s *terms) Advance(ctx context.Context, all ...fence.Term) error {
	for _, t := range all {
		name := s.name + t.Election
		if s.led[name][t.Token] != nil {
			continue
		}
		if before := s.led[name][s.newest[name]]; before != nil {
			if err := aegis.Open(s.cli, "").Evict(ctx, before.Term); err != nil {
				return err
			}
		}
		led, err := join(s.t, ctx).Election(name).Campaign(ctx)
		if err != nil {
			return err
		}
		if s.led[name] == nil {
			s.led[name] = map[fence.Token]*aegis.Leadership{}
		}
		s.led[name][t.Token], s.newest[name] = led, t.Token
	}
	return nil
}

func (s *terms) once(ctx context.Context, t fence.Term, key string, fn func(func(key, value string) error) ([]byte, error)) ([]byte, bool, error) {
	name := s.name + t.Election
	fenced := &fence.FencedError{Name: t.Election, Token: t.Token, Newest: s.newest[name]}
	led := s.led[name][t.Token]
	if led == nil {
		return nil, false, fenced // nobody has such a leadership
	}
	result, first, err := etcdfence.Once(ctx, led, "", key, func() (ops []clientv3.Op, result []byte, err error) {
		result, err = fn(func(key, value string) error {
			ops = append(ops, clientv3.OpPut(s.name+key, value))
			return nil
		})
		return ops, result, err
	})
	if errors.Is(err, aegis.ErrFenced) {
		return result, first, fenced
	}
	return result, first, err
}

// BenchmarkGuardedOverPlain compares Leadership.Commit and Once with a bare Put of the same key, one etcd on this
// machine's disk. The ways take turns in short rounds, and each round gives one ratio of throughput, guarded / plain, 1
// being as fast; printed are the ratios' quartiles. A disk drifts: mind the ratios, not the milliseconds.
func BenchmarkGuardedOverPlain(b *testing.B) {
	for _, workers := range []int{1, 16} {
		b.Run(fmt.Sprintf("workers=%d", workers), func(b *testing.B) {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
			defer cancel()
			cli := dial(b)
			led, err := join(b, ctx).Election(fmt.Sprint("bench-", time.Now().UnixNano())).Campaign(ctx)
			if err != nil {
				b.Fatal(err)
			}
			const value = "a value of some fifty bytes, as a loot table may have"
			put := func(w, i int) error {
				_, err := cli.Put(ctx, fmt.Sprint("bench/", w), value)
				return err
			}
			txn := func(w, i int) error {
				_, err := cli.Txn(ctx).Then(clientv3.OpPut(fmt.Sprint("bench/", w), value)).Commit()
				return err
			}
			cmp := func(w, i int) error {
				resp, err := cli.Txn(ctx).If(led.Cmp()).Then(clientv3.OpPut(fmt.Sprint("bench/", w), value)).Commit()
				if err == nil && !resp.Succeeded {
					err = aegis.ErrFenced
				}
				return err
			}
			commit := func(w, i int) error {
				_, err := led.Commit(ctx, clientv3.OpPut(fmt.Sprint("bench/", w), value))
				return err
			}
			once := func(w, i int) error {
				_, _, err := etcdfence.Once(ctx, led, "/bench-once/", fmt.Sprint(w, "-", i, "-", time.Now().UnixNano()), func() ([]clientv3.Op, []byte, error) {
					return []clientv3.Op{clientv3.OpPut(fmt.Sprint("bench/", w), value)}, []byte("done"), nil
				})
				return err
			}
			compare(b, workers, put, map[string]func(w, i int) error{"Txn": txn, "Cmp": cmp, "Commit": commit, "Once": once})
			b.ReportMetric(0, "ns/op")
		})
	}
}

func compare(b *testing.B, workers int, plain func(w, i int) error, ways map[string]func(w, i int) error) {
	const rounds, each = 15, 320
	round := func(write func(w, i int) error) time.Duration {
		var all sync.WaitGroup
		begin := time.Now()
		for w := range workers {
			all.Go(func() {
				for i := range each / workers {
					if err := write(w, i); err != nil {
						b.Error(err)
						return
					}
				}
			})
		}
		all.Wait()
		return time.Since(begin)
	}
	ratios := map[string][]float64{}
	round(plain)
	var took []float64
	for range rounds {
		for name, write := range ways { // in random order
			p, g := round(plain), round(write)
			ratios[name] = append(ratios[name], float64(p)/float64(g))
			took = append(took, float64(p.Microseconds())/each)
		}
	}
	slices.Sort(took)
	b.ReportMetric(took[len(took)/2], "µs/plain-Put")
	for name, r := range ratios {
		slices.Sort(r)
		b.ReportMetric(r[rounds/4], name+"-q1")
		b.ReportMetric(r[rounds/2], name+"-median")
		b.ReportMetric(r[rounds*3/4], name+"-q3")
	}
}
