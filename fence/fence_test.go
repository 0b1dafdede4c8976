package fence_test

import (
	"errors"
	"fmt"
	"math"
	"testing"

	"aegis/fence"
)

func term(token fence.Token, nonce, cluster uint64) fence.Term {
	return fence.Term{Election: "boss/1", Node: "scene-01", Token: token, Nonce: nonce, Cluster: cluster}
}

// kinds are the errors that callers tell apart.
var kinds = []error{fence.ErrFenced, fence.ErrUnknown, fence.ErrTokenWentBack, fence.ErrForeignCluster, fence.ErrInvalidToken}

// wantKinds demands that err is these kinds and no other.
func wantKinds(t *testing.T, err error, want ...error) {
	t.Helper()
	if (err == nil) != (len(want) == 0) {
		t.Fatalf("got error %v, want %v", err, want)
	}
	for _, kind := range kinds {
		wanted := false
		for _, w := range want {
			wanted = wanted || w == kind
		}
		if errors.Is(err, kind) != wanted {
			t.Errorf("errors.Is(%q, %q) is %v", err, kind, !wanted)
		}
	}
}

func TestRecordRules(t *testing.T) {
	seven := fence.Record{Token: 7, Nonce: 70, Cluster: 1}
	invalid := []error{fence.ErrFenced, fence.ErrInvalidToken}
	for name, c := range map[string]struct {
		record         fence.Record
		term           fence.Term
		advanced       fence.Record // where the advance is admitted
		advance, admit []error
	}{
		"smaller":                   {seven, term(6, 60, 1), seven, []error{fence.ErrFenced}, []error{fence.ErrFenced}},
		"equal":                     {seven, term(7, 70, 1), seven, nil, nil},
		"greater":                   {seven, term(8, 80, 1), fence.Record{8, 80, 1}, nil, []error{fence.ErrFenced}},
		"no record":                 {fence.Record{}, term(7, 70, 1), seven, nil, []error{fence.ErrFenced}},
		"equal of another nonce":    {seven, term(7, 71, 1), seven, []error{fence.ErrTokenWentBack}, []error{fence.ErrTokenWentBack}},
		"equal of unknown nonce":    {seven, term(7, 0, 1), seven, nil, nil},
		"equal to an unknown nonce": {fence.Record{7, 0, 1}, term(7, 70, 1), fence.Record{7, 0, 1}, nil, nil},
		"greater of unknown nonce":  {seven, term(8, 0, 1), fence.Record{8, 0, 1}, nil, []error{fence.ErrFenced}},
		"foreign and smaller":       {seven, term(6, 60, 2), seven, []error{fence.ErrForeignCluster}, []error{fence.ErrForeignCluster}},
		"foreign and equal":         {seven, term(7, 70, 2), seven, []error{fence.ErrForeignCluster}, []error{fence.ErrForeignCluster}},
		"foreign and greater":       {seven, term(8, 80, 2), seven, []error{fence.ErrForeignCluster}, []error{fence.ErrForeignCluster}},
		"unknown cluster":           {seven, term(8, 80, 0), fence.Record{8, 80, 1}, nil, []error{fence.ErrFenced}},
		"cluster becomes known":     {fence.Record{7, 70, 0}, term(8, 80, 1), fence.Record{8, 80, 1}, nil, []error{fence.ErrFenced}},
		"token 0":                   {seven, term(0, 70, 1), seven, invalid, invalid},
		"token 0, no record":        {fence.Record{}, term(0, 0, 0), fence.Record{}, invalid, invalid},
		"token -1":                  {seven, term(-1, 70, 1), seven, invalid, invalid},
		"token 2^53":                {seven, term(1<<53, 70, 1), seven, invalid, invalid},
		"the largest token":         {seven, term(1<<53-1, 9, 1), fence.Record{1<<53 - 1, 9, 1}, nil, []error{fence.ErrFenced}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := c.record.Advance(c.term)
			wantKinds(t, err, c.advance...)
			if got != c.advanced {
				t.Errorf("Advance leaves %+v, want %+v", got, c.advanced)
			}
			wantKinds(t, c.record.Admit(c.term), c.admit...)
		})
	}
}

func TestValidToken(t *testing.T) {
	for token, valid := range map[fence.Token]bool{
		math.MinInt64: false, -1: false, 0: false, 1: true, fence.MaxToken: true, fence.MaxToken + 1: false, math.MaxInt64: false,
	} {
		if err := fence.ValidToken(token); (err == nil) != valid {
			t.Errorf("ValidToken(%d) = %v", token, err)
		}
	}
	if fence.MaxToken != 9_007_199_254_740_991 || int64(float64(fence.MaxToken)) != fence.MaxToken {
		t.Error("MaxToken must be the largest integer up to which a double carries each one")
	}
}

func TestErrorsCarryNumbersAndRemedy(t *testing.T) {
	for _, c := range []struct {
		err  error
		kind error
		text string
	}{
		{&fence.FencedError{Name: "boss/1", Token: 7, Newest: 8}, fence.ErrFenced,
			`fenced: "boss/1" token 7 refused: the guard's newest is 8; the term is over, stop its work`},
		{&fence.FencedError{Token: 7, Newest: 8}, fence.ErrFenced,
			`fenced: token 7 refused: the guard's newest is 8; the term is over, stop its work`},
		{&fence.FencedError{Name: "boss/1", Token: 9, Newest: 8}, fence.ErrFenced,
			`fenced: "boss/1" token 9 refused: the guard's newest is 8; advance it before the first write`},
		{&fence.FencedError{Name: "boss/1", Token: 9}, fence.ErrFenced,
			`fenced: "boss/1" token 9 refused: the guard has taken no token yet; advance it before the first write`},
		{&fence.TokenWentBackError{Name: "boss/1", Token: 7, Newest: 7}, fence.ErrTokenWentBack,
			`token went back: "boss/1" was given token 7, but the guard has already taken 7 from another term; ` +
				"etcd seems restored from a snapshot: stop the writers and run `aegis token raise --above 7`"},
		{&fence.ForeignClusterError{Name: "boss/1", Cluster: 0xabc, Known: 0xdef}, fence.ErrForeignCluster,
			`token of a foreign cluster: "boss/1" belongs to etcd cluster def at this guard, the token comes from cluster abc; ` +
				"check the endpoints; docs/guide.md says how to move a guard to another cluster"},
	} {
		wantKinds(t, c.err, c.kind)
		wantKinds(t, fmt.Errorf("wrapped: %w", c.err), c.kind)
		if c.err.Error() != c.text {
			t.Errorf("got  %s\nwant %s", c.err, c.text)
		}
	}
	var fenced *fence.FencedError
	err := fence.Record{Token: 8}.Admit(term(7, 0, 0))
	if !errors.As(err, &fenced) || *fenced != (fence.FencedError{Name: "boss/1", Token: 7, Newest: 8}) {
		t.Errorf("got %#v", err)
	}
	if got, want := fence.ValidToken(0).Error(), "fenced: invalid token: 0 is outside 1 … 9007199254740991"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if got, want := term(7, 1, 2).String(), "boss/1 (token 7, node scene-01)"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
