package trial

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"aegis"
	"aegis/fence/sqlitefence"
	"aegis/internal/lab"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/goleak"
	"go.uber.org/zap"
)

func TestMain(m *testing.M) {
	if lab.Role() == roleNode {
		if err := playNode(); err != nil {
			fmt.Fprintln(os.Stderr, "node:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

const (
	roleNode  = "node"
	configEnv = "AEGIS_TRIAL_NODE"

	systemAegis       = "aegis"
	systemConcurrency = "etcd concurrency"

	ttl      = 2 * time.Second
	margin   = ttl / 5
	election = "boss/7"
	sampling = 500 * time.Microsecond // pause between two questions to Held
)

// nodeConfig says what a node process is.
type nodeConfig struct {
	System    string // whose election it enters
	ID        string
	Endpoints []string
	Prefix    string
	Guard     string // an SQLite file; "" for none
}

// span is the time that one call took, by lab.Now.
type span struct{ Before, After int64 }

// report is what a node process says: one JSON object a line.
type report struct {
	Kind  string `json:""`
	At    int64  `json:",omitzero"` // by lab.Now
	Token int64  `json:",omitzero"` // of the term concerned
	PID   int    `json:",omitzero"`

	First, Last span   `json:",omitzero"` // "won", "end": the calls that said yes first and last
	No          span   `json:",omitzero"` // "end": the call that said no; zero when it was stopped otherwise
	Ended       int64  `json:",omitzero"` // "end": when the context had ended
	Cause       string `json:",omitzero"` // "end": why

	Err    string `json:",omitzero"` // of joining, of a write, of leaving
	Fenced bool   `json:",omitzero"` // "write": refused by the guard
	Newest int64  `json:",omitzero"` // "write": which then names this token
	Taken  bool   `json:",omitzero"` // "refused": the name is taken
	Note   string `json:",omitzero"`
}

// player is the state of a node process.
type player struct {
	cfg   nodeConfig
	cli   *clientv3.Client
	guard *sqlitefence.Guard

	mu    sync.Mutex
	terms map[int64]aegis.Term
}

func (p *player) say(r report) {
	r.At, r.PID = lab.Now(), os.Getpid()
	b, err := json.Marshal(r)
	if err != nil {
		panic(err)
	}
	fmt.Println(string(b)) // one write
}

// newClient is a client as a service would make it.
func newClient(endpoints []string) (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{Endpoints: endpoints, DialTimeout: 2 * time.Second,
		DialKeepAliveTime: 10 * time.Second, DialKeepAliveTimeout: 3 * time.Second, Logger: zap.NewNop()})
}

// playNode is main for a node process. It ends with its standard input, or when it is told to leave.
func playNode() error {
	p := &player{terms: map[int64]aegis.Term{}}
	if err := json.Unmarshal([]byte(os.Getenv(configEnv)), &p.cfg); err != nil {
		return err
	}
	slog.SetDefault(slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug})))
	var err error
	if p.cli, err = newClient(p.cfg.Endpoints); err != nil {
		return err
	}
	if p.cfg.Guard != "" {
		if p.guard, err = openGuard(p.cfg.Guard); err != nil {
			return err
		}
	}
	ctx := context.Background()
	if p.cfg.System == systemConcurrency {
		go p.playConcurrency(ctx)
		return p.obey(ctx, nil)
	}
	node, err := aegis.Join(ctx, p.cli, aegis.Config{ID: aegis.NodeID(p.cfg.ID), Prefix: p.cfg.Prefix, TTL: ttl, Margin: margin,
		OnEvent: func(e aegis.Event) { p.say(report{Kind: "event", Note: e.String(), Token: e.Term.Token}) }})
	if err != nil {
		p.say(report{Kind: "refused", Err: err.Error(), Taken: errors.Is(err, aegis.ErrNodeIDTaken)})
		return nil
	}
	p.say(report{Kind: "joined"})
	go p.playAegis(ctx, node)
	return p.obey(ctx, node)
}

func openGuard(path string) (*sqlitefence.Guard, error) {
	g, err := sqlitefence.Open(path, sqlitefence.Config{})
	if err != nil {
		return nil, err
	}
	if err := g.Setup(context.Background(), "CREATE TABLE IF NOT EXISTS loot (item TEXT, token INTEGER)"); err != nil {
		return nil, errors.Join(err, g.Close())
	}
	return g, nil
}

