package slotwise

import (
	"context"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc/status"

	pb "slotwise/slotwisepb"
)

// Stream is the events of one request as they come: Accepted, Deltas, a Finished for each choice.
//
// Read it to its end, or close it. One goroutine reads; any may close.
type Stream struct {
	client  *Client
	reading *reading
	ctx     context.Context
	cancel  context.CancelFunc
	call    interface {
		Recv() (*pb.GenerateResponse, error)
	}
	// How the stream was lost that is yet to be dealt with; its end.
	failure error
	err     error
	// Closed when nothing is left to cancel; and when the watcher has ended.
	over     chan struct{}
	overOnce sync.Once
	watched  chan struct{}
}

func newStream(ctx context.Context, client *Client, reading *reading) *Stream {
	s := &Stream{
		client: client, reading: reading, over: make(chan struct{}), watched: make(chan struct{}),
	}
	s.ctx, s.cancel = context.WithCancel(ctx)
	client.enders.Add(1)
	go s.watch()
	s.open()
	return s
}

// RequestID is the request's name, for Cancel and Attach.
func (s *Stream) RequestID() string { return s.reading.id }

// Recv returns the next event, io.EOF behind the last one, or an *Error.
func (s *Stream) Recv() (*pb.GenerateResponse, error) {
	for s.err == nil {
		response, err := s.receive()
		if err != nil {
			s.lose(err)
			continue
		}
		event, err := s.reading.take(response)
		if err != nil {
			// A new run that is not the same one is nobody's.
			s.fail(err)
			continue
		}
		if s.reading.isOver {
			s.setOver()
		}
		if event != nil {
			return event, nil
		}
	}
	return nil, s.err
}

// gather reads the stream to its end and returns it as one answer.
func (s *Stream) gather() (*pb.CompleteResponse, error) {
	whole := &pb.CompleteResponse{RequestId: s.RequestID()}
	logprobs := map[uint32][]*pb.TokenLogprobs{}
	finished := map[uint32]*pb.Finished{}
	for {
		response, err := s.Recv()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, err
		}
		switch event := response.Event.(type) {
		case *pb.GenerateResponse_Accepted:
			whole.Accepted = event.Accepted
		case *pb.GenerateResponse_PromptLogprobs:
			whole.PromptLogprobs = append(whole.PromptLogprobs, event.PromptLogprobs.Logprobs...)
		case *pb.GenerateResponse_Delta:
			index := event.Delta.Index
			logprobs[index] = append(logprobs[index], event.Delta.Logprobs...)
		case *pb.GenerateResponse_Finished:
			finished[event.Finished.Index] = event.Finished
		}
	}
	for i, received := range s.reading.received {
		choice := received.whole()
		choice.Index = uint32(i)
		choice.Logprobs, choice.Finished = logprobs[choice.Index], finished[choice.Index]
		whole.Choices = append(whole.Choices, choice)
	}
	return whole, nil
}

// Close ends the request, if it still runs, and returns when the server knows, or after a second.
func (s *Stream) Close() {
	s.cancel()
	<-s.watched
}

// Detach stops reading and lets the request run, for its attach window, for Client.Attach.
func (s *Stream) Detach() {
	s.setOver()
	s.Close()
}

// watch ends the request at the server when the context ends before it: the call alone may be lost,
// and the request go on.
func (s *Stream) watch() {
	defer s.client.enders.Done()
	defer close(s.watched)
	select {
	case <-s.over:
		return
	case <-s.client.closing.Done():
		s.cancel()
	case <-s.ctx.Done():
	}
	select {
	case <-s.over:
	default:
		s.client.end(s.reading.id)
	}
}

func (s *Stream) receive() (*pb.GenerateResponse, error) {
	if s.failure != nil {
		return nil, s.failure
	}
	response, err := s.call.Recv()
	if err == nil {
		s.client.reached.Store(true)
	}
	return response, err
}

// lose goes on after a stream has ended, or ends with it.
func (s *Stream) lose(err error) {
	if s.reading.isOver || err == io.EOF && s.reading.request == nil {
		// How many answers an attached request has may not be known here.
		s.reading.isOver = true
		s.fail(io.EOF)
		return
	}
	if ended := s.ctx.Err(); ended != nil {
		failure := fromRPC(s.ctx, status.FromContextError(ended).Err(), s.client.address)
		s.fail(s.reading.explained(failure))
		return
	}
	var failure *Error
	if err != io.EOF {
		failure = fromRPC(s.ctx, err, s.client.address)
	}
	delay, end := s.reading.lost(failure, s.client.reached.Load())
	if end != nil {
		s.fail(end)
		return
	}
	s.wait(delay)
	s.open()
}

// fail ends the stream. Where the request is not over by that it waits until the server knows, so
// that a program may exit on the error.
func (s *Stream) fail(err error) {
	s.err = err
	if s.reading.isOver {
		s.setOver()
	}
	s.Close()
}

func (s *Stream) setOver() { s.overOnce.Do(func() { close(s.over) }) }

func (s *Stream) wait(delay time.Duration) {
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-s.ctx.Done():
	}
}

// open makes the next call. What fails here is dealt with by Recv.
func (s *Stream) open() {
	switch request := s.reading.nextCall().(type) {
	case *pb.GenerateRequest:
		s.call, s.failure = s.client.Inference.Generate(s.ctx, request)
	case *pb.AttachRequest:
		s.call, s.failure = s.client.Inference.Attach(s.ctx, request)
	}
}
