// Errors of the client: one class for each way a call can fail, made from gRPC statuses.

import { status } from '@grpc/grpc-js';
import { details } from './details.js';

/** A call failed. `message` is the server's sentence, `code` the number of the gRPC status. */
export class SlotwiseError extends Error {
  constructor(message, code) {
    super(message);
    this.name = new.target.name;
    this.code = code;
  }
}

/** The request was refused; `violations` names the fields. Do not send it again unchanged. */
export class InvalidArgumentError extends SlotwiseError {
  constructor(message, violations = []) {
    super(message, status.INVALID_ARGUMENT);
    this.violations = violations;
  }

  /** The first refused field, as the API names it; null when the server named none. */
  get field() {
    return this.violations[0]?.field ?? null;
  }
}

/** The queue is full; try again after `retryAfterMs`, null when the server gave no time. */
export class QueueFullError extends SlotwiseError {
  constructor(message, retryAfterMs = null) {
    super(message, status.RESOURCE_EXHAUSTED);
    this.retryAfterMs = retryAfterMs;
  }
}

/** A message was larger than the transport allows (64 MiB). */
export class MessageTooLargeError extends SlotwiseError {}

/** No server there, or it drains, or its workers are down. Another server may answer. */
export class UnavailableError extends SlotwiseError {}

/** The call's timeout passed; the server has stopped working on it. */
export class DeadlineError extends SlotwiseError {}

/** The call was cancelled on its way. */
export class CancelledError extends SlotwiseError {}

/** No token could continue the output under its constraint; another seed may do better. */
export class FailedPreconditionError extends SlotwiseError {}

/** The request ended too long ago; its tokens are forgotten. */
export class ExpiredError extends FailedPreconditionError {}

/** No request of that id waits or runs, or is kept. */
export class NotFoundError extends SlotwiseError {}

/** The request has not as many tokens. */
export class OutOfRangeError extends SlotwiseError {}

/** Another connection reads the request now. */
export class SupersededError extends SlotwiseError {}

/** The events were not read for so long that the server stopped sending them. */
export class SlowReaderError extends SlotwiseError {}

/** The call brought no token, or none that the server knows. */
export class UnauthenticatedError extends SlotwiseError {}

/** The token is not good for this: the request is another caller's. */
export class PermissionDeniedError extends SlotwiseError {}

/** Another request of that id waits or runs. */
export class AlreadyExistsError extends SlotwiseError {}

/** The server failed. */
export class InternalError extends SlotwiseError {}

/** An answer that was computed anew is not the one that had begun: servers differ. */
export class AnswerChangedError extends SlotwiseError {}

const BY_CODE = {
  [status.UNAVAILABLE]: UnavailableError,
  [status.DEADLINE_EXCEEDED]: DeadlineError,
  [status.CANCELLED]: CancelledError,
  [status.FAILED_PRECONDITION]: FailedPreconditionError,
  [status.NOT_FOUND]: NotFoundError,
  [status.ALREADY_EXISTS]: AlreadyExistsError,
  [status.OUT_OF_RANGE]: OutOfRangeError,
  [status.ABORTED]: SupersededError,
  [status.UNAUTHENTICATED]: UnauthenticatedError,
  [status.PERMISSION_DENIED]: PermissionDeniedError,
  [status.INTERNAL]: InternalError,
};

// Of google.rpc.ErrorInfo, where the code alone does not tell.
const BY_REASON = { EXPIRED_REQUEST: ExpiredError, SLOW_READER: SlowReaderError };

// What gRPC says, by codes that a server has too, of a connection that broke.
const LOST =
  /RST_STREAM|Connection dropped|GOAWAY|http2|HTTP\/2|EOF|ECONNRESET|without gRPC status/;

/** The stream broke off (null: it ended early) without a word of the server. */
export function isLoss(error) {
  if (error === null) return true;
  if (details(error).isThere) return false;
  if (error.code === status.UNAVAILABLE || error.code === status.CANCELLED) return true;
  const isUnclear = error.code === status.INTERNAL || error.code === status.UNKNOWN;
  return isUnclear && LOST.test(error.details ?? '');
}

/** The typed error of a failed call to `target`. */
export function fromStatus(error, target) {
  if (error instanceof SlotwiseError) return error;
  const { isThere, violations, retryAfterMs, reason } = details(error);
  const told = error.details || status[error.code] || error.message;
  // A note that is empty, of grpc-js.
  const text = told.replace(/\.? Resolution note: $/, '');
  if (error.code === status.INVALID_ARGUMENT) return new InvalidArgumentError(text, violations);
  if (error.code === status.RESOURCE_EXHAUSTED) {
    // gRPC itself uses this code for messages over the size limit; it never sends details.
    const isTooLarge = !isThere && text.includes('larger than');
    if (isTooLarge) return new MessageTooLargeError(text, error.code);
    return new QueueFullError(text, retryAfterMs);
  }
  const kind = BY_REASON[reason] ?? BY_CODE[error.code] ?? SlotwiseError;
  const isUnanswered = error.code === status.UNAVAILABLE && !isThere;
  return new kind(isUnanswered ? `no answer from ${target}: ${text}` : text, error.code);
}
