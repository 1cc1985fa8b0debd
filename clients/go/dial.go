package slotwise

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	pb "slotwise/slotwisepb"
)

const maxMessageBytes = 64 << 20

// DialOption sets how a client reaches its server.
type DialOption func(*dialing)

type dialing struct {
	tls           *tls.Config
	token         string
	hasToken      bool
	insecureToken bool
	patience      time.Duration
}

// WithTLS encrypts the connection; nil trusts whom the system trusts. Config holds another authority
// (RootCAs), what this client shows (Certificates), and the server's name where the address has
// another one (ServerName).
func WithTLS(config *tls.Config) DialOption {
	return func(d *dialing) {
		if d.tls = config; config == nil {
			d.tls = &tls.Config{}
		}
	}
}

// WithToken sends a bearer token with every call; without TLS only to this machine.
func WithToken(token string) DialOption {
	return func(d *dialing) { d.token, d.hasToken = token, true }
}

// WithInsecureToken lets a token go anywhere unencrypted, where the network is trusted.
func WithInsecureToken() DialOption {
	return func(d *dialing) { d.insecureToken = true }
}

// WithReconnectTimeout sets for how long a lost request is looked for without news; 60 s if unset,
// and 0 does not look.
func WithReconnectTimeout(patience time.Duration) DialOption {
	return func(d *dialing) { d.patience = patience }
}

// Dial makes a client of the server at an address such as "127.0.0.1:50051". It does not wait for
// the server: the first call tells whether there is one. An error is a fault of the options.
func Dial(address string, options ...DialOption) (*Client, error) {
	settings := dialing{patience: time.Minute}
	for _, option := range options {
		option(&settings)
	}
	dialOptions, err := settings.grpcOptions(address)
	if err != nil {
		return nil, err
	}
	conn, err := grpc.Dial(address, dialOptions...)
	if err != nil {
		return nil, fmt.Errorf("slotwise: the address %q: %w", address, err)
	}
	closing, closeAll := context.WithCancel(context.Background())
	return &Client{
		Inference: pb.NewInferenceClient(conn),
		address:   address,
		conn:      conn,
		patience:  settings.patience,
		closing:   closing,
		closeAll:  closeAll,
		enders:    &sync.WaitGroup{},
	}, nil
}

func (d *dialing) grpcOptions(address string) ([]grpc.DialOption, error) {
	// What a server calls idle or dead must be found by pings; dialling again starts fast, so that
	// waiting for a server that is just starting does not overshoot by a long back-off.
	back := backoff.Config{BaseDelay: firstDelay, Multiplier: 1.6, Jitter: 0.2, MaxDelay: maxDelay}
	options := []grpc.DialOption{
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: back, MinConnectTimeout: 5 * time.Second}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: 10 * time.Second, Timeout: 10 * time.Second,
		}),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(maxMessageBytes), grpc.MaxCallSendMsgSize(maxMessageBytes)),
		// This client sends again what was lost, and knows when that is right.
		grpc.WithDisableRetry(),
	}
	if d.tls != nil {
		options = append(options, grpc.WithTransportCredentials(credentials.NewTLS(d.tls)))
	} else {
		options = append(options, grpc.WithInsecure())
	}
	if !d.hasToken {
		return options, nil
	}
	if err := checkToken(d.token); err != nil {
		return nil, err
	}
	if d.tls == nil && !d.insecureToken && !isLocal(address) {
		return nil, fmt.Errorf("slotwise: the token would go to %s unencrypted; use WithTLS, or "+
			"allow it by WithInsecureToken where the network is trusted", address)
	}
	return append(options, grpc.WithPerRPCCredentials(bearer(d.token))), nil
}

func checkToken(token string) error {
	isGood := token != "" && strings.IndexFunc(token, func(c rune) bool { return c <= ' ' || c > '~' }) < 0
	if !isGood {
		// The token itself is never shown.
		return errors.New("slotwise: the token is empty, or has characters besides printable ASCII")
	}
	return nil
}

// bearer is a token as the metadata of a call. Where it may go is checked by Dial.
type bearer string

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(b)}, nil
}

func (b bearer) RequireTransportSecurity() bool { return false }

// isLocal: the address stays on this machine. What is not understood does not.
func isLocal(address string) bool {
	if strings.HasPrefix(address, "unix:") || strings.HasPrefix(address, "unix-abstract:") {
		return true
	}
	address = address[strings.LastIndex(address, "/")+1:]
	for _, scheme := range []string{"dns:", "passthrough:"} {
		address = strings.TrimPrefix(address, scheme)
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		host = address
	}
	ip := net.ParseIP(strings.Trim(host, "[]"))
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
