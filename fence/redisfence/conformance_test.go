package redisfence_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"aegis/fence"
	"aegis/fence/fencetest"
	"aegis/fence/redisfence"
	"aegis/internal/servers"

	"github.com/redis/go-redis/v9"
)

func TestConformance(t *testing.T) { fencetest.Test(t, newSubject) }

func TestConformanceOfOnce(t *testing.T) { fencetest.TestOnce(t, newSubject) }

func newSubject(t *testing.T) fencetest.Subject {
	return subject(t, client(t, server.Addr), redisfence.Config{Prefix: fresh(), AnySlot: true}, fresh())
}

func subject(t *testing.T, c redis.UniversalClient, cfg redisfence.Config, data string) fencetest.Subject {
	g := newGuard(t, c, cfg)
	s := fencetest.Subject{
		Guard: g,
		Write: func(ctx context.Context, term fence.Term, key, value string, between func()) error {
			if between != nil {
				between()
			}
			_, err := g.Exec(ctx, term, "SET", data+key, value)
			return err
		},
		Read: func(ctx context.Context, key string) (value string, err error) {
			value, err = c.Get(ctx, data+key).Result()
			if errors.Is(err, redis.Nil) {
				return "", nil
			}
			return value, err
		},
		Once: func(ctx context.Context, term fence.Term, key string, fn func(func(key, value string) error) ([]byte, error)) ([]byte, bool, error) {
			return g.Once(ctx, term, key, func(b *redisfence.Batch) ([]byte, error) {
				return fn(func(key, value string) error { return b.Add("SET", data+key, value) })
			})
		},
	}
	if single, ok := c.(*redis.Client); ok {
		s.Peer = func() (fencetest.Subject, error) {
			return subject(t, client(t, single.Options().Addr), cfg, data), nil
		}
		if !server.Given() {
			s.Reopen = func() (fencetest.Subject, error) {
				if err := server.Kill(); err != nil {
					return fencetest.Subject{}, err
				}
				return subject(t, client(t, server.Addr), cfg, data), server.Start(bounded(t))
			}
		}
	}
	return s
}

// On a Cluster of one node that has all slots, keys of several slots are refused by the server as on any other.
func TestConformanceOnACluster(t *testing.T) {
	c := cluster(t)
	fencetest.Test(t, func(t *testing.T) fencetest.Subject {
		return subject(t, c, redisfence.Config{Prefix: fresh(), Tag: "world"}, fresh()+"{world}")
	})
}

func cluster(t *testing.T) *redis.ClusterClient {
	r := start(t, servers.RedisConfig{Cluster: true})
	ctx := bounded(t)
	if err := client(t, r.Addr).ClusterAddSlotsRange(ctx, 0, 16383).Err(); err != nil {
		t.Fatal(err)
	}
	c := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{r.Addr}, ContextTimeoutEnabled: true})
	t.Cleanup(func() { c.Close() })
	for {
		info, err := c.ClusterInfo(ctx).Result()
		if err == nil && strings.Contains(info, "cluster_state:ok") {
			return c
		}
		if ctx.Err() != nil {
			t.Fatal("the cluster is not up: ", info, err)
		}
	}
}
