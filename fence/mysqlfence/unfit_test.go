package mysqlfence

import (
	"strings"
	"testing"
)

func TestServersWithoutSharedLocksAreRefused(t *testing.T) {
	for _, c := range []struct {
		vars map[string]string
		says string
	}{
		{map[string]string{}, ""},
		{map[string]string{"wsrep_on": "OFF", "read_only": "OFF", "super_read_only": "0"}, ""},
		{map[string]string{"wsrep_on": "ON"}, "Galera"},
		{map[string]string{"wsrep_on": "1"}, "Galera"},
		{map[string]string{"group_replication_group_name": "", "group_replication_single_primary_mode": "OFF"}, ""},
		{map[string]string{"group_replication_group_name": "aaaa", "group_replication_single_primary_mode": "ON"}, ""},
		{map[string]string{"group_replication_group_name": "aaaa", "group_replication_single_primary_mode": "OFF"}, "multi-primary"},
		{map[string]string{"read_only": "ON"}, "read-only"},
		{map[string]string{"read_only": "NO_LOCK_NO_ADMIN"}, "read-only"},
		{map[string]string{"super_read_only": "ON"}, "read-only"},
		{map[string]string{"innodb_read_only": "ON"}, "read-only"},
	} {
		err := unfit(c.vars)
		if c.says == "" && err != nil || c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%v: %v, must say %q", c.vars, err, c.says)
		}
	}
}
