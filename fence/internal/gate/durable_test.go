package gate

import (
	"errors"
	"testing"

	"aegis/fence"
)

func TestDurableGuardBehind(t *testing.T) {
	t.Run("RestartForgetsNothing", func(t *testing.T) {
		m := newMemory()
		advance(t, newGate(t, Config{Durable: m}), boss(7))
		g := newGate(t, Config{Durable: m})
		refused(t, attempt(t, g, boss(6)), 6, 7)
		enter(t, g, boss(7)).End()
	})
	t.Run("TermsTakenElsewhereAreAdmitted", func(t *testing.T) {
		m := newMemory()
		g := newGate(t, Config{Durable: m})
		advance(t, g, boss(7))
		old := enter(t, g, boss(7))
		if err := m.Advance(t.Context(), boss(8)); err != nil {
			t.Fatal(err)
		}
		go func() {
			<-old.Context().Done() // the handler of 8 makes room for itself
			old.End()
		}()
		enter(t, g, boss(8)).End()
		refused(t, attempt(t, g, boss(7)), 7, 8)
		refused(t, attempt(t, g, boss(9)), 9, 8)
	})
	t.Run("LateAnswerDoesNotBringAnOldTermBack", func(t *testing.T) {
		m := newMemory()
		if err := m.Advance(t.Context(), boss(7)); err != nil {
			t.Fatal(err)
		}
		g := newGate(t, Config{Durable: m, MaxNames: 1})
		m.newest = func() { // between reading 7 and answering it
			advance(t, g, boss(8))
			var full *FullError
			if err := g.Advance(t.Context(), of("guild", 9)); !errors.As(err, &full) {
				t.Errorf("what was taken meanwhile was dropped: %v", err)
			}
		}
		refused(t, attempt(t, g, boss(7)), 7, 8)
		enter(t, g, boss(8)).End()
	})
	t.Run("ItsErrorsAdmitNobody", func(t *testing.T) {
		m := newMemory()
		g := newGate(t, Config{Durable: m})
		advance(t, g, boss(7))
		m.fails = errors.New("disk full")
		for _, err := range []error{g.Advance(t.Context(), boss(8)), attempt(t, g, boss(8)), attempt(t, g, of("guild", 1))} {
			if !errors.Is(err, m.fails) || errors.Is(err, fence.ErrFenced) {
				t.Errorf("got %v", err)
			}
		}
		enter(t, g, boss(7)).End() // known to be the newest
		if g.Names() != 1 {
			t.Errorf("%d names are kept", g.Names())
		}
	})
	t.Run("WhatItDoesNotTakeIsNotTaken", func(t *testing.T) {
		m := newMemory()
		g := newGate(t, Config{Durable: m})
		advance(t, g, boss(7))
		m.refuses = errors.New("read only")
		if err := g.Advance(t.Context(), boss(8)); !errors.Is(err, m.refuses) {
			t.Errorf("got %v", err)
		}
		enter(t, g, boss(7)).End()
		refused(t, attempt(t, g, boss(8)), 8, 7)
	})
	t.Run("AdvanceThatWasOvertakenIsTold", func(t *testing.T) {
		m := newMemory()
		g := newGate(t, Config{Durable: m})
		m.taken = func() { m.records["boss"] = fence.Record{Token: 9} } // by another process
		refused(t, g.Advance(t.Context(), boss(8)), 8, 9)
		refused(t, attempt(t, g, boss(8)), 8, 9)
	})
	t.Run("ItsPanicLeavesTheGateUsable", func(t *testing.T) {
		m := newMemory()
		g := newGate(t, Config{Durable: m})
		advance(t, g, boss(7))
		m.newest = func() { panic("driver") }
		func() {
			defer func() {
				if recover() == nil {
					t.Error("the panic was swallowed")
				}
			}()
			_ = attempt(t, g, boss(8))
		}()
		enter(t, g, boss(7)).End()
	})
	t.Run("LearningTakesTheTokenThereFirst", func(t *testing.T) {
		m := newMemory()
		g := newGate(t, Config{Durable: m, Learn: true})
		enter(t, g, boss(7)).End()
		if rec, _ := m.Newest(t.Context(), "boss"); rec.Token != 7 {
			t.Errorf("the durable guard has %v", rec)
		}
		if err := m.Advance(t.Context(), boss(9)); err != nil {
			t.Fatal(err)
		}
		refused(t, attempt(t, g, boss(8)), 8, 9)
	})
}
