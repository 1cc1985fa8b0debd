export { Client } from './client.js';
export { Stream } from './stream.js';
export {
  AlreadyExistsError,
  AnswerChangedError,
  CancelledError,
  DeadlineError,
  ExpiredError,
  FailedPreconditionError,
  InternalError,
  InvalidArgumentError,
  MessageTooLargeError,
  NotFoundError,
  OutOfRangeError,
  PermissionDeniedError,
  QueueFullError,
  SlotwiseError,
  SlowReaderError,
  SupersededError,
  UnauthenticatedError,
  UnavailableError,
} from './errors.js';
