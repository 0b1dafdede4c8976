package lab

import (
	"math/rand/v2"
	"os"
	"strconv"
)

// SeedVariable gives random tests their seed back.
const SeedVariable = "AEGIS_SEED"

// Seed returns the seed of a random test: a new one, or the one to be replayed. It logs how to replay it.
func Seed(t interface {
	Name() string
	Logf(format string, args ...any)
	Fatalf(format string, args ...any)
}) uint64 {
	seed := rand.Uint64()
	if s := os.Getenv(SeedVariable); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatalf("%s=%s: %v", SeedVariable, s, err)
		}
	}
	t.Logf("replay: %s=%d go test -run '^%s$' in this package", SeedVariable, seed, t.Name())
	return seed
}
