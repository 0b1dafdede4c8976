package gate

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"aegis/fence"
)

const (
	// MaxTerm bounds the encoded form of a term in bytes: two names of 255 bytes, each escaped, and three numbers fit.
	MaxTerm = 2048

	maxName = 255
)

// TermError is a term that is missing, doubled, malformed or not this service's: a mistake in the caller's program.
type TermError struct{ Text string }

func (e *TermError) Error() string { return e.Text }

// Encode is the form in which a term travels: application/x-www-form-urlencoded, ASCII whatever the names are made of.
// Nonce and cluster are hexadecimal and, like the node, left out where they are not known.
//
//	election=boss%2F%E5%8C%97%E5%A2%83&token=451&node=scene-01&nonce=9f3a&cluster=cdf818194e3a8c32
func Encode(t fence.Term) (string, error) {
	if err := validName("election", t.Election, 1); err != nil {
		return "", err
	}
	if err := validName("node", string(t.Node), 0); err != nil {
		return "", err
	}
	if err := fence.ValidToken(t.Token); err != nil {
		return "", fmt.Errorf("term of %q: %w", t.Election, err)
	}
	b := make([]byte, 0, 128)
	b = append(append(b, "election="...), url.QueryEscape(t.Election)...)
	b = strconv.AppendInt(append(b, "&token="...), t.Token, 10)
	if t.Node != "" {
		b = append(append(b, "&node="...), url.QueryEscape(string(t.Node))...)
	}
	if t.Nonce != 0 {
		b = strconv.AppendUint(append(b, "&nonce="...), t.Nonce, 16)
	}
	if t.Cluster != 0 {
		b = strconv.AppendUint(append(b, "&cluster="...), t.Cluster, 16)
	}
	return string(b), nil
}

// Decode is the inverse of Encode. Election and token must be there, no key may come twice, unknown keys are ignored.
// Errors: [*TermError], or [fence.ErrInvalidToken].
func Decode(s string) (t fence.Term, err error) {
	if len(s) > MaxTerm {
		return t, &TermError{fmt.Sprintf("the term is %d bytes long, at most %d are allowed", len(s), MaxTerm)}
	}
	if strings.ContainsRune(s, ',') { // Encode escapes commas; a proxy joins doubled headers with one
		return t, &TermError{"there are several terms; each request carries exactly one"}
	}
	fields, err := decodeForm(s)
	if err != nil {
		return t, err
	}
	t.Election, t.Node = fields["election"], fence.NodeID(fields["node"])
	if err := validName("election", t.Election, 1); err != nil {
		return t, err
	}
	if err := validName("node", string(t.Node), 0); err != nil {
		return t, err
	}
	if t.Token, err = strconv.ParseInt(fields["token"], 10, 64); err != nil {
		return t, &TermError{fmt.Sprintf("the term's token is %.40q, not a whole number", fields["token"])}
	}
	if t.Nonce, err = hex(fields["nonce"]); err != nil {
		return t, &TermError{fmt.Sprintf("the term's nonce is %.40q, not a hexadecimal number of 64 bits", fields["nonce"])}
	}
	if t.Cluster, err = hex(fields["cluster"]); err != nil {
		return t, &TermError{fmt.Sprintf("the term's cluster is %.40q, not a hexadecimal number of 64 bits", fields["cluster"])}
	}
	if err := fence.ValidToken(t.Token); err != nil {
		return t, fmt.Errorf("term of %q: %w", t.Election, err)
	}
	return t, nil
}

// EncodeTerms puts each term on a line of its own.
func EncodeTerms(terms []fence.Term) (string, error) {
	var lines strings.Builder
	for _, t := range terms {
		line, err := Encode(t)
		if err != nil {
			return "", err
		}
		lines.WriteString(line + "\n")
	}
	return lines.String(), nil
}

// DecodeTerms returns the terms up to and with the first that is wrong.
func DecodeTerms(r io.Reader) (terms []fence.Term, err error) {
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		t, err := Decode(lines.Text())
		terms = append(terms, t)
		if err != nil {
			return terms, fmt.Errorf("line %d: %w", len(terms), err)
		}
	}
	if err := lines.Err(); err != nil {
		return terms, &TermError{fmt.Sprintf("reading the terms after line %d: %v", len(terms), err)}
	}
	return terms, nil
}

// One returns the term in values, which must be exactly one. where names the place in errors.
func One(where string, values []string) (t fence.Term, err error) {
	switch len(values) {
	case 0:
		return t, Missing(where)
	case 1:
		if t, err = Decode(values[0]); err != nil {
			err = fmt.Errorf("%s: %w", where, err)
		}
		return t, err
	default:
		return t, &TermError{fmt.Sprintf("there are %d values of %s; each request carries exactly one term", len(values), where)}
	}
}

// Missing is the error of a request without a term.
func Missing(where string) error {
	return &TermError{fmt.Sprintf("%s is missing: this service admits only requests that carry the term of a leader, "+
		"such as election=boss&token=451", where)}
}

func hex(s string) (uint64, error) {
	if s == "" {
		return 0, nil
	}
	return strconv.ParseUint(s, 16, 64)
}

func decodeForm(s string) (map[string]string, error) {
	fields := make(map[string]string, 6)
	for pair := range strings.SplitSeq(s, "&") {
		key, value, _ := strings.Cut(pair, "=")
		value, err := url.QueryUnescape(value)
		if err != nil {
			return nil, &TermError{fmt.Sprintf("the value of %.40q is not escaped properly: %v", key, err)}
		}
		if _, twice := fields[key]; twice {
			return nil, &TermError{fmt.Sprintf("%.40q is there twice", key)}
		}
		fields[key] = value
	}
	return fields, nil
}

