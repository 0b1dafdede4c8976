package demo

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"time"

	"aegis"
	"aegis/fence/sqlitefence"
	"aegis/internal/lab"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// world plays one run: it is the game that kills bosses, the combat log that scenes ask, and fate.
type world struct {
	cfg     Config
	mode    mode
	dir     string
	cluster *lab.Cluster
	show    *printer

	db     *sql.DB
	guard  *sqlitefence.Guard // in the file, to be asked what it has taken; nil without the fence
	cli    *clientv3.Client
	prefix string
	scenes [2]*actor
	events chan heard

	zero     int64            // t0, by lab.Now
	boss     <-chan time.Time // it is killed whenever this ticks
	kills    int
	withhold bool // scene-01's next round gets no answer
	facts    *Facts
	tries    []Try
}

// actor is a scene as the world sees it.
type actor struct {
	name    string
	process *lab.Process
	log     *os.File
	lane    lane

	token   aegis.Token // of its latest term
	at      int64       // when it was elected
	asks    []int       // the round that it has no answer to
	settled int         // kills, in rounds that are over
	last    event       // wrote
	woke    *event
	ended   *event
}

// heard is a line of a scene's log, or that there are no more.
type heard struct {
	scene int
	event event
	err   error
}

const patience = 20 * time.Second // for any one thing that must happen, besides two leases

func (w *world) play(ctx context.Context) (_ *Facts, err error) {
	file := filepath.Join(w.dir, w.mode.file())
	s, err := openStore(file, w.mode, false)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	w.db, w.guard = s.db, s.guard
	if _, err := w.db.ExecContext(ctx, schema); err != nil {
		return nil, fmt.Errorf("create the tables: %w", err)
	}
	w.prefix = "/demo/" + string(w.mode) + "/"
	if w.cli, err = w.cluster.Client("world"); err != nil {
		return nil, err
	}
	defer w.cli.Close()
	w.facts = &Facts{}
	w.events = make(chan heard)
	readers, stop := context.WithCancel(ctx)
	defer func() {
		for _, a := range w.scenes {
			if a != nil {
				a.process.Close()
				err = errors.Join(err, a.log.Close())
			}
		}
		stop()
	}()
	boss := time.NewTicker(killEach)
	defer boss.Stop()
	w.show.run(w.mode)
	for _, step := range []func(context.Context) error{
		func(context.Context) error { return w.enter(readers, 0) },
		func(ctx context.Context) error { return w.elect(ctx, boss.C) },
		func(context.Context) error { return w.enter(readers, 1) },
		w.candidate,
		w.part,
		w.succeed,
		w.heal,
		w.recover,
		w.finish,
	} {
		if err := step(ctx); err != nil {
			return nil, err
		}
	}
	ledger, err := audit(ctx, w.db)
	if err != nil {
		return nil, fmt.Errorf("count: %w", err)
	}
	w.facts.count(w.tries, ledger)
	return w.facts, nil
}

// enter starts a scene, and listens to it until ctx ends.
func (w *world) enter(ctx context.Context, n int) error {
	a := &actor{name: sceneNames[n]}
	var err error
	a.log, err = os.Create(filepath.Join(w.dir, string(w.mode)+"-the-fence-"+a.name+".log"))
	if err != nil {
		return err
	}
	o := orders{Name: a.name, Mode: w.mode, Database: filepath.Join(w.dir, w.mode.file()), Endpoints: w.cluster.Endpoints(a.name),
		Prefix: w.prefix, TTL: w.cfg.TTL, Bypass: w.cfg.bypass}
	a.process, err = lab.Run(lab.Command{Name: a.name, Role: Role, Args: w.cfg.Scene, Env: []string{o.env()}})
	if err != nil {
		return errors.Join(err, a.log.Close())
	}
	w.scenes[n] = a
	go func() {
		for {
			line, err := a.process.Next(ctx)
			h := heard{scene: n, err: err}
			if err == nil {
				if err := json.Unmarshal([]byte(line.Text), &h.event); err != nil {
					h.err = fmt.Errorf("%s says %q: %w", a.name, line.Text, err)
				}
				fmt.Fprintln(a.log, line.Text)
			}
			select {
			case w.events <- h:
			case <-ctx.Done():
				return
			}
			if h.err != nil {
				return
			}
		}
	}()
	return nil
}

