package httpfence

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"aegis/fence"
	"aegis/fence/internal/gate"
)

const (
	// Header carries the term of a request.
	Header = "Aegis-Term"

	// RefusalHeader carries the refusal in a response.
	RefusalHeader = "Aegis-Fenced"

	maxAdvance = 1 << 20 // bytes of one advance's body
)

// Handler admits requests by the term in their header and runs next for those that are admitted, holding the name
// shared until next has returned. The request's context carries the term and ends when a newer one is taken; then
// reads of the request's body fail with the refusal as well. The package's comment lists the answers to requests that
// are not admitted. When next has returned without writing anything after a newer term interrupted it, the answer is
// 409, unknown, and not the 200 that net/http would send.
//
// next should pass errors of guards, and its context's cause, to [Refuse]. Its ResponseWriter is wrapped:
// [http.ResponseController], Flusher, Hijacker and ReaderFrom work as before.
func (g *Guard) Handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		values := r.Header.Values(Header)
		t, err := gate.One("header "+Header, values)
		if len(values) == 0 && g.gate.Reports() && g.gate.Verdict(fmt.Errorf("%w: %w", fence.ErrFenced, err)) == nil {
			next.ServeHTTP(w, r)
			return
		}
		var hold *gate.Hold
		if err == nil {
			hold, err = g.gate.Enter(r.Context(), t, func() string { return describe(r) })
		}
		if err != nil {
			answer(w, explain(err), t)
			return
		}
		defer hold.End()
		resume := g.interrupt(w, r, hold)
		defer resume()
		inner := r.WithContext(hold.Context())
		if hasBody(r) {
			inner.Body = &body{ReadCloser: r.Body, hold: hold}
		}
		out := &writer{ResponseWriter: w}
		next.ServeHTTP(out, inner)
		if fenced := hold.Fenced(); fenced != nil && !out.wrote {
			answer(w, explain(gate.Superseded(fenced)), t)
		}
	})
}

// describe names a request to the operator who reads what blocks an advance.
func describe(r *http.Request) string {
	return fmt.Sprintf("%s %.100q from %s", r.Method, r.URL.Path, r.RemoteAddr)
}

func hasBody(r *http.Request) bool { return r.Body != nil && r.Body != http.NoBody }

// interrupt has the reads and writes of a handler fail when a newer term is taken: a client that was cut off in the
// middle of its request must not keep the name. What the handler still has to say has half of Drain for it.
func (g *Guard) interrupt(w http.ResponseWriter, r *http.Request, hold *gate.Hold) (resume func()) {
	conn := http.NewResponseController(w)
	done := make(chan struct{})
	fenced := false
	stop := context.AfterFunc(hold.Context(), func() {
		defer close(done)
		if hold.Fenced() == nil {
			return // the client is gone
		}
		fenced = true
		if hasBody(r) {
			_ = conn.SetReadDeadline(time.Unix(1, 0))
		}
		_ = conn.SetWriteDeadline(time.Now().Add(g.gate.Drain() / 2))
	})
	return func() {
		if stop() {
			return
		}
		if <-done; fenced {
			_ = conn.SetWriteDeadline(time.Time{}) // the connection may live on; its next read sets a deadline of its own
		}
	}
}

// body tells why reading failed after a takeover.
type body struct {
	io.ReadCloser
	hold *gate.Hold
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && err != io.EOF {
		if fenced := b.hold.Fenced(); fenced != nil {
			err = fmt.Errorf("httpfence: reading the request: %w (%w)", fenced, err)
		}
	}
	return n, err
}

// writer knows whether the handler has begun to answer.
type writer struct {
	http.ResponseWriter
	wrote bool
}

func (w *writer) WriteHeader(code int) {
	w.wrote = w.wrote || code >= 200 || code == http.StatusSwitchingProtocols
	w.ResponseWriter.WriteHeader(code)
}

func (w *writer) Write(p []byte) (int, error) {
	w.wrote = true
	return w.ResponseWriter.Write(p)
}

func (w *writer) ReadFrom(r io.Reader) (int64, error) {
	w.wrote = true
	return io.Copy(w.ResponseWriter, r) // uses the inner ReaderFrom where there is one
}

func (w *writer) FlushError() error {
	w.wrote = true
	return http.NewResponseController(w.ResponseWriter).Flush()
}

func (w *writer) Flush() { _ = w.FlushError() }

func (w *writer) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	w.wrote = true
	return http.NewResponseController(w.ResponseWriter).Hijack()
}

func (w *writer) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// Refuse answers a request whose handler met a refusal, the cause of its ended context or the error of a store's own
// guard, so that the client gets the same error: 412 with both tokens for [fence.ErrFenced],
// [fence.ErrTokenWentBack] and [fence.ErrForeignCluster], 400 for [fence.ErrInvalidToken], 409 for [fence.ErrUnknown].
// For other errors, nil among them, it does nothing and returns false.
func Refuse(w http.ResponseWriter, r *http.Request, err error) bool {
	t, _ := TermFromContext(r.Context())
	if gate.Refusal(err, t) == nil {
		return false
	}
	answer(w, err, t)
	return true
}

// answer sends the error of a request that is not admitted.
func answer(w http.ResponseWriter, err error, t fence.Term) {
	status := http.StatusServiceUnavailable
	var term *gate.TermError
	if refusal := gate.Refusal(err, t); refusal != nil {
		w.Header().Set(RefusalHeader, gate.EncodeFields(refusal))
		switch {
		case errors.Is(err, fence.ErrUnknown):
			status = http.StatusConflict
		case errors.Is(err, fence.ErrInvalidToken):
			status = http.StatusBadRequest
		default:
			status = http.StatusPreconditionFailed
		}
	} else if errors.As(err, &term) {
		status = http.StatusBadRequest
	}
	http.Error(w, err.Error(), status)
}

// AdvanceHandler is the server's side of [Remote]. POST with one term per line, each in the form of the header, at most
// 1 MiB, takes all or none and answers 204:
//
//	curl --data 'election=boss&token=451&node=scene-01' http://localhost:8080/aegis/advance
//
// GET with ?election=… answers the newest token, as token=…&nonce=…&cluster=…; token=0 if there is none. The refusals
// are those of [Guard.Handler]. Who may send requests to it may shut out any leader: protect it as the other handlers
// are protected.
func (g *Guard) AdvanceHandler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.Method {
		case http.MethodGet:
			rec, err := g.Newest(r.Context(), r.URL.Query().Get("election"))
			if err != nil {
				answer(w, err, fence.Term{})
				return
			}
			fmt.Fprintln(w, gate.EncodeRecord(rec))
		case http.MethodPost:
			terms, err := gate.DecodeTerms(http.MaxBytesReader(w, r.Body, maxAdvance))
			if err == nil {
				err = g.Advance(r.Context(), terms...)
			}
			if err != nil {
				t := fence.Term{}
				if len(terms) > 0 {
					t = terms[len(terms)-1]
				}
				answer(w, explain(err), t)
				return
			}
			w.WriteHeader(http.StatusNoContent)
		default:
			w.Header().Set("Allow", "GET, POST")
			http.Error(w, "httpfence: POST terms to advance, GET ?election=… for the newest", http.StatusMethodNotAllowed)
		}
	})
}

// explain puts the package's name before errors that do not bear one; fence's own say all by themselves.
func explain(err error) error {
	var fenced *fence.FencedError
	var back *fence.TokenWentBackError
	var foreign *fence.ForeignClusterError
	if err == nil || errors.As(err, &fenced) || errors.As(err, &back) || errors.As(err, &foreign) {
		return err
	}
	return fmt.Errorf("httpfence: %w", err)
}
