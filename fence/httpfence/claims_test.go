package httpfence_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"aegis/fence"
	"aegis/fence/httpfence"
)

func boss(token fence.Token) fence.Term {
	return fence.Term{Election: "boss/北境", Node: "scene-01", Token: token, Nonce: uint64(token) * 11, Cluster: 1}
}

func bounded(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func newGuard(t testing.TB, cfg httpfence.Config) *httpfence.Guard {
	t.Helper()
	g, err := httpfence.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func advance(t testing.TB, g fence.Guard, terms ...fence.Term) {
	t.Helper()
	if err := g.Advance(bounded(t), terms...); err != nil {
		t.Fatal(err)
	}
}

// post sends a request under a term and returns the status and the body of the answer.
func post(t testing.TB, client *http.Client, url string, term fence.Term, body io.Reader) (int, string, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(httpfence.WithTerm(bounded(t), term), "POST", url, body)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

func refused(t testing.TB, err error, token, newest fence.Token) {
	t.Helper()
	var fenced *fence.FencedError
	if !errors.As(err, &fenced) || fenced.Token != token || fenced.Newest != newest {
		t.Fatalf("got %v, want token %d refused by %d", err, token, newest)
	}
}

func wait(t testing.TB, what string, done <-chan struct{}) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Fatal("waited in vain for ", what)
	}
}

// overBoth runs a claim over HTTP/1.1 and HTTP/2.
func overBoth(t *testing.T, claim func(t *testing.T, k kind)) {
	t.Run("HTTP1", func(t *testing.T) { claim(t, plain) })
	t.Run("HTTP2", func(t *testing.T) { claim(t, http2) })
}

func TestTakeoverEndsRunningHandlers(t *testing.T) {
	overBoth(t, func(t *testing.T, k kind) {
		g := newGuard(t, httpfence.Config{})
		advance(t, g, boss(7))
		started := make(chan struct{})
		var left atomic.Bool
		server, client := serve(t, g.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			close(started)
			<-r.Context().Done()
			left.Store(true)
			httpfence.Refuse(w, r, context.Cause(r.Context()))
		})), k)
		answered := make(chan struct{})
		go func() {
			defer close(answered)
			_, _, err := post(t, client, server.URL, boss(7), nil)
			refused(t, err, 7, 8)
		}()
		wait(t, "the handler", started)
		advance(t, g, boss(8))
		if !left.Load() {
			t.Error("Advance returned before the handler had")
		}
		wait(t, "the answer", answered)
	})
}

// The stale leader's process is stopped in the middle of sending: the server waits for bytes that do not come.
func TestClientThatFallsSilentKeepsNobodyWaiting(t *testing.T) {
	overBoth(t, func(t *testing.T, k kind) {
		g := newGuard(t, httpfence.Config{Drain: 10 * time.Second})
		advance(t, g, boss(7))
		started, read := make(chan struct{}), make(chan error, 1)
		server, client := serve(t, g.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			close(started)
			_, err := io.Copy(io.Discard, r.Body)
			read <- err
			httpfence.Refuse(w, r, err)
		})), k)
		silent, w := io.Pipe()
		answered := make(chan struct{})
		go func() {
			defer close(answered)
			_, _, err := post(t, client, server.URL, boss(7), silent)
			if !errors.Is(err, fence.ErrFenced) && !errors.Is(err, fence.ErrUnknown) {
				t.Errorf("got %v", err)
			}
		}()
		if _, err := w.Write(make([]byte, 64<<10)); err != nil { // half of it, and no more to come
			t.Fatal(err)
		}
		wait(t, "the handler", started)
		start := time.Now()
		advance(t, g, boss(8))
		if took := time.Since(start); took > 4*time.Second {
			t.Errorf("Advance took %v", took)
		}
		refused(t, <-read, 7, 8)
		w.Close()
		wait(t, "the answer", answered)
		advance(t, g, boss(9))
	})
}

