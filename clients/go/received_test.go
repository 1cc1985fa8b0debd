package slotwise

import (
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "slotwise/slotwisepb"
)

func delta(first uint32, text string, ids ...uint32) *pb.Delta {
	return &pb.Delta{FirstTokenIndex: first, TokenIds: ids, Text: text}
}

// taken fails the test on an error; nil: nothing is new.
func taken(t *testing.T, r *received, d *pb.Delta) *pb.Delta {
	t.Helper()
	isNew, err := r.take(d)
	if err != nil {
		t.Fatal(err)
	}
	if !isNew {
		return nil
	}
	return d
}

func expect(t *testing.T, got, want *pb.Delta) {
	t.Helper()
	if !proto.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func expectCode(t *testing.T, r *received, d *pb.Delta, code codes.Code) {
	t.Helper()
	if _, err := r.take(d); status.Code(err) != code {
		t.Errorf("got %v, want %v", err, code)
	}
}

func TestNewDeltasPassUnchanged(t *testing.T) {
	r := newReceived(0)
	expect(t, taken(t, r, delta(0, "a b", 5, 6)), delta(0, "a b", 5, 6))
	expect(t, taken(t, r, delta(2, "", 7)), delta(2, "", 7))
	expect(t, taken(t, r, delta(3, " c")), delta(3, " c"))
	if r.numTokens() != 3 {
		t.Errorf("%d tokens", r.numTokens())
	}
}

func TestDeltaIsCutWhereItOverlaps(t *testing.T) {
	r := newReceived(0)
	taken(t, r, delta(0, "one two", 5, 6))
	r.rewind(true)
	if d := taken(t, r, delta(0, "one", 5)); d != nil {
		t.Errorf("%v came before", d)
	}
	again := delta(1, " two three", 6, 7)
	again.Logprobs = []*pb.TokenLogprobs{{Token: &pb.TokenLogprob{TokenId: 6}}, {}}
	want := delta(2, " three", 7)
	want.Logprobs = []*pb.TokenLogprobs{{}}
	expect(t, taken(t, r, again), want)
	expect(t, taken(t, r, delta(3, " four", 8)), delta(3, " four", 8))
}

func TestAttachedStreamRepeatsWhatWasReleasedBehindTheLastToken(t *testing.T) {
	r := newReceived(0)
	taken(t, r, delta(0, "a", 5))
	taken(t, r, delta(1, " held back"))
	r.rewind(false)
	if d := taken(t, r, delta(1, " held")); d != nil {
		t.Errorf("%v came before", d)
	}
	expect(t, taken(t, r, delta(1, " back!")), delta(1, "!"))
}

func TestTextBehindOneTokenMayComeInOtherPieces(t *testing.T) {
	r := newReceived(0)
	// The second token's text is still half a character when the stream is lost.
	taken(t, r, delta(0, "a", 5))
	taken(t, r, delta(1, "", 6))
	r.rewind(true)
	expect(t, taken(t, r, delta(0, "aé", 5, 6, 7)), delta(2, "é", 7))
}

func TestIndexOfTheFirstTokenIsKept(t *testing.T) {
	r := newReceived(4)
	expect(t, taken(t, r, delta(4, "e", 9)), delta(4, "e", 9))
	r.rewind(true)
	expect(t, taken(t, r, delta(4, "ef", 9, 10)), delta(5, "f", 10))
	expectCode(t, r, delta(3, "x", 8), codes.Internal)
}

func TestMissingTokensAreAnError(t *testing.T) {
	r := newReceived(0)
	taken(t, r, delta(0, "a", 5))
	expectCode(t, r, delta(2, "c", 7), codes.Internal)
}

func TestAnotherAnswerIsAnError(t *testing.T) {
	for name, other := range map[string]*pb.Delta{
		"token": delta(0, "ab", 5, 9),
		"text":  delta(0, "aX", 5, 6),
	} {
		r := newReceived(0)
		taken(t, r, delta(0, "ab", 5, 6))
		r.rewind(true)
		t.Run(name, func(t *testing.T) { expectCode(t, r, other, codes.DataLoss) })
	}
}

func callPart(id, name, arguments string) *pb.Delta {
	part := &pb.ToolCallDelta{Id: id, Name: name, ArgumentsJson: arguments}
	return &pb.Delta{ToolCalls: []*pb.ToolCallDelta{part}}
}

func TestToolCallsAndReasoningAreCut(t *testing.T) {
	r := newReceived(0)
	taken(t, r, &pb.Delta{ReasoningText: "so"})
	taken(t, r, callPart("id1", "find", `{"a"`))
	r.rewind(true)
	expect(t, taken(t, r, &pb.Delta{ReasoningText: "so that"}), &pb.Delta{ReasoningText: " that"})
	// The id that came first stays: a new run makes another one.
	expect(t, taken(t, r, callPart("id2", "find", `{"a": 1`)), callPart("", "", ": 1"))
	expect(t, taken(t, r, callPart("", "", "}")), callPart("", "", "}"))
	call := r.whole().ToolCalls[0]
	want := &pb.ToolCall{Id: "id1", Name: "find", ArgumentsJson: `{"a": 1}`}
	if !proto.Equal(call, want) {
		t.Errorf("got %v, want %v", call, want)
	}
	r.rewind(true)
	expectCode(t, r, callPart("id3", "look", ""), codes.DataLoss)
}
