package bench

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"aegis"
	"aegis/internal/lab"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
)

// field is a cluster with two nodes and two sessions of etcd's concurrency package, all with clients of their own.
type field struct {
	testing.TB
	ctx      context.Context
	cli      *clientv3.Client
	others   *clientv3.Client // of the other writers: on the Put's own connection they would keep that one warm
	a, b     *aegis.Node
	sa, sb   *concurrency.Session
	samples  map[string][]time.Duration
	sequence int
}

func newField(b *testing.B, members int) *field {
	ctx, cancel := context.WithTimeout(b.Context(), 10*time.Minute)
	b.Cleanup(cancel)
	cluster, err := lab.Start(ctx, lab.Options{Members: members})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = cluster.Close() })
	f := &field{TB: b, ctx: ctx, samples: map[string][]time.Duration{}}
	connect := func(id string) *clientv3.Client {
		cli, err := cluster.Client(id)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = cli.Close() })
		return cli
	}
	join := func(id string) *aegis.Node {
		n, err := aegis.Join(ctx, connect(id), aegis.Config{ID: aegis.NodeID(id), Logger: slog.New(slog.NewTextHandler(io.Discard, nil))})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = n.Leave(context.Background()) })
		return n
	}
	session := func(id string) *concurrency.Session {
		s, err := concurrency.NewSession(connect(id), concurrency.WithTTL(10))
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = s.Close() })
		return s
	}
	f.cli, f.others = connect("put"), connect("others")
	f.a, f.b, f.sa, f.sb = join("a"), join("b"), session("sa"), session("sb")
	return f
}

func (f *field) sample(what string, began time.Time) {
	f.samples[what] = append(f.samples[what], time.Since(began))
}

func (f *field) must(err error) {
	if err != nil {
		f.Helper()
		f.Fatal(err)
	}
}

// phase waits for a moment, so that nothing that is measured begins just when the disk is done with what was measured
// before it: among other writers that makes half a cycle's difference.
func (f *field) phase() { time.Sleep(rand.N(4 * time.Millisecond)) }

func (f *field) put() {
	f.phase()
	began := time.Now()
	_, err := f.cli.Put(f.ctx, "/bench/put", "scene-01")
	f.must(err)
	f.sample("put", began)
}

// queued waits until the candidate key of the waiter is there and then as long as the measurement wants it to have
// waited.
func (f *field) queued(name string, for_ time.Duration) {
	f.must(lab.Eventually(f.ctx, "the waiter queues", func(ctx context.Context) (bool, error) {
		c, err := f.a.Election(name).Candidates(ctx)
		return len(c) == 1, err
	}))
	time.Sleep(for_) // the length of the wait is part of what is measured
}

type outcome struct {
	led *aegis.Leadership
	at  time.Time
	err error
}

func (f *field) await(e *aegis.Election) chan outcome {
	c := make(chan outcome, 1)
	go func() {
		led, err := e.Await(f.ctx)
		c <- outcome{led, time.Now(), err}
	}()
	return c
}

// round takes one sample of everything, so that a drift of the machine meets all alike.
func (f *field) round() {
	f.sequence++
	name := fmt.Sprintf("boss-%d", f.sequence)
	f.put()

	f.phase()
	began := time.Now()
	led, err := f.a.Election(name).Campaign(f.ctx)
	f.must(err)
	f.sample("campaign", began)

	for _, wait := range []time.Duration{8 * time.Millisecond, 60 * time.Millisecond} {
		next := f.await(f.b.Election(name))
		f.queued(name, wait)
		f.put()
		f.phase()
		began = time.Now()
		f.must(led.Resign(f.ctx))
		f.sample("resign", began)
		o := <-next
		f.must(o.err)
		f.samples[fmt.Sprintf("resign→await,queued=%v", wait)] = append(f.samples[fmt.Sprintf("resign→await,queued=%v", wait)], o.at.Sub(began))
		f.must(o.led.Resign(f.ctx))
		led, err = f.a.Election(name).Await(f.ctx)
		f.must(err)
	}

	next := f.await(f.b.Election(name))
	f.queued(name, 8*time.Millisecond)
	f.put()
	f.phase()
	began = time.Now()
	f.must(led.Transfer(f.ctx, f.b.ID()))
	o := <-next
	f.must(o.err)
	f.samples["transfer→held"] = append(f.samples["transfer→held"], o.at.Sub(began))
	f.must(o.led.Resign(f.ctx))

	f.peer(name)
}

