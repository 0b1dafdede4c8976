package aegis

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// DefaultPrefix is where aegis keeps its keys unless [Config] says otherwise.
const DefaultPrefix = "/aegis/"

// NoPrefix, as a prefix, puts the keys at the root of etcd's key space, which nothing else should share.
const NoPrefix = "\x00"

// keyspace is the only place that spells keys:
//
//	election/<name>                  the leader's node id, plain; under the leader's lease
//	term/<name>                      termRecord; survives the leader
//	candidate/<escaped name>/<lease> candidateRecord; under the candidate's lease
//	request/<name>                   requestRecord; an operator's wish
//	node/<id>                        nodeRecord; under the node's lease
//	meta/token-offset, meta/cluster  numbers, decimal and hexadecimal
//	write/<name>                     token of the latest Commit; not watched
type keyspace string

func newKeyspace(prefix string) keyspace {
	switch prefix {
	case "":
		return DefaultPrefix
	case NoPrefix:
		return ""
	}
	return keyspace(prefix)
}

const (
	dirCandidate = "candidate/"
	dirElection  = "election/"
	dirMeta      = "meta/"
	dirNode      = "node/"
	dirRequest   = "request/"
	dirTerm      = "term/"
	dirWrite     = "write/"
	metaOffset   = dirMeta + "token-offset"
	metaCluster  = dirMeta + "cluster"
)

func (k keyspace) leader(name string) string  { return string(k) + dirElection + name }
func (k keyspace) term(name string) string    { return string(k) + dirTerm + name }
func (k keyspace) request(name string) string { return string(k) + dirRequest + name }
func (k keyspace) node(id NodeID) string      { return string(k) + dirNode + string(id) }
func (k keyspace) commit(name string) string  { return string(k) + dirWrite + name }
func (k keyspace) offset() string             { return string(k) + metaOffset }
func (k keyspace) cluster() string            { return string(k) + metaCluster }
func (k keyspace) dir(dir string) string      { return string(k) + dir }

// candidates is the common prefix of an election's candidate keys. Names are escaped, so that no name's candidates
// lie under another's; elections themselves are only ever read by their exact key.
func (k keyspace) candidates(name string) string {
	return string(k) + dirCandidate + url.PathEscape(name) + "/"
}

func (k keyspace) candidate(name string, lease clientv3.LeaseID) string {
	return k.candidates(name) + strconv.FormatInt(int64(lease), 16)
}

// watched is the range that holds all keys that anybody waits for, [first, end). One watch over it sees one election's leader, term
// and queue in one order.
func (k keyspace) watched() (first, end string) {
	return string(k) + dirCandidate, clientv3.GetPrefixRangeEnd(string(k) + dirTerm)
}

// split takes a key apart: the directory that it lies in and the rest, or "", "" for a foreign key.
func (k keyspace) split(key []byte) (dir, rest string) {
	s, ok := strings.CutPrefix(string(key), string(k))
	if !ok {
		return "", ""
	}
	i := strings.IndexByte(s, '/') + 1
	switch d := s[:i]; d {
	case dirCandidate, dirElection, dirMeta, dirNode, dirRequest, dirTerm:
		return d, s[i:]
	}
	return "", ""
}

// splitCandidate takes the rest of a candidate key apart.
func splitCandidate(rest string) (name string, lease clientv3.LeaseID, ok bool) {
	escaped, hex, ok := strings.Cut(rest, "/")
	if !ok {
		return "", 0, false
	}
	name, err := url.PathUnescape(escaped)
	id, err2 := strconv.ParseInt(hex, 16, 64)
	return name, clientv3.LeaseID(id), err == nil && err2 == nil
}

// recordVersion is written into every record; readers take any version and ignore fields that they do not know.
const recordVersion = 1

