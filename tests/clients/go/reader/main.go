// Prints what the Go client tells of one request, a JSON object a line: events of a stream (or, with
// -complete, the whole answer), then {"error": ...} where it failed. The request is a GenerateRequest
// as JSON, or with -attach an AttachRequest.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"slotwise"
	pb "slotwise/slotwisepb"
)

func main() {
	server := flag.String("server", "", "address")
	attach := flag.Bool("attach", false, "the request is an AttachRequest")
	complete := flag.Bool("complete", false, "ask for the whole answer")
	detachAfter := flag.Int("detach-after", 0, "stop reading behind so many events")
	timeout := flag.Duration("timeout", time.Minute, "deadline")
	patience := flag.Duration("reconnect-timeout", time.Minute, "as of the client")
	token := flag.String("token", "", "bearer token")
	authority := flag.String("ca", "", "PEM file; without it no TLS")
	flag.Parse()

	options := []slotwise.DialOption{slotwise.WithReconnectTimeout(*patience)}
	if *token != "" {
		options = append(options, slotwise.WithToken(*token))
	}
	if *authority != "" {
		options = append(options, slotwise.WithTLS(trusting(*authority)))
	}
	client, err := slotwise.Dial(*server, options...)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, *timeout)
	defer cancel()
	// A server that was never reached is not waited for.
	_, _ = client.Health(ctx, "")

	var stream *slotwise.Stream
	if *attach {
		request := &pb.AttachRequest{}
		parse(request)
		stream = client.Attach(
			ctx, request.RequestId, request.NextTokenIndex, request.OtherNextTokenIndices...)
	} else {
		request := &pb.GenerateRequest{}
		parse(request)
		if *complete {
			fill := func(r *pb.GenerateRequest) { proto.Reset(r); proto.Merge(r, request) }
			answer, err := client.Complete(ctx, "", fill)
			show(answer, err)
			return
		}
		stream = client.Generate(ctx, request)
	}
	for count := 1; ; count++ {
		event, err := stream.Recv()
		if err == io.EOF {
			return
		}
		show(event, err)
		if err != nil {
			return
		}
		if count == *detachAfter {
			stream.Detach()
			return
		}
	}
}

func parse(request proto.Message) {
	if err := protojson.Unmarshal([]byte(flag.Arg(0)), request); err != nil {
		log.Fatal(err)
	}
}

func show(message proto.Message, err error) {
	if err == nil {
		fmt.Println(protojson.MarshalOptions{}.Format(message))
		return
	}
	var failed *slotwise.Error
	if !errors.As(err, &failed) {
		log.Fatalf("%v is no *slotwise.Error", err)
	}
	line, _ := json.Marshal(map[string]interface{}{"error": map[string]interface{}{
		"code":        failed.GRPCStatus().Code().String(),
		"message":     failed.Error(),
		"field":       failed.Field(),
		"retry_after": failed.RetryAfter().Seconds(),
		"cancelled":   errors.Is(err, context.Canceled),
		"late":        errors.Is(err, context.DeadlineExceeded),
	}})
	fmt.Println(string(line))
}

func trusting(path string) *tls.Config {
	pem, err := os.ReadFile(path)
	if err != nil {
		log.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	return &tls.Config{RootCAs: roots}
}
