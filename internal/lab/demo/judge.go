package demo

import (
	"fmt"
	"slices"
	"strings"

	"aegis"
)

// Report is what the demo has shown.
type Report struct {
	OK       bool     `json:"ok"`       // the run without the fence shows the damage, and the one with it is clean
	Problems []string `json:"problems"` // why not
	Unfenced Facts    `json:"unfenced"`
	Fenced   Facts    `json:"fenced"`
	Seconds  float64  `json:"seconds"`
}

// Facts are the numbers of one run, counted from its database and its scenes' logs.
type Facts struct {
	Terms      []Reign   `json:"terms"`
	Kills      int       `json:"kills"`
	Settled    int       `json:"settled"` // kills paid at least once
	Tried      int       `json:"tried"`
	Admitted   int       `json:"admitted"`
	Refused    int       `json:"refused"`
	PaidTwice  []int     `json:"paidTwice"` // kills
	GoldPaid   int       `json:"goldPaid"`
	GoldOwed   int       `json:"goldOwed"`
	Contested  []Contest `json:"contested"`            // kills that two terms have tried to pay
	HeldAfter  bool      `json:"heldAfterWaking"`      // Held at scene-01's first call after its stop
	EndedAfter float64   `json:"contextEndedWithinMs"` // of scene-01's being continued, rounded up
	Timeline   []Moment  `json:"timeline"`

	failures []Try     // neither paid nor refused
	tries    []Try     // from the logs
	payments []Payment // from the database
}

// Reign is a term as its leader logged it.
type Reign struct {
	Scene   string      `json:"scene"`
	Token   aegis.Token `json:"token"`
	Seconds float64     `json:"seconds"` // after t0
}

// Contest is a kill that more than one term has tried to pay.
type Contest struct {
	Kill  int       `json:"kill"`
	Item  string    `json:"item"`
	Paid  []Payment `json:"paid"`
	Tries []Try     `json:"tries"`
}

// Moment is one of t0 … t4.
type Moment struct {
	Name    string  `json:"name"`
	Seconds float64 `json:"seconds"` // after t0
	What    string  `json:"what"`
}

// count fills in what follows from the scenes' tries and the ledger.
func (f *Facts) count(tries []Try, l ledger) {
	f.tries, f.payments = tries, l.payments
	f.Kills, f.Tried, f.Admitted = len(l.kills), len(tries), len(l.payments)
	f.GoldPaid, f.GoldOwed = l.gold, gold*len(l.kills)
	f.PaidTwice, f.Contested = []int{}, []Contest{}
	for _, t := range tries {
		switch t.Outcome {
		case refused:
			f.Refused++
		case failed:
			f.failures = append(f.failures, t)
		}
	}
	for _, kill := range l.kills {
		c := Contest{Kill: kill, Item: item(kill), Paid: []Payment{}}
		for _, p := range l.payments {
			if p.Kill == kill {
				c.Paid = append(c.Paid, p)
			}
		}
		for _, t := range tries {
			if t.Kill == kill {
				c.Tries = append(c.Tries, t)
			}
		}
		if len(c.Paid) > 0 {
			f.Settled++
		}
		if len(c.Paid) > 1 {
			f.PaidTwice = append(f.PaidTwice, kill)
		}
		if len(c.Tries) > 1 {
			f.Contested = append(f.Contested, c)
		}
	}
}

// judge decides whether the demo has shown what it is for.
func (r *Report) judge() {
	r.Problems = []string{}
	r.Problems = append(r.Problems, r.Unfenced.common("without")...)
	if r.Unfenced.Refused > 0 {
		r.problem("without the fence: something refused %d writes: a guard is at work", r.Unfenced.Refused)
	}
	if len(r.Unfenced.PaidTwice) == 0 {
		r.problem("without the fence: no kill was paid twice: the damage that the fence prevents was not there")
	}
	r.Problems = append(r.Problems, r.Fenced.common("with")...)
	r.Problems = append(r.Problems, r.Fenced.damage()...)
	r.OK = len(r.Problems) == 0
}

func (r *Report) problem(format string, args ...any) {
	r.Problems = append(r.Problems, fmt.Sprintf(format, args...))
}

// common are the problems that either run can have.
func (f *Facts) common(run string) (problems []string) {
	add := func(format string, args ...any) {
		problems = append(problems, run+" the fence: "+fmt.Sprintf(format, args...))
	}
	if len(f.Terms) != 2 || f.Terms[0].Scene != sceneNames[0] || f.Terms[1].Scene != sceneNames[1] || f.Terms[0].Token >= f.Terms[1].Token {
		add("the terms were %v; expected one of scene-01, then one of scene-02 with a greater token", f.Terms)
	}
	if f.HeldAfter {
		add("Held was true at scene-01's first call after its stop: it did not stop by itself")
	}
	if f.Settled != f.Kills {
		add("%d of %d kills were settled", f.Settled, f.Kills)
	}
	for _, t := range f.failures {
		add("%s failed to pay kill %d under token %d: %s", t.Scene, t.Kill, t.Token, t.Error)
	}
	// The log and the table must tell one story.
	var logged, stored []string
	for _, t := range f.tries {
		if t.Outcome == paid {
			logged = append(logged, fmt.Sprintf("%d/%s/%d", t.Kill, t.Scene, t.Token))
		}
	}
	for _, p := range f.payments {
		stored = append(stored, fmt.Sprintf("%d/%s/%d", p.Kill, p.Scene, p.Token))
	}
	slices.Sort(logged)
	slices.Sort(stored)
	if !slices.Equal(logged, stored) {
		add("the scenes logged the payments %v (kill/scene/token), the table has %v", logged, stored)
	}
	if f.GoldPaid != gold*len(f.payments) {
		add("%d gold for %d rows of loot: they are not written together", f.GoldPaid, len(f.payments))
	}
	return problems
}

// damage is what a fence must prevent, and what it must have been seen to prevent.
func (f *Facts) damage() (problems []string) {
	add := func(format string, args ...any) {
		problems = append(problems, "with the fence: "+fmt.Sprintf(format, args...))
	}
	if n := len(f.PaidTwice); n > 0 {
		add("paid twice: %s", killList(f.PaidTwice))
	}
	if f.GoldPaid != f.GoldOwed {
		add("%d gold paid, %d owed", f.GoldPaid, f.GoldOwed)
	}
	if f.Refused == 0 {
		add("no write was refused: the old leader's late write was not put to the test")
	}
	for _, t := range f.tries {
		if t.Outcome == refused && (t.Scene != sceneNames[0] || t.Token >= t.Newest) {
			add("a write of %s for kill %d was refused, token %d by %d: it was not an old leader's", t.Scene, t.Kill, t.Token, t.Newest)
		}
	}
	return problems
}

func killList(kills []int) string {
	return strings.Trim(fmt.Sprint(kills), "[]")
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}
