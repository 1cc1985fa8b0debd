// reader ADDRESS generate|complete|attach|cancel REQUEST [NAME=VALUE...]: prints what the client
// tells, for the tests. The request, and the events, are serialized and in hex. Names: reconnect_ms,
// timeout_ms, token, ca; drop_after, detach_after: after so many events the stream is dropped, and
// the end of the input waited for.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"slotwise"
	pb "slotwise/slotwisepb"
)

type settings map[string]string

func main() {
	given := settings{}
	for _, word := range os.Args[4:] {
		pair := strings.SplitN(word, "=", 2)
		given[pair[0]] = pair[1]
	}
	client, err := slotwise.Dial(os.Args[1], given.dialOptions()...)
	if err != nil {
		fmt.Println("refused", err)
		return
	}
	defer client.Close()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if given["timeout_ms"] != "" {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, given.milliseconds("timeout_ms"))
		defer cancel()
	}
	// A server that was never reached is not waited for.
	_, _ = client.Health(ctx, "")
	if err := ask(ctx, client, given); err != nil {
		tell(err)
	}
}

func ask(ctx context.Context, client *slotwise.Client, given settings) error {
	switch request := parsed(os.Args[2]).(type) {
	case *pb.CancelRequest:
		return client.Cancel(ctx, request.RequestId)
	case *pb.AttachRequest:
		next, others := request.NextTokenIndex, request.OtherNextTokenIndices
		return read(client.Attach(ctx, request.RequestId, next, others...), given)
	case *pb.GenerateRequest:
		if os.Args[2] == "generate" {
			return read(client.Generate(ctx, request), given)
		}
		answer, err := client.Complete(ctx, "", func(r *pb.GenerateRequest) {
			proto.Reset(r)
			proto.Merge(r, request)
		})
		if err == nil {
			show("answer", answer)
		}
		return err
	}
	return nil
}

func read(stream *slotwise.Stream, given settings) error {
	for count := 0; ; count++ {
		word := strconv.Itoa(count)
		if given["drop_after"] == word || given["detach_after"] == word {
			if given["drop_after"] == word {
				stream.Close()
			} else {
				stream.Detach()
			}
			fmt.Println("dropped")
			_, err := io.ReadAll(os.Stdin)
			return err
		}
		event, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		show("event", event)
	}
}

func parsed(kind string) proto.Message {
	var request proto.Message
	switch kind {
	case "cancel":
		request = &pb.CancelRequest{}
	case "attach":
		request = &pb.AttachRequest{}
	default:
		request = &pb.GenerateRequest{}
	}
	bytes, err := hex.DecodeString(os.Args[3])
	if err == nil {
		err = proto.Unmarshal(bytes, request)
	}
	if err != nil {
		log.Fatal(err)
	}
	return request
}

func show(kind string, message proto.Message) {
	bytes, err := proto.Marshal(message)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(kind, hex.EncodeToString(bytes))
}

func tell(err error) {
	var failed *slotwise.Error
	if !errors.As(err, &failed) {
		log.Fatalf("%v is no *slotwise.Error", err)
	}
	fmt.Printf("error %s\t%s\t%d\t%s\n", failed.Name(), failed.Field(),
		failed.RetryAfter().Milliseconds(), failed.GRPCStatus().Message())
	isLate, isCancelled := errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled)
	if isLate != (failed.Name() == "DEADLINE_EXCEEDED") || isCancelled != (failed.Name() == "CANCELLED") {
		log.Fatalf("%v: its cause is %v", err, errors.Unwrap(err))
	}
}

func (s settings) milliseconds(name string) time.Duration {
	count, err := strconv.Atoi(s[name])
	if err != nil {
		log.Fatal(err)
	}
	return time.Duration(count) * time.Millisecond
}

func (s settings) dialOptions() []slotwise.DialOption {
	var options []slotwise.DialOption
	if s["reconnect_ms"] != "" {
		options = append(options, slotwise.WithReconnectTimeout(s.milliseconds("reconnect_ms")))
	}
	if s["token"] != "" {
		options = append(options, slotwise.WithToken(s["token"]))
	}
	if s["ca"] != "" {
		pem, err := os.ReadFile(s["ca"])
		if err != nil {
			log.Fatal(err)
		}
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(pem)
		options = append(options, slotwise.WithTLS(&tls.Config{RootCAs: roots}))
	}
	return options
}
