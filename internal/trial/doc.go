// Package trial tries aegis on real processes and a real etcd: each of its tests is one claim about what happens when
// a link is cut, a process is stopped or killed, or etcd dies, goes back or lies.
//
//	test ── etcd members, links, clients ── internal/lab
//	  │
//	  ├── node process "scene-01": the test binary again, in the role of a node
//	  └── node process "scene-02"
//
// A node process asks Held all the time and reports, for each term, when the first and when the last yes was said, on
// the one monotonic clock that all processes of a machine share. So "no two say yes at the same time" is not sampled
// but computed: a term's Held is true from its first yes to its last, and two such spans overlap or they do not. Each
// span is taken at its widest, from before the call that said yes first to after the call that said yes last, so that
// an interruption between a call and a look at the clock makes the test stricter, never laxer.
//
// It holds nothing but tests. AEGIS_TRIAL_ROUNDS sets how often the partition is repeated (30; 5 with -short).
package trial