// The stale leader does not read its answer: the server waits for room in the connection.
func TestClientThatReadsNothingKeepsNobodyWaiting(t *testing.T) {
	g := newGuard(t, httpfence.Config{Drain: 2 * time.Second})
	advance(t, g, boss(7))
	started, ended := make(chan struct{}), make(chan struct{})
	server, _ := serve(t, g.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer close(ended)
		close(started)
		for {
			if _, err := w.Write(make([]byte, 1<<20)); err != nil {
				return
			}
		}
	})), plain)
	conn, err := net.Dial("tcp", server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: a\r\nAegis-Term: election=boss%%2F%%E5%%8C%%97%%E5%%A2%%83&token=7\r\n\r\n")
	wait(t, "the handler", started)
	advance(t, g, boss(8))
	wait(t, "the handler's end", ended)
}

func TestHandlerThatIgnoresItsContextIsNamed(t *testing.T) {
	g := newGuard(t, httpfence.Config{Drain: 100 * time.Millisecond})
	advance(t, g, boss(7))
	started, let := make(chan struct{}), make(chan struct{})
	mux := http.NewServeMux()
	mux.Handle("/aegis/advance", g.AdvanceHandler())
	mux.Handle("/slow", g.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		close(started)
		<-let
		w.WriteHeader(http.StatusOK)
	})))
	mux.Handle("/", g.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})))
	server, client := serve(t, mux, plain)
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		if status, _, err := post(t, client, server.URL+"/slow", boss(7), nil); err != nil || status != 200 {
			t.Errorf("the handler did its work before anybody of 8 could begin: got %d, %v", status, err)
		}
	}()
	wait(t, "the handler", started)
	remote := httpfence.NewRemote(server.URL+"/aegis/advance", client)
	err := remote.Advance(bounded(t), boss(8))
	if err == nil || errors.Is(err, fence.ErrFenced) {
		t.Fatalf("got %v", err)
	}
	for _, want := range []string{"503", `POST "/slow" from 127.0.0.1:`, "token 7, node scene-01", "token 8 is taken"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not contain %q", err, want)
		}
	}
	if status, body, err := post(t, client, server.URL, boss(8), nil); err != nil || status != 503 || !strings.Contains(body, `POST "/slow"`) {
		t.Errorf("a handler of 8 beside one of 7: %d %s %v", status, body, err)
	}
	_, _, err = post(t, client, server.URL, boss(7), nil)
	refused(t, err, 7, 8)
	close(let)
	wait(t, "the answer", answered)
	if err := remote.Advance(bounded(t), boss(8)); err != nil {
		t.Error(err)
	}
	if status, _, err := post(t, client, server.URL, boss(8), nil); err != nil || status != 200 {
		t.Errorf("got %d, %v", status, err)
	}
}

// A handler that gives up in silence would be answered with 200 by net/http: a leader would believe that it was done.
func TestInterruptedHandlerThatSaysNothingIsUnknown(t *testing.T) {
	overBoth(t, func(t *testing.T, k kind) {
		g := newGuard(t, httpfence.Config{})
		advance(t, g, boss(7))
		started := make(chan struct{})
		server, client := serve(t, g.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			close(started)
			<-r.Context().Done()
		})), k)
		answered := make(chan struct{})
		go func() {
			defer close(answered)
			_, _, err := post(t, client, server.URL, boss(7), nil)
			if !errors.Is(err, fence.ErrUnknown) || errors.Is(err, fence.ErrFenced) {
				t.Errorf("got %v", err)
			}
		}()
		wait(t, "the handler", started)
		advance(t, g, boss(8))
		wait(t, "the answer", answered)
	})
}

