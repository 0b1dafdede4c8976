package etcdsim

import (
	_ "unsafe" // for go:linkname

	clientv3 "go.etcd.io/etcd/client/v3"
)

// clientv3 keeps the contexts of its watch streams from ending with a channel that never closes, made when the
// package is initialised and so outside every bubble. A goroutine that waits on it is never durably blocked, and
// virtual time stands still for ever. A nil channel never closes either, and nobody waits on it.
//
//go:linkname valCtxCh go.etcd.io/etcd/client/v3.valCtxCh
var valCtxCh chan struct{}

var _ clientv3.Watcher // its package is initialised before this one

func init() { valCtxCh = nil }
