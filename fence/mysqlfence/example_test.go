package mysqlfence_test

import (
	"context"
	"errors"
	"fmt"

	"aegis/fence"
	"aegis/fence/mysqlfence"
)

// A boss is killed under term 7 and its loot handed out once; the next leader repeats the settlement, to be sure, and
// the old one comes back too late.
func Example() {
	name, err := server.Database()
	must(err)
	defer server.Drop(name)
	ctx := context.Background()

	g, err := mysqlfence.Open(server.DSN(name), mysqlfence.Config{}) // "app:…@tcp(db:3306)/game"
	must(err)
	defer g.Close()
	must(g.Install(ctx))
	_, err = g.DB().ExecContext(ctx, "CREATE TABLE IF NOT EXISTS loot (player VARCHAR(40), item VARCHAR(40))")
	must(err)

	settle := func(t fence.Term) {
		winner, first, err := g.Once(ctx, t, "kill-4711", func(tx *mysqlfence.Tx) ([]byte, error) {
			_, err := tx.ExecContext(ctx, "INSERT INTO loot VALUES (?, ?)", "Ayla", "Frostmourne")
			return []byte("Ayla"), err
		})
		if errors.Is(err, fence.ErrFenced) {
			fmt.Println(err)
			return
		}
		must(err)
		fmt.Printf("term %d: winner %s, settled now: %v\n", t.Token, winner, first)
	}

	old := fence.Term{Election: "boss/frost", Node: "scene-01", Token: 7}
	must(g.Advance(ctx, old)) // before the term's first read
	settle(old)

	next := fence.Term{Election: "boss/frost", Node: "scene-02", Token: 8}
	must(g.Advance(ctx, next))
	settle(next)
	settle(old)

	// Output:
	// term 7: winner Ayla, settled now: true
	// term 8: winner Ayla, settled now: false
	// fenced: "boss/frost" token 7 refused: the guard's newest is 8; the term is over, stop its work
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}
