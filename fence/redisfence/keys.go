package redisfence

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"aegis/fence"

	"github.com/redis/go-redis/v9"
)

// Key returns a key for data of the election: what, with the election's hash tag behind it, as in "loot:{boss/7}".
func (g *Guard) Key(election, what string) string { return what + ":{" + g.tag(election) + "}" }

// tag is what lies between the braces. Redis ends a tag at the first closing brace, and takes an empty one for none;
// such names are escaped there, and only there.
func (g *Guard) tag(election string) string {
	if g.cfg.Tag != "" {
		return g.cfg.Tag
	}
	if election == "" {
		return "%"
	}
	return strings.ReplaceAll(election, "}", "%7D")
}

func (g *Guard) fenceKey(election string) string { return g.ownKey("fence", election) }

func (g *Guard) ownKey(kind, election string) string {
	return g.cfg.Prefix + kind + ":{" + g.tag(election) + "}:" + election
}

// slot is the hash slot of a key, as Redis Cluster counts it: CRC16 (XMODEM) of the tag, or of the whole key.
func slot(key string) uint16 {
	if i := strings.IndexByte(key, '{'); i >= 0 {
		if j := strings.IndexByte(key[i+1:], '}'); j > 0 {
			key = key[i+1 : i+1+j]
		}
	}
	var crc uint16
	for i := range len(key) {
		crc = crc<<8 ^ crcTable[byte(crc>>8)^key[i]]
	}
	return crc % 16384
}

