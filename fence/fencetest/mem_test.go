package fencetest_test

import (
	"context"
	"errors"
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"aegis/fence"
	"aegis/fence/fencetest"
)

// store is what a guard in memory keeps on its "disk", behind a lock that is fair and knows contexts.
type store struct {
	lock    chan struct{}
	records map[string]fence.Record
	values  map[string]string
	done    map[string]outcome

	committed sync.Map     // the records once more, readable without the lock
	writing   atomic.Int32 // writers that hold or want the lock
	broken    string       // the fault under test, "" for none
}

type outcome struct{ result string }

// subject returns a guard in memory that keeps all rules but the one whose name is broken.
func subject(broken string) fencetest.Subject {
	return (&store{
		lock: make(chan struct{}, 1), records: map[string]fence.Record{}, values: map[string]string{}, done: map[string]outcome{},
		broken: broken,
	}).subject()
}

func (s *store) subject() fencetest.Subject {
	return fencetest.Subject{
		Guard: s,
		Write: s.write,
		Read: func(ctx context.Context, key string) (string, error) {
			if err := s.take(ctx); err != nil {
				return "", err
			}
			defer s.free()
			return s.values[key], nil
		},
		Once: s.once,
		Reopen: func() (fencetest.Subject, error) {
			switch s.broken {
			case "forgets tokens on reopening":
				clear(s.records)
			case "forgets nonces on reopening":
				for name, r := range s.records {
					r.Nonce = 0
					s.records[name] = r
				}
			case "forgets clusters on reopening":
				for name, r := range s.records {
					r.Cluster = 0
					s.records[name] = r
				}
			case "forgets data on reopening":
				clear(s.values)
			case "forgets keys on reopening":
				clear(s.done)
			}
			return s.subject(), nil
		},
		Peer: func() (fencetest.Subject, error) {
			if s.broken == "locks within one client only" {
				peer := &store{lock: make(chan struct{}, 1), records: s.records, values: s.values, done: s.done}
				return peer.subject(), nil
			}
			return s.subject(), nil
		},
	}
}

