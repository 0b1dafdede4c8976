package main

import (
	"net/url"
	"path/filepath"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
)

// startSecure runs an etcd of its own, changed by the test; `aegis dev` knows neither TLS nor authentication.
func startSecure(t *testing.T, scheme string, change func(*embed.Config)) (dir, endpoint string) {
	t.Helper()
	cfg := embed.NewConfig()
	cfg.Dir = t.TempDir()
	at := []url.URL{{Scheme: scheme, Host: "127.0.0.1:0"}}
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = at, at
	cfg.ListenPeerUrls = []url.URL{{Scheme: "http", Host: "127.0.0.1:0"}}
	cfg.EnableGRPCGateway = false
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	change(cfg)
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		e.Server.HardStop()
		e.Close()
	})
	select {
	case <-e.Server.ReadyNotify():
	case <-bounded(t).Done():
		t.Fatal("etcd is not ready")
	}
	return cfg.Dir, e.Clients[0].Addr().String()
}

// With authentication: who is refused is told so, and no password is shown.
func TestAuthentication(t *testing.T) {
	t.Parallel()
	_, endpoint := startSecure(t, "http", func(cfg *embed.Config) { cfg.BcryptCost = 4 })
	cli, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer cli.Close()
	ctx := bounded(t)
	for _, step := range []func() error{
		func() error { _, err := cli.UserAdd(ctx, "root", "sesame"); return err },
		func() error { _, err := cli.UserGrantRole(ctx, "root", "root"); return err },
		func() error { _, err := cli.UserAdd(ctx, "guest", "sesame"); return err },
		func() error { _, err := cli.AuthEnable(ctx); return err },
	} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	at := "AEGIS_ENDPOINTS=" + endpoint
	for _, c := range []struct {
		claim string
		env   []string
		args  []string
		code  int
		want  string
	}{
		{"Nobody", nil, []string{"status"}, 6, "refuses"},
		{"WrongPassword", nil, []string{"status", "--user", "root:melon"}, 6, "refuses"},
		{"WrongPasswordForRun", nil, []string{"run", "x", "--user", "root", "--password", "melon", "--", "true"}, 6, "refuses"},
		{"NoPermission", nil, []string{"campaign", "x", "--user", "guest:sesame"}, 6, "permission denied"},
		{"UserAndPasswordInOne", nil, []string{"status", "--user", "root:sesame"}, 0, ""},
		{"Flags", nil, []string{"run", "x", "--user", "root", "--password", "sesame", "--", "true"}, 0, ""},
		{"Variables", []string{"AEGIS_USER=root", "AEGIS_PASSWORD=sesame"}, []string{"status"}, 0, ""},
	} {
		t.Run(c.claim, func(t *testing.T) {
			r := aegisEnv(t, append(c.env, at), c.args...)
			r.wants(t, c.code, "", c.want)
			if strings.Contains(r.stderr, "sesame") || strings.Contains(r.stderr, "melon") {
				t.Errorf("stderr shows the password: %s", r.stderr)
			}
			if c.code != 0 {
				oneLineError(t, r)
			}
		})
	}
}

func TestTLS(t *testing.T) {
	t.Parallel()
	dir, endpoint := startSecure(t, "https", func(cfg *embed.Config) {
		cfg.ClientAutoTLS = true
		cfg.SelfSignedCertValidity = 1
	})
	cert := filepath.Join(dir, "fixtures", "client", "cert.pem")
	for _, c := range []struct {
		claim string
		args  []string
		code  int
		want  string
	}{
		{"PlainText", []string{"--endpoints", endpoint}, 6, "cannot be reached"},
		{"UnknownAuthority", []string{"--endpoints", "https://" + endpoint}, 6, "certificate signed by unknown authority"},
		{"NotVerified", []string{"--endpoints", "https://" + endpoint, "--insecure-skip-tls-verify"}, 0, ""},
		{"CertificateTrusted", []string{"--endpoints", endpoint, "--cacert", cert}, 0, ""},
		{"NoPlainText", []string{"--endpoints", endpoint, "--insecure-transport=false", "--insecure-skip-tls-verify"}, 0, ""},
	} {
		t.Run(c.claim, func(t *testing.T) {
			r := aegisCmd(t, append(c.args, "--timeout", "2s", "status")...)
			r.wants(t, c.code, "", c.want)
			if c.code != 0 {
				oneLineError(t, r)
			}
		})
	}
}
