package sqlitefence_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"aegis/fence"
	"aegis/fence/sqlitefence"
)

// A boss is killed under term 7 and its loot handed out once; the next leader repeats the settlement, to be sure, and
// the old one comes back too late.
func Example() {
	dir, err := os.MkdirTemp("", "example")
	check(err)
	defer os.RemoveAll(dir)
	ctx := context.Background()

	g, err := sqlitefence.Open(filepath.Join(dir, "game.db"), sqlitefence.Config{})
	check(err)
	defer g.Close()
	check(g.Setup(ctx, "CREATE TABLE IF NOT EXISTS loot (player TEXT, item TEXT)"))

	settle := func(t fence.Term) {
		winner, first, err := g.Once(ctx, t, "kill-4711", func(tx *sqlitefence.Tx) ([]byte, error) {
			_, err := tx.ExecContext(ctx, "INSERT INTO loot VALUES (?, ?)", "Ayla", "Frostmourne")
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
