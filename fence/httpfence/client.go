package httpfence

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strings"
	"sync/atomic"

	"aegis/fence"
	"aegis/fence/internal/gate"
)

// SetHeader puts the term into a request's header, in place of one that is there. Errors: a token or a name that is
// not valid; [fence.ErrInvalidToken] for the token.
func SetHeader(h http.Header, t fence.Term) error {
	s, err := gate.Encode(t)
	if err != nil {
		return fmt.Errorf("httpfence: %w", err)
	}
	h.Set(Header, s)
	return nil
}

// NewRequest is [http.NewRequestWithContext] for a request under a term. Errors: those of SetHeader, too.
func NewRequest(ctx context.Context, t fence.Term, method, url string, body io.Reader) (*http.Request, error) {
	req, err := http.NewRequestWithContext(WithTerm(ctx, t), method, url, body)
	if err != nil {
		return nil, err
	}
	return req, SetHeader(req.Header, t)
}

// CheckResponse returns the refusal that a response carries, nil if it carries none: [*fence.FencedError] with both
// tokens, [*fence.TokenWentBackError], [*fence.ForeignClusterError], [fence.ErrInvalidToken], or [fence.ErrUnknown]. It
// is for clients without a [Transport]; it reads the body of a refusal and leaves other bodies alone.
func CheckResponse(resp *http.Response) error {
	s := resp.Header.Get(RefusalHeader)
	if s == "" {
		return nil
	}
	return gate.Restore(gate.DecodeFields(s), text(resp))
}

func text(resp *http.Response) string {
	b, _ := io.ReadAll(io.LimitReader(resp.Body, 4<<10))
	return strings.TrimSpace(string(b))
}

// Transport is the client's side: an [http.RoundTripper] that puts the term of the request's context ([WithTerm])
// into the header and makes refusals errors, which [http.Client] wraps in a [*url.Error]: use [errors.As] and
// [errors.Is]. Requests without a term are sent as they are, and those whose header was set by hand, too.
//
// An error after the request went out may have come after the work was done: it is [fence.ErrUnknown], too, unless
// the method is GET, HEAD or OPTIONS. Bound requests by their context: [http.Client].Timeout hides what kind of error
// it was. The zero value is ready; it is safe for concurrent use.
type Transport struct {
	Base http.RoundTripper // defaults to http.DefaultTransport
}

// RoundTrip sends a request.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	base := t.Base
	if base == nil {
		base = http.DefaultTransport
	}
	if len(req.Header.Values(Header)) == 0 {
		term, ok := TermFromContext(req.Context())
		if !ok {
			return base.RoundTrip(req)
		}
		req = req.Clone(req.Context())
		if err := SetHeader(req.Header, term); err != nil {
			if req.Body != nil {
				req.Body.Close()
			}
			return nil, err
		}
	}
	var sent atomic.Bool
	switch req.Method {
	case "", http.MethodGet, http.MethodHead, http.MethodOptions:
	default:
		req = req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{WroteHeaders: func() { sent.Store(true) }}))
	}
	resp, err := base.RoundTrip(req)
	if err != nil {
		if sent.Load() {
			err = &lostError{err}
		}
		return nil, err
	}
	if err := CheckResponse(resp); err != nil {
		resp.Body.Close()
		return nil, err
	}
	return resp, nil
}

// lostError is the loss of a reply. It is ErrUnknown, and a timeout if err is.
type lostError struct{ err error }

func (e *lostError) Error() string   { return fence.ErrUnknown.Error() + ": " + e.err.Error() }
func (e *lostError) Unwrap() []error { return []error{fence.ErrUnknown, e.err} }
func (e *lostError) Timeout() bool {
	var t interface{ Timeout() bool }
	return errors.As(e.err, &t) && t.Timeout()
}

// Remote is a [fence.Guard] on a service elsewhere, for WithGuards. It is safe for concurrent use.
type Remote struct {
	url    string
	client *http.Client
}

var _ fence.Guard = (*Remote)(nil)

// NewRemote returns the guard of the service whose [Guard.AdvanceHandler] is at url. client defaults to
// [http.DefaultClient] and authenticates as the service demands.
func NewRemote(url string, client *http.Client) *Remote {
	if client == nil {
		client = http.DefaultClient
	}
	return &Remote{url: url, client: client}
}

// Advance has the service take the terms' tokens: see [fence.Guard] and [Guard.Advance], whose errors it returns, and
// whose waiting for older handlers it shares. All terms are taken or none, unless the reply is lost; advancing again
// is harmless. It blocks until ctx ends at the latest.
func (r *Remote) Advance(ctx context.Context, terms ...fence.Term) error {
	lines, err := gate.EncodeTerms(terms)
	if err != nil {
		return fmt.Errorf("httpfence: advance: %w", err)
	}
	_, err = r.call(ctx, http.MethodPost, r.url, lines, http.StatusNoContent)
	return err
}

// Newest returns what the service has taken for the name; the zero Record if nothing.
func (r *Remote) Newest(ctx context.Context, name string) (fence.Record, error) {
	u, err := url.Parse(r.url)
	if err != nil {
		return fence.Record{}, fmt.Errorf("httpfence: %w", err)
	}
	q := u.Query()
	q.Set("election", name)
	u.RawQuery = q.Encode()
	s, err := r.call(ctx, http.MethodGet, u.String(), "", http.StatusOK)
	if err != nil {
		return fence.Record{}, err
	}
	rec, err := gate.DecodeRecord(s)
	if err != nil {
		return fence.Record{}, fmt.Errorf("httpfence: %s answers %.80q, is it an AdvanceHandler? %w", r.url, s, err)
	}
	return rec, nil
}

func (r *Remote) call(ctx context.Context, method, url, body string, want int) (string, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return "", fmt.Errorf("httpfence: %w", err)
	}
	resp, err := r.client.Do(req)
	if err != nil {
		return "", fmt.Errorf("httpfence: advance: %w", err)
	}
	defer resp.Body.Close()
	if err := CheckResponse(resp); err != nil {
		return "", err
	}
	s := text(resp)
	switch {
	case resp.StatusCode == want:
		return s, nil
	case strings.HasPrefix(s, "httpfence: "):
		return "", fmt.Errorf("httpfence: %s answers %s: %s", r.url, resp.Status, strings.TrimPrefix(s, "httpfence: "))
	default:
		return "", fmt.Errorf("httpfence: %s %s answers %s, not %d; is it an AdvanceHandler, and are you let in? %.200q", method, r.url, resp.Status, want, s)
	}
}