// peer does the same with etcd's concurrency package.
func (f *field) peer(name string) {
	ea, eb := concurrency.NewElection(f.sa, "/peer/"+name), concurrency.NewElection(f.sb, "/peer/"+name)
	f.put()
	f.phase()
	began := time.Now()
	f.must(ea.Campaign(f.ctx, "a"))
	f.sample("etcd-concurrency:campaign", began)
	won := make(chan time.Time, 1)
	go func() {
		if err := eb.Campaign(f.ctx, "b"); err != nil {
			f.Error(err)
		}
		won <- time.Now()
	}()
	f.must(lab.Eventually(f.ctx, "the waiter queues", func(ctx context.Context) (bool, error) {
		r, err := f.cli.Get(ctx, "/peer/"+name, clientv3.WithPrefix(), clientv3.WithCountOnly())
		return r != nil && r.Count == 2, err
	}))
	time.Sleep(8 * time.Millisecond)
	f.phase()
	began = time.Now()
	f.must(ea.Resign(f.ctx))
	at := <-won
	f.samples["etcd-concurrency:resign→campaign,queued=8ms"] = append(f.samples["etcd-concurrency:resign→campaign,queued=8ms"], at.Sub(began))
	f.must(eb.Resign(f.ctx))
}

func quantile(d []time.Duration, q float64) time.Duration {
	d = slices.Clone(d)
	slices.Sort(d)
	return d[min(int(q*float64(len(d))), len(d)-1)]
}

// report prints medians and 99th percentiles as multiples of the median Put of the same run.
func (f *field) report(b *testing.B) {
	unit := quantile(f.samples["put"], 0.5)
	b.ReportMetric(float64(unit.Microseconds())/1000, "put-ms")
	b.ReportMetric(0, "ns/op")
	var names []string
	for name := range f.samples {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		med, p99 := quantile(f.samples[name], 0.5), quantile(f.samples[name], 0.99)
		b.Logf("%-48s median %5.2f × Put   p99 %6.2f × Put   (%v, %v)", name, float64(med)/float64(unit), float64(p99)/float64(unit),
			med.Round(10*time.Microsecond), p99.Round(10*time.Microsecond))
		if name != "put" { // whose own 99th percentile says how much of the others' is the disk's
			b.ReportMetric(float64(med)/float64(unit), name+"/put")
		}
	}
}

// BenchmarkElection measures campaigns and handovers. "busy" has two other writers on the cluster.
func BenchmarkElection(b *testing.B) {
	for _, members := range []int{1, 3} {
		for _, busy := range []bool{false, true} {
			b.Run(fmt.Sprintf("members=%d/busy=%v", members, busy), func(b *testing.B) {
				f := newField(b, members)
				if busy {
					stop := make(chan struct{})
					for i := range 2 {
						done := make(chan struct{})
						defer func() { <-done }()
						go func() {
							defer close(done)
							for {
								select {
								case <-stop:
									return
								case <-time.After(5 * time.Millisecond):
									_, _ = f.others.Put(f.ctx, fmt.Sprintf("/elsewhere/%d", i), "x")
								}
							}
						}()
					}
					defer close(stop)
				}
				for range 20 {
					f.round()
				}
				clear(f.samples)
				for b.Loop() {
					f.round()
				}
				f.report(b)
			})
		}
	}
}

// BenchmarkHeld is the check for every tick.
func BenchmarkHeld(b *testing.B) {
	f := newField(b, 1)
	led, err := f.a.Election("held").Campaign(f.ctx)
	f.must(err)
	b.ReportAllocs()
	for b.Loop() {
		if !led.Held() {
			b.Fatal("lost")
		}
	}
}

// BenchmarkAdmit is the guard in memory, uncontended.
func BenchmarkAdmit(b *testing.B) {
	var f aegis.Fencer
	b.ReportAllocs()
	for b.Loop() {
		if err := f.Admit(451); err != nil {
			b.Fatal(err)
		}
	}
}
