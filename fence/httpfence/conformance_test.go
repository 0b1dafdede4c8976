package httpfence_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	"aegis/fence"
	"aegis/fence/fencetest"
	"aegis/fence/httpfence"
	"aegis/fence/sqlitefence"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestConformance(t *testing.T) {
	fencetest.Test(t, func(t *testing.T) fencetest.Subject { return newKV(t, httpfence.Config{}, plain).subject(t) })
}

func TestConformanceOverHTTP2(t *testing.T) {
	fencetest.Test(t, func(t *testing.T) fencetest.Subject { return newKV(t, httpfence.Config{}, http2).subject(t) })
}

// The service dies with its memory and comes back; the fence lies in a file.
func TestConformanceWithADurableGuardBehind(t *testing.T) {
	fencetest.Test(t, func(t *testing.T) fencetest.Subject {
		durable, err := sqlitefence.Open(filepath.Join(t.TempDir(), "fence.db"), sqlitefence.Config{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { durable.Close() })
		return newKV(t, httpfence.Config{Durable: durable}, plain).subject(t)
	})
}

// kv is a service under test: strings at keys, in memory, behind a guard, on a real server of the loopback.
type kv struct {
	cfg    httpfence.Config
	kind   kind
	guard  *httpfence.Guard
	server *httptest.Server
	client *http.Client

	mu      sync.Mutex
	values  map[string]string
	between map[string]func() // by number of the write, which travels in its header
	n       int
}

type kind int

const (
	plain kind = iota
	http2
)

func newKV(t *testing.T, cfg httpfence.Config, k kind) *kv {
	t.Helper()
	s := &kv{cfg: cfg, kind: k, values: map[string]string{}, between: map[string]func(){}}
	s.start(t)
	return s
}

// start serves what s holds with a new guard, as a new process would.
func (s *kv) start(t *testing.T) {
	t.Helper()
	guard, err := httpfence.New(s.cfg)
	if err != nil {
		t.Fatal(err)
	}
	s.guard = guard
	mux := http.NewServeMux()
	mux.Handle("/aegis/advance", guard.AdvanceHandler())
	mux.Handle("POST /kv", guard.Handler(http.HandlerFunc(s.put)))
	mux.HandleFunc("GET /kv", func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		defer s.mu.Unlock()
		fmt.Fprint(w, s.values[r.FormValue("key")])
	})
	s.server, s.client = serve(t, mux, s.kind)
}

func serve(t testing.TB, h http.Handler, k kind) (*httptest.Server, *http.Client) {
	t.Helper()
	server := httptest.NewUnstartedServer(h)
	if k == http2 {
		server.EnableHTTP2 = true
		server.StartTLS()
	} else {
		server.Start()
	}
	return server, clientOf(t, server)
}

// clientOf returns a client with connections of its own.
func clientOf(t testing.TB, server *httptest.Server) *http.Client {
	base := server.Client().Transport.(*http.Transport).Clone()
	t.Cleanup(func() { base.CloseIdleConnections(); server.Close() })
	return &http.Client{Transport: &httpfence.Transport{Base: base}}
}

func (s *kv) put(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	between := s.between[r.Header.Get("Write")]
	s.mu.Unlock()
	if between != nil {
		between()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.values[r.FormValue("key")] = r.FormValue("value")
	w.WriteHeader(http.StatusOK) // done, whatever happened meanwhile: otherwise a takeover makes it 409, unknown
}

func (s *kv) subject(t *testing.T) fencetest.Subject { return s.subjectWith(t, s.server.URL, s.client) }

func (s *kv) subjectWith(t *testing.T, base string, client *http.Client) fencetest.Subject {
	return fencetest.Subject{
		Guard: httpfence.NewRemote(base+"/aegis/advance", client),
		Write: func(ctx context.Context, term fence.Term, key, value string, between func()) error {
			s.mu.Lock()
			s.n++
			n := strconv.Itoa(s.n)
			s.between[n] = between
			s.mu.Unlock()
			form := url.Values{"key": {key}, "value": {value}}
			req, err := http.NewRequestWithContext(ctx, "POST", base+"/kv?"+form.Encode(), nil)
			if err != nil {
				return err
			}
			req.Header.Set("Write", n)
			if httpfence.SetHeader(req.Header, term) != nil { // have the server say so
				req.Header.Set(httpfence.Header, fmt.Sprintf("election=%s&token=%d", url.QueryEscape(term.Election), term.Token))
			}
			_, err = ask(client, req)
			return err
		},
		Read: func(ctx context.Context, key string) (string, error) {
			req, err := http.NewRequestWithContext(ctx, "GET", base+"/kv?"+url.Values{"key": {key}}.Encode(), nil)
			if err != nil {
				return "", err
			}
			return ask(client, req)
		},
		Reopen: s.reopen(t),
		Peer:   func() (fencetest.Subject, error) { return s.subjectWith(t, base, clientOf(t, s.server)), nil },
	}
}

// reopen ends the service and starts it anew, where its guard is a durable one.
func (s *kv) reopen(t *testing.T) func() (fencetest.Subject, error) {
	if s.cfg.Durable == nil {
		return nil
	}
	return func() (fencetest.Subject, error) {
		s.server.Close()
		s.start(t)
		return s.subject(t), nil
	}
}

// ask sends a request and returns the body of a 200.
func ask(client *http.Client, req *http.Request) (string, error) {
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	var body [1 << 16]byte
	n := 0
	for n < len(body) && err == nil {
		var m int
		m, err = resp.Body.Read(body[n:])
		n += m
	}
	if resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("%s: %s", resp.Status, body[:n])
	}
	return string(body[:n]), nil
}
