package etcdsim

import (
	"container/heap"
	"time"
)

// loop runs events in the order of their times, and in the order of their making where the times are equal. It uses
// one timer and no goroutine of its own. All of it is guarded by the cluster's mutex, under which events run.
type loop struct {
	events  queue
	seq     uint64
	timer   *time.Timer
	armed   time.Time // when the timer rings; zero when it does not
	running bool
	outside []func() // to be run by the loop without the mutex: what users gave us
}

type event struct {
	at  time.Time
	seq uint64
	run func()
}

// at has run called at t, with c.mu held. c.mu must be held.
func (c *Cluster) at(t time.Time, run func()) {
	c.loop.seq++
	heap.Push(&c.loop.events, event{t, c.loop.seq, run})
	if !c.loop.running {
		c.arm()
	}
}

// arm sets the timer for the first event. c.mu must be held.
func (c *Cluster) arm() {
	l := &c.loop
	if len(l.events) == 0 {
		return
	}
	first := l.events[0].at
	if !l.armed.IsZero() && !first.Before(l.armed) {
		return
	}
	l.armed = first
	d := max(0, time.Until(first))
	if l.timer == nil {
		l.timer = time.AfterFunc(d, c.fire)
	} else {
		l.timer.Reset(d)
	}
}

func (c *Cluster) fire() {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := &c.loop
	l.armed = time.Time{}
	if l.running {
		return // a function of the user's blocks the loop in another goroutine; it goes on from there
	}
	l.running = true
	for len(l.events) > 0 && !l.events[0].at.After(time.Now()) {
		e := heap.Pop(&l.events).(event)
		e.run()
		for len(l.outside) > 0 {
			f := l.outside[0]
			l.outside = l.outside[1:]
			c.mu.Unlock()
			f()
			c.mu.Lock()
		}
	}
	l.running = false
	c.arm()
}

type queue []event

func (q queue) Len() int { return len(q) }
func (q queue) Less(i, j int) bool {
	return q[i].at.Before(q[j].at) || q[i].at.Equal(q[j].at) && q[i].seq < q[j].seq
}
func (q queue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *queue) Push(e any)   { *q = append(*q, e.(event)) }
func (q *queue) Pop() any {
	old := *q
	e := old[len(old)-1]
	old[len(old)-1] = event{}
	*q = old[:len(old)-1]
	return e
}
