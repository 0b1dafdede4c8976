package redisfence_test

import (
	"context"
	"errors"
	"fmt"

	"aegis/fence"
	"aegis/fence/redisfence"

	"github.com/redis/go-redis/v9"
)

// A boss is killed under term 7 and its loot handed out once; the next leader repeats the settlement, to be sure, and
// the old one comes back too late.
func Example() {
	ctx := context.Background()
	client := redis.NewClient(&redis.Options{Addr: server.Addr, ContextTimeoutEnabled: true})
	defer client.Close()
	g, err := redisfence.New(client, redisfence.Config{Prefix: "example:"})
	check(err)

	settle := func(t fence.Term) {
		winner, first, err := g.Once(ctx, t, "kill-4711", func(b *redisfence.Batch) ([]byte, error) {
			err := errors.Join(
				b.Add("RPUSH", g.Key("boss/frost", "loot"), "Frostmourne for Ayla"),
				b.Add("DEL", g.Key("boss/frost", "health")))
			return []byte("Ayla"), err
		})
		if errors.Is(err, fence.ErrFenced) {
			fmt.Println(err)
			return
		}
		check(err)
		fmt.Printf("term %d: winner %s, settled now: %v\n", t.Token, winner, first)
	}

	old := fence.Term{Election: "boss/frost", Node: "scene-01", Token: 7}
	check(g.Advance(ctx, old)) // before the term's first read
	settle(old)

	next := fence.Term{Election: "boss/frost", Node: "scene-02", Token: 8}
	check(g.Advance(ctx, next))
	settle(next)
	settle(old)

	// Output:
	// term 7: winner Ayla, settled now: true
	// term 8: winner Ayla, settled now: false
	// fenced: "boss/frost" token 7 refused: the guard's newest is 8; the term is over, stop its work
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
