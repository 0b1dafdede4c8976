package pgfence_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	osexec "os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"aegis/fence"
	"aegis/fence/pgfence"

	"github.com/jackc/pgx/v5/pgxpool"
)

func itoa(n int) string { return strconv.Itoa(n) }

// settle hands out the loot of a kill once.
func settle(ctx context.Context, g *pgfence.Guard, t fence.Term, kill string) (string, bool, error) {
	result, first, err := g.Once(ctx, t, kill, func(tx *pgfence.Tx) ([]byte, error) {
		result := fmt.Sprintf("%s by %d", kill, t.Token)
		return []byte(result), insert(result)(tx)
	})
	return string(result), first, err
}

// Settlements are cut off at a random piece of the conversation, most often around the commit and its reply,
// and repeated by the same term or the next one: each is done once, and the repeat returns what was done.
// AEGIS_TEST_KILLS says how many.
func TestSettlementsCutAtRandomPointsAreDoneOnce(t *testing.T) {
	t.Parallel()
	kills := 250
	if n, err := strconv.Atoi(os.Getenv("AEGIS_TEST_KILLS")); err == nil { // such as 1000, which takes 20 s and more
		kills = n
	}
	rng := seeded(t)
	p := startProxy(t)
	name := database(t)
	g := guardOn(t, connect(t, pg.URL(name, "postgres"), through(p)), pgfence.Config{})
	pool := connect(t, pg.URL(name, "postgres"))
	ctx := context.Background()
	token := fence.Token(1)
	if err := g.Advance(ctx, term(token)); err != nil {
		t.Fatal(err)
	}
	unknown, known, done := 0, 0, 0
	var said []string
	for i := range kills {
		kill := fmt.Sprint("kill-", i)
		var seen atomic.Int64
		at, reply := rng.Int64N(6), rng.IntN(2) == 0
		cut := func(isReply bool, _ []byte) bool { return isReply == reply && seen.Add(1) == at+1 }
		p.cut.Store(&cut)
		first, _, err := settle(ctx, g, term(token), kill)
		p.cut.Store(nil)
		switch {
		case err == nil:
			done++
		case errors.Is(err, fence.ErrUnknown):
			unknown++
		case errors.Is(err, fence.ErrFenced):
			t.Fatal(err)
		default:
			known++
		}
		if rng.IntN(3) == 0 {
			token++
			if err := g.Advance(ctx, term(token)); err != nil {
				t.Fatal(err)
			}
		}
		again, isFirst, e := settle(ctx, g, term(token), kill)
		if e != nil {
			t.Fatal(e)
		}
		// What was done is returned, and an error that said that nothing was done spoke the truth.
		if err == nil && (again != first || isFirst) || err != nil && !errors.Is(err, fence.ErrUnknown) && !isFirst {
			t.Fatalf("kill %d: %q, %v; then %q (first=%v)", i, first, err, again, isFirst)
		}
		said = append(said, again)
	}
	wantLoot(t, pool, said...)
	t.Logf("done %d, failed %d, unknown %d", done, known, unknown)
	if unknown < kills/30 || known < kills/30 || done < kills/30 {
		t.Error("the cuts do not reach all points")
	}
}

// playSettler is the process that settles kill after kill until it is killed; with AEGIS_TEST_LEAVE_OPEN it stops in
// the middle of a transaction instead and goes on when told to.
func playSettler(url string) {
	ctx := context.Background()
	fail := func(err error) {
		fmt.Println("failed:", err)
		os.Exit(1)
	}
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		fail(err)
	}
	cfg.ConnConfig.RuntimeParams["application_name"] = "settler"
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		fail(err)
	}
	g, err := pgfence.New(pool, pgfence.Config{})
	if err != nil {
		fail(err)
	}
	token, _ := strconv.ParseInt(os.Getenv("AEGIS_TEST_TOKEN"), 10, 64)
	if err := g.Advance(ctx, term(token)); err != nil {
		fail(err)
	}
	in := bufio.NewScanner(os.Stdin)
	if os.Getenv("AEGIS_TEST_LEAVE_OPEN") != "" {
		err := g.Do(ctx, term(token), func(tx *pgfence.Tx) error {
			if err := insert("by the stopped leader")(tx); err != nil {
				return err
			}
			fmt.Println("open")
			in.Scan()
			return nil
		})
		fmt.Println("outcome:", err)
		return
	}
	for i := 0; ; i++ {
		result, first, err := settle(ctx, g, term(token), fmt.Sprint("kill-", i))
		if err != nil {
			fail(err)
		}
		if first {
			fmt.Println(result)
		}
	}
}

type settler struct {
	*osexec.Cmd
	out *bufio.Scanner
	in  *os.File
}

func startSettler(t *testing.T, url string, token fence.Token, env ...string) *settler {
	t.Helper()
	s := &settler{Cmd: osexec.Command(os.Args[0])}
	s.Env = append(os.Environ(), append(env, "AEGIS_TEST_SETTLER="+url, "AEGIS_TEST_TOKEN="+fmt.Sprint(token))...)
	s.Stderr = os.Stderr
	out, err := s.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	s.Stdin, s.in = r, w
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	r.Close()
	s.out = bufio.NewScanner(out)
	t.Cleanup(func() { w.Close(); _ = s.Process.Kill(); _ = s.Wait() })
	return s
}