// obey does what the test says, a line at a time.
func (p *player) obey(ctx context.Context, node *aegis.Node) error {
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		order, rest, _ := strings.Cut(in.Text(), " ")
		switch order {
		case "write": // token item: a write that is past its check of Held, so nothing but the guard can refuse it
			var token int64
			var item string
			if _, err := fmt.Sscan(rest, &token, &item); err != nil {
				return err
			}
			p.say(p.write(ctx, token, item))
		case "until": // renewed, or a state of health
			p.say(p.until(node, rest))
		case "leave":
			err := node.Leave(ctx)
			p.say(report{Kind: "left", Err: fmt.Sprint(err)})
			return err
		default:
			return fmt.Errorf("unknown order %q", order)
		}
	}
	return nil
}

// until waits until the node has been renewed once more, or is in the given state.
func (p *player) until(node *aegis.Node, what string) report {
	from := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	err := lab.Eventually(ctx, p.cfg.ID+" to be "+what, func(context.Context) (bool, error) {
		h := node.Health()
		return h.State == what || what == "renewed" && h.LastRenewal.After(from), nil
	})
	r := report{Kind: "until", Note: what}
	if err != nil {
		r.Err = fmt.Sprintf("%v; it is %+v", err, node.Health())
	}
	return r
}

func (p *player) write(ctx context.Context, token int64, item string) report {
	p.mu.Lock()
	term := p.terms[token]
	p.mu.Unlock()
	r := report{Kind: "write", Token: token, Note: item}
	_, err := p.guard.Exec(ctx, term, "INSERT INTO loot VALUES (?, ?)", item, token)
	if err == nil {
		return r
	}
	r.Err, r.Fenced = err.Error(), errors.Is(err, aegis.ErrFenced)
	if fenced := (*aegis.FencedError)(nil); errors.As(err, &fenced) {
		r.Token, r.Newest = fenced.Token, fenced.Newest
	}
	return r
}

// playAegis leads whenever it can.
func (p *player) playAegis(ctx context.Context, node *aegis.Node) {
	var opts []aegis.ElectionOption
	if p.guard != nil {
		opts = append(opts, aegis.WithGuards(p.guard))
	}
	err := node.Election(election, opts...).Run(ctx, func(ctx context.Context, led *aegis.Leadership) error {
		p.mu.Lock()
		p.terms[led.Token] = led.Term
		p.mu.Unlock()
		ended := make(chan int64, 1)
		context.AfterFunc(led.Context(), func() { ended <- lab.Now() })
		r := p.sample(ctx, led.Token, led.Held)
		if led.Context().Err() != nil || r.No.Before != 0 {
			r.Ended = <-ended
			r.Cause = fmt.Sprint(context.Cause(led.Context()))
		}
		p.say(r)
		return nil
	})
	p.say(report{Kind: "stopped", Err: fmt.Sprint(err)})
}

// playConcurrency leads whenever it can, by etcd's own package, used as its documentation shows: the leader believes
// to lead until Session.Done is closed.
func (p *player) playConcurrency(ctx context.Context) {
	for {
		s, err := concurrency.NewSession(p.cli, concurrency.WithTTL(int(ttl/time.Second)))
		if err != nil || s == nil {
			continue
		}
		e := concurrency.NewElection(s, p.cfg.Prefix+election)
		if err := e.Campaign(ctx, p.cfg.ID); err != nil {
			fmt.Fprintln(os.Stderr, "campaign:", err)
			_ = s.Close()
			continue
		}
		r := p.sample(ctx, e.Rev(), func() bool {
			select {
			case <-s.Done():
				return false
			default:
				return true
			}
		})
		r.Ended, r.Cause = r.No.After, "session done"
		p.say(r)
	}
}

// sample asks held until it says no or ctx ends, and returns the report of that. It reports the first yes at once.
func (p *player) sample(ctx context.Context, token int64, held func() bool) report {
	r := report{Kind: "end", Token: token}
	pause := time.NewTicker(sampling)
	defer pause.Stop()
	for {
		var s span
		s.Before = lab.Now()
		yes := held()
		s.After = lab.Now()
		if !yes {
			r.No = s
			return r
		}
		if r.Last = s; r.First.Before == 0 {
			r.First = s
			p.say(report{Kind: "won", Token: token, First: s, Last: s})
		}
		select {
		case <-pause.C:
		case <-ctx.Done():
			if held() {
				r.Last.After = lab.Now()
				return r // stopped while it leads
			}
		}
	}
}
