package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"aegis"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
	"golang.org/x/term"
)

func init() {
	// The library looks at NO_COLOR and TERM, not at where the output goes.
	if !term.IsTerminal(int(os.Stdout.Fd())) && os.Getenv("FORCE_COLOR") == "" || os.Getenv("NO_COLOR") != "" {
		text.DisableColors()
	}
}

var (
	good = text.Colors{text.FgGreen}
	bad  = text.Colors{text.FgRed}
	warn = text.Colors{text.FgYellow}
	dim  = text.Colors{text.Faint}
)

// printTable prints rows under a header, without lines around them, so that they can be copied and cut.
func printTable(w io.Writer, header table.Row, rows []table.Row) {
	t := table.NewWriter()
	t.SetOutputMirror(w)
	style := table.StyleLight
	style.Options = table.OptionsNoBordersAndSeparators
	style.Box.PaddingLeft, style.Box.PaddingRight = "", "   "
	style.Color.Header = text.Colors{text.Bold}
	style.Format.Header = text.FormatUpper
	t.SetStyle(style)
	t.AppendHeader(header)
	t.AppendRows(rows)
	t.SuppressTrailingSpaces()
	t.Render()
}

func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

var eventColors = map[string]text.Colors{"elected": good, "leader": good, "lost": bad, "vacant": warn, "waiting": dim, "released": dim}

// line prints a transition as a line of text or of JSON.
func (o *options) line(w io.Writer, event string, t aegis.Term, reason string) {
	now := time.Now()
	if o.output == "json" {
		b, err := json.Marshal(transition{Time: now, Event: event, Election: t.Election, Node: t.Node, Token: t.Token, Reason: reason})
		if err == nil {
			fmt.Fprintf(w, "%s\n", b)
		}
		return
	}
	s := dim.Sprint(now.Format("15:04:05.000")) + "  " + eventColors[event].Sprintf("%-8s", event) + "  " + t.Election
	if t.Token != 0 {
		s += fmt.Sprintf("  %s  token %d", t.Node, t.Token)
	}
	if reason != "" {
		s += ": " + reason
	}
	fmt.Fprintln(w, s)
}

// ago shows a time for people: when it was and how long ago.
func ago(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	layout := time.TimeOnly
	if time.Since(t) > 20*time.Hour {
		layout = "2006-01-02 15:04"
	}
	return fmt.Sprintf("%s (%s ago)", t.Local().Format(layout), short(time.Since(t)))
}

// short shows a duration in its two largest units.
func short(d time.Duration) string {
	switch d = max(d, 0); {
	case d >= 48*time.Hour:
		return fmt.Sprintf("%dd%dh", d/(24*time.Hour), d%(24*time.Hour)/time.Hour)
	case d >= time.Hour:
		return strings.TrimSuffix(d.Truncate(time.Minute).String(), "0s")
	}
	return d.Truncate(time.Second).String()
}
