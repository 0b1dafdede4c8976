package aegis

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"
)

// EventKind says what an [Event] tells of.
type EventKind string

// The kinds of events.
const (
	EventJoined           EventKind = "joined"            // the node has a lease: at first, and again after each loss
	EventLeaseLost        EventKind = "lease-lost"        // its lease is no longer trusted; all its terms have ended
	EventElected          EventKind = "elected"           // a term began
	EventLost             EventKind = "lost"              // a term ended against the leader's will
	EventReleased         EventKind = "released"          // a term ended by Resign, Transfer, Leave or a return from Run
	EventGuardUnreachable EventKind = "guard-unreachable" // won, but a guard could not be advanced
	EventOverrun          EventKind = "overrun"           // the work of a term outlives it
	EventSwept            EventKind = "swept"             // a key of this node's that nobody claims was deleted
	EventHalted           EventKind = "halted"            // etcd went back: nobody campaigns until its token offset is raised
	EventDropped          EventKind = "dropped"           // the queue was full: N events are missing before this one
)

// Event is one transition of a node, for logs and metrics.
type Event struct {
	Time time.Time
	Kind EventKind
	Term Term  // of the election concerned; zero where it is the node as a whole
	Err  error // why, where there is a reason
	N    int   // of EventDropped: how many
}

func (e Event) String() string {
	s := string(e.Kind)
	if e.Term.Election != "" {
		s += " " + e.Term.String()
	}
	if e.N > 0 {
		s += fmt.Sprintf(" %d events", e.N)
	}
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// eventQueueLen bounds the events that wait for a slow OnEvent.
const eventQueueLen = 256

// events hands events to the user's function in order, on one goroutine that lives only while there are any.
type events struct {
	log *slog.Logger
	fn  func(Event)

	mu      sync.Mutex
	queue   []Event
	dropped int
	running bool
}

func newEvents(log *slog.Logger, fn func(Event)) *events {
	return &events{log: log, fn: fn}
}

func (q *events) emit(e Event) {
	e.Time = time.Now()
	level := slog.LevelInfo
	switch e.Kind {
	case EventLeaseLost, EventLost, EventGuardUnreachable, EventOverrun, EventHalted:
		level = slog.LevelWarn
	}
	attrs := []any{}
	if e.Term.Election != "" {
		attrs = append(attrs, "election", e.Term.Election, "node", e.Term.Node, "token", e.Term.Token)
	}
	if e.Err != nil {
		attrs = append(attrs, "reason", e.Err)
	}
	q.log.Log(context.Background(), level, "aegis: "+string(e.Kind), attrs...)

	if q.fn == nil {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.queue) >= eventQueueLen {
		q.dropped++
		return
	}
	if q.dropped > 0 {
		q.queue = append(q.queue, Event{Time: e.Time, Kind: EventDropped, N: q.dropped})
		q.dropped = 0
	}
	q.queue = append(q.queue, e)
	if !q.running {
		q.running = true
		go q.deliver()
	}
}

func (q *events) deliver() {
	for {
		q.mu.Lock()
		if len(q.queue) == 0 {
			q.running = false
			q.mu.Unlock()
			return
		}
		batch := q.queue
		q.queue = nil
		q.mu.Unlock()
		for _, e := range batch {
			q.fn(e)
		}
	}
}
