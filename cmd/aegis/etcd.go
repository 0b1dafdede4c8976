package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// prepareDataDir creates the directory, or sees that it holds an etcd's data and nobody uses it.
func prepareDataDir(dir string) (unlock func(), err error) {
	if dir == "" {
		return nil, usagef("--data-dir is empty; it must name a directory")
	}
	if info, err := os.Stat(dir); err == nil && !info.IsDir() {
		return nil, usagef("--data-dir %s is a file, not a directory; remove it or name another", dir)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("--data-dir: %w", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("--data-dir: %w", err)
	}
	const lockName = "aegis-dev.lock"
	for _, e := range entries {
		if e.Name() != "member" && e.Name() != lockName {
			return nil, usagef("--data-dir %s holds something else than an etcd's data (%s); name another", dir, e.Name())
		}
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		return nil, fmt.Errorf("--data-dir: %w", err)
	}
	unlock, err = lockFile(filepath.Join(dir, lockName))
	if err != nil {
		return nil, fmt.Errorf("--data-dir %s is in use by another `aegis dev`: %w; stop that one or name another", dir, err)
	}
	return unlock, nil
}

const etcdStartsWithin = 30 * time.Second

// startEtcd returns when etcd serves, with nil when ctx ended first.
func startEtcd(ctx context.Context, dir, listen string) (*embed.Etcd, error) {
	// etcd reports a port that is taken among many other lines; asking first makes it one.
	probe, err := net.Listen("tcp", listen)
	var lookup *net.AddrError
	if errors.As(err, &lookup) {
		return nil, usagef("--listen %s is not an address: %w", listen, err)
	}
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("cannot listen on %s: %w; is another etcd running there? --listen 127.0.0.1:0 takes a free port", listen, syscall.EADDRINUSE)
	}
	if err != nil {
		return nil, fmt.Errorf("cannot listen on %s: %w", listen, err)
	}
	_ = probe.Close()
	if host, port, err := net.SplitHostPort(listen); err == nil && host == "" {
		listen = net.JoinHostPort("0.0.0.0", port) // etcd wants it spelled out
	}

	cfg := embed.NewConfig()
	cfg.Name, cfg.Dir = "dev", dir
	client := url.URL{Scheme: "http", Host: listen}
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	cfg.ListenPeerUrls = []url.URL{{Scheme: "http", Host: "127.0.0.1:0"}} // has no peers, but etcd insists
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	cfg.EnableGRPCGateway = false
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(lastWords(dir))
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		return nil, fmt.Errorf("start etcd in %s on %s: %w", dir, listen, err)
	}
	select {
	case <-e.Server.ReadyNotify():
		return e, nil
	case <-ctx.Done():
		e.Server.HardStop()
		e.Close()
		return nil, nil
	case err = <-e.Err():
	case <-time.After(etcdStartsWithin):
		err = fmt.Errorf("not ready after %v", etcdStartsWithin)
	}
	e.Server.HardStop()
	e.Close()
	return nil, fmt.Errorf("start etcd in %s on %s: %w", dir, listen, err)
}

// lastWords is a log that is silent until etcd gives up, which it does by ending the process: then it says why.
func lastWords(dir string) *zap.Logger {
	hook := giveUp(dir)
	return zap.New(zapcore.NewNopCore(), zap.WithPanicHook(hook), zap.WithFatalHook(hook))
}

type giveUp string

// OnWrite implements zapcore.CheckWriteHook.
func (dir giveUp) OnWrite(e *zapcore.CheckedEntry, fields []zapcore.Field) {
	values := zapcore.NewMapObjectEncoder()
	for _, f := range fields {
		f.AddTo(values)
	}
	why := e.Message
	if err, ok := values.Fields["error"]; ok {
		why = fmt.Sprintf("%s: %v", why, err)
	}
	fmt.Fprintf(os.Stderr, "aegis: etcd cannot go on: %s; if the data in %s is damaged, delete it to start anew\n", strings.ReplaceAll(why, "\n", "; "), string(dir))
	os.Exit(exitFailure)
}

// clientAddress is how clients on this machine reach a listener.
func clientAddress(a net.Addr) string {
	t, ok := a.(*net.TCPAddr)
	if ok && t.IP.IsUnspecified() {
		return fmt.Sprintf("127.0.0.1:%d", t.Port)
	}
	return a.String()
}