// validName holds names to the rule for elections: least to 255 bytes of UTF-8 without control characters.
func validName(what, s string, least int) error {
	if len(s) < least || len(s) > maxName {
		return &TermError{fmt.Sprintf("the term's %s is %d bytes long, must be %d to %d", what, len(s), least, maxName)}
	}
	if !utf8.ValidString(s) || strings.ContainsFunc(s, unicode.IsControl) {
		return &TermError{fmt.Sprintf("the term's %s is %q, must be UTF-8 without control characters", what, s)}
	}
	return nil
}

// EncodeRecord is the form in which a record travels; the zero record is token=0.
func EncodeRecord(r fence.Record) string {
	return fmt.Sprintf("token=%d&nonce=%x&cluster=%x", r.Token, r.Nonce, r.Cluster)
}

// DecodeRecord is the inverse of EncodeRecord.
func DecodeRecord(s string) (r fence.Record, err error) {
	fields, err := decodeForm(s)
	if err != nil {
		return r, err
	}
	var errs [3]error
	r.Token, errs[0] = strconv.ParseInt(fields["token"], 10, 64)
	r.Nonce, errs[1] = hex(fields["nonce"])
	r.Cluster, errs[2] = hex(fields["cluster"])
	return r, errors.Join(errs[:]...)
}

// Kinds of refusals, as they travel.
const (
	kindFenced   = "fenced"
	kindWentBack = "token-went-back"
	kindForeign  = "foreign-cluster"
	kindInvalid  = "invalid-token"
	kindUnknown  = "unknown"
)

// Refusal returns err as fields that Restore makes an error of again; nil if err is none of fence's refusals, nor an
// unknown outcome. t is the term of the request.
func Refusal(err error, t fence.Term) map[string]string {
	var fenced *fence.FencedError
	var back *fence.TokenWentBackError
	var foreign *fence.ForeignClusterError
	fields := map[string]string{"election": t.Election, "token": strconv.FormatInt(t.Token, 10)}
	tokens := func(kind, name string, token, newest fence.Token) {
		fields["kind"], fields["election"] = kind, name
		fields["token"], fields["newest"] = strconv.FormatInt(token, 10), strconv.FormatInt(newest, 10)
	}
	switch {
	case errors.Is(err, fence.ErrUnknown):
		fields["kind"] = kindUnknown
	case errors.As(err, &back):
		tokens(kindWentBack, back.Name, back.Token, back.Newest)
	case errors.As(err, &foreign):
		fields["kind"], fields["election"] = kindForeign, foreign.Name
		fields["cluster"], fields["known"] = strconv.FormatUint(foreign.Cluster, 16), strconv.FormatUint(foreign.Known, 16)
	case errors.As(err, &fenced):
		tokens(kindFenced, fenced.Name, fenced.Token, fenced.Newest)
	case errors.Is(err, fence.ErrInvalidToken):
		fields["kind"] = kindInvalid
	case errors.Is(err, fence.ErrTokenWentBack):
		tokens(kindWentBack, t.Election, t.Token, 0)
	case errors.Is(err, fence.ErrForeignCluster):
		fields["kind"] = kindForeign
	case errors.Is(err, fence.ErrFenced):
		tokens(kindFenced, t.Election, t.Token, 0)
	default:
		return nil
	}
	return fields
}

// Restore is the inverse of Refusal; text is what the server said. It returns nil where it knows no such kind.
func Restore(fields map[string]string, text string) error {
	token, _ := strconv.ParseInt(fields["token"], 10, 64)
	newest, _ := strconv.ParseInt(fields["newest"], 10, 64)
	name := fields["election"]
	switch fields["kind"] {
	case kindFenced:
		return &fence.FencedError{Name: name, Token: token, Newest: newest}
	case kindWentBack:
		return &fence.TokenWentBackError{Name: name, Token: token, Newest: newest}
	case kindForeign:
		cluster, _ := hex(fields["cluster"])
		known, _ := hex(fields["known"])
		return &fence.ForeignClusterError{Name: name, Cluster: cluster, Known: known}
	case kindInvalid:
		if err := fence.ValidToken(token); err != nil {
			return fmt.Errorf("term of %q: %w", name, err)
		}
	case kindUnknown:
		return &unknown{text}
	}
	return nil
}

// EncodeFields and DecodeFields carry a refusal where only a string can be had.
func EncodeFields(fields map[string]string) string {
	v := make(url.Values, len(fields))
	for key, value := range fields {
		v.Set(key, value)
	}
	return v.Encode()
}

// DecodeFields is the inverse of EncodeFields; nil if s is malformed.
func DecodeFields(s string) map[string]string {
	fields, err := decodeForm(s)
	if err != nil {
		return nil
	}
	return fields
}

// Superseded is the outcome of a handler that a newer term interrupted and that did not say how far it had come. It is
// [fence.ErrUnknown].
func Superseded(fenced *fence.FencedError) error {
	return &unknown{fmt.Sprintf("outcome unknown: token %d has taken %q over from token %d, whose handler was interrupted and did not say "+
		"what it had done", fenced.Newest, fenced.Name, fenced.Token)}
}

type unknown struct{ text string }

func (e *unknown) Error() string        { return e.text }
func (e *unknown) Is(target error) bool { return target == fence.ErrUnknown }

type termKey struct{}

// WithTerm returns ctx with the term under which work is done; both packages share it.
func WithTerm(ctx context.Context, t fence.Term) context.Context {
	return context.WithValue(ctx, termKey{}, t)
}

// TermFrom returns the term that WithTerm put into ctx.
func TermFrom(ctx context.Context) (t fence.Term, ok bool) {
	t, ok = ctx.Value(termKey{}).(fence.Term)
	return t, ok
}