// The same with processes that are killed: each new one settles all kills from the first on.
func TestSettlersThatAreKilledSettleOnce(t *testing.T) {
	t.Parallel()
	rng := seeded(t)
	name := database(t)
	pool := connect(t, pg.URL(name, "postgres"))
	said := map[string]string{}
	for token := fence.Token(1); token <= 12; token++ {
		s := startSettler(t, pg.URL(name, "postgres"), token)
		lines := 1 + rng.IntN(20)
		for n := 0; s.out.Scan(); n++ {
			kill, _, ok := strings.Cut(s.out.Text(), " by ")
			if !ok || said[kill] != "" {
				t.Fatalf("token %d says %q, was %q", token, s.out.Text(), said[kill])
			}
			said[kill] = s.out.Text()
			if n == lines { // its output is buffered by the pipe: by now it is somewhere further on
				_ = s.Process.Kill()
			}
		}
		_ = s.Wait()
	}
	if double := value(t, pool, "select string_agg(item, ', ') from (select min(item) as item from loot group by split_part(item, ' ', 1) having count(*) > 1) x"); double != "" {
		t.Errorf("settled twice: %s", double)
	}
	if apart := value(t, pool, "select count(*) from loot full join aegis.once on item = convert_from(result, 'UTF8') where item is null or key is null"); apart != "0" {
		t.Errorf("%s settlements and records differ", apart)
	}
	for kill, result := range said {
		if got := value(t, pool, "select item from loot where item like $1 || ' by %'", kill); got != result {
			t.Errorf("%s: a process said %q, the loot is %q", kill, result, got)
		}
	}
	t.Logf("%d kills settled and told", len(said))
}

// A leader is stopped inside a transaction; the next one names it, ends its session and goes on.
func TestTransactionLeftOpenByAStoppedLeader(t *testing.T) {
	name := database(t)
	pool := connect(t, pg.URL(name, "postgres"))
	s := startSettler(t, pg.URL(name, "postgres"), 7, "AEGIS_TEST_LEAVE_OPEN=1")
	if !s.out.Scan() || s.out.Text() != "open" {
		t.Fatal(s.out.Text())
	}
	if err := s.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	g := guardOn(t, pool, pgfence.Config{Advance: pgfence.AdvanceOptions{Wait: 200 * time.Millisecond}})
	ctx := bounded(t)
	err := g.Advance(ctx, term(8))
	wantText(t, err, "waited 200ms", "application settler", "idle in transaction", "INSERT INTO loot")
	if err := g.AdvanceWith(ctx, pgfence.AdvanceOptions{Wait: 50 * time.Millisecond, EndBlockers: true}, term(8)); err != nil {
		t.Fatal(err)
	}
	wantLoot(t, pool)
	if err := g.Do(ctx, term(8), insert("by the new one")); err != nil {
		t.Fatal(err)
	}
	_ = s.Process.Signal(syscall.SIGCONT)
	s.in.Close()
	if !s.out.Scan() || !strings.HasPrefix(s.out.Text(), "outcome: ") || strings.Contains(s.out.Text(), "<nil>") {
		t.Errorf("the stopped leader says %q", s.out.Text())
	}
	wantLoot(t, pool, "by the new one")
}

// The reply to a commit is dropped: unknown, and the write is there.
func TestALostReplyToTheCommitIsUnknown(t *testing.T) {
	p := startProxy(t)
	name := database(t)
	lossy := connect(t, pg.URL(name, "postgres"), through(p))
	g := guardOn(t, lossy, pgfence.Config{})
	pool := connect(t, pg.URL(name, "postgres"))
	ctx := bounded(t)
	advance(t, g, 7)
	if _, err := g.Exec(ctx, term(7), "INSERT INTO loot (item) VALUES ($1)", "prepares"); err != nil {
		t.Fatal(err)
	}
	drop := func(reply bool, piece []byte) bool { return reply && strings.Contains(string(piece), "COMMIT\x00") }
	p.cut.Store(&drop)
	wantIs(t, g.Do(ctx, term(7), insert("by Do")), fence.ErrUnknown)
	wantIs(t, g.Advance(ctx, term(8)), fence.ErrUnknown)
	advance(t, guardOn(t, pool, pgfence.Config{}), 8) // it was taken; again does no harm
	p.cut.Store(nil)
	if _, err := g.Exec(ctx, term(8), "INSERT INTO loot (item) VALUES ($1)", "prepares"); err != nil {
		t.Fatal(err)
	}
	dropInsert := func(reply bool, piece []byte) bool { return reply && strings.Contains(string(piece), "INSERT 0 1") }
	p.cut.Store(&dropInsert) // a variable of its own: the proxy may still look at the other
	_, err := g.Exec(ctx, term(8), "INSERT INTO loot (item) VALUES ($1)", "by Exec")
	wantIs(t, err, fence.ErrUnknown)
	p.cut.Store(nil)
	until(t, pool, "select count(*) = 4 from loot")
	wantLoot(t, pool, "prepares", "by Do", "prepares", "by Exec")

	// A context that ends while the server commits says both.
	exec(t, pool, `CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(5); RETURN NULL; END $$;
		CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON loot DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION slow()`)
	short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	err = g.Do(short, term(8), insert("slow"))
	wantIs(t, err, fence.ErrUnknown)
	wantIs(t, err, context.DeadlineExceeded)
}
