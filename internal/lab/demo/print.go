package demo

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// printer shows the demo, at most 100 columns wide, line by line: what it prints on a terminal and in a log is the same
// but for the colours.
type printer struct {
	w     io.Writer
	color bool

	holding bool
	held    []row
}

type color int

const (
	red    color = 31
	green  color = 32
	yellow color = 33
	cyan   color = 36
)

type style struct {
	bold, dim bool
	color     color
}

// paint pads text to a width and gives it a style.
func (p *printer) paint(text string, width int, st style) string {
	if n := utf8.RuneCountInString(text); n < width {
		text += strings.Repeat(" ", width-n)
	}
	var codes []string
	if st.bold {
		codes = append(codes, "1")
	}
	if st.dim {
		codes = append(codes, "2")
	}
	if st.color != 0 {
		codes = append(codes, fmt.Sprint(int(st.color)))
	}
	if !p.color || len(codes) == 0 || strings.TrimSpace(text) == "" {
		return text
	}
	return "\x1b[" + strings.Join(codes, ";") + "m" + text + "\x1b[0m"
}

func (p *printer) line(parts ...string) {
	fmt.Fprintln(p.w, strings.TrimRight(strings.Join(parts, ""), " "))
}

// lane is how a scene stands.
type lane int

const (
	absent lane = iota
	waits
	leads
	stopped
	woken // runs again, its term is over
)

func (l lane) glyph() (string, style) {
	switch l {
	case waits:
		return "┊", style{dim: true}
	case leads:
		return "┃", style{bold: true, color: green}
	case stopped:
		return "░", style{color: yellow}
	case woken:
		return "╏", style{bold: true, color: red}
	}
	return " ", style{}
}

// row is a line of the time line.
type row struct {
	seconds    float64
	name       string // t0 … t4
	lanes      [2]lane
	texts      [2]string
	style      style
	store      string
	storeStyle style
}

const laneWidth = 31

func (p *printer) intro(ttl time.Duration) {
	p.line(p.paint("A split brain, for real.", 0, style{bold: true}), " Two scenes, processes of their own, may own a boss and pay its loot into")
	p.line("an SQLite file. An etcd of three members elects the owner, on a lease of ", ttl.String(), ".")
	p.line()
	p.line(p.paint("starting etcd …", 0, style{dim: true}))
}

func (p *printer) ready(d time.Duration) {
	p.line(p.paint(fmt.Sprintf("three members serve after %.1f s", d.Seconds()), 0, style{dim: true}))
}

func (p *printer) run(m mode) {
	title := map[mode]string{
		plain:   "1. WITHOUT THE FENCE: the leader checks that it leads, then writes to the file",
		guarded: "2. WITH THE FENCE: the same, but the write goes through the guard in the file",
	}[m]
	p.line()
	p.line(p.paint("── "+title+" "+strings.Repeat("─", 100-4-utf8.RuneCountInString(title)), 0, style{bold: true, color: cyan}))
	p.line()
	p.line(p.paint("   time        "+pad(sceneNames[0], laneWidth)+pad(sceneNames[1], laneWidth-2)+"the loot table", 0, style{dim: true}))
}

func pad(s string, width int) string {
	return s + strings.Repeat(" ", max(0, width-utf8.RuneCountInString(s)))
}

// hold keeps rows back until flush shows them in the order of their times.
func (p *printer) hold() { p.holding = true }

func (p *printer) flush() {
	p.holding = false
	slices.SortStableFunc(p.held, func(a, b row) int { return cmp.Compare(a.seconds, b.seconds) })
	for _, r := range p.held {
		p.row(r)
	}
	p.held = nil
}

func (p *printer) row(r row) {
	if p.holding {
		p.held = append(p.held, r)
		return
	}
	parts := []string{p.paint(fmt.Sprintf("%6.2f s", r.seconds), 10, style{dim: true}), p.paint(r.name, 3, style{bold: true, color: cyan})}
	for n := range r.lanes {
		glyph, st := r.lanes[n].glyph()
		parts = append(parts, p.paint(glyph, 2, st), p.paint(r.texts[n], laneWidth-2, r.style))
	}
	p.line(append(parts, p.paint(r.store, 0, r.storeStyle))...)
}

// box is a verdict table.
type box struct {
	title string
	rows  []boxRow
}

type boxRow struct {
	left, right string
	style       style
	rule        bool
}

const boxWidth = 49

