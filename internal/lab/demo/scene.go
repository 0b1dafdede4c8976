package demo

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"time"

	"aegis"
	"aegis/internal/lab"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// event is a line of a scene's log.
type event struct {
	At    int64 // by lab.Now, one clock for all processes
	Event string
	Token aegis.Token `json:",omitempty"`
	Kills []int       `json:",omitempty"` // asks: the round that has passed its check
	Tries []Try       `json:",omitempty"` // wrote: how each kill of the round ended
	Held  *bool       `json:",omitempty"` // woke: at the first call
	Why   string      `json:",omitempty"` // ended
}

// What scenes log.
const (
	elected = "elected"
	asks    = "asks"  // past its check; waits for who took part, then writes
	wrote   = "wrote" // a round
	woke    = "woke"  // the tick loop runs again after a stop
	ended   = "ended" // the term's context
)

// Try is one attempt to pay a kill.
type Try struct {
	Kill    int         `json:"kill"`
	Scene   string      `json:"scene"`
	Token   aegis.Token `json:"token"`
	Outcome string      `json:"outcome"` // paid, refused or failed
	Newest  aegis.Token `json:"newest,omitempty"`
	Error   string      `json:"error,omitempty"`
}

// Outcomes of a try.
const (
	paid    = "paid"
	refused = "refused"
	failed  = "failed"
)

// scene is one process of the game: it owns the boss while it leads, and settles its kills.
type scene struct {
	orders
	store   *store
	kill    chan struct{} // there is a new one; holds one
	answers chan []string // of the combat log: who took part
	mu      sync.Mutex    // of standard output
}

// Scene is the process of one scene: it is told what it is by its environment, of kills by its standard input, and
// leaves when that ends. It returns the exit code.
func Scene() int {
	s := &scene{kill: make(chan struct{}, 1), answers: make(chan []string, 1)}
	if err := json.Unmarshal([]byte(os.Getenv(environment)), &s.orders); err != nil {
		fmt.Fprintf(os.Stderr, "this is a part of `aegis demo` and not for use alone: %v\n", err)
		return 2
	}
	ctx, stop := context.WithCancelCause(context.Background())
	go s.listen(os.Stdin, stop)
	if err := s.run(ctx); err != nil && !errors.Is(err, io.EOF) {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func (s *scene) listen(in io.Reader, stop context.CancelCauseFunc) {
	for lines := bufio.NewScanner(in); lines.Scan(); {
		switch word, rest, _ := strings.Cut(lines.Text(), " "); word {
		case "kill":
			select {
			case s.kill <- struct{}{}:
			default:
			}
		case "party":
			s.answers <- strings.Fields(rest)
		}
	}
	close(s.answers)
	stop(io.EOF)
}

func (s *scene) emit(e event) {
	e.At = lab.Now()
	b, _ := json.Marshal(e)
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Printf("%s\n", b)
}

func (s *scene) run(ctx context.Context) (err error) {
	if s.store, err = openStore(s.Database, s.Mode, s.Bypass); err != nil {
		return err
	}
	defer s.store.Close()
	cli, err := clientv3.New(clientv3.Config{
		Endpoints: s.Endpoints, DialTimeout: 2 * time.Second, DialKeepAliveTime: 10 * time.Second, DialKeepAliveTimeout: 3 * time.Second, Logger: zap.NewNop(),
	})
	if err != nil {
		return err
	}
	defer cli.Close()
	node, err := aegis.Join(ctx, cli, aegis.Config{
		ID: aegis.NodeID(s.Name), Prefix: s.Prefix, TTL: s.TTL, Logger: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	if err != nil {
		return err
	}
	defer node.Leave(ctx)
	var options []aegis.ElectionOption
	if s.store.guard != nil {
		options = append(options, aegis.WithGuards(s.store.guard))
	}
	return node.Election(election, options...).Run(ctx, s.lead)
}

// lead is a term: it settles kills until the term ends.
func (s *scene) lead(ctx context.Context, l *aegis.Leadership) error {
	s.emit(event{Event: elected, Token: l.Token})
	context.AfterFunc(l.Context(), func() {
		s.emit(event{Event: ended, Token: l.Token, Why: context.Cause(l.Context()).Error()})
	})
	go s.tick(l)
	for {
		for {
			more, err := s.settle(ctx, l)
			if err != nil {
				return err
			}
			if !more {
				break
			}
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-s.kill:
		}
	}
}

// tick is the scene's game loop: before each step it asks whether the boss is still its own.
func (s *scene) tick(l *aegis.Leadership) {
	t := time.NewTicker(20 * time.Millisecond)
	defer t.Stop()
	for last := lab.Now(); ; {
		<-t.C
		held, now := l.Held(), lab.Now()
		if time.Duration(now-last) > s.TTL/2 {
			s.emit(event{Event: woke, Token: l.Token, Held: &held})
		}
		if last = now; !held {
			return
		}
	}
}

// settle pays a round of kills: it checks, asks, and acts. It reports whether it did something.
//
// Between its check and its write there is a call to another service, as there is in most settlements; there may as well
// be a garbage collection, a slow disk or nothing at all: the next instruction is late enough if the process is stopped
// before it. The writes have a deadline of their own. That of the term would make the hole smaller, and would not close it.
func (s *scene) settle(ctx context.Context, l *aegis.Leadership) (more bool, err error) {
	if !l.Held() {
		return false, nil
	}
	kills, err := s.store.unpaid(ctx, round)
	if err != nil || len(kills) < round {
		return false, err
	}
	s.emit(event{Event: asks, Token: l.Token, Kills: kills})
	party, ok := <-s.answers
	if !ok {
		return false, io.EOF
	}
	write, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	var tries []Try
	for _, kill := range kills {
		tries = append(tries, s.pay(write, l.Term, kill, party[rand.IntN(len(party))]))
	}
	s.emit(event{Event: wrote, Token: l.Token, Kills: kills, Tries: tries})
	return true, nil
}

// pay hands out the loot of one kill: the item, and gold.
func (s *scene) pay(ctx context.Context, term aegis.Term, kill int, player string) Try {
	err := s.store.settle(ctx, term, func(tx execer) error {
		const loot = "INSERT INTO loot (kill, item, player, scene, token) VALUES (?, ?, ?, ?, ?)"
		if _, err := tx.ExecContext(ctx, loot, kill, item(kill), player, s.Name, term.Token); err != nil {
			return err
		}
		const more = "INSERT INTO gold (player, balance) VALUES (?, ?) ON CONFLICT (player) DO UPDATE SET balance = balance + excluded.balance"
		_, err := tx.ExecContext(ctx, more, player, gold)
		return err
	})
	try := Try{Kill: kill, Scene: s.Name, Token: term.Token, Outcome: paid}
	var fenced *aegis.FencedError
	switch {
	case errors.As(err, &fenced):
		try.Outcome, try.Newest, try.Error = refused, fenced.Newest, err.Error()
	case err != nil:
		try.Outcome, try.Error = failed, err.Error()
	}
	return try
}
