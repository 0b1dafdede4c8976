package fencetest

import "time"

// The suite's own tests contain guards that never do what must happen: no need to wait for it as long as for a store.
func init() { bound = 3 * time.Second }
