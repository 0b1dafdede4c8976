package fencetest_test

import (
	"strings"
	"testing"

	"aegis/fence/fencetest"
)

func TestAGuardThatKeepsTheRulesPasses(t *testing.T) {
	newGuard := func(*testing.T) fencetest.Subject { return subject("") }
	t.Run("Guard", func(t *testing.T) { fencetest.Test(t, newGuard) })
	t.Run("Once", func(t *testing.T) { fencetest.TestOnce(t, newGuard) })
}

// Each guard is broken in one way; the case that was written for it must tell. Others may tell too.
func TestBrokenGuardsAreCaught(t *testing.T) {
	for broken, intended := range map[string]string{
		"compares and writes in two steps":              "StaleWriteNeverCommits",
		"locks within one client only":                  "StaleWriteNeverCommitsAgainstPeers",
		"compares with a snapshot from before the lock": "CheckSeesWhatTheLockWaitedFor",
		"returns before it has advanced":                "StaleWriteNeverCommits",
		"admits all":                                    "SmallerTokenIsRefused",
		"writes before it compares":                     "SmallerTokenIsRefused",
		"refuses without numbers":                       "SmallerTokenIsRefused",
		"advances downwards":                            "SmallerTokenIsRefused",
		"admits each token once":                        "EqualTokenIsAdmittedManyTimes",
		"loses writes":                                  "SmallerTokenIsRefused",
		"admits greater tokens":                         "GreaterTokenMustAdvanceFirst",
		"admits without a record":                       "NoRecordMustAdvanceFirst",
		"creates the record on a write":                 "NoRecordMustAdvanceFirst",
		"ignores nonces in Write":                       "TokenGivenOutTwiceIsTold",
		"ignores nonces in Advance":                     "TokenGivenOutTwiceIsTold",
		"keeps nonces as signed numbers":                "TokenGivenOutTwiceIsTold",
		"lets an unknown nonce replace the known one":   "TokenGivenOutTwiceIsTold",
		"ignores clusters in Write":                     "ForeignClusterIsRefused",
		"ignores clusters in Advance":                   "ForeignClusterIsRefused",
		"lets an unknown cluster replace the known one": "ForeignClusterIsRefused",
		"takes invalid tokens":                          "InvalidTokensAreRefused",
		"admits invalid tokens":                         "InvalidTokensAreRefused",
		"keeps tokens as 32-bit floats":                 "InvalidTokensAreRefused",
		"one token for all names":                       "NamesAreIndependent",
		"folds case":                                    "NamesAreIndependent",
		"trims spaces":                                  "NamesAreIndependent",
		"cuts names at 64 bytes":                        "NamesAreIndependent",
		"refuses the same term twice":                   "AdvanceIsIdempotent",
		"takes the terms before the refused one":        "AdvanceIsAllOrNone",
		"forgets tokens on reopening":                   "FenceSurvivesReopening",
		"forgets nonces on reopening":                   "FenceSurvivesReopening",
		"forgets clusters on reopening":                 "FenceSurvivesReopening",
		"forgets data on reopening":                     "FenceSurvivesReopening",
		"fails writers that meet":                       "WritersOfOneTermAllSucceed",
		"advance is starved by writers":                 "AdvanceGetsInUnderLoad",
		"advance ignores its context":                   "AdvanceIsBoundedByItsContext",
		"runs repeats":                                  "OnceRunsOnce",
		"keys are each term's own":                      "OnceRunsOnce",
		"answers repeats without the result":            "OnceRunsOnce",
		"answers old terms":                             "OnceIsGuarded",
		"records the key although fn failed":            "OnceThatFailsLeavesNothing",
		"keeps the writes of a failed fn":               "OnceThatFailsLeavesNothing",
		"keys are shared by all elections":              "OnceKeysBelongToTheirElection",
		"keeps results as C strings":                    "OnceReturnsTheBytes",
		"runs fn outside its lock":                      "OnceHasOneWinner",
		"forgets keys on reopening":                     "OnceSurvivesReopening",
	} {
		t.Run(broken, func(t *testing.T) {
			t.Parallel() // they mostly wait
			by := map[string]bool{}
			for _, f := range fencetest.Check(func() fencetest.Subject { return subject(broken) }) {
				by[f.Case] = true
				if f.Case == intended && (f.Rule == "" || len(f.Steps) == 0 || !strings.Contains(f.Error(), f.Rule)) {
					t.Errorf("the failure does not say what was broken and how: %v", f)
				}
			}
			if !by[intended] {
				t.Errorf("not caught by %s; caught by %v", intended, by)
			}
		})
	}
}