var crcTable = func() (t [256]uint16) {
	for i := range t {
		crc := uint16(i) << 8
		for range 8 {
			if crc&0x8000 != 0 {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
		t[i] = crc
	}
	return t
}()

// claim is what a term's writes have in common, made once a term.
type claim struct {
	term fence.Term
	key  string // of the fence
	slot uint16
	want string // the record that the term stands for
}

func (g *Guard) claim(t fence.Term) *claim {
	if c := g.latest.Load(); c != nil && c.term == t {
		return c
	}
	c := &claim{term: t, key: g.fenceKey(t.Election), want: encode(fence.Record{Token: t.Token, Nonce: t.Nonce, Cluster: t.Cluster})}
	c.slot = slot(c.key)
	g.latest.Store(c)
	return c
}

// admissible checks the keys that a term wants to write, before anything is sent.
func (g *Guard) admissible(t fence.Term, keys []string) error {
	c := g.claim(t)
	for _, key := range keys {
		if strings.HasPrefix(key, g.cfg.Prefix) {
			return fmt.Errorf("redisfence: %s: key %q has the prefix %q of the guard's own keys; choose another, or another Config.Prefix", t, key, g.cfg.Prefix)
		}
		if !g.cfg.AnySlot && slot(key) != c.slot {
			return fmt.Errorf("redisfence: %s: key %q: %w: it is in slot %d, the fence %q in slot %d; give the key the tag {%s} (Guard.Key), or see Config.Tag and Config.AnySlot",
				t, key, ErrSlot, slot(key), c.key, c.slot, g.tag(t.Election))
		}
	}
	return nil
}

// command is what the guard must know of a command of Redis.
type command struct {
	arity             int // with the name; below 0: at least so many
	first, last, step int // of its keys; last below 0 counts from the end
	ask               bool
	keyless, never    bool
}

// keyless are the commands without a key that a term may execute: they have an effect or none, but touch no data.
var keyless = map[string]bool{"publish": true, "ping": true, "echo": true, "time": true}

// keysOf validates a command, so that the server will not stumble over it halfway through a batch, and returns its keys.
// It takes one more round trip for the few commands whose keys the server alone knows (SORT … STORE, ZUNIONSTORE, XGROUP).
func (g *Guard) keysOf(ctx context.Context, t fence.Term, args []any) ([]string, error) {
	refuse := func(format string, a ...any) ([]string, error) {
		return nil, fmt.Errorf("redisfence: %s: %s", t, fmt.Sprintf(format, a...))
	}
	if len(args) == 0 {
		return refuse("a command without a name")
	}
	if len(args) > maxArgs {
		return refuse("a command of %d arguments; a script takes %d at most: split it", len(args), maxArgs)
	}
	commands, err := g.commandTable(ctx)
	if err != nil {
		return nil, g.explain("validate a command of", t.Election, err, errNoReply)
	}
	name := text(args[0])
	c, known := commands[name]
	if !known {
		c, known = commands[strings.ToLower(name)]
	}
	switch {
	case !known:
		return refuse("the server knows no command %q", name)
	case c.arity > 0 && len(args) != c.arity, c.arity < 0 && len(args) < -c.arity:
		return refuse("wrong number of arguments for %q: %d", name, len(args)-1)
	case c.never:
		return refuse("%q cannot be guarded: Redis does not allow it in scripts", name)
	case c.keyless:
		return nil, nil
	}
	var keys []string
	if c.ask {
		get := redis.NewStringSliceCmd(ctx, append([]any{"COMMAND", "GETKEYS"}, args...)...)
		if err := g.client.Process(ctx, get); err != nil {
			if _, replied := err.(redis.Error); replied {
				return refuse("%q cannot be guarded, since it names no key that could lie beside the fence: %v", name, err)
			}
			return nil, g.explain("validate a command of", t.Election, err, errNoReply)
		}
		keys = get.Val()
	} else {
		last := c.last
		if last < 0 {
			last += len(args)
		}
		for i := c.first; i <= last && i < len(args); i += c.step {
			keys = append(keys, text(args[i]))
		}
	}
	return keys, g.admissible(t, keys)
}

// maxArgs stays below Lua's bound of what unpack returns.
const maxArgs = 7000

// commandTable is the server's own, asked for once. It is never changed.
func (g *Guard) commandTable(ctx context.Context) (map[string]command, error) {
	if known := g.commands.Load(); known != nil {
		return *known, nil
	}
	infos, err := g.client.Command(ctx).Result()
	if err != nil {
		return nil, err
	}
	table := make(map[string]command, 2*len(infos))
	for name, i := range infos {
		c := command{arity: int(i.Arity), first: int(i.FirstKeyPos), last: int(i.LastKeyPos), step: max(int(i.StepCount), 1), keyless: keyless[name]}
		c.ask = c.first <= 0 || slices.Contains(i.Flags, "movablekeys")
		c.never = slices.Contains(i.Flags, "noscript")
		table[name], table[strings.ToUpper(name)] = c, c
	}
	g.commands.Store(&table)
	return table, nil
}

// text is how the client writes an argument that is a name or a key.
func text(arg any) string {
	switch a := arg.(type) {
	case string:
		return a
	case []byte:
		return string(a)
	}
	return fmt.Sprint(arg)
}

// encode is a record as its fence key holds it. It is made of strings, which Lua compares byte by byte: no number can
// lose a bit. A later version of this package will begin it with something that is not a digit.
func encode(r fence.Record) string {
	if r == (fence.Record{}) {
		return ""
	}
	return strconv.FormatInt(r.Token, 10) + ":" + strconv.FormatUint(r.Nonce, 16) + ":" + strconv.FormatUint(r.Cluster, 16)
}

func decode(name, s string) (fence.Record, error) {
	if s == "" {
		return fence.Record{}, nil
	}
	var r fence.Record
	parts := strings.Split(s, ":")
	if len(parts) == 3 {
		var err [3]error
		r.Token, err[0] = strconv.ParseInt(parts[0], 10, 64)
		r.Nonce, err[1] = strconv.ParseUint(parts[1], 16, 64)
		r.Cluster, err[2] = strconv.ParseUint(parts[2], 16, 64)
		if err == [3]error{} && fence.ValidToken(r.Token) == nil {
			return r, nil
		}
	}
	return fence.Record{}, fmt.Errorf("redisfence: the fence of %q reads %q, which this program does not understand: "+
		"a newer version wrote it, so use a newer aegis; or somebody else did", name, s)
}

// glob escapes what SCAN's patterns would read.
func glob(s string) string {
	return strings.NewReplacer("\\", "\\\\", "*", "\\*", "?", "\\?", "[", "\\[", "]", "\\]").Replace(s)
}
