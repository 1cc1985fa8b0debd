package slotwise

import (
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "slotwise/slotwisepb"
)

// timed is a reading with a patience of 10 s and a clock that the test turns.
func timed() (*reading, *time.Time) {
	clock := time.Unix(1000, 0)
	r := newReading(&pb.GenerateRequest{}, 10*time.Second)
	r.now = func() time.Time { return clock }
	r.beganAt, r.heardAt = clock, clock
	return r, &clock
}

var broken = newError(codes.Unavailable, "transport is closing")

func (r *reading) accept(t *testing.T) {
	t.Helper()
	r.nextCall()
	accepted := &pb.Accepted{Seed: r.request.Sampling.GetSeed()}
	event := &pb.GenerateResponse_Accepted{Accepted: accepted}
	if _, err := r.take(&pb.GenerateResponse{Event: event}); err != nil {
		t.Fatal(err)
	}
}

func TestPatienceEndsWithoutNews(t *testing.T) {
	r, clock := timed()
	r.accept(t)
	var waited time.Duration
	for !r.isOver {
		delay, err := r.lost(broken, true)
		if (err != nil) != r.isOver {
			t.Fatal(err)
		}
		waited += delay
		*clock = clock.Add(delay)
	}
	if waited < 8*time.Second || waited > 10*time.Second {
		t.Errorf("waited %v", waited)
	}
}

func TestTimeWithAServerCountsBack(t *testing.T) {
	r, clock := timed()
	for i := 0; i < 20; i++ {
		r.accept(t)
		// It is read for long, and tells nothing; then there is none for 4 s.
		*clock = clock.Add(6 * time.Second)
		if _, err := r.lost(broken, true); err != nil {
			t.Fatal(err)
		}
		*clock = clock.Add(4 * time.Second)
	}
	for i := 0; i < 2; i++ {
		r.accept(t)
		*clock = clock.Add(time.Second)
		if _, err := r.lost(broken, true); err != nil {
			t.Fatal(err)
		}
		*clock = clock.Add(4 * time.Second)
	}
	r.accept(t)
	*clock = clock.Add(time.Second)
	if _, err := r.lost(broken, true); err == nil {
		t.Error("no end, after 15 s without a server in 18")
	}
}

func TestAServerThatNeverAnsweredIsReportedAtOnce(t *testing.T) {
	r, _ := timed()
	r.nextCall()
	if _, err := r.lost(broken, false); err == nil {
		t.Error("it is looked for")
	}
}

func TestAFullQueueSaysWhen(t *testing.T) {
	r, _ := timed()
	r.accept(t)
	wait := &errdetails.RetryInfo{RetryDelay: durationpb.New(3 * time.Second)}
	full, err := status.New(codes.ResourceExhausted, "the queue is full").WithDetails(wait)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.lost(broken, true); err != nil {
		t.Fatal(err)
	}
	if delay, err := r.lost(&Error{status: full}, true); err != nil || delay != 3*time.Second {
		t.Errorf("%v, %v", delay, err)
	}
}

func TestTheCallersRequestIsLeftAsItIs(t *testing.T) {
	request := &pb.GenerateRequest{}
	r := newReading(request, time.Minute)
	if request.RequestId != nil || request.Sampling != nil || request.AttachWindowMs != nil {
		t.Errorf("changed: %v", request)
	}
	other := newReading(request, time.Minute)
	if r.id == other.id || r.request.Sampling.GetSeed() == other.request.Sampling.GetSeed() {
		t.Error("two requests are the same one")
	}
}

func TestNoRequestIsAnEmptyOne(t *testing.T) {
	if r := newReading(nil, time.Minute); r.request.GetRequestId() == "" {
		t.Error("it has no name")
	}
}
