// Package etcdfence is what guards data in etcd beyond [aegis.Leadership.Commit]: a settlement that happens once.
//
// etcd needs no guard of its own. The leader key is in the same store as the data, so Commit compares that key's
// ModRevision in the transaction of the write, and there is no token to advance and none to lose. [Once] puts the record
// of what was done, and the question whether it was, into that same transaction:
//
//	If   leader key at this term's revision                      Commit: ErrFenced when it is not
//	Then If   no record of (election, key)
//	     Then put the record with the result; the operations     first
//	     Else get the record                                     the first result
//
// It lies beside the other guards because that is where a user looks for Once, and it is the one among them that imports
// package aegis: a Leadership is its guard, as a connection is the others'. So fence stays free of etcd, and aegis small.
package etcdfence

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"strconv"
	"strings"
	"time"

	"aegis"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// DefaultPrefix is where records are kept unless a call says otherwise. It lies outside of aegis.DefaultPrefix, below
// which every node of the cluster watches.
const DefaultPrefix = "/aegis-once/"

// record says what was done, in JSON. Programs read any version and ignore fields that they do not know.
type record struct {
	Version int       `json:"v"`
	Nonce   string    `json:"nonce"` // of the attempt that did it: tells a first execution that was sent again from a repeat
	Token   int64     `json:"token"`
	Node    string    `json:"node"`
	At      time.Time `json:"at"` // by the leader's wall clock; for Forget and for people
	Result  []byte    `json:"result"`
}

const recordVersion = 1

// Once executes the operations that build returns, under led's term, but once for each key of its election, however many
// terms, retries and crashes it takes. The key, build's result and the operations are one transaction. A repeat, under
// this term or a later one, does nothing, does not call build, and returns the first result with first = false. So after
// [aegis.ErrUnknown], or after a crash, the same call again makes certain.
//
// Records lie below prefix, "" being [DefaultPrefix]; all callers that mean the same settlements must use the same one.
// build must only build: two calls at once may both run it, and the operations of one are executed. At most 124
// operations with etcd's default limits.
//
// It blocks for two commits of TTL/3 at most. Errors: build's own, and nothing was done; those of
// [aegis.Leadership.Commit]: [aegis.ErrFenced] when the term is over, [aegis.ErrUnknown] when the commit's answer was lost,
// etcd's own; and one for an empty key, a prefix that nodes watch, or a record of a newer version.
func Once(ctx context.Context, led *aegis.Leadership, prefix, key string, build func() (ops []clientv3.Op, result []byte, err error)) (result []byte, first bool, err error) {
	fail := func(err error) ([]byte, bool, error) {
		return nil, false, fmt.Errorf("etcdfence: once %q of %q: %w", key, led.Election, err)
	}
	if key == "" {
		return fail(errors.New("the key is empty"))
	}
	dir, err := directory(prefix, led.Election)
	if err != nil {
		return fail(err)
	}
	at := dir + key
	resp, err := led.Commit(ctx, clientv3.OpGet(at))
	if err != nil {
		if errors.Is(err, aegis.ErrUnknown) { // of a look, which is nothing that could be done
			return fail(errors.Join(fmt.Errorf("no answer to whether it was done before; nothing was written: %v", err), context.Cause(ctx)))
		}
		return fail(err)
	}
	if kvs := resp.Responses[0].GetResponseRange().Kvs; len(kvs) > 0 {
		r, err := decode(kvs[0].Value)
		if err != nil {
			return fail(err)
		}
		return r.Result, false, nil
	}

	ops, result, err := build()
	if err != nil {
		return nil, false, err
	}
	mine := record{Version: recordVersion, Nonce: strconv.FormatUint(rand.Uint64(), 16), Token: led.Token, Node: string(led.Node), At: time.Now().UTC(), Result: result}
	value, err := json.Marshal(mine)
	if err != nil {
		return fail(err)
	}
	resp, err = led.Commit(ctx, clientv3.OpTxn(
		[]clientv3.Cmp{clientv3.Compare(clientv3.CreateRevision(at), "=", 0)},
		append([]clientv3.Op{clientv3.OpPut(at, string(value))}, ops...),
		[]clientv3.Op{clientv3.OpGet(at)}))
	if err != nil {
		return fail(err)
	}
	inner := resp.Responses[0].GetResponseTxn()
	if inner.Succeeded {
		return result, true, nil
	}
	r, err := decode(inner.Responses[0].GetResponseRange().Kvs[0].Value)
	if err != nil {
		return fail(err)
	}
	return r.Result, r.Nonce == mine.Nonce, nil // mine: executed before, and sent again by etcd's client
}

// Forget removes the records of the election that were written before the given time, by the clocks of the leaders that
// wrote them, and returns how many that were. A Once that is repeated after its key was forgotten is a new one, so keep
// them for longer than anybody may retry. It needs no term: the fence is the leader key, which it does not touch. After an
// error it has removed as many as it says.
func Forget(ctx context.Context, cli *clientv3.Client, prefix, election string, before time.Time) (int, error) {
	dir, err := directory(prefix, election)
	if err != nil {
		return 0, fmt.Errorf("etcdfence: forget keys of %q: %w", election, err)
	}
	const page = 100 // fits one transaction of deletions
	removed, from, end := 0, dir, clientv3.GetPrefixRangeEnd(dir)
	for {
		resp, err := cli.Get(ctx, from, clientv3.WithRange(end), clientv3.WithLimit(page))
		if err != nil {
			return removed, fmt.Errorf("etcdfence: forget keys of %q: %w", election, err)
		}
		var drop []clientv3.Op
		for _, kv := range resp.Kvs {
			if r, err := decode(kv.Value); err == nil && r.At.Before(before) { // records are never overwritten
				drop = append(drop, clientv3.OpDelete(string(kv.Key)))
			}
			from = string(kv.Key) + "\x00"
		}
		if len(drop) > 0 {
			done, err := cli.Txn(ctx).Then(drop...).Commit()
			if err != nil {
				return removed, fmt.Errorf("etcdfence: forget keys of %q: %w", election, err)
			}
			for _, r := range done.Responses {
				removed += int(r.GetResponseDeleteRange().Deleted)
			}
		}
		if !resp.More {
			return removed, nil
		}
	}
}

// directory is where the records of an election lie. The name is escaped, so that no name's records lie under another's.
func directory(prefix, election string) (string, error) {
	if prefix == "" {
		prefix = DefaultPrefix
	}
	if strings.HasPrefix(prefix, aegis.DefaultPrefix) {
		return "", fmt.Errorf("the prefix %q lies below %q, which every node watches; choose one outside", prefix, aegis.DefaultPrefix)
	}
	return prefix + url.PathEscape(election) + "/", nil
}

func decode(value []byte) (record, error) {
	var r record
	if err := json.Unmarshal(value, &r); err != nil {
		return r, fmt.Errorf("its record is not ours; did somebody else write it? %w", err)
	}
	if r.Version != recordVersion {
		return r, fmt.Errorf("its record is of version %d, this program knows version %d; use a newer aegis", r.Version, recordVersion)
	}
	return r, nil
}