// termRecord is written in the transaction that wins and kept when the leader is gone. It does not hold the token,
// which a transaction cannot know of itself: token = ModRevision of the leader key + Offset.
type termRecord struct {
	Version   int       `json:"v"`
	Nonce     hex64     `json:"nonce"`            // of the winning attempt
	Offset    int64     `json:"offset"`           // the cluster's token offset under which it won
	Node      NodeID    `json:"node"`             //
	Since     time.Time `json:"since"`            // by the winner's wall clock, to be shown only
	Host      string    `json:"host,omitempty"`   //
	PID       int       `json:"pid,omitempty"`    //
	Candidate int64     `json:"cand,omitempty"`   // of a transfer: CreateRevision of the successor's candidate key
	Ended     string    `json:"ended,omitempty"`  // how this term ended, if its leader could still say so
	Won       int64     `json:"won,omitempty"`    // beside Ended: ModRevision of the leader key that was
	Before    string    `json:"before,omitempty"` // how the term before ended

	rest map[string]json.RawMessage // fields of later versions, kept when the record is written again
}

// plainTerm has the fields of termRecord and not its methods.
type plainTerm termRecord

func (r *termRecord) UnmarshalJSON(b []byte) error {
	p := plainTerm{}
	if err := json.Unmarshal(b, &p); err != nil {
		return err
	}
	if err := json.Unmarshal(b, &p.rest); err != nil {
		return err
	}
	*r = termRecord(p)
	return nil
}

func (r termRecord) MarshalJSON() ([]byte, error) {
	b, err := json.Marshal(plainTerm(r))
	if err != nil || len(r.rest) == 0 {
		return b, err
	}
	known := map[string]json.RawMessage{}
	if err := json.Unmarshal(b, &known); err != nil {
		return nil, err
	}
	all := maps.Clone(r.rest)
	maps.Copy(all, known)
	return json.Marshal(all)
}

type candidateRecord struct {
	Version  int       `json:"v"`
	Node     NodeID    `json:"node"`
	Priority int       `json:"priority"`
	Since    time.Time `json:"since"`
}

type requestRecord struct {
	Version int    `json:"v"`
	Op      string `json:"op"` // "transfer" or "resign"
	To      NodeID `json:"to,omitempty"`
	Term    int64  `json:"term"` // ModRevision of the leader key that the operator saw
	By      string `json:"by,omitempty"`
}

type nodeRecord struct {
	Version int               `json:"v"`
	Host    string            `json:"host"`
	PID     int               `json:"pid"`
	Started time.Time         `json:"started"`
	Program string            `json:"program,omitempty"` // module version of the program that runs
	Meta    map[string]string `json:"meta,omitempty"`
	Addrs   []string          `json:"addresses,omitempty"`
}

// hex64 is a uint64 as a hexadecimal string in JSON, whose numbers carry only 53 bits.
type hex64 uint64

func (h hex64) MarshalText() ([]byte, error) { return strconv.AppendUint(nil, uint64(h), 16), nil }
func (h *hex64) UnmarshalText(b []byte) error {
	u, err := strconv.ParseUint(string(b), 16, 64)
	*h = hex64(u)
	return err
}

func encode(record any) string {
	b, err := json.Marshal(record)
	if err != nil {
		panic(err) // our own records, of plain types: a defect of this package
	}
	return string(b)
}

// MaxNameLen bounds the names of elections and node ids, in bytes.
const MaxNameLen = 255

// reservedNames begin the names of the elections that coordinators of shard tables use.
const reservedNames = "shard/"

func validName(what, name string) error {
	switch {
	case name == "":
		return fmt.Errorf("%w: %s is empty", ErrInvalidName, what)
	case len(name) > MaxNameLen:
		return fmt.Errorf("%w: %s has %d bytes, at most %d are allowed: %.40q…", ErrInvalidName, what, len(name), MaxNameLen, name)
	case !utf8.ValidString(name):
		return fmt.Errorf("%w: %s %q is not valid UTF-8", ErrInvalidName, what, name)
	case strings.ContainsFunc(name, unicode.IsControl):
		return fmt.Errorf("%w: %s %q contains a control character", ErrInvalidName, what, name)
	}
	return nil
}

func validElection(name string) error {
	if err := validName("election name", name); err != nil {
		return err
	}
	if strings.HasPrefix(name, reservedNames) {
		return fmt.Errorf("%w: election name %q begins with %q, which is reserved for coordinators", ErrInvalidName, name, reservedNames)
	}
	return nil
}
