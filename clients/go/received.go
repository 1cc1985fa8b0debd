package slotwise

import (
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"

	pb "slotwise/slotwisepb"
)

// received is what came of one answer, and where in it the present stream is.
//
// A stream that begins again, at the first token or behind the last one that came, repeats a part;
// take compares it and cuts it off. A server's text behind a token depends on the tokens up to it
// alone; what was held back until the end comes after the last token.
type received struct {
	// Tokens before firstIndex are not known here.
	firstIndex uint32
	tokenIDs   []uint32
	// Of the present stream, the next token in the same count.
	token     uint32
	text      text
	reasoning text
	calls     []*call
	// The present stream may repeat what came.
	repeats    bool
	isFinished bool
}

func newReceived(firstIndex uint32) *received {
	return &received{firstIndex: firstIndex, token: firstIndex}
}

// numTokens counts the tokens that came and those before firstIndex.
func (r *received) numTokens() uint32 {
	return r.firstIndex + uint32(len(r.tokenIDs))
}

// rewind is told when another stream follows: from the start, or from token numTokens on.
func (r *received) rewind(toStart bool) {
	r.repeats = true
	r.token = r.numTokens()
	if toStart {
		r.token = r.firstIndex
	}
	r.text.rewind(toStart)
	r.reasoning.rewind(toStart)
	for _, call := range r.calls {
		call.rewind(toStart)
	}
}

// take cuts a delta to what is new and says whether anything is. DATA_LOSS where the rest is not
// what came, INTERNAL where something is missing.
func (r *received) take(delta *pb.Delta) (bool, error) {
	hasTokens := len(delta.TokenIds) > 0
	if err := r.takeTokens(delta); err != nil {
		return false, err
	}
	var err error
	if delta.Text, err = r.text.take(delta.Text, "text"); err != nil {
		return false, err
	}
	if delta.ReasoningText, err = r.reasoning.take(delta.ReasoningText, "reasoning"); err != nil {
		return false, err
	}
	if err := r.takeCalls(delta); err != nil {
		return false, err
	}
	if hasTokens && r.token == r.numTokens() {
		r.mark()
	}
	isNew := len(delta.TokenIds) > 0 || delta.Text != "" || delta.ReasoningText != ""
	return isNew || len(delta.ToolCalls) > 0, nil
}

func (r *received) takeTokens(delta *pb.Delta) error {
	if len(delta.TokenIds) == 0 {
		return nil
	}
	if delta.FirstTokenIndex != r.token {
		return newError(codes.Internal, fmt.Sprintf(
			"tokens are missing in the stream of choice %d: it goes on at %d and had come to %d",
			delta.Index, delta.FirstTokenIndex, r.token))
	}
	known := r.tokenIDs[r.token-r.firstIndex:]
	if len(known) > len(delta.TokenIds) {
		known = known[:len(delta.TokenIds)]
	}
	for i, old := range known {
		if delta.TokenIds[i] != old {
			return differs("token %d is %d and was %d", r.token+uint32(i), delta.TokenIds[i], old)
		}
	}
	r.token += uint32(len(delta.TokenIds))
	delta.FirstTokenIndex += uint32(len(known))
	delta.TokenIds = delta.TokenIds[len(known):]
	if len(delta.Logprobs) > 0 {
		delta.Logprobs = delta.Logprobs[len(known):]
	}
	r.tokenIDs = append(r.tokenIDs, delta.TokenIds...)
	return nil
}

func (r *received) takeCalls(delta *pb.Delta) error {
	parts := delta.ToolCalls
	delta.ToolCalls = nil
	for _, part := range parts {
		if int(part.Index) == len(r.calls) {
			r.calls = append(r.calls, &call{id: part.Id, name: part.Name})
		}
		if int(part.Index) > len(r.calls) {
			return newError(codes.Internal, fmt.Sprintf(
				"a tool call is missing in the stream of choice %d: part of call %d came and call "+
					"%d had not", delta.Index, part.Index, len(r.calls)))
		}
		isNew, err := r.calls[part.Index].take(part)
		if err != nil {
			return err
		}
		if isNew {
			delta.ToolCalls = append(delta.ToolCalls, part)
		}
	}
	return nil
}

// mark notes that the last token came with what the present stream has told.
func (r *received) mark() {
	r.text.mark()
	r.reasoning.mark()
	for _, call := range r.calls {
		call.mark()
	}
}

// finish says whether the answer's last message came for the first time.
func (r *received) finish() bool {
	wasFinished := r.isFinished
	r.isFinished = true
	return !wasFinished
}

// whole is the answer so far, without its logprobs.
func (r *received) whole() *pb.CompleteChoice {
	choice := &pb.CompleteChoice{
		TokenIds: r.tokenIDs, Text: r.text.whole.String(), ReasoningText: r.reasoning.whole.String(),
	}
	for _, call := range r.calls {
		choice.ToolCalls = append(choice.ToolCalls, &pb.ToolCall{
			Id: call.id, Name: call.name, ArgumentsJson: call.arguments.whole.String(),
		})
	}
	return choice
}

// text is a text as it came, how far the present stream is in it, and how far the last token's was.
type text struct {
	whole strings.Builder
	at    int
	last  int
}

func (t *text) mark() { t.last = t.at }

func (t *text) rewind(toStart bool) {
	t.at = t.last
	if toStart {
		t.at = 0
	}
}

// take returns what is new of the stream's next piece.
func (t *text) take(piece, name string) (string, error) {
	known := t.whole.String()[t.at:]
	if len(known) > len(piece) {
		known = known[:len(piece)]
	}
	if !strings.HasPrefix(piece, known) {
		return "", differs("the %s has %q where it had %q", name, piece[:len(known)], known)
	}
	t.at += len(piece)
	piece = piece[len(known):]
	t.whole.WriteString(piece)
	return piece, nil
}

// call is a tool call as it came.
type call struct {
	id        string
	name      string
	arguments text
	wasTold   bool
	// The present stream has told of it; and had when the last token came.
	isOpen bool
	last   bool
}

func (c *call) mark() {
	c.last = c.isOpen
	c.arguments.mark()
}

func (c *call) rewind(toStart bool) {
	c.isOpen = c.last && !toStart
	c.arguments.rewind(toStart)
}

// take cuts a part to what is new and says whether anything is. The id that came first stays.
func (c *call) take(part *pb.ToolCallDelta) (bool, error) {
	isRepeated := c.wasTold && !c.isOpen
	isNew := !c.wasTold
	c.isOpen, c.wasTold = true, true
	if isRepeated {
		if part.Name != c.name {
			return false, differs("tool call %d is %q and was %q", part.Index, part.Name, c.name)
		}
		part.Id, part.Name = "", ""
	}
	var err error
	part.ArgumentsJson, err = c.arguments.take(part.ArgumentsJson, "tool call")
	return isNew || part.ArgumentsJson != "", err
}

// differs says how a new run is not the one that had begun.
func differs(format string, values ...interface{}) error {
	return newError(codes.DataLoss, "the answer was computed anew and is not the one that had "+
		"begun: "+fmt.Sprintf(format, values...)+"; are the servers behind the address set up alike?")
}