func TestMissingDoubledAndMalformedHeadersAreExplained(t *testing.T) {
	g := newGuard(t, httpfence.Config{Known: func(name string) bool { return name == "boss" }})
	ran := false
	server, client := serve(t, g.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { ran = true })), plain)
	for name, c := range map[string]struct {
		headers []string
		want    string
	}{
		"Missing":        {nil, "header Aegis-Term is missing"},
		"Doubled":        {[]string{"election=boss&token=7", "election=boss&token=8"}, "2 values of header Aegis-Term"},
		"JoinedByAProxy": {[]string{"election=boss&token=7, election=boss&token=8"}, "several terms"},
		"Malformed":      {[]string{"7"}, "election is 0 bytes long"},
		"TooLong":        {[]string{"election=boss&token=7&node=" + strings.Repeat("x", 2048)}, "at most 2048"},
		"InvalidToken":   {[]string{"election=boss&token=0"}, "0 is outside 1 … 9007199254740991"},
		"NotOurElection": {[]string{"election=guild&token=7"}, `no election "guild"`},
	} {
		t.Run(name, func(t *testing.T) {
			req, _ := http.NewRequestWithContext(bounded(t), "POST", server.URL, nil)
			req.Header[httpfence.Header] = c.headers
			resp, err := client.Transport.(*httpfence.Transport).Base.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			b, _ := io.ReadAll(resp.Body)
			if resp.StatusCode != http.StatusBadRequest || !strings.Contains(string(b), c.want) || ran {
				t.Errorf("got %s, %s, ran: %v", resp.Status, b, ran)
			}
		})
	}
}

func TestRefusalsKeepTheirKind(t *testing.T) {
	for _, want := range []error{
		&fence.FencedError{Name: "boss", Token: 7, Newest: 8},
		&fence.TokenWentBackError{Name: "boss", Token: 7, Newest: 7},
		&fence.ForeignClusterError{Name: "boss", Cluster: 1 << 63, Known: 5},
	} {
		g := newGuard(t, httpfence.Config{})
		advance(t, g, boss(7))
		server, client := serve(t, g.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if !httpfence.Refuse(w, r, fmt.Errorf("the store: %w", want)) || httpfence.Refuse(w, r, errors.New("disk full")) || httpfence.Refuse(w, r, nil) {
				t.Error("Refuse must answer refusals and nothing else")
			}
		})), plain)
		_, _, err := post(t, client, server.URL, boss(7), nil)
		var refusal *url.Error
		if !errors.As(err, &refusal) || refusal.Err.Error() != want.Error() {
			t.Errorf("%v became %v", want, err)
		}
	}
}

func TestHandlerHasTheTermForItsOwnStore(t *testing.T) {
	g := newGuard(t, httpfence.Config{})
	advance(t, g, boss(7))
	server, client := serve(t, g.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		term, ok := httpfence.TermFromContext(r.Context())
		_ = json.NewEncoder(w).Encode(struct {
			Term fence.Term
			OK   bool
		}{term, ok})
	})), plain)
	var got struct {
		Term fence.Term
		OK   bool
	}
	_, body, err := post(t, client, server.URL, boss(7), nil)
	if err := errors.Join(err, json.Unmarshal([]byte(body), &got)); err != nil || !got.OK || got.Term != boss(7) {
		t.Errorf("got %s, %v", body, err)
	}
}

func TestHandlersOfOneTermRunSideBySide(t *testing.T) {
	overBoth(t, func(t *testing.T, k kind) {
		const n = 16
		g := newGuard(t, httpfence.Config{})
		advance(t, g, boss(7))
		var inside atomic.Int32
		all := make(chan struct{})
		server, client := serve(t, g.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if inside.Add(1) == n {
				close(all)
			}
			<-all
			w.WriteHeader(http.StatusOK)
		})), k)
		errs := make(chan error, n)
		for range n {
			go func() {
				_, _, err := post(t, client, server.URL, boss(7), nil)
				errs <- err
			}()
		}
		for range n {
			if err := <-errs; err != nil {
				t.Error(err)
			}
		}
	})
}

