// Package bench measures aegis side by side with what it is compared to, in one run on one cluster: a bare etcd Put
// is the unit, etcd's own concurrency package the peer. It is a module of its own so that peers stay out of users'
// go.mod. Times drift with the disk and the machine; the ratios are what counts.
//
//	make bench
package bench
