package main

import (
	"time"

	"aegis"
)

// The shapes of -o json. Fields are only ever added.

// termJSON is how a term looks in JSON.
type termJSON struct {
	Election string       `json:"election"`
	Node     aegis.NodeID `json:"node"`
	Token    aegis.Token  `json:"token"`
}

// transition is one line of campaign and watch.
type transition struct {
	Time     time.Time    `json:"time"`
	Event    string       `json:"event"`
	Election string       `json:"election"`
	Node     aegis.NodeID `json:"node,omitempty"`
	Token    aegis.Token  `json:"token,omitempty"`
	Reason   string       `json:"reason,omitempty"`
}

type electionJSON struct {
	Election  string          `json:"election"`
	Leader    *leaderJSON     `json:"leader"` // null when vacant
	Waiting   []candidateJSON `json:"waiting"`
	LastEnded string          `json:"lastEnded,omitempty"`
	Faults    []string        `json:"faults,omitempty"`
}

type leaderJSON struct {
	Node         aegis.NodeID `json:"node"`
	Token        aegis.Token  `json:"token"`
	Host         string       `json:"host,omitempty"`
	PID          int          `json:"pid,omitempty"`
	Since        time.Time    `json:"since,omitzero"`
	LeaseSeconds int          `json:"leaseSeconds"`
}

type candidateJSON struct {
	Node     aegis.NodeID `json:"node"`
	Priority int          `json:"priority"`
	Since    time.Time    `json:"since,omitzero"`
}

func electionsJSON(infos []aegis.ElectionInfo) []electionJSON {
	out := make([]electionJSON, 0, len(infos))
	for _, i := range infos {
		e := electionJSON{Election: i.Name, LastEnded: i.LastEnd, Faults: i.Faults, Waiting: []candidateJSON{}}
		if i.Term.Token != 0 {
			e.Leader = &leaderJSON{Node: i.Term.Node, Token: i.Term.Token, Host: i.Host, PID: i.PID, Since: i.Since, LeaseSeconds: int(i.LeaseLeft / time.Second)}
		}
		for _, c := range i.Candidates {
			e.Waiting = append(e.Waiting, candidateJSON(c))
		}
		out = append(out, e)
	}
	return out
}

type memberJSON struct {
	ID        aegis.NodeID      `json:"id"`
	Host      string            `json:"host,omitempty"`
	PID       int               `json:"pid,omitempty"`
	Started   time.Time         `json:"started,omitzero"`
	Program   string            `json:"program,omitempty"`
	Meta      map[string]string `json:"meta,omitempty"`
	Addresses []string          `json:"addresses,omitempty"`
	Fault     string            `json:"fault,omitempty"`
}

func membersJSON(members []aegis.Member) []memberJSON {
	out := make([]memberJSON, 0, len(members))
	for _, m := range members {
		out = append(out, memberJSON(m))
	}
	return out
}
