package httpfence_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"aegis/fence"
	"aegis/fence/httpfence"
)

func TestLostReplyIsUnknown(t *testing.T) {
	g := newGuard(t, httpfence.Config{})
	advance(t, g, boss(7))
	server, client := serve(t, g.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		panic(http.ErrAbortHandler) // cuts the connection
	})), plain)
	_, _, err := post(t, client, server.URL, boss(7), nil)
	if !errors.Is(err, fence.ErrUnknown) {
		t.Errorf("got %v", err)
	}
	server.Close()
	_, _, err = post(t, client, server.URL, boss(7), nil)
	if err == nil || errors.Is(err, fence.ErrUnknown) {
		t.Errorf("nothing was sent, but: %v", err)
	}
	advance(t, g, boss(8)) // the panic has let the name go
}

// net/http sends requests again by itself when a connection turns out to be dead, and follows redirects.
func TestRetriesAndRedirectsCarryOneHeader(t *testing.T) {
	g := newGuard(t, httpfence.Config{})
	advance(t, g, boss(7))
	var seen []string
	mux := http.NewServeMux()
	mux.HandleFunc("/moved", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/", http.StatusTemporaryRedirect) })
	mux.Handle("/", g.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		seen = append(seen, string(b))
		w.WriteHeader(http.StatusOK)
	})))
	server, client := serve(t, mux, plain)
	send := func(path string) {
		t.Helper()
		req, err := httpfence.NewRequest(bounded(t), boss(7), "POST", server.URL+path, bytes.NewReader([]byte("body")))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Idempotency-Key", "1") // allows net/http to send again
		if _, err := ask(client, req); err != nil {
			t.Error(err)
		}
	}
	send("/")
	server.CloseClientConnections()
	send("/")
	if _, body, err := post(t, client, server.URL+"/moved", boss(7), bytes.NewReader([]byte("body"))); err != nil {
		t.Error(body, err)
	}
	send("/moved")
	if strings.Join(seen, " ") != "body body body body" {
		t.Errorf("seen: %q", seen)
	}
}

func TestTransportLeavesTheRequestAlone(t *testing.T) {
	g := newGuard(t, httpfence.Config{})
	advance(t, g, boss(7))
	server, client := serve(t, g.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(200) })), plain)
	req, _ := http.NewRequestWithContext(httpfence.WithTerm(bounded(t), boss(7)), "POST", server.URL, nil)
	if _, err := ask(client, req); err != nil || len(req.Header) != 0 {
		t.Errorf("%v, header %v", err, req.Header)
	}
	req, _ = http.NewRequestWithContext(httpfence.WithTerm(bounded(t), fence.Term{Election: "boss"}), "POST", server.URL, nil)
	if _, err := ask(client, req); !errors.Is(err, fence.ErrInvalidToken) {
		t.Errorf("got %v", err)
	}
}

func TestRemoteAdvances(t *testing.T) {
	g := newGuard(t, httpfence.Config{})
	mux := http.NewServeMux()
	mux.Handle("/aegis/advance", g.AdvanceHandler())
	mux.HandleFunc("/moved", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/page", http.StatusFound) })
	mux.HandleFunc("/page", func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "<html>sign in") })
	server, client := serve(t, mux, plain)
	remote := httpfence.NewRemote(server.URL+"/aegis/advance", client)

	advance(t, remote, boss(7), fence.Term{Election: "guild", Token: 5})
	for name, want := range map[string]fence.Record{boss(7).Election: {Token: 7, Nonce: 77, Cluster: 1}, "guild": {Token: 5}, "none": {}} {
		if got, err := remote.Newest(bounded(t), name); err != nil || got != want {
			t.Errorf("%s: got %v, %v", name, got, err)
		}
	}
	for _, elsewhere := range []string{"/moved", "/page", "/missing"} {
		if err := httpfence.NewRemote(server.URL+elsewhere, client).Advance(bounded(t), boss(8)); err == nil && elsewhere != "/aegis/advance" {
			t.Errorf("%s was taken for an AdvanceHandler", elsewhere)
		} else if err != nil && !strings.Contains(err.Error(), "is it an AdvanceHandler") {
			t.Error(err)
		}
	}
	if _, err := httpfence.NewRemote(server.URL+"/page", client).Newest(bounded(t), "boss"); err == nil {
		t.Error("a page was taken for a record")
	}
	resp, err := http.Post(server.URL+"/aegis/advance", "", strings.NewReader("election=boss&token=8\nelection=boss&token=x"))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusBadRequest {
		t.Error(resp.Status)
	}
	resp, err = http.Post(server.URL+"/aegis/advance", "", strings.NewReader(strings.Repeat("election=boss&token=8\n", 100_000)))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusBadRequest {
		t.Error(resp.Status)
	}
	if rec, err := g.Newest(bounded(t), "boss"); err != nil || rec.Token != 0 {
		t.Errorf("a part of a wrong body was taken: %v, %v", rec, err)
	}
	server.Close()
	if err := remote.Advance(bounded(t), boss(8)); err == nil || errors.Is(err, fence.ErrFenced) {
		t.Errorf("got %v", err)
	}
	http.DefaultClient.CloseIdleConnections()
}