// await lets the world turn until done says so: it takes what scenes say, answers them, and kills the boss. waiting is
// what each lane shows in every second of silence.
func (w *world) await(ctx context.Context, what string, waiting func(d time.Duration) [2]string, done func() bool) error {
	within := patience + 2*w.cfg.TTL
	ctx, cancel := context.WithTimeoutCause(ctx, within, fmt.Errorf("did not happen within %v", within))
	defer cancel()
	second := time.NewTicker(time.Second)
	defer second.Stop()
	begin := lab.Now()
	for !done() {
		var err error
		select {
		case h := <-w.events:
			err = w.hear(h)
		case <-w.boss:
			err = w.killBoss(ctx)
		case <-second.C:
			if waiting != nil {
				w.row(lab.Now(), "", waiting(time.Duration(lab.Now()-begin)), style{dim: true}, "")
			}
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
		if err != nil {
			return fmt.Errorf("%s: %w%s", what, err, w.stderr())
		}
	}
	return nil
}

func (w *world) stderr() string {
	var s strings.Builder
	for _, a := range w.scenes {
		if a == nil {
			continue
		}
		if text := strings.TrimSpace(a.process.Stderr()); text != "" {
			lines := strings.Split(text, "\n")
			fmt.Fprintf(&s, "\n%s's log ends with:\n%s", a.name, strings.Join(lines[max(0, len(lines)-8):], "\n"))
		}
	}
	return s.String()
}

// hear takes one line of a scene.
func (w *world) hear(h heard) error {
	a := w.scenes[h.scene]
	if errors.Is(h.err, io.EOF) {
		return fmt.Errorf("%s ended: %w", a.name, a.process.Wait(context.Background()))
	}
	if h.err != nil {
		return h.err
	}
	e := h.event
	switch e.Event {
	case elected:
		a.token, a.at = e.Token, e.At
		if w.zero == 0 {
			w.zero = e.At
		}
		w.facts.Terms = append(w.facts.Terms, Reign{Scene: a.name, Token: e.Token, Seconds: w.since(e.At)})
	case asks:
		a.asks = e.Kills
		if h.scene == 0 && w.withhold {
			return nil
		}
		return w.answer(a)
	case wrote:
		a.last = e
		a.settled += len(e.Kills)
		w.tries = append(w.tries, e.Tries...)
		if !w.late(h.scene) {
			w.round(h.scene, e)
		}
	case woke:
		if e.Held == nil {
			return fmt.Errorf("%s woke, but does not say whether Held was true", a.name)
		}
		a.woke = &e
	case ended:
		a.ended = &e
	}
	return nil
}

// late reports whether what the scene writes was decided before its stop.
func (w *world) late(n int) bool { return n == 0 && w.withhold }

// answer is the combat log's: who took part in the kills.
func (w *world) answer(a *actor) error {
	a.asks = nil
	return a.process.Send("party " + strings.Join(players, " "))
}

func (w *world) killBoss(ctx context.Context) error {
	w.kills++
	if _, err := w.db.ExecContext(ctx, "INSERT INTO kills (id, item) VALUES (?, ?)", w.kills, item(w.kills)); err != nil {
		return fmt.Errorf("kill %d: %w", w.kills, err)
	}
	for n, a := range w.scenes {
		if a == nil || n == 0 && a.lane == stopped { // a stopped process reads nothing; it will look by itself
			continue
		}
		if err := a.process.Send(fmt.Sprint("kill ", w.kills)); err != nil {
			return err
		}
	}
	return nil
}

func (w *world) since(at int64) float64 { return seconds(time.Duration(at - w.zero)) }

func (w *world) moment(name string, at int64, what string) {
	w.facts.Timeline = append(w.facts.Timeline, Moment{Name: name, Seconds: w.since(at), What: what})
}

func (w *world) row(at int64, name string, texts [2]string, st style, store string, storeStyle ...style) {
	r := row{seconds: w.since(at), name: name, style: st, store: store}
	for _, s := range storeStyle {
		r.storeStyle = s
	}
	for n, a := range w.scenes {
		r.texts[n] = texts[n]
		if a != nil {
			r.lanes[n] = a.lane
		}
	}
	w.show.row(r)
}

// round shows what a scene has written.
func (w *world) round(n int, e event) {
	var texts [2]string
	texts[n] = "pays kills " + killList(e.Kills)
	w.row(e.At, "", texts, style{}, outcome(e.Tries))
}

// outcome says in few words how a round ended.
func outcome(tries []Try) string {
	var admitted int
	for _, t := range tries {
		switch t.Outcome {
		case refused:
			return fmt.Sprintf("refused: token %d < %d", t.Token, t.Newest)
		case failed:
			return "failed: " + t.Error
		}
		admitted++
	}
	return fmt.Sprintf("+%d items, +%d gold", admitted, admitted*gold)
}

// elect is t0.
func (w *world) elect(ctx context.Context, boss <-chan time.Time) error {
	a := w.scenes[0]
	if err := w.await(ctx, "scene-01 is elected", nil, func() bool { return a.token != 0 }); err != nil {
		return err
	}
	a.lane = leads
	w.moment("t0", a.at, fmt.Sprintf("scene-01 is elected, token %d", a.token))
	took, err := w.took(ctx)
	if err != nil {
		return err
	}
	w.row(a.at, "t0", [2]string{fmt.Sprintf("elected, token %d", a.token)}, style{bold: true}, took)
	w.boss = boss
	return nil
}

// took says which token the guard has taken; Run has it take each term's before it calls the scene.
func (w *world) took(ctx context.Context) (string, error) {
	if w.guard == nil {
		return "", nil
	}
	newest, err := w.guard.Newest(ctx, election)
	return fmt.Sprintf("guard takes token %d", newest.Token), err
}

// candidate waits until scene-02 stands in the queue.
func (w *world) candidate(ctx context.Context) error {
	if err := w.queues(ctx, sceneNames[1]); err != nil {
		return err
	}
	w.scenes[1].lane = waits
	w.row(lab.Now(), "", [2]string{"", "waits its turn"}, style{dim: true}, "")
	return nil
}

// queues waits until etcd lists the scene as a candidate, and lets the world turn meanwhile.
func (w *world) queues(ctx context.Context, name string) error {
	found := make(chan error, 1)
	asking, cancel := context.WithTimeout(ctx, patience+2*w.cfg.TTL)
	defer cancel()
	go func() {
		found <- lab.Eventually(asking, name+" waits", func(ctx context.Context) (bool, error) {
			infos, err := aegis.Open(w.cli, w.prefix).Elections(ctx)
			for _, i := range infos {
				for _, c := range i.Candidates {
					if string(c.Node) == name {
						return true, nil
					}
				}
			}
			return false, err
		})
	}()
	var err error
	over := false
	return errors.Join(w.await(ctx, name+" waits its turn", nil, func() bool {
		if !over {
			select {
			case err = <-found:
				over = true
			default:
			}
		}
		return over
	}), err)
}

// part is t1: between scene-01's check and its write.
func (w *world) part(ctx context.Context) error {
	a := w.scenes[0]
	if err := w.await(ctx, "scene-01 settles two rounds", nil, func() bool { return a.settled >= 2*round }); err != nil {
		return err
	}
	w.withhold = true
	if err := w.await(ctx, "scene-01 is past its check", nil, func() bool { return a.asks != nil }); err != nil {
		return err
	}
	w.row(lab.Now(), "", [2]string{"Held? yes: kills " + killList(a.asks) + " …"}, style{}, "")
	w.cluster.Cut(a.name, lab.Both)
	if err := a.process.Stop(); err != nil {
		return err
	}
	at := lab.Now()
	a.lane = stopped
	w.moment("t1", at, fmt.Sprintf("scene-01, past its check for kills %s, is cut off from etcd and stopped", killList(a.asks)))
	w.row(at, "t1", [2]string{"cut off from etcd, stopped"}, style{bold: true, color: yellow}, "")
	return nil
}

// succeed is t2: scene-02 takes over, and pays what scene-01 was about to pay.
func (w *world) succeed(ctx context.Context) error {
	old, a := w.scenes[0], w.scenes[1]
	waiting := func(d time.Duration) [2]string {
		return [2]string{fmt.Sprintf("stopped for %.0f s", d.Seconds()), "waits for the lease's end"}
	}
	if err := w.await(ctx, "scene-02 is elected", waiting, func() bool { return a.token != 0 }); err != nil {
		return err
	}
	a.lane = leads
	w.moment("t2", a.at, fmt.Sprintf("scene-01's lease has run out; scene-02 is elected, token %d", a.token))
	took, err := w.took(ctx)
	if err != nil {
		return err
	}
	w.row(a.at, "t2", [2]string{"its lease has run out", fmt.Sprintf("elected, token %d", a.token)}, style{bold: true}, took)
	return w.await(ctx, "scene-02 pays the kills of scene-01's last round", nil, func() bool { return a.settled >= len(old.asks) })
}

// heal is t3, and t4: scene-01 runs again and writes what it had decided.
func (w *world) heal(ctx context.Context) error {
	a := w.scenes[0]
	kills := a.asks
	w.cluster.Heal(a.name)
	if err := w.answer(a); err != nil { // into the pipe of a process that does not read yet
		return err
	}
	a.woke, a.ended = nil, nil
	before, at := a.settled, lab.Now()
	if err := a.process.Continue(); err != nil {
		return err
	}
	a.lane = woken
	w.moment("t3", at, "the network heals, and scene-01 runs again")
	w.row(at, "t3", [2]string{"network healed, runs again"}, style{bold: true, color: yellow}, "")
	w.show.hold() // what several processes log within milliseconds is shown in its order
	if err := w.await(ctx, "scene-01 wakes and writes", nil, func() bool {
		return a.woke != nil && a.ended != nil && a.settled > before
	}); err != nil {
		return err
	}
	w.facts.HeldAfter = *a.woke.Held
	w.facts.EndedAfter = math.Ceil(float64(a.ended.At-at) / float64(time.Millisecond))
	held := "Held? no: stops by itself"
	if w.facts.HeldAfter {
		held = "Held? YES"
	}
	w.row(a.woke.At, "", [2]string{held}, style{}, "")
	late, st := outcome(a.last.Tries), style{bold: true, color: green}
	const doubles = "SELECT kill FROM loot GROUP BY kill HAVING count(*) > 1 ORDER BY kill"
	twice, err := column[int](ctx, w.db, doubles)
	if err != nil {
		return err
	}
	if len(twice) > 0 {
		late, st = "kills "+killList(twice)+" PAID TWICE", style{bold: true, color: red}
	}
	w.moment("t4", a.last.At, fmt.Sprintf("scene-01's late writes for kills %s reach the store: %s", killList(kills), late))
	w.row(a.last.At, "t4", [2]string{"late writes: kills " + killList(kills)}, style{bold: true}, late, st)
	w.show.flush()
	w.withhold = false
	return nil
}

// recover sees that scene-01 comes back, as a candidate, and that scene-02 works on.
func (w *world) recover(ctx context.Context) error {
	if err := w.queues(ctx, sceneNames[0]); err != nil {
		return err
	}
	w.scenes[0].lane = waits
	w.row(lab.Now(), "", [2]string{"back: waits its turn"}, style{dim: true}, "")
	rounds := w.scenes[1].settled
	return w.await(ctx, "scene-02 works on", nil, func() bool { return w.scenes[1].settled > rounds })
}

// finish lets scene-02 settle what is left and has both leave.
func (w *world) finish(ctx context.Context) error {
	if err := w.await(ctx, "the last kill", nil, func() bool { return w.kills >= leastKills && w.kills%round == 0 }); err != nil {
		return err
	}
	w.boss = nil
	err := w.await(ctx, "the last round", nil, func() bool {
		paidFor := map[int]bool{}
		for _, t := range w.tries {
			if t.Outcome == paid {
				paidFor[t.Kill] = true
			}
		}
		return len(paidFor) == w.kills
	})
	if err != nil {
		return err
	}
	for _, a := range w.scenes { // the candidate first, so that nobody follows the leader
		a.process.CloseInput()
		if err := w.leaves(ctx, a); err != nil {
			return err
		}
	}
	return nil
}

func (w *world) leaves(ctx context.Context, a *actor) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return a.process.Wait(ctx)
}