func (s *store) take(ctx context.Context) error {
	select {
	case s.lock <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *store) free() { <-s.lock }

func (s *store) is(broken string) bool { return s.broken == broken }

// name is the key under which a record is kept.
func (s *store) name(name string) string {
	switch s.broken {
	case "one token for all names":
		return ""
	case "folds case":
		return strings.ToLower(name)
	case "trims spaces":
		return strings.TrimSpace(name)
	case "cuts names at 64 bytes":
		return name[:min(64, len(name))]
	}
	return name
}

func (s *store) Advance(ctx context.Context, terms ...fence.Term) error {
	if s.is("returns before it has advanced") && len(terms) > 0 {
		time.AfterFunc(50*time.Millisecond, func() { s.advance(context.Background(), terms) })
		return nil
	}
	return s.advance(ctx, terms)
}

func (s *store) advance(ctx context.Context, terms []fence.Term) error {
	if s.is("advance ignores its context") {
		ctx = context.Background()
	}
	for s.is("advance is starved by writers") && s.writing.Load() > 0 {
		select {
		case <-time.After(time.Microsecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err := s.take(ctx); err != nil {
		return err
	}
	defer s.free()
	next := maps.Clone(s.records)
	for _, t := range terms {
		old := next[s.name(t.Election)]
		switch {
		case s.is("ignores nonces in Advance"):
			t.Nonce = 0
		case s.is("ignores clusters in Advance"):
			t.Cluster = 0
		case s.is("takes invalid tokens") && fence.ValidToken(t.Token) != nil:
			next[s.name(t.Election)] = fence.Record{Token: t.Token}
			continue
		case s.is("advances downwards") && t.Token < old.Token:
			old = fence.Record{}
		case s.is("refuses the same term twice") && t.Token == old.Token:
			return &fence.FencedError{Name: t.Election, Token: t.Token, Newest: old.Token}
		case s.is("keeps nonces as signed numbers"):
			t.Nonce &^= 1 << 63
		case s.is("lets an unknown cluster replace the known one") && t.Cluster == 0:
			old.Cluster = 0
		}
		r, err := old.Advance(t)
		if err != nil {
			return err
		}
		if s.is("lets an unknown nonce replace the known one") && t.Nonce == 0 {
			r.Nonce = 0
		}
		next[s.name(t.Election)] = r
		if s.is("takes the terms before the refused one") {
			s.records[s.name(t.Election)] = r
		}
	}
	s.records = next
	for name, r := range next {
		s.committed.Store(name, r)
	}
	return nil
}

func (s *store) admit(t fence.Term) error { return s.compare(s.records[s.name(t.Election)], t) }

func (s *store) compare(r fence.Record, t fence.Term) error {
	switch {
	case s.is("admits all"):
		return nil
	case s.is("admits greater tokens") && t.Token > r.Token && r.Token > 0:
		return nil
	case s.is("admits without a record") && r.Token == 0:
		return nil
	case s.is("creates the record on a write") && r.Token == 0 && fence.ValidToken(t.Token) == nil:
		r, _ = r.Advance(t)
		s.records[s.name(t.Election)] = r
	case s.is("ignores nonces in Write"):
		t.Nonce = 0
	case s.is("ignores clusters in Write"):
		t.Cluster = 0
	case s.is("admits invalid tokens") && fence.ValidToken(t.Token) != nil:
		return nil
	case s.is("admits each token once"):
		err := r.Admit(t)
		if err == nil {
			r.Token++
			s.records[s.name(t.Election)] = r
		}
		return err
	case s.is("keeps tokens as 32-bit floats"):
		r.Token, t.Token = int64(float32(r.Token)), int64(float32(t.Token))
	case s.is("keeps nonces as signed numbers"):
		t.Nonce &^= 1 << 63
	}
	err := r.Admit(t)
	if s.is("refuses without numbers") && errors.Is(err, fence.ErrFenced) {
		return fence.ErrFenced
	}
	return err
}

func (s *store) write(ctx context.Context, t fence.Term, key, value string, between func()) error {
	s.writing.Add(1)
	defer s.writing.Add(-1)
	if s.is("fails writers that meet") && s.writing.Load() > 1 {
		return errors.New("database is locked")
	}
	snapshot := fence.Record{}
	if s.is("compares with a snapshot from before the lock") {
		if r, ok := s.committed.Load(s.name(t.Election)); ok {
			snapshot = r.(fence.Record)
		}
	}
	if err := s.take(ctx); err != nil {
		return err
	}
	defer s.free()
	if s.is("writes before it compares") {
		s.values[key] = value
	}
	var err error
	if s.is("compares with a snapshot from before the lock") {
		err = snapshot.Admit(t)
	} else {
		err = s.admit(t)
	}
	if err != nil {
		return err
	}
	if s.is("compares and writes in two steps") {
		s.free()
	}
	if between != nil {
		between()
	}
	if s.is("compares and writes in two steps") {
		s.take(context.Background())
	}
	s.values[key] = value
	if s.is("loses writes") && t.Token%2 == 0 {
		delete(s.values, key)
	}
	return nil
}

func (s *store) once(ctx context.Context, t fence.Term, key string,
	fn func(put func(key, value string) error) ([]byte, error)) ([]byte, bool, error) {
	if err := s.take(ctx); err != nil {
		return nil, false, err
	}
	defer s.free()
	at := t.Election + "\x00" + key
	switch s.broken {
	case "keys are shared by all elections":
		at = key
	case "keys are each term's own":
		at += string(rune(t.Token))
	}
	old, known := s.done[at]
	if known && s.is("answers old terms") {
		return []byte(old.result), false, nil
	}
	if err := s.admit(t); err != nil {
		return nil, false, err
	}
	if known && !s.is("runs repeats") {
		if s.is("answers repeats without the result") {
			return nil, false, nil
		}
		return []byte(old.result), false, nil
	}
	if s.is("records the key although fn failed") {
		s.done[at] = outcome{}
	}
	values := maps.Clone(s.values)
	if s.is("keeps the writes of a failed fn") {
		values = s.values
	}
	if s.is("runs fn outside its lock") {
		s.free()
	}
	result, err := fn(func(key, value string) error { values[key] = value; return nil })
	if s.is("runs fn outside its lock") {
		s.take(context.Background())
	}
	if err != nil {
		return nil, false, err
	}
	s.values = values
	kept := string(result)
	if s.is("keeps results as C strings") {
		kept, _, _ = strings.Cut(kept, "\x00")
	}
	s.done[at] = outcome{kept}
	return result, true, nil
}