func TestReportLetsAllIn(t *testing.T) {
	report := &fence.Report{}
	g := newGuard(t, httpfence.Config{Report: report})
	advance(t, g, boss(8))
	server, client := serve(t, g.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(200) })), plain)
	if status, body, err := post(t, client, server.URL, boss(7), nil); err != nil || status != 200 {
		t.Errorf("stale: %d %s %v", status, body, err)
	}
	req, _ := http.NewRequestWithContext(bounded(t), "POST", server.URL, nil)
	if _, err := ask(client, req); err != nil {
		t.Errorf("without a term: %v", err)
	}
	req.Header.Set(httpfence.Header, "election=boss&token=0")
	if _, err := ask(client, req); !errors.Is(err, fence.ErrInvalidToken) {
		t.Errorf("invalid: %v", err)
	}
	if report.Count() != 2 {
		t.Errorf("%d counted", report.Count())
	}
}

func TestDoIsAHandlerWithoutARequest(t *testing.T) {
	g := newGuard(t, httpfence.Config{})
	refused(t, g.Do(bounded(t), boss(7), func(context.Context) error { t.Error("ran"); return nil }), 7, 0)
	advance(t, g, boss(7))
	own := errors.New("own")
	err := g.Do(bounded(t), boss(7), func(ctx context.Context) error {
		done := make(chan error, 1)
		go func() { done <- g.Advance(bounded(t), boss(8)) }()
		<-ctx.Done()
		refused(t, context.Cause(ctx), 7, 8)
		select {
		case err := <-done:
			t.Error("Advance returned before fn: ", err)
		default:
		}
		t.Cleanup(func() {
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
		return own
	})
	if err != own {
		t.Errorf("got %v", err)
	}
}

func TestResponseWriterKeepsItsAbilities(t *testing.T) {
	g := newGuard(t, httpfence.Config{})
	advance(t, g, boss(7))
	mux := http.NewServeMux()
	mux.Handle("/flush", g.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.(http.Flusher).Flush()
		if _, err := w.(io.ReaderFrom).ReadFrom(strings.NewReader("copied")); err != nil {
			t.Error(err)
		}
		if err := http.NewResponseController(w).SetWriteDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Error(err)
		}
	})))
	mux.Handle("/hijack", g.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn, _, err := w.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		fmt.Fprint(conn, "HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nhijacked")
	})))
	server, client := serve(t, mux, plain)
	for path, want := range map[string]string{"/flush": "copied", "/hijack": "hijacked"} {
		if _, body, err := post(t, client, server.URL+path, boss(7), nil); err != nil || body != want {
			t.Errorf("%s: %q, %v", path, body, err)
		}
	}
}

// A connection whose request met a takeover serves others afterwards.
func TestConnectionSurvivesATakeover(t *testing.T) {
	overBoth(t, func(t *testing.T, k kind) {
		g := newGuard(t, httpfence.Config{Drain: 200 * time.Millisecond})
		advance(t, g, boss(1))
		server, client := serve(t, g.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			term, _ := httpfence.TermFromContext(r.Context())
			go g.Advance(context.WithoutCancel(r.Context()), fence.Term{Election: term.Election, Token: term.Token + 1})
			<-r.Context().Done()
			httpfence.Refuse(w, r, context.Cause(r.Context()))
		})), k)
		for token := fence.Token(1); token < 4; token++ {
			_, _, err := post(t, client, server.URL, fence.Term{Election: boss(1).Election, Token: token}, strings.NewReader("body"))
			refused(t, err, token, token+1)
			<-time.After(150 * time.Millisecond) // is the experiment: a deadline left behind would be over by now
		}
	})
}

func TestLinksNothingButTheStandardLibrary(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", "aegis/fence/httpfence").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	want := "aegis/fence aegis/fence/internal/gate aegis/fence/httpfence"
	if got := strings.Join(strings.Fields(string(out)), " "); got != want {
		t.Errorf("links %s, want %s", got, want)
	}
}

var _ httpfence.Durable = (*httpfence.Remote)(nil)
