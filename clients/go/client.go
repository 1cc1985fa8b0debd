// Package slotwise is a client of Slotwise, a gRPC service that serves a language model.
//
//	client, err := slotwise.Dial("127.0.0.1:50051")
//	...
//	stream := client.Chat(ctx, "What is the capital of France?", slotwise.MaxNewTokens(32))
//	for {
//		event, err := stream.Recv()
//		if err == io.EOF {
//			break
//		}
//		...
//		fmt.Print(event.GetDelta().GetText())
//	}
//
// Messages are those of slotwisepb, generated from the API's inference.proto, whose comments say
// what every field means.
package slotwise

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	pb "slotwise/slotwisepb"
)

// Service is the health name of a server that is ready; "" is that of its process.
const Service = "slotwise.v1.Inference"

// For how long the end of a stream waits until the server knows of it.
const cancelTimeout = time.Second

// Client is a connection to one server, for use by any number of goroutines.
type Client struct {
	// Inference has all calls of the API, as generated, for those that have no method here. It does
	// not reconnect.
	Inference pb.InferenceClient

	address  string
	conn     *grpc.ClientConn
	patience time.Duration
	// It has answered once: what is lost now may come back.
	reached atomic.Bool
	// Ends when the client is closed, and every stream with it.
	closing  context.Context
	closeAll context.CancelFunc
	enders   *sync.WaitGroup
}

// Close ends all streams and the connection.
func (c *Client) Close() error {
	c.closeAll()
	c.enders.Wait()
	return c.conn.Close()
}

// Chat asks a question by the model's chat template and streams the answer. A conversation goes
// with Generate.
func (c *Client) Chat(ctx context.Context, question string, options ...Option) *Stream {
	user := &pb.ChatMessage{Role: "user", Content: &question}
	chat := &pb.Chat{Messages: []*pb.ChatMessage{user}}
	request := &pb.GenerateRequest{Input: &pb.GenerateRequest_Chat{Chat: chat}}
	for _, option := range options {
		option(request)
	}
	return c.Generate(ctx, request)
}

// Generate starts a request and streams its events. It goes on by itself when its connection, or the
// server, is lost and comes back: each token comes exactly once. The context's end ends the request.
func (c *Client) Generate(ctx context.Context, request *pb.GenerateRequest) *Stream {
	return newStream(ctx, c, newReading(request, c.patience))
}

// Complete is Chat, answered whole.
func (c *Client) Complete(
	ctx context.Context, question string, options ...Option,
) (*pb.CompleteResponse, error) {
	stream := c.Chat(ctx, question, options...)
	defer stream.Close()
	return stream.gather()
}

// Attach reads a request on, from any connection: one that runs, or ended not long ago. next is the
// first token to come, others the same of choices 1, 2 and so on.
func (c *Client) Attach(
	ctx context.Context, requestID string, next uint32, others ...uint32,
) *Stream {
	request := &pb.AttachRequest{
		RequestId: requestID, NextTokenIndex: next, OtherNextTokenIndices: others,
	}
	return newStream(ctx, c, newAttached(request, c.patience))
}

// Cancel stops a request of any connection; its stream ends with FINISH_REASON_CANCELLED. NOT_FOUND
// where none of that id waits or runs.
func (c *Client) Cancel(ctx context.Context, requestID string) error {
	_, err := c.Inference.Cancel(ctx, &pb.CancelRequest{RequestId: requestID})
	return c.answered(ctx, err)
}

// Health asks whether a service is SERVING: Service, "", or "slotwise.worker/<rank>". NOT_FOUND for
// a name that the server does not know (yet).
func (c *Client) Health(
	ctx context.Context, service string,
) (healthpb.HealthCheckResponse_ServingStatus, error) {
	request := &healthpb.HealthCheckRequest{Service: service}
	response, err := healthpb.NewHealthClient(c.conn).Check(ctx, request)
	return response.GetStatus(), c.answered(ctx, err)
}

// answered notes that the server is there, or keeps the status of a call that failed.
func (c *Client) answered(ctx context.Context, err error) error {
	if err != nil {
		return fromRPC(ctx, err, c.address)
	}
	c.reached.Store(true)
	return nil
}

// end tells the server that nobody reads a request any more. Best effort: what is not heard of is
// ended by its attach window.
func (c *Client) end(requestID string) {
	ctx, cancel := context.WithTimeout(context.Background(), cancelTimeout)
	defer cancel()
	_, _ = c.Inference.Cancel(ctx, &pb.CancelRequest{RequestId: requestID})
}
