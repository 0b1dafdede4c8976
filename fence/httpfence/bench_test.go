package httpfence_test

import (
	"context"
	"io"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"aegis/fence/httpfence"
)

// BenchmarkGuardedOverPlain compares requests through Transport and Handler with the same requests without them, to a
// handler that does nothing: the worst case. Machines drift, so the two ways take turns in short rounds, and what
// counts is the median over the rounds of plain time / guarded time, 1 being as fast, with its quartiles.
func BenchmarkGuardedOverPlain(b *testing.B) {
	for name, k := range map[string]kind{"HTTP1": plain, "HTTP2": http2} {
		for clients, label := range map[int]string{1: "1conn", 16: "16conns"} {
			b.Run(name+"/"+label, func(b *testing.B) { guardedOverPlain(b, k, clients) })
		}
	}
}

func guardedOverPlain(b *testing.B, k kind, clients int) {
	g := newGuard(b, httpfence.Config{})
	advance(b, g, boss(7))
	work := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, "done")
	})
	mux := http.NewServeMux()
	mux.Handle("/guarded", g.Handler(work))
	mux.Handle("/plain", work)
	server, guarded := serve(b, mux, k)
	base := guarded.Transport.(*httpfence.Transport).Base.(*http.Transport)
	base.MaxIdleConnsPerHost = clients
	bare := &http.Client{Transport: base}
	ctx := httpfence.WithTerm(context.Background(), boss(7))
	round := func(client *http.Client, path string) time.Duration {
		const requests = 320
		start := time.Now()
		var wg sync.WaitGroup
		for range clients {
			wg.Go(func() {
				for range requests / clients {
					req, err := http.NewRequestWithContext(ctx, "POST", server.URL+path, http.NoBody)
					if err == nil {
						_, err = ask(client, req)
					}
					if err != nil {
						b.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
		return time.Since(start)
	}
	round(guarded, "/guarded") // warm
	var ratios []float64
	for b.Loop() {
		var plain, fenced time.Duration
		if len(ratios)%2 == 0 {
			plain, fenced = round(bare, "/plain"), round(guarded, "/guarded")
		} else {
			fenced, plain = round(guarded, "/guarded"), round(bare, "/plain")
		}
		ratios = append(ratios, float64(plain)/float64(fenced))
	}
	reportRatios(b, ratios)
}

func reportRatios(b *testing.B, ratios []float64) {
	slices.Sort(ratios)
	at := func(q float64) float64 { return ratios[int(q*float64(len(ratios)-1))] }
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(at(.25), "q1")
	b.ReportMetric(at(.5), "guarded/plain")
	b.ReportMetric(at(.75), "q3")
}