func (p *printer) verdict(r *Report) {
	boxes := [2]box{
		p.table("WITHOUT THE FENCE", &r.Unfenced),
		p.table("WITH THE FENCE", &r.Fenced),
	}
	for len(boxes[0].rows) < len(boxes[1].rows) {
		boxes[0].rows = append(boxes[0].rows, boxRow{})
	}
	for len(boxes[1].rows) < len(boxes[0].rows) {
		boxes[1].rows = append(boxes[1].rows, boxRow{})
	}
	for n, f := range []*Facts{&r.Unfenced, &r.Fenced} {
		last := boxRow{left: "✓ ONE OWNER: every kill paid once", style: style{bold: true, color: green}}
		if k := len(f.PaidTwice); k > 0 {
			last = boxRow{left: fmt.Sprintf("✗ SPLIT BRAIN: loot of %d kills paid twice", k), style: style{bold: true, color: red}}
		} else if len(f.failures) > 0 || f.Settled < f.Kills {
			last = boxRow{left: "✗ INCOMPLETE: not every kill is paid", style: style{bold: true, color: red}}
		}
		boxes[n].rows = append(boxes[n].rows, boxRow{rule: true}, last)
	}
	p.line()
	for _, b := range boxes {
		title := "─ " + b.title + " "
		fmt.Fprint(p.w, "╭", p.paint(title, 0, style{bold: true, color: cyan}), strings.Repeat("─", boxWidth-2-utf8.RuneCountInString(title)), "╮")
		if b.title == boxes[0].title {
			fmt.Fprint(p.w, "  ")
		}
	}
	p.line()
	for i := range boxes[0].rows {
		p.line(p.boxRow(boxes[0].rows[i]), "  ", p.boxRow(boxes[1].rows[i]))
	}
	bottom := "╰" + strings.Repeat("─", boxWidth-2) + "╯"
	p.line(bottom, "  ", bottom)
	p.line()
	for _, text := range closing(r) {
		p.line(text)
	}
}

func (p *printer) boxRow(r boxRow) string {
	if r.rule {
		return "├" + strings.Repeat("─", boxWidth-2) + "┤"
	}
	inner := boxWidth - 4
	gap := inner - utf8.RuneCountInString(r.left) - utf8.RuneCountInString(r.right)
	return "│ " + p.paint(r.left+strings.Repeat(" ", max(gap, 0))+r.right, inner, r.style) + " │"
}

func (p *printer) table(title string, f *Facts) box {
	b := box{title: title}
	add := func(left string, right any, st style) {
		b.rows = append(b.rows, boxRow{left: left, right: fmt.Sprint(right), style: st})
	}
	mark := func(bad bool, c color) style {
		if bad {
			return style{bold: true, color: c}
		}
		return style{}
	}
	for _, t := range f.Terms {
		add(t.Scene+" elected", fmt.Sprintf("token %d", t.Token), style{})
	}
	add("scene-01 awake: Held at its first call", yesNo(f.HeldAfter), mark(f.HeldAfter, red))
	add("scene-01 awake: context ended within", fmt.Sprintf("%.0f ms", f.EndedAfter), style{})
	add("writes tried", f.Tried, style{})
	add("  admitted", f.Admitted, style{})
	add("  refused", f.Refused, mark(f.Refused > 0, green))
	add("kills settled", fmt.Sprintf("%d of %d", f.Settled, f.Kills), mark(f.Settled != f.Kills, red))
	add("kills paid twice", len(f.PaidTwice), mark(len(f.PaidTwice) > 0, red))
	add("gold paid, of gold owed", fmt.Sprintf("%d of %d", f.GoldPaid, f.GoldOwed), mark(f.GoldPaid != f.GoldOwed, red))
	b.rows = append(b.rows, boxRow{rule: true})
	for _, c := range f.Contested {
		b.rows = append(b.rows, boxRow{left: fmt.Sprintf("kill %d, %s", c.Kill, c.Item)})
		for n, pay := range c.Paid {
			left := fmt.Sprintf("  paid to %s", pay.Player)
			if n > 0 {
				left = fmt.Sprintf("  PAID AGAIN to %s", pay.Player)
			}
			add(left, fmt.Sprintf("%s, token %d", pay.Scene, pay.Token), mark(n > 0, red))
		}
		for _, t := range c.Tries {
			if t.Outcome == refused {
				add("  refused", fmt.Sprintf("%s, token %d < %d", t.Scene, t.Token, t.Newest), mark(true, green))
			}
		}
	}
	return b
}

// closing says what was shown, or why not.
func closing(r *Report) []string {
	if !r.OK {
		lines := []string{"The demo did not show what it should:"}
		for _, problem := range r.Problems {
			lines = append(lines, "  - "+problem)
		}
		return lines
	}
	return []string{
		"In both runs the old leader stopped by itself: Held was false when it first asked. But its late",
		"writes were past their check, and nothing in the leader can call them back: only the store could",
		fmt.Sprintf("refuse them. All numbers are counted from the databases and the scenes' logs. It took %.0f s.", r.Seconds),
	}
}

func (p *printer) kept(dir string) {
	p.line("Databases and logs are kept in ", dir, ".")
}
