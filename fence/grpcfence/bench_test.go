package grpcfence_test

import (
	"context"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"aegis/fence/grpcfence"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// BenchmarkGuardedOverPlain compares calls, and messages of one stream, through the interceptors with the same without
// them, to a handler that does next to nothing: the worst case. Machines drift, so the two ways take turns in short rounds,
// and what counts is the median over the rounds of plain time / guarded time, 1 being as fast, with its quartiles.
func BenchmarkGuardedOverPlain(b *testing.B) {
	for kind, send := range map[string]func(b *testing.B, conn *grpc.ClientConn, n int){
		"Calls": func(b *testing.B, conn *grpc.ClientConn, n int) {
			for range n {
				if err := viaCall(grpcfence.WithTerm(context.Background(), boss(7)), conn, message); err != nil {
					b.Error(err)
					return
				}
			}
		},
		"Messages": func(b *testing.B, conn *grpc.ClientConn, n int) {
			stream, err := openFeed(grpcfence.WithTerm(context.Background(), boss(7)), conn)
			for range n {
				if err == nil {
					err = tell(stream, message)
				}
			}
			if err == nil {
				err = end(stream)
			}
			if err != nil {
				b.Error(err)
			}
		},
	} {
		for clients, label := range map[int]string{1: "1conn", 16: "16conns"} {
			b.Run(kind+"/"+label, func(b *testing.B) { guardedOverPlain(b, send, clients) })
		}
	}
}

func guardedOverPlain(b *testing.B, send func(b *testing.B, conn *grpc.ClientConn, n int), clients int) {
	s := newKV(b, grpcfence.Config{})
	advance(b, s.guard, boss(7))
	guarded, bare := make([]*grpc.ClientConn, clients), make([]*grpc.ClientConn, clients)
	addr := s.servePlain(b)
	for i := range clients {
		guarded[i] = s.dial(b)
		conn, err := grpc.NewClient("dns:///"+addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { conn.Close() })
		bare[i] = conn
	}
	round := func(conns []*grpc.ClientConn) time.Duration {
		const messages = 320
		start := time.Now()
		var wg sync.WaitGroup
		for _, conn := range conns {
			wg.Go(func() { send(b, conn, messages/clients) })
		}
		wg.Wait()
		return time.Since(start)
	}
	round(bare) // warm
	round(guarded)
	var ratios []float64
	for b.Loop() {
		var plain, fenced time.Duration
		if len(ratios)%2 == 0 {
			plain, fenced = round(bare), round(guarded)
		} else {
			fenced, plain = round(guarded), round(bare)
		}
		ratios = append(ratios, float64(plain)/float64(fenced))
	}
	slices.Sort(ratios)
	at := func(q float64) float64 { return ratios[int(q*float64(len(ratios)-1))] }
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(at(.25), "q1")
	b.ReportMetric(at(.5), "guarded/plain")
	b.ReportMetric(at(.75), "q3")
}

// servePlain serves the same handlers without a guard.
func (s *kv) servePlain(b *testing.B) (addr string) {
	server := grpc.NewServer(grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		return handler(ctx, req) // the test's service wants one
	}))
	server.RegisterService(s.desc(), s)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	go server.Serve(l)
	b.Cleanup(server.Stop)
	return l.Addr().String()
}
