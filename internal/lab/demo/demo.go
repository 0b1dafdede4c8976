// Package demo plays the split brain for real, once without and once with the fence, and counts what it did.
//
//	t0  scene-01 is elected and settles the kills of a boss
//	t1  past its check and before its write, scene-01 is stopped (SIGSTOP) and cut off from etcd
//	t2  its lease runs out; scene-02 is elected and settles the same kills
//	t3  the network heals, scene-01 runs again (SIGCONT)
//	t4  what it had decided before the stop reaches the store
//
// The scenes are processes, etcd is three members, the cut is a black hole in the network, the store is an SQLite file.
// Both runs are one program, one election and one sequence of faults. They differ in one call: whether a settlement goes
// through the guard (sqlitefence's Do) or to the file directly. In both runs the scene checks Leadership.Held
// before it settles, and in both runs its tick loop sees Held false at its first call after the stop: the leader stops
// by itself. But what is between its check and its write at that moment is past every check, and only the store can
// refuse it. (A unique key on the kill would catch this very double, in SQL, if somebody had thought of it. It would not
// catch what has no such key: a balance overwritten, a row deleted, a plan replaced by a leader of the past.)
//
// Nothing waits for a time: scene-01 is stopped when it says that it is past its check, and runs again when scene-02 says
// that it has paid the same kills. The numbers are counted from the database and from what the scenes logged.
package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"aegis/internal/lab"
)

// Bounds of Config.TTL.
const (
	MinTTL     = 2 * time.Second
	MaxTTL     = 30 * time.Second
	DefaultTTL = 3 * time.Second
)

// Config says how the demo is played. The zero value is ready, but for Scene.
type Config struct {
	TTL   time.Duration // of the scenes' leases; defaults to DefaultTTL; whole seconds from MinTTL to MaxTTL
	Scene []string      // arguments with which this executable, started again, calls Scene
	Keep  string        // directory for the databases and logs; defaults to none: they are removed
	Out   io.Writer     // takes the time line; defaults to none
	Color bool          // Out shows colours

	bypass bool // tests: in the run with the fence, writes go around the guard
	_      struct{}
}

// ErrConfig: a field of Config is out of its bounds.
var ErrConfig = errors.New("bad configuration")

func (c *Config) validate() error {
	if c.TTL == 0 {
		c.TTL = DefaultTTL
	}
	if c.TTL < MinTTL || c.TTL > MaxTTL || c.TTL%time.Second != 0 {
		return fmt.Errorf("%w: the TTL is %v; it must be whole seconds from %v to %v", ErrConfig, c.TTL, MinTTL, MaxTTL)
	}
	if c.Out == nil {
		c.Out = io.Discard
	}
	if c.Keep == "" {
		return nil
	}
	if err := os.MkdirAll(c.Keep, 0o755); err != nil {
		return fmt.Errorf("keep: %w", err)
	}
	for _, mode := range []mode{plain, guarded} {
		if _, err := os.Stat(filepath.Join(c.Keep, mode.file())); err == nil {
			return fmt.Errorf("%w: %s holds the database of another demo; name another directory to keep this one's", ErrConfig, c.Keep)
		}
	}
	return nil
}

// Run plays both runs. Its error is a failure of the demo itself; that a run did not show what it should is in the
// report. It ends all processes and removes all files that it made, also when ctx ends.
func Run(ctx context.Context, cfg Config) (_ *Report, err error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	begin := time.Now()
	tmp, err := os.MkdirTemp("", "aegis-demo-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	dir := cfg.Keep
	if dir == "" {
		dir = tmp
	}
	show := &printer{w: cfg.Out, color: cfg.Color}
	show.intro(cfg.TTL)
	cluster, err := lab.Start(ctx, lab.Options{Members: 3, Dir: filepath.Join(tmp, "etcd")})
	if err != nil {
		return nil, interrupted(ctx, err)
	}
	defer func() { err = errors.Join(err, cluster.Close()) }()
	show.ready(time.Since(begin))

	report := &Report{}
	for _, part := range []struct {
		mode mode
		runs *Facts
	}{{plain, &report.Unfenced}, {guarded, &report.Fenced}} {
		w := &world{cfg: cfg, mode: part.mode, dir: dir, cluster: cluster, show: show}
		facts, err := w.play(ctx)
		if err != nil {
			return nil, interrupted(ctx, fmt.Errorf("the run %s the fence: %w", part.mode, err))
		}
		*part.runs = *facts
	}
	report.Seconds = seconds(time.Since(begin))
	report.judge()
	show.verdict(report)
	if cfg.Keep != "" {
		show.kept(cfg.Keep)
	}
	return report, nil
}

// interrupted makes the end of ctx the one reason: what it broke on the way is of no interest.
func interrupted(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// mode is what the two runs differ in.
type mode string

const (
	plain   mode = "without"
	guarded mode = "with"
)

func (m mode) file() string { return string(m) + "-the-fence.db" }

// The story's constants.
const (
	election = "boss/42"
	round    = 3 // kills that a scene settles after one check
	gold     = 100
	killEach = 400 * time.Millisecond

	leastKills = 18
)

var (
	sceneNames = [2]string{"scene-01", "scene-02"}
	players    = []string{"Ayla", "Boran", "Cato", "Dara"}
	items      = []string{"Ember Blade", "Frost Helm", "Storm Ring", "Oak Shield", "Night Cloak", "Sun Amulet", "Bone Bow", "Moon Staff", "Wolf Mantle"}
)

func item(kill int) string { return items[(kill-1)%len(items)] }

func seconds(d time.Duration) float64 {
	return float64(d.Round(time.Millisecond)) / float64(time.Second)
}

// environment carries the scene's orders to its process.
const environment = "AEGIS_DEMO_SCENE"

// orders are what a scene is told at its start.
type orders struct {
	Name      string
	Mode      mode
	Database  string
	Endpoints []string
	Prefix    string
	TTL       time.Duration
	Bypass    bool // see Config
}

func (o orders) env() string {
	b, _ := json.Marshal(o)
	return environment + "=" + string(b)
}

// Role is the lab's role of a scene's process, for a test's TestMain.
const Role = "demo-scene"
