package slotwise

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	pb "slotwise/slotwisepb"
)

const (
	// Within what a server allows by default; a request that nobody reads for longer ends.
	attachWindow = 30 * time.Second
	firstDelay   = 100 * time.Millisecond
	maxDelay     = 2 * time.Second
)

// way is how to go on.
type way int

const (
	none way = iota
	send
	attach
	// From the first token on, which are compared with those that came.
	attachToAll
	// In the place of the first sending: the server takes no attach window.
	sendPlain
)

// reading is a request as its reader sees it: what came, and how to go on when the stream is lost.
//
// The request has an id and a seed from the start: sent anew, it is the same one. What a new run
// repeats is compared with what came, and not told again.
type reading struct {
	id string
	// Nil where only the id is known.
	request *pb.GenerateRequest
	// The attach window is not the caller's wish.
	ownWindow bool
	// For how long a request is tried without news.
	patience time.Duration
	now      func() time.Time

	way        way
	accepted   *pb.Accepted
	received   []*received // by choice
	numChoices int         // 0: not known yet
	nextPrompt uint32
	numSent    int
	isOver     bool
	delay      time.Duration
	// The present stream has begun, and when; since when there is none (zero: there is one), and
	// for how long there was none since the last news.
	isHeard bool
	beganAt time.Time
	lostAt  time.Time
	lostFor time.Duration
	failure *Error
	// When the server can last have known that somebody reads, and how long that was ago.
	heardAt  time.Time
	silence  time.Duration
	isUnread bool
}

func newReading(request *pb.GenerateRequest, patience time.Duration) *reading {
	r := &reading{patience: patience, now: time.Now, way: send, delay: firstDelay}
	// A copy, also of nil, which is a request without anything.
	r.request = &pb.GenerateRequest{}
	proto.Merge(r.request, request)
	r.name()
	r.id = r.request.GetRequestId()
	r.numChoices = 1
	if n := r.request.GetN(); n > 1 {
		r.numChoices = int(n)
	}
	r.beganAt, r.heardAt = r.now(), r.now()
	return r
}

func newAttached(request *pb.AttachRequest, patience time.Duration) *reading {
	r := &reading{patience: patience, now: time.Now, way: attach, delay: firstDelay}
	r.id = request.RequestId
	for _, next := range append([]uint32{request.NextTokenIndex}, request.OtherNextTokenIndices...) {
		r.received = append(r.received, newReceived(next))
	}
	r.nextPrompt = request.NextPromptTokenIndex
	r.beganAt, r.heardAt = r.now(), r.now()
	return r
}

// name gives the request what makes it the same one when it is sent anew.
func (r *reading) name() {
	var random [24]byte
	if _, err := rand.Read(random[:]); err != nil {
		panic("slotwise: no random numbers on this machine: " + err.Error())
	}
	if r.request.RequestId == nil {
		r.request.RequestId = proto.String(fmt.Sprintf("%x", random[:16]))
	}
	if r.request.Sampling == nil {
		r.request.Sampling = &pb.SamplingParams{}
	}
	if r.request.Sampling.Seed == nil {
		r.request.Sampling.Seed = proto.Uint64(binary.LittleEndian.Uint64(random[16:]))
	}
	if r.request.AttachWindowMs == nil && r.patience > 0 {
		r.ownWindow = true
		r.request.AttachWindowMs = proto.Uint32(uint32(attachWindow.Milliseconds()))
	}
}

// nextCall is the request of the next stream: a GenerateRequest or an AttachRequest.
func (r *reading) nextCall() proto.Message {
	r.isHeard = false
	for _, received := range r.received {
		received.rewind(r.way != attach)
	}
	if r.way == send {
		r.numSent++
		return r.request
	}
	r.silence = r.now().Sub(r.heardAt)
	request := &pb.AttachRequest{RequestId: r.id}
	if r.way == attach {
		request.NextTokenIndex = r.choice(0).numTokens()
		for _, other := range r.received[1:] {
			request.OtherNextTokenIndices = append(request.OtherNextTokenIndices, other.numTokens())
		}
		request.NextPromptTokenIndex = r.nextPrompt
	}
	return request
}

// take cuts a message to what is new; nil: nothing is.
func (r *reading) take(response *pb.GenerateResponse) (*pb.GenerateResponse, error) {
	r.heardAt = r.now()
	isNew := false
	var err error
	switch event := response.Event.(type) {
	case *pb.GenerateResponse_Accepted:
		isNew, err = r.takeAccepted(event.Accepted)
		if !isNew || err != nil {
			return nil, err
		}
		return response, nil
	case *pb.GenerateResponse_Delta:
		isNew, err = r.choice(event.Delta.Index).take(event.Delta)
	case *pb.GenerateResponse_Finished:
		isNew = r.takeFinished(event.Finished)
	case *pb.GenerateResponse_PromptLogprobs:
		isNew = r.takePromptLogprobs(event.PromptLogprobs)
	}
	if !isNew || err != nil {
		return nil, err
	}
	r.lostFor, r.delay, r.failure = 0, firstDelay, nil
	return response, nil
}

