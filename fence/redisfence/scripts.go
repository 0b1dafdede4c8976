package redisfence

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"strings"

	"aegis/fence"

	"github.com/redis/go-redis/v9"
)

// script is the text of a Lua script with its hash, by which the server finds it in its cache.
type script struct {
	text, hash string
	lost       error // what it means that there is no reply
}

func newScript(text string) script {
	sum := sha1.Sum([]byte(text))
	return script{text, hex.EncodeToString(sum[:]), fence.ErrUnknown}
}

func newReading(text string) script {
	s := newScript(text)
	s.lost = errNoReply
	return s
}

// admit is the head of every guarded script: KEYS[1] is the fence, ARGV[1] the record that the term stands for, "" to
// admit whatever is there (report mode). The usual case is one comparison of strings; numbers do not occur. It is one
// line, so that the lines in the errors of a user's script are the user's.
var admit = oneLine(`
local aegis_have = redis.call('HGET', KEYS[1], 'r')
if aegis_have ~= ARGV[1] and ARGV[1] ~= '' then
  local ht, hn, hc = string.match(aegis_have or '', '^(%d+):(%x+):(%x+)$')
  local wt, wn, wc = string.match(ARGV[1], '^(%d+):(%x+):(%x+)$')
  if not ht or ht ~= wt or (hn ~= wn and hn ~= '0' and wn ~= '0') or (hc ~= wc and hc ~= '0' and wc ~= '0') then
    return redis.error_reply('AEGISFENCED ' .. (aegis_have or ''))
  end
end `)

var (
	readScript = newReading(`
local out = {}
for i, key in ipairs(KEYS) do out[i] = redis.call('HGET', key, 'r') or '' end
return out`)

	// ARGV: whether to check the policy, the time, and for each key the record as it was, as it shall be, and the node.
	// It writes what is there already, too: a replica must not pass for the primary.
	advanceScript = newScript(`
if ARGV[1] == '1' then
  local info = redis.pcall('INFO', 'memory')
  if type(info) ~= 'string' then return redis.error_reply('AEGISPOLICY unknown ' .. (info.err or '')) end
  local policy = string.match(info, 'maxmemory_policy:([%w-]+)')
  if not policy then return redis.error_reply('AEGISPOLICY unknown it is not in INFO memory') end
  if string.sub(policy, 1, 7) == 'allkeys' then return redis.error_reply('AEGISPOLICY evicts ' .. policy) end
end
for i, key in ipairs(KEYS) do
  if (redis.call('HGET', key, 'r') or '') ~= ARGV[i * 3] then return 0 end
end
for i, key in ipairs(KEYS) do
  redis.call('HSET', key, 'r', ARGV[i * 3 + 1], 'node', ARGV[i * 3 + 2], 'at', ARGV[2])
  redis.call('PERSIST', key)
end
return 1`)

	resetScript = newScript("return redis.call('DEL', KEYS[1])")

	// ARGV: the record, the command.
	execScript = newScript(admit + `
return redis.pcall(unpack(ARGV, 2))`)

	// ARGV: the record, and for each command the number of its words and the words.
	doScript = newScript(admit + `
local out, at = {}, 2
while at <= #ARGV do
  local n = tonumber(ARGV[at])
  local v = redis.pcall(unpack(ARGV, at + 1, at + n))
  if type(v) == 'table' and v.err then
    return redis.error_reply('AEGISPARTIAL ' .. #out .. ' ' .. v.err)
  end
  out[#out + 1] = v
  at = at + n + 1
end
return out`)

	// KEYS[2] is the hash of what was done. ARGV: the record, the key.
	lookScript = newReading(admit + `
return redis.call('HGET', KEYS[2], ARGV[2])`)

	// KEYS[3] orders what was done by time. ARGV: the record, the key, the result, then as for doScript. The key is
	// recorded first, as nothing that can go wrong with that may come after a command.
	onceScript = newScript(admit + `
local had = redis.call('HGET', KEYS[2], ARGV[2])
if had then return {1, had} end
local now = redis.call('TIME')
redis.call('ZADD', KEYS[3], now[1] .. '.' .. string.format('%06d', now[2]), ARGV[2])
redis.call('HSET', KEYS[2], ARGV[2], 'D' .. ARGV[3])
local done, at = 0, 4
while at <= #ARGV do
  local n = tonumber(ARGV[at])
  local v = redis.pcall(unpack(ARGV, at + 1, at + n))
  if type(v) == 'table' and v.err then
    if done == 0 then
      redis.call('HDEL', KEYS[2], ARGV[2])
      redis.call('ZREM', KEYS[3], ARGV[2])
    else
      redis.call('HSET', KEYS[2], ARGV[2], 'P' .. done .. ' ' .. v.err)
    end
    return redis.error_reply('AEGISPARTIAL ' .. done .. ' ' .. v.err)
  end
  done = done + 1
  at = at + n + 1
end
return {0, ''}`)

	// KEYS: what was done, and its order. ARGV: seconds. At most 1,000 at a time, as Redis does nothing else meanwhile.
	forgetScript = newScript(`
local old = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '(' .. ARGV[1], 'LIMIT', 0, 1000)
if #old > 0 then
  redis.call('HDEL', KEYS[1], unpack(old))
  redis.call('ZREM', KEYS[2], unpack(old))
end
return #old`)
)

// wrapped is a user's script behind the comparison. KEYS and ARGV are the user's inside, and an error that it does not
// catch is told apart from one that it returns.
func wrapped(src string) string {
	return admit + oneLine(`
local aegis_keys, aegis_args = {unpack(KEYS, 2)}, {unpack(ARGV, 2)}
local aegis_ok, aegis_v = pcall(function(KEYS, ARGV) `) + src + "\n" + oneLine(`
end, aegis_keys, aegis_args)
if aegis_ok then return aegis_v end
return redis.error_reply('AEGISPARTIAL -1 ' .. (type(aegis_v) == 'table' and aegis_v.err or tostring(aegis_v)))`)
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") + " " }

// once is a command that must not be sent again by the client: the first may have been executed.
type once struct{ *redis.Cmd }

func (once) NoRetry() bool { return true }

type processor interface {
	Process(ctx context.Context, cmd redis.Cmder) error
}

// run executes a script by its hash, and sends its text when the server does not know it (any more).
func (g *Guard) run(ctx context.Context, doing, name string, c processor, s script, keys []string, args []any) (any, error) {
	if ctx.Err() != nil {
		return nil, notSent(doing, name, context.Cause(ctx))
	}
	v, err := eval(ctx, c, "EVALSHA", s.hash, keys, args)
	if redis.HasErrorPrefix(err, "NOSCRIPT") {
		v, err = eval(ctx, c, "EVAL", s.text, keys, args)
	}
	if err != nil {
		return nil, g.explain(doing, name, err, s.lost)
	}
	return v, nil
}

func eval(ctx context.Context, c processor, how, script string, keys []string, args []any) (any, error) {
	words := make([]any, 3, 3+len(keys)+len(args))
	words[0], words[1], words[2] = how, script, len(keys)
	for _, key := range keys {
		words = append(words, key)
	}
	cmd := once{redis.NewCmd(ctx, append(words, args...)...)}
	cmd.SetFirstKeyPos(3)
	err := c.Process(ctx, cmd)
	if err == redis.Nil { // is a reply like any other
		return nil, nil
	}
	return cmd.Val(), err
}
