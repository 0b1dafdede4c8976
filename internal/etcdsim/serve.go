package etcdsim

import (
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

const maxRequestBytes = 1.5 * 1024 * 1024

// serve carries a unary request out. c.mu must be held.
func (c *Cluster) serve(name string, req proto.Message) (proto.Message, error) {
	switch r := req.(type) {
	case *pb.RangeRequest:
		if name != "Range" {
			break
		}
		if err := checkRange(r); err != nil {
			return nil, err
		}
		resp, err := c.store.read(r, c.store.rev)
		return c.headed(resp, resp.GetHeader(), err)
	case *pb.PutRequest:
		if err := checkPut(r); err != nil {
			return nil, err
		}
		if err := c.checkSize(r); err != nil {
			return nil, err
		}
		if err := c.checkPutNow(r); err != nil {
			return nil, err
		}
		t := &tx{c: c, s: c.store}
		resp := t.put(r)
		t.end()
		return c.headed(resp, resp.Header, nil)
	case *pb.DeleteRangeRequest:
		if err := checkDelete(r); err != nil {
			return nil, err
		}
		t := &tx{c: c, s: c.store}
		resp := t.delete(r)
		t.end()
		return c.headed(resp, resp.Header, nil)
	case *pb.TxnRequest:
		if err := c.checkSize(r); err != nil {
			return nil, err
		}
		resp, err := c.txn(r)
		return c.headed(resp, resp.GetHeader(), err)
	case *pb.CompactionRequest:
		if err := c.compactTo(r.Revision); err != nil {
			return nil, err
		}
		return &pb.CompactionResponse{Header: c.header(c.store.rev)}, nil
	case *pb.LeaseGrantRequest:
		resp, err := c.grant(r)
		return c.headed(resp, resp.GetHeader(), err)
	case *pb.LeaseRevokeRequest:
		if err := c.revoke(r.ID); err != nil {
			return nil, err
		}
		return &pb.LeaseRevokeResponse{Header: c.header(c.store.rev)}, nil
	case *pb.LeaseTimeToLiveRequest:
		return c.timeToLive(r), nil
	case *pb.LeaseLeasesRequest:
		return c.allLeases(), nil
	}
	return nil, status.Error(codes.Unimplemented, "etcdsim does not do "+name)
}

// headed fills the header of a reply; those inside a transaction have a revision only, as etcd's.
func (c *Cluster) headed(resp proto.Message, h *pb.ResponseHeader, err error) (proto.Message, error) {
	if err != nil {
		return nil, err
	}
	h.ClusterId, h.MemberId, h.RaftTerm = c.clusterID, memberID, c.term
	return resp, nil
}

func (c *Cluster) checkSize(r proto.Message) error {
	if proto.Size(r) > maxRequestBytes {
		return rpctypes.ErrGRPCRequestTooLarge
	}
	return nil
}

func (c *Cluster) compactTo(rev int64) error {
	switch {
	case rev <= c.store.compact:
		return rpctypes.ErrGRPCCompacted
	case rev > c.store.rev:
		return rpctypes.ErrGRPCFutureRev
	}
	c.store.compactTo(rev)
	return nil
}