// lost is told when a stream ended with an error, or without one (nil) before its last message. It
// returns how long to wait before nextCall, or the error where the request has come to its end.
func (r *reading) lost(failure *Error, wasReached bool) (time.Duration, error) {
	now := r.now()
	if !r.lostAt.IsZero() {
		r.lostFor += now.Sub(r.lostAt)
	} else if r.lostFor -= now.Sub(r.beganAt); r.lostFor < 0 {
		// Time with a server counts back, also where it had no news yet.
		r.lostFor = 0
	}
	r.lostAt = now
	isLoss := failure == nil || failure.isLoss()
	failure = r.explained(failure)
	r.failure = failure
	way := r.wayOn(failure, isLoss, wasReached)
	if way == sendPlain {
		r.request.AttachWindowMs = nil
		r.numSent--
		r.way = send
		return 0, nil
	}
	delay := r.delay
	if failure.status.Code() == codes.ResourceExhausted && failure.RetryAfter() > delay {
		delay = failure.RetryAfter()
	}
	if way == none || r.lostFor+delay > r.patience {
		r.isOver = true
		return 0, failure
	}
	r.way = way
	if r.delay *= 2; r.delay > maxDelay {
		r.delay = maxDelay
	}
	return delay, nil
}

// explained says what came before, where a deadline passed while a server was looked for.
func (r *reading) explained(failure *Error) *Error {
	if failure == nil {
		return newError(codes.Internal,
			fmt.Sprintf("the stream of request %q ended before its answer did", r.id))
	}
	if failure.status.Code() == codes.DeadlineExceeded && r.failure != nil {
		message := "the deadline passed; before that: " + r.failure.status.Message()
		explained := newError(codes.DeadlineExceeded, message)
		explained.cause = failure.cause
		return explained
	}
	return failure
}

func (r *reading) wayOn(failure *Error, isLoss, wasReached bool) way {
	attached := r.way != send
	again := attach
	if r.accepted == nil && r.request != nil {
		again = send
	}
	code := failure.status.Code()
	if r.isUnread {
		r.isUnread = false
		return send
	}
	if failure.reason() == "SLOW_READER" {
		// Nobody read since long before its last messages were taken here.
		r.heardAt = time.Time{}
		return attach
	}
	if isLoss {
		if wasReached {
			return again
		}
		return none
	}
	if r.request == nil {
		if code == codes.Unavailable {
			return attach
		}
		return none
	}
	switch {
	case code == codes.Unavailable && attached && r.isHeard:
		// After Accepted it is the request's own end: given up there, but not elsewhere.
		return send
	case code == codes.Unavailable:
		// The server starts or drains.
		return again
	case attached && (code == codes.NotFound || failure.reason() == "EXPIRED_REQUEST"),
		attached && code == codes.Unimplemented:
		return send
	case code == codes.OutOfRange && r.way == attach:
		return attachToAll
	case code == codes.AlreadyExists && r.numSent > 1 && !attached:
		return attach
	case code == codes.ResourceExhausted && r.accepted != nil:
		return r.way
	case code == codes.InvalidArgument && r.ownWindow && failure.Field() == "attach_window_ms" &&
		r.request.AttachWindowMs != nil:
		return sendPlain
	}
	return none
}

func (r *reading) takeAccepted(accepted *pb.Accepted) (bool, error) {
	r.isHeard = true
	r.beganAt = r.now()
	if r.numChoices == 0 {
		r.numChoices = int(accepted.NumChoices)
	}
	if !r.lostAt.IsZero() {
		r.lostFor += r.beganAt.Sub(r.lostAt)
		r.lostAt = time.Time{}
	}
	isAgain := r.accepted != nil || r.numSent > 1
	if r.request != nil && isAgain && accepted.Seed != r.request.Sampling.GetSeed() {
		// An id of the caller's may be that of another request of theirs.
		r.isOver = true
		return false, newError(codes.AlreadyExists, fmt.Sprintf(
			"a request of id %q that is not this one is known to the server", r.id))
	}
	if r.accepted != nil {
		return false, nil
	}
	r.accepted = accepted
	if r.request == nil {
		r.delay = firstDelay
	}
	return true, nil
}

func (r *reading) takePromptLogprobs(part *pb.PromptLogprobs) bool {
	if known := int(r.nextPrompt) - int(part.FirstTokenIndex); known > 0 {
		if known > len(part.Logprobs) {
			known = len(part.Logprobs)
		}
		part.Logprobs = part.Logprobs[known:]
		part.FirstTokenIndex += uint32(known)
	}
	if next := part.FirstTokenIndex + uint32(len(part.Logprobs)); next > r.nextPrompt {
		r.nextPrompt = next
	}
	return len(part.Logprobs) > 0
}

func (r *reading) takeFinished(finished *pb.Finished) bool {
	if r.wasUnread(finished) {
		r.isUnread = true
		return false
	}
	isNew := r.choice(finished.Index).finish()
	numFinished := 0
	for _, received := range r.received {
		if received.isFinished {
			numFinished++
		}
	}
	r.isOver = numFinished == r.numChoices
	return isNew
}

// wasUnread: its end is that nobody read it for as long as its attach window; to be sent anew.
func (r *reading) wasUnread(finished *pb.Finished) bool {
	if r.request == nil || r.way == send {
		return false
	}
	isCancelled := finished.FinishReason == pb.FinishReason_FINISH_REASON_CANCELLED
	window := time.Duration(r.request.GetAttachWindowMs()) * time.Millisecond
	return isCancelled && r.silence >= window
}

// choice is what came of one answer; those before it are there too.
func (r *reading) choice(index uint32) *received {
	for uint32(len(r.received)) <= index {
		r.received = append(r.received, newReceived(0))
	}
	return r.received[index]
}
