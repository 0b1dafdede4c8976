package discovery

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"aegis"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// Assignment says who owns which shard. It is stored whole, in one key of etcd beside the election's.
type Assignment map[string]NodeID

// storedAssignment is the table as the store keeps it, with the token of the leader that wrote it.
type storedAssignment struct {
	Token  int64      `json:"token"`
	Owners Assignment `json:"owners"`
}

func (e *Election) assignmentKey() string {
	prefix := e.prefix
	if prefix == aegis.NoPrefix {
		prefix = ""
	}
	return prefix + "assignment/" + e.name
}

// commitAssignment stores the plan if the leadership's token is still the newest: the fence is asked first, by Admit's
// rule, since a leader commits many plans under one token; then the store compares the token again, in its own
// transaction, because the fence lives in this process and a rival may win between the two. [ErrFenced] means that
// the table is untouched.
func (l *Leadership) commitAssignment(ctx context.Context, f *Fencer, a Assignment) error {
	if err := f.Admit(l.Token); err != nil {
		return fmt.Errorf("commit assignment: %w", err)
	}
	if l.held == nil {
		return errors.New("commit assignment: this leadership was not won by Campaign")
	}
	value, err := json.Marshal(storedAssignment{Token: l.Token, Owners: a})
	if err != nil {
		return fmt.Errorf("commit assignment: %w", err)
	}
	_, err = l.held.Commit(ctx, clientv3.OpPut(l.election.assignmentKey(), string(value)))
	return err
}

// assignment reads the table as last committed, and under which token; an empty one if there was none.
func (e *Election) assignment(ctx context.Context) (Assignment, int64, error) {
	resp, err := e.cli.Get(ctx, e.assignmentKey())
	if err != nil || len(resp.Kvs) == 0 {
		return nil, 0, err
	}
	var s storedAssignment
	if err := json.Unmarshal(resp.Kvs[0].Value, &s); err != nil {
		return nil, 0, fmt.Errorf("read %s: %w", e.assignmentKey(), err)
	}
	return s.Owners, s.Token, nil
}
