package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"aegis"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"golang.org/x/term"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"
)

// maxReconnectDelay bounds gRPC's pauses between attempts to connect, which grow to two minutes by themselves.
const maxReconnectDelay = 2 * time.Second

// client is the connection to etcd.
type client struct{ *clientv3.Client }

func (c *client) connected() bool {
	conn := c.ActiveConnection()
	return conn != nil && conn.GetState() == connectivity.Ready
}

// diagnose asks once more, without waiting for a connection, and so learns why there is none: a call that waits for
// one until its deadline says no more than that the deadline has passed.
func (c *client) diagnose() string {
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	_, err := pb.NewMaintenanceClient(c.ActiveConnection()).Status(ctx, &pb.StatusRequest{}, grpc.WaitForReady(false))
	if !unavailable(err) {
		return "no answer to the attempt to connect"
	}
	msg := status.Convert(err).Message()
	if _, desc, ok := strings.Cut(msg, `desc = "`); ok {
		msg = strings.TrimSuffix(desc, `"`)
	}
	return strings.TrimPrefix(msg, "transport: ")
}

// connect makes the client. It does not wait for etcd, save to authenticate.
func (o *options) connect() (*client, error) {
	spec := &clientv3.ConfigSpec{
		Endpoints: o.endpoints, DialTimeout: o.dialTimeout, KeepAliveTime: o.keepaliveTime, KeepAliveTimeout: o.keepaliveTimeout,
		Secure: &clientv3.SecureConfig{Cert: o.cert, Key: o.key, Cacert: o.cacert,
			InsecureTransport: o.insecureTransport, InsecureSkipVerify: o.insecureSkipVerify},
	}
	if o.user != "" {
		name, password, err := o.credentials()
		if err != nil {
			return nil, err
		}
		spec.Auth = &clientv3.AuthConfig{Username: name, Password: password}
	}
	cfg, err := clientv3.NewClientConfig(spec, zap.NewNop())
	if err != nil {
		return nil, usagef("TLS flags (--cacert, --cert, --key): %w", err)
	}
	c := &client{}
	pauses := backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: maxReconnectDelay}
	cfg.Logger = zap.NewNop()
	cfg.DialOptions = []grpc.DialOption{
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: pauses, MinConnectTimeout: o.dialTimeout}),
	}
	if c.Client, err = clientv3.New(*cfg); err == nil {
		o.cli = c
		return c, nil
	}
	err = fmt.Errorf("connect to etcd: %w", err)
	if cfg.Username, cfg.Password = "", ""; timedOut(err) { // without authentication it is there to be diagnosed
		if cli, err := clientv3.New(*cfg); err == nil {
			o.cli = &client{cli}
		}
	}
	return nil, err
}

// cluster connects for a command that asks once: ctx ends after --timeout.
func (o *options) cluster(ctx context.Context) (context.Context, context.CancelFunc, *aegis.Cluster, error) {
	cli, err := o.connect()
	if err != nil {
		return nil, nil, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	return ctx, cancel, aegis.Open(cli.Client, o.prefixOrNone()), nil
}

// prefixOrNone is the prefix as the library takes it, for which "" means the default.
func (o *options) prefixOrNone() string {
	if o.prefix == "" {
		return aegis.NoPrefix
	}
	return o.prefix
}

// credentials takes --user apart, as etcdctl does.
func (o *options) credentials() (name, password string, err error) {
	if o.password != "" {
		return o.user, o.password, nil
	}
	name, password, ok := strings.Cut(o.user, ":")
	if ok {
		return name, password, nil
	}
	if !term.IsTerminal(int(os.Stdin.Fd())) {
		return "", "", usagef("--user %s has no password; add --password, or set AEGIS_PASSWORD", name)
	}
	fmt.Fprintf(os.Stderr, "Password of %s: ", name)
	b, err := term.ReadPassword(int(os.Stdin.Fd()))
	fmt.Fprintln(os.Stderr)
	return name, string(b), err
}
