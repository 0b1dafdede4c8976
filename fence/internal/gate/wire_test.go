package gate

import (
	"errors"
	"fmt"
	"math"
	"net/url"
	"strings"
	"testing"

	"aegis/fence"
)

func TestTermsTravelUnchanged(t *testing.T) {
	for _, name := range []string{"boss", "boss/北境 +%&=;,\"'", "🐉", "\u200b", strings.Repeat("龙", 85), " ", "a=b&token=9"} {
		want := fence.Term{Election: name, Node: fence.NodeID(name), Token: fence.MaxToken, Nonce: math.MaxUint64, Cluster: 1 << 63}
		s, err := Encode(want)
		if err != nil {
			t.Fatal(err)
		}
		if len(s) > MaxTerm || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r >= 0x7f || r == ',' || r == '"' }) {
			t.Errorf("%q is not fit for a header", s)
		}
		if got, err := Decode(s); err != nil || got != want {
			t.Errorf("%q became %v, %v", s, got, err)
		}
		if v, err := url.ParseQuery(s); err != nil || v.Get("election") != name { // as other languages would
			t.Errorf("%q is no query string: %v", s, err)
		}
	}
	bare := fence.Term{Election: "boss", Token: 7}
	if s, _ := Encode(bare); s != "election=boss&token=7" {
		t.Errorf("got %s", s)
	}
	if got, err := Decode("token=7&election=boss&since=now"); err != nil || got != bare {
		t.Errorf("got %v, %v", got, err)
	}
}

func TestMalformedTermsAreExplained(t *testing.T) {
	for s, want := range map[string]string{
		"":                                 "election is 0 bytes long",
		"token=7":                          "election is 0 bytes long",
		"election=boss":                    `token is "", not a whole number`,
		"election=boss&token=7.0":          "not a whole number",
		"election=boss&token=7&token=8":    `"token" is there twice`,
		"election=boss&token=7,election=b": "several terms",
		"election=boss&token=7&nonce=x":    "nonce",
		"election=boss&token=7&nonce=-1":   "nonce",
		"election=boss&token=7&cluster=" + strings.Repeat("f", 17): "cluster",
		"election=%zz&token=7":                              "not escaped properly",
		"election=%ff&token=7":                              "must be UTF-8",
		"election=a%0ab&token=7":                            "without control characters",
		"election=a&token=7&node=%00":                       "without control characters",
		"election=" + strings.Repeat("x", 256) + "&token=7": "256 bytes long",
		"election=" + strings.Repeat("x", MaxTerm):          "at most 2048",
	} {
		var term *TermError
		if _, err := Decode(s); !errors.As(err, &term) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want %s", s, err, want)
		}
	}
	for _, token := range []string{"0", "-1", "9007199254740992", "9223372036854775807"} {
		if _, err := Decode("election=boss&token=" + token); !errors.Is(err, fence.ErrInvalidToken) {
			t.Errorf("token %s: %v", token, err)
		}
	}
	for _, term := range []fence.Term{{Token: 7}, {Election: "a\nb", Token: 7}, {Election: "a"}, {Election: "a", Token: 7, Node: "\x7f"}, {Election: strings.Repeat("x", 256), Token: 7}} {
		if s, err := Encode(term); err == nil {
			t.Errorf("%v was encoded as %q", term, s)
		}
	}
}

func TestOneTermExactly(t *testing.T) {
	if _, err := One("header X", nil); err == nil || !strings.Contains(err.Error(), "header X is missing") {
		t.Error(err)
	}
	if _, err := One("header X", []string{"election=a&token=1", "election=a&token=1"}); err == nil || !strings.Contains(err.Error(), "2 values of header X") {
		t.Error(err)
	}
	if term, err := One("header X", []string{"election=a&token=1"}); err != nil || term.Token != 1 {
		t.Error(term, err)
	}
}

func TestRefusalsTravelUnchanged(t *testing.T) {
	term := fence.Term{Election: "boss", Token: 7}
	for _, want := range []error{
		&fence.FencedError{Name: "北境 &", Token: 7, Newest: 8},
		&fence.TokenWentBackError{Name: "boss", Token: 7, Newest: 7},
		&fence.ForeignClusterError{Name: "boss", Cluster: math.MaxUint64, Known: 1 << 63},
	} {
		got := Restore(DecodeFields(EncodeFields(Refusal(fmt.Errorf("store: %w", want), term))), "")
		if got == nil || got.Error() != want.Error() {
			t.Errorf("%v became %v", want, got)
		}
	}
	for _, kind := range []error{fence.ErrFenced, fence.ErrTokenWentBack, fence.ErrForeignCluster, fence.ErrUnknown} {
		if got := Restore(Refusal(kind, term), "text"); !errors.Is(got, kind) {
			t.Errorf("%v became %v", kind, got)
		}
	}
	if got := Restore(Refusal(fence.ValidToken(0), fence.Term{}), ""); !errors.Is(got, fence.ErrInvalidToken) {
		t.Errorf("got %v", got)
	}
	if got := Refusal(errors.New("disk full"), term); got != nil {
		t.Errorf("got %v", got)
	}
	for _, fields := range []map[string]string{nil, {}, {"kind": "new"}, {"kind": kindInvalid, "token": "7"}} {
		if got := Restore(fields, ""); got != nil {
			t.Errorf("%v became %v", fields, got)
		}
	}
}

func TestRecordsTravelUnchanged(t *testing.T) {
	for _, want := range []fence.Record{{}, {Token: fence.MaxToken, Nonce: math.MaxUint64, Cluster: 1 << 63}} {
		if got, err := DecodeRecord(EncodeRecord(want)); err != nil || got != want {
			t.Errorf("%v became %v, %v", want, got, err)
		}
	}
	if _, err := DecodeRecord("<html>"); err == nil {
		t.Error("a page was taken for a record")
	}
}

// What Decode takes, Encode gives back, whatever anybody sends.
func FuzzDecode(f *testing.F) {
	f.Add("election=boss%2F1&token=451&node=scene-01&nonce=9f3a&cluster=cdf818194e3a8c32")
	f.Add("election=a&token=1&token=1")
	f.Fuzz(func(t *testing.T, s string) {
		term, err := Decode(s)
		if err != nil {
			return
		}
		again, err := Encode(term)
		if err != nil {
			t.Fatalf("%q was taken as %v, which is refused: %v", s, term, err)
		}
		if got, err := Decode(again); err != nil || got != term {
			t.Fatalf("%q became %v, then %v, %v", s, term, got, err)
		}
	})
}
