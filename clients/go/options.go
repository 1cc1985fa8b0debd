package slotwise

import pb "slotwise/slotwisepb"

// Option sets a field of a request. Any function of this shape is one, for the fields that have
// none here.
type Option func(*pb.GenerateRequest)

// System is the message before the question.
func System(text string) Option {
	return func(r *pb.GenerateRequest) {
		system := &pb.ChatMessage{Role: "system", Content: &text}
		r.GetChat().Messages = append([]*pb.ChatMessage{system}, r.GetChat().Messages...)
	}
}

// RequestID names the request; a random name if unset.
func RequestID(id string) Option {
	return func(r *pb.GenerateRequest) { r.RequestId = &id }
}

// MaxNewTokens is the most tokens of the answer; all the room that the context leaves if unset.
func MaxNewTokens(count uint32) Option {
	return func(r *pb.GenerateRequest) { r.MaxNewTokens = &count }
}

// Temperature 0 is greedy; the model's default if unset.
func Temperature(value float32) Option {
	return func(r *pb.GenerateRequest) { sampling(r).Temperature = &value }
}

// Seed is the key of the draw: equal seeds give equal tokens. Random if unset.
func Seed(seed uint64) Option {
	return func(r *pb.GenerateRequest) { sampling(r).Seed = &seed }
}

// Stop ends the answer before one of these texts.
func Stop(texts ...string) Option {
	return func(r *pb.GenerateRequest) { r.Stop = texts }
}

// JSONSchema makes the answer a JSON value that this schema, as JSON text, allows.
func JSONSchema(schema string) Option {
	return func(r *pb.GenerateRequest) {
		r.Constraint = &pb.GenerateRequest_JsonSchema{JsonSchema: schema}
	}
}

func sampling(r *pb.GenerateRequest) *pb.SamplingParams {
	if r.Sampling == nil {
		r.Sampling = &pb.SamplingParams{}
	}
	return r.Sampling
}
