package lab

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
)

// identities are certificates by which a peer link knows which member has dialed it.
//
// All members dial a member at the one address that it advertises, so the address does not say who dials; and of the
// requests between members only some carry the sender's id (forwarded lease renewals do not). So members advertise
// https, with a certificate each for dialing, and the link ends TLS and passes plain HTTP on to the member.
type identities struct {
	files  [][2]string    // certificate and key, per member
	owners map[string]int // member by certificate
	server tls.Certificate
}

// newIdentities makes a certificate per member, and one for the links, in dir.
func newIdentities(dir string, members int) (*identities, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	ids := &identities{owners: map[string]int{}}
	for i := range members + 1 {
		cert, certPEM, keyPEM, err := newCertificate(fmt.Sprintf("m%d", i))
		if err != nil {
			return nil, err
		}
		if i == members {
			ids.server = cert
			break
		}
		files := [2]string{filepath.Join(dir, fmt.Sprintf("m%d.crt", i)), filepath.Join(dir, fmt.Sprintf("m%d.key", i))}
		for j, text := range [][]byte{certPEM, keyPEM} {
			if err := os.WriteFile(files[j], text, 0o600); err != nil {
				return nil, err
			}
		}
		ids.files = append(ids.files, files)
		ids.owners[string(cert.Certificate[0])] = i
	}
	return ids, nil
}

func newCertificate(name string) (cert tls.Certificate, certPEM, keyPEM []byte, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return cert, nil, nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(365 * 24 * time.Hour),
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return cert, nil, nil, err
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return cert, nil, nil, err
	}
	certPEM = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	keyPEM = pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8})
	cert, err = tls.X509KeyPair(certPEM, keyPEM)
	return cert, certPEM, keyPEM, err
}

// tlsInfo is what a member dials others with. Nothing is protected here, so nothing is verified.
func (ids *identities) tlsInfo(member int) transport.TLSInfo {
	return transport.TLSInfo{
		CertFile: ids.files[member][0], KeyFile: ids.files[member][1], InsecureSkipVerify: true,
	}
}

// identifyPeer returns how connections to the given member's peer link find out who has dialed. A member that is
// stopped reaches nobody any more.
func (c *Cluster) identifyPeer(to int) identify {
	return func(conn net.Conn) (int, net.Conn, *gate, *gate, error) {
		t := tls.Server(conn, &tls.Config{
			Certificates: []tls.Certificate{c.ids.server}, ClientAuth: tls.RequireAnyClientCert, MinVersion: tls.VersionTLS12,
		})
		_ = conn.SetDeadline(time.Now().Add(dialWithin))
		if err := t.Handshake(); err != nil {
			return 0, nil, nil, nil, err
		}
		_ = conn.SetDeadline(time.Time{})
		from, ok := c.ids.owners[string(t.ConnectionState().PeerCertificates[0].Raw)]
		if !ok {
			return 0, nil, nil, nil, errors.New("an unknown certificate")
		}
		if c.members[from].down.Load() {
			return 0, nil, nil, nil, errStopped
		}
		return from, t, c.peerGates[from][to], c.peerGates[to][from], nil
	}
}
