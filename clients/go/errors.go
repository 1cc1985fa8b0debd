package slotwise

import (
	"context"
	"fmt"
	"strings"
	"time"
	"unicode"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Error is a call that failed. It keeps the gRPC status: status.Code and status.FromError know it.
type Error struct {
	status *status.Status
	// Why the caller's own context ended, where that is what happened.
	cause error
}

// Error is the server's sentence behind its code, such as "INVALID_ARGUMENT: n: 33 is above 32".
func (e *Error) Error() string {
	return fmt.Sprintf("%s: %s", e.Name(), e.status.Message())
}

// Name is the code as the API's documents write it.
func (e *Error) Name() string {
	if e.status.Code() == codes.Canceled {
		return "CANCELLED"
	}
	var name strings.Builder
	for i, letter := range e.status.Code().String() {
		if i > 0 && unicode.IsUpper(letter) {
			name.WriteByte('_')
		}
		name.WriteRune(unicode.ToUpper(letter))
	}
	return name.String()
}

// GRPCStatus is the status as it came, with its details.
func (e *Error) GRPCStatus() *status.Status { return e.status }

// Unwrap is context.Canceled or context.DeadlineExceeded where the caller's context ended.
func (e *Error) Unwrap() error { return e.cause }

// Field names what the server refused, such as "sampling.temperature"; "" where it named nothing.
func (e *Error) Field() string {
	for _, detail := range e.status.Details() {
		if bad, ok := detail.(*errdetails.BadRequest); ok && len(bad.FieldViolations) > 0 {
			return bad.FieldViolations[0].Field
		}
	}
	return ""
}

// RetryAfter is how long to wait before trying again, where a full queue said so; else 0.
func (e *Error) RetryAfter() time.Duration {
	for _, detail := range e.status.Details() {
		if info, ok := detail.(*errdetails.RetryInfo); ok {
			return info.RetryDelay.AsDuration()
		}
	}
	return 0
}

// reason tells statuses of one code apart.
func (e *Error) reason() string {
	for _, detail := range e.status.Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return info.Reason
		}
	}
	return ""
}

// What gRPC says, by codes that a server has too, of a connection that broke.
var lostWords = []string{"RST_STREAM", "GOAWAY", "transport", "without sending trailers", "EOF"}

// isLoss says that the stream broke off on the way, without a word of the server.
func (e *Error) isLoss() bool {
	if len(e.status.Proto().Details) > 0 {
		return false
	}
	switch e.status.Code() {
	case codes.Unavailable, codes.Canceled:
		return true
	case codes.Internal, codes.Unknown:
		for _, words := range lostWords {
			if strings.Contains(e.status.Message(), words) {
				return true
			}
		}
	}
	return false
}

func newError(code codes.Code, message string) *Error {
	return &Error{status: status.New(code, message)}
}

// fromRPC keeps the status of a failed call to address.
func fromRPC(ctx context.Context, err error, address string) *Error {
	if known, ok := err.(*Error); ok {
		return known
	}
	failed := &Error{status: status.Convert(err), cause: ctx.Err()}
	if failed.status.Code() == codes.DeadlineExceeded {
		// The server may have told it a moment before the context knows.
		failed.cause = context.DeadlineExceeded
	}
	if failed.status.Code() == codes.Unavailable && len(failed.status.Proto().Details) == 0 {
		message := fmt.Sprintf("no answer from %s: %s", address, failed.status.Message())
		failed.status = status.New(codes.Unavailable, message)
	}
	return failed
}
