package redisfence

import (
	"context"
	"fmt"
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
		crc ^= uint16(key[i]) << 8
		for range 8 {
			if crc&0x8000 != 0 {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
	}
	return crc % 16384
}

// admissible checks the keys that a term wants to write, before anything is sent.
func (g *Guard) admissible(t fence.Term, keys []string) error {
	own := g.fenceKey(t.Election)
	for _, key := range keys {
		if strings.HasPrefix(key, g.cfg.Prefix) {
			return fmt.Errorf("redisfence: %s: key %q has the prefix %q of the guard's own keys; choose another, or another Config.Prefix", t, key, g.cfg.Prefix)
		}
		if !g.cfg.AnySlot && slot(key) != slot(own) {
			return fmt.Errorf("redisfence: %s: key %q: %w: it is in slot %d, the fence %q in slot %d; give the key the tag {%s} (Guard.Key), or see Config.Tag and Config.AnySlot",
				t, key, ErrSlot, slot(key), own, slot(own), g.tag(t.Election))
		}
	}
	return nil
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
	name := strings.ToLower(text(args[0]))
	info := commands[name]
	switch {
	case info == nil:
		return refuse("the server knows no command %q", name)
	case info.Arity > 0 && len(args) != int(info.Arity), info.Arity < 0 && len(args) < -int(info.Arity):
		return refuse("wrong number of arguments for %q: %d", name, len(args)-1)
	case flag(info, "noscript"), flag(info, "blocking") && !flag(info, "write"):
		return refuse("%q cannot be guarded: Redis does not allow it in scripts", name)
	case keyless[name]:
		return nil, nil
	}
	var keys []string
	if info.FirstKeyPos <= 0 || flag(info, "movablekeys") {
		get := redis.NewStringSliceCmd(ctx, append([]any{"COMMAND", "GETKEYS"}, args...)...)
		if err := g.client.Process(ctx, get); err != nil {
			if _, replied := err.(redis.Error); replied {
				return refuse("%q cannot be guarded, since it names no key that could lie beside the fence: %v", name, err)
			}
			return nil, g.explain("validate a command of", t.Election, err, errNoReply)
		}
		keys = get.Val()
	} else {
		last := int(info.LastKeyPos)
		if last < 0 {
			last += len(args)
		}
		for i := int(info.FirstKeyPos); i <= last && i < len(args); i += max(int(info.StepCount), 1) {
			keys = append(keys, text(args[i]))
		}
	}
	return keys, g.admissible(t, keys)
}

// maxArgs stays below Lua's bound of what unpack returns.
const maxArgs = 7000

func (g *Guard) commandTable(ctx context.Context) (map[string]*redis.CommandInfo, error) {
	if known := g.commands.Load(); known != nil {
		return *known, nil
	}
	table, err := g.client.Command(ctx).Result()
	if err != nil {
		return nil, err
	}
	g.commands.Store(&table)
	return table, nil
}

func flag(info *redis.CommandInfo, name string) bool {
	for _, f := range info.Flags {
		if f == name {
			return true
		}
	}
	return false
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

func want(t fence.Term) string {
	return encode(fence.Record{Token: t.Token, Nonce: t.Nonce, Cluster: t.Cluster})
}

// glob escapes what SCAN's patterns would read.
func glob(s string) string {
	return strings.NewReplacer("\\", "\\\\", "*", "\\*", "?", "\\?", "[", "\\[", "]", "\\]").Replace(s)
}
