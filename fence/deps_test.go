package fence_test

import (
	"os/exec"
	"strings"
	"testing"
)

// A database job or the user of another lock takes a guard without etcd, and the fence without anything.
func TestDependencies(t *testing.T) {
	for pkg, allowed := range map[string][]string{
		"aegis/fence":             {"aegis/fence"},
		"aegis/fence/fencetest":   {"aegis/fence"},
		"aegis/fence/mysqlfence":  {"aegis/fence", "github.com/go-sql-driver/", "filippo.io/edwards25519", "filippo.io/edwards25519/"},
		"aegis/fence/httpfence":   {"aegis/fence", "aegis/fence/internal/gate"},
		"aegis/fence/pgfence":     {"aegis/fence", "github.com/jackc/", "golang.org/x/text/", "golang.org/x/sync/"},
		"aegis/fence/redisfence":  {"aegis/fence", "github.com/redis/", "github.com/cespare/xxhash/", "go.uber.org/atomic", "golang.org/x/sys/"},
		"aegis/fence/sqlitefence": {"aegis/fence", "github.com/ncruces/", "golang.org/x/sys/"},
	} {
		out, err := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", pkg).CombinedOutput()
		if err != nil {
			t.Fatalf("go list -deps %s: %v\n%s", pkg, err, out)
		}
	deps:
		for dep := range strings.FieldsSeq(string(out)) {
			if dep == pkg {
				continue
			}
			for _, a := range allowed {
				if dep == a || strings.HasSuffix(a, "/") && strings.HasPrefix(dep, a) {
					continue deps
				}
			}
			t.Errorf("%s must not import %s", pkg, dep)
		}
	}
}
