package httpfence_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"

	"aegis/fence"
	"aegis/fence/httpfence"
)

// A loot service in memory. The old leader comes back after a pause and is refused by the service itself.
func Example() {
	guard, err := httpfence.New(httpfence.Config{})
	check(err)
	mux := http.NewServeMux()
	mux.Handle("/aegis/advance", guard.AdvanceHandler())
	mux.Handle("POST /loot", guard.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		term, _ := httpfence.TermFromContext(r.Context()) // for the guard of a store behind this service
		fmt.Fprintf(w, "%s hands out the loot", term.Node)
	})))
	server := httptest.NewServer(mux)
	defer server.Close()

	client := &http.Client{Transport: &httpfence.Transport{}}
	defer client.CloseIdleConnections()
	remote := httpfence.NewRemote(server.URL+"/aegis/advance", client)
	settle := func(t fence.Term) {
		req, err := http.NewRequestWithContext(httpfence.WithTerm(context.Background(), t), "POST", server.URL+"/loot", nil)
		check(err)
		resp, err := client.Do(req)
		if fenced := (*fence.FencedError)(nil); errors.As(err, &fenced) {
			fmt.Println(fenced)
			return
		}
		check(err)
		defer resp.Body.Close()
		answer, err := io.ReadAll(resp.Body)
		check(err)
		fmt.Printf("%s\n", answer)
	}

	old := fence.Term{Election: "boss/frost", Node: "scene-01", Token: 7}
	check(remote.Advance(context.Background(), old)) // with aegis: WithGuards(remote), before the term's first read
	settle(old)

	next := fence.Term{Election: "boss/frost", Node: "scene-02", Token: 8}
	check(remote.Advance(context.Background(), next))
	settle(next)
	settle(old)

	// Output:
	// scene-01 hands out the loot
	// scene-02 hands out the loot
	// fenced: "boss/frost" token 7 refused: the guard's newest is 8; the term is over, stop its work
}

// Any counter that grows with each change of owner will do as a token: here the transitions of a Kubernetes Lease, as
// client-go's leader election keeps them. They begin at 0, tokens at 1; a Lease that is deleted and created anew
// begins again, so give it a new name then.
func Example_kubernetesLease() {
	type LeaseSpec struct { // of coordination.k8s.io/v1, in part
		HolderIdentity   string
		LeaseTransitions int32
	}
	guard, err := httpfence.New(httpfence.Config{})
	check(err)
	term := func(l LeaseSpec) fence.Term {
		return fence.Term{Election: "kube-system/boss", Node: fence.NodeID(l.HolderIdentity), Token: fence.Token(l.LeaseTransitions) + 1}
	}
	write := func(ctx context.Context) error { fmt.Println("written"); return nil }

	a, b := LeaseSpec{"pod-a", 3}, LeaseSpec{"pod-b", 4} // as OnStartedLeading finds them
	check(guard.Advance(context.Background(), term(a)))
	fmt.Println(guard.Do(context.Background(), term(a), write))
	check(guard.Advance(context.Background(), term(b)))
	fmt.Println(guard.Do(context.Background(), term(a), write))
	// Output:
	// written
	// <nil>
	// fenced: "kube-system/boss" token 4 refused: the guard's newest is 5; the term is over, stop its work
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
