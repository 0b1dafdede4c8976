package etcdsim_test

import (
	"fmt"
	"net/url"
	"os"
	"slices"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
)

// difference shows two texts from a little before where they part.
func difference(etcd, simulator string) string {
	a, b := strings.Split(etcd, "\n"), strings.Split(simulator, "\n")
	i := 0
	for i < len(a) && i < len(b) && a[i] == b[i] {
		i++
	}
	show := func(s []string) string {
		return strings.Join(s[min(len(s), max(0, i-20)):min(len(s), i+20)], "\n")
	}
	return fmt.Sprintf("%s\n…\netcd:\n%s\n\nsimulator:\n%s", a[0], show(a), show(b))
}

// embedded starts an etcd, fresh and at revision 1, and returns what makes clients of it.
func embedded(t *testing.T) (dial func() *clientv3.Client) {
	t.Helper()
	dir, err := os.MkdirTemp("", "etcdsim") // not t.TempDir: etcd may still write when that is removed
	if err != nil {
		t.Fatal(err)
	}
	cfg := embed.NewConfig()
	cfg.Dir, cfg.LogLevel, cfg.UnsafeNoFsync = dir, "fatal", true
	socket := url.URL{Scheme: "unix", Path: dir + "/c"}
	peer := url.URL{Scheme: "unix", Path: dir + "/p"}
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{socket}, []url.URL{socket}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		e.Close()
		_ = os.RemoveAll(dir)
	})
	<-e.Server.ReadyNotify()
	return func() *clientv3.Client {
		cli, err := clientv3.New(clientv3.Config{Endpoints: []string{socket.String()}, Logger: zap.NewNop()})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cli.Close() })
		return cli
	}
}

// text prints a message, with ids replaced by what they have in common on both sides.
func (r *run) text(m proto.Message) string {
	m = proto.Clone(m)
	r.normalize(m)
	return prototext.Format(m)
}

func (r *run) normalize(m proto.Message) {
	switch m := m.(type) {
	case *mvccpb.Event:
		r.normalize(m.Kv)
		if m.PrevKv != nil {
			r.normalize(m.PrevKv)
		}
	case *mvccpb.KeyValue:
		if m.Lease != 0 {
			m.Lease = int64(slices.Index(r.leases, clientv3.LeaseID(m.Lease))) + 1
		}
	case *pb.ResponseHeader:
		if m.GetClusterId() != 0 && m.MemberId != 0 && m.RaftTerm != 0 {
			m.ClusterId, m.MemberId, m.RaftTerm = 1, 1, 1
		}
	case *pb.RangeResponse:
		r.normalize(m.Header)
		for _, kv := range m.Kvs {
			r.normalize(kv)
		}
	case *pb.PutResponse:
		r.normalize(m.Header)
		if m.PrevKv != nil {
			r.normalize(m.PrevKv)
		}
	case *pb.DeleteRangeResponse:
		r.normalize(m.Header)
		for _, kv := range m.PrevKvs {
			r.normalize(kv)
		}
	case *pb.TxnResponse:
		r.normalize(m.Header)
		for _, op := range m.Responses {
			switch o := op.Response.(type) {
			case *pb.ResponseOp_ResponseRange:
				r.normalize(o.ResponseRange)
			case *pb.ResponseOp_ResponsePut:
				r.normalize(o.ResponsePut)
			case *pb.ResponseOp_ResponseDeleteRange:
				r.normalize(o.ResponseDeleteRange)
			case *pb.ResponseOp_ResponseTxn:
				r.normalize(o.ResponseTxn)
			}
		}
	case interface{ GetHeader() *pb.ResponseHeader }:
		if h := m.GetHeader(); h != nil {
			r.normalize(h)
		}
	}
}
