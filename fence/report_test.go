package fence_test

import (
	"errors"
	"fmt"
	"testing"

	"aegis/fence"
)

func TestReportLetsRefusalsThroughAndNothingElse(t *testing.T) {
	fenced := fmt.Errorf("write: %w", &fence.FencedError{Name: "boss", Token: 7, Newest: 8})
	var told []error
	r := &fence.Report{Tell: func(err error) { told = append(told, err) }}
	for _, refusal := range []error{fenced, &fence.TokenWentBackError{Name: "boss"}, &fence.ForeignClusterError{Name: "boss"}} {
		if err := r.Verdict(refusal); err != nil {
			t.Errorf("%v was not let through: %v", refusal, err)
		}
	}
	for _, other := range []error{nil, errors.New("disk full"), fence.ErrUnknown, fence.ValidToken(0)} {
		if err := r.Verdict(other); err != other {
			t.Errorf("%v became %v", other, err)
		}
	}
	if r.Count() != 3 || len(told) != 3 || told[0] != fenced {
		t.Errorf("counted %d, told %v", r.Count(), told)
	}
	var enforce *fence.Report
	if err := enforce.Verdict(fenced); err != fenced {
		t.Errorf("a nil report let %v through", fenced)
	}
}
