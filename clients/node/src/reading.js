// One request as its reader sees it: what came, and how to go on when the stream is lost.

import { randomBytes, randomUUID } from 'node:crypto';
import { performance } from 'node:perf_hooks';
import { status } from '@grpc/grpc-js';
import {
  AlreadyExistsError,
  AnswerChangedError,
  DeadlineError,
  ExpiredError,
  InternalError,
  InvalidArgumentError,
  NotFoundError,
  OutOfRangeError,
  QueueFullError,
  SlowReaderError,
  UnavailableError,
  fromStatus,
  isLoss,
} from './errors.js';
import { CALLS, event } from './protocol.js';
import { DifferenceError, Received } from './received.js';

// Within what a server allows by default; a request that nobody reads for longer ends.
const ATTACH_WINDOW_MS = 30_000;
const FIRST_DELAY_MS = 100;
const MAX_DELAY_MS = 2_000;

const SEND = 'send';
const ATTACH = 'attach';
// From the first token on, which are compared with those that came.
const ATTACH_TO_ALL = 'attach to all';
// In the place of the first sending: the server takes no attach window.
const SEND_PLAIN = 'send plain';

/** A call that is made once. */
export class Once {
  isOver = false;
  requestId = null;

  constructor(connection, call, request) {
    this.connection = connection;
    this.call = call;
    this.first = request;
  }

  nextCall() {
    return [this.call, this.first];
  }

  take(response) {
    this.connection.wasReached = true;
    return this.call.tell(response);
  }

  lost(error) {
    this.isOver = true;
    throw fromStatus(error, this.connection.target);
  }

  ended() {
    this.isOver = true;
    return true;
  }
}

/**
 * A request that survives its connection, its server, and the move to another server.
 *
 * It has an id and a seed from the start: sent anew, it is the same one. What a new run repeats is
 * compared with what came, and not told again.
 */
export class Reading {
  /** It has ended, by its last message or by a status: nothing is left to cancel. */
  isOver = false;
  #connection;
  #request = null;
  #ownWindow = false;
  #way = SEND;
  #received = new Map();
  // Of an attached request it is told with Accepted.
  #numChoices = null;
  #nextPrompt = 0;
  #accepted = null;
  #numSent = 0;
  #delayMs = FIRST_DELAY_MS;
  // Since when there is no stream, and for how long there was none since the last news.
  #lostAt = null;
  #lostMs = 0;
  #beganAt = performance.now();
  #lastFailure = null;
  // When the server was last heard, or can last have known that somebody reads.
  #heardAt = performance.now();
  #silenceMs = 0;
  #isUnread = false;
  // The present stream has begun.
  #isHeard = false;

  /** A request that is yet to be sent. */
  static send(connection, request) {
    const reading = new Reading(connection, request.requestId ?? randomUUID());
    reading.#ownWindow = request.attachWindowMs === undefined;
    reading.#request = named(request, reading.requestId);
    reading.#numChoices = Math.max(request.n ?? 1, 1);
    return reading;
  }

  /** One that the server knows; the indices are those of AttachRequest. */
  static attach(connection, request) {
    const reading = new Reading(connection, request.requestId);
    const firsts = [request.nextTokenIndex ?? 0, ...(request.otherNextTokenIndices ?? [])];
    reading.#received = new Map(firsts.map((first, index) => [index, new Received(first)]));
    reading.#nextPrompt = request.nextPromptTokenIndex ?? 0;
    reading.#way = ATTACH;
    return reading;
  }

  constructor(connection, requestId) {
    this.#connection = connection;
    this.requestId = requestId;
  }

  /** The request, for a call other than `nextCall` that is made first. */
  get first() {
    this.#numSent += 1;
    return this.#request;
  }

  /** The call to make, and its request. */
  nextCall() {
    this.#isHeard = false;
    const attaches = this.#way === ATTACH;
    for (const received of this.#received.values()) received.rewind(!attaches);
    if (this.#way === SEND) {
      this.#numSent += 1;
      return [CALLS.generate, this.#request];
    }
    this.#silenceMs = performance.now() - this.#heardAt;
    const { requestId } = this;
    if (!attaches) return [CALLS.attach, { requestId }];
    const count = Math.max(1, ...[...this.#received.keys()].map((index) => index + 1));
    const [nextTokenIndex, ...otherNextTokenIndices] = Array.from(
      { length: count },
      (_, index) => this.#choice(index).numTokens,
    );
    const nextPromptTokenIndex = this.#nextPrompt;
    const where = { nextTokenIndex, otherNextTokenIndices, nextPromptTokenIndex };
    return [CALLS.attach, { requestId, ...where }];
  }

  /**
   * What a message says to the reader; null: nothing new. AnswerChangedError when a new run
   * differs, InternalError for a gap.
   */
  take(response) {
    this.#connection.wasReached = true;
    this.#heardAt = performance.now();
    if (response.accepted) return this.#takeAccepted(response);
    if (!this.#isNew(response)) return null;
    this.#lostMs = 0;
    this.#delayMs = FIRST_DELAY_MS;
    this.#lastFailure = null;
    return event(response);
  }

  /**
   * The stream ended, with an error or (null) before its last message. Milliseconds to wait before
   * `nextCall`; throws the typed error when it is not to be made.
   */
  lost(error) {
    const now = performance.now();
    // Time with a server counts back, also where it had no news yet.
    if (this.#lostAt === null) this.#lostMs = Math.max(0, this.#lostMs - (now - this.#beganAt));
    else this.#lostMs += now - this.#lostAt;
    this.#lostAt = now;
    const failure = this.#failure(error);
    this.#lastFailure = failure;
    const way = this.#wayOn(failure, isLoss(error));
    const delay = way === SEND_PLAIN ? 0 : Math.max(this.#delayMs, failure.retryAfterMs ?? 0);
    if (way === null || this.#lostMs + delay > this.#connection.reconnectTimeoutMs) {
      this.isOver = true;
      throw failure;
    }
    if (way === SEND_PLAIN) {
      delete this.#request.attachWindowMs;
      this.#numSent -= 1;
    }
    this.#way = way === SEND_PLAIN ? SEND : way;
    this.#delayMs = Math.min(2 * this.#delayMs, MAX_DELAY_MS);
    return delay;
  }

  /** The call ended without an error; whether nothing is missing. */
  ended() {
    // How many answers an attached request has may not be known here.
    this.isOver ||= this.#request === null;
    return this.isOver;
  }

  #failure(error) {
    if (error === null) {
      const text = `the stream of request "${this.requestId}" ended before its answer did`;
      return new InternalError(text, status.INTERNAL);
    }
    const failure = fromStatus(error, this.#connection.target);
    if (!(failure instanceof DeadlineError) || this.#lastFailure === null) return failure;
    const text = `the timeout passed; before that: ${this.#lastFailure.message}`;
    return new DeadlineError(text, failure.code);
  }

  /** How to go on; null: there is no way. */
  #wayOn(failure, isLost) {
    if (this.#connection.isClosed) return null;
    if (this.#isUnread) {
      this.#isUnread = false;
      return SEND;
    }
    if (failure instanceof SlowReaderError) {
      // Nobody read since long before its last messages were taken here.
      this.#heardAt = -Infinity;
      return ATTACH;
    }
    const again = this.#accepted === null && this.#request !== null ? SEND : ATTACH;
    if (isLost) return this.#connection.wasReached ? again : null;
    if (this.#request === null) return failure instanceof UnavailableError ? ATTACH : null;
    return this.#wayOnAfter(failure, again);
  }

  /** The same after a word of the server. */
  #wayOnAfter(failure, again) {
    const attached = this.#way !== SEND;
    if (failure instanceof UnavailableError) {
      // After Accepted it is the request's own end: given up there, but not elsewhere. Else the
      // server starts or drains.
      return attached && this.#isHeard ? SEND : again;
    }
    if (attached && (failure instanceof NotFoundError || failure instanceof ExpiredError))
      return SEND;
    if (attached && failure.code === status.UNIMPLEMENTED) return SEND;
    if (this.#way === ATTACH && failure instanceof OutOfRangeError) return ATTACH_TO_ALL;
    if (!attached && this.#numSent > 1 && failure instanceof AlreadyExistsError) return ATTACH;
    if (this.#accepted !== null && failure instanceof QueueFullError) return this.#way;
    const isOfWindow =
      failure instanceof InvalidArgumentError && failure.field === 'attach_window_ms';
    const isSent = this.#ownWindow && this.#request.attachWindowMs !== undefined;
    return isOfWindow && isSent ? SEND_PLAIN : null;
  }

  #takeAccepted(response) {
    const { accepted } = response;
    this.#isHeard = true;
    this.#beganAt = performance.now();
    this.#numChoices ??= accepted.numChoices || null;
    if (this.#lostAt !== null) {
      this.#lostMs += this.#beganAt - this.#lostAt;
      this.#lostAt = null;
    }
    if (this.#request !== null && (this.#accepted || this.#numSent > 1)) this.#checkSeed(accepted);
    if (this.#accepted !== null) return null;
    this.#accepted = accepted;
    if (this.#request === null) this.#delayMs = FIRST_DELAY_MS;
    return event(response);
  }

  /** An id of the caller's may be that of another request of theirs. */
  #checkSeed({ seed }) {
    if (String(seed) === this.#request.sampling.seed) return;
    this.isOver = true;
    throw new AlreadyExistsError(
      `a request of id "${this.requestId}" that is not this one is known to the server`,
      status.ALREADY_EXISTS,
    );
  }

  #isNew({ delta, finished, promptLogprobs }) {
    if (delta) return this.#takeDelta(delta);
    if (finished) return this.#takeFinished(finished);
    return promptLogprobs ? this.#takePromptLogprobs(promptLogprobs) : false;
  }

  #takeDelta(delta) {
    try {
      return this.#choice(delta.index).take(delta);
    } catch (error) {
      if (!(error instanceof DifferenceError)) throw error;
      throw new AnswerChangedError(
        `request "${this.requestId}" was computed anew, and answer ${delta.index} is not the one ` +
          `that had begun: ${error.message}; the servers behind ${this.#connection.target} are ` +
          'not set up alike',
        status.DATA_LOSS,
      );
    }
  }

  #takePromptLogprobs(part) {
    const numKnown = Math.max(0, this.#nextPrompt - part.firstTokenIndex);
    part.logprobs.splice(0, numKnown);
    part.firstTokenIndex += numKnown;
    this.#nextPrompt = Math.max(this.#nextPrompt, part.firstTokenIndex + part.logprobs.length);
    return part.logprobs.length > 0;
  }

  #takeFinished(finished) {
    if (this.#wasUnread(finished)) {
      this.#isUnread = true;
      return false;
    }
    const isNew = this.#choice(finished.index).finish();
    const numFinished = [...this.#received.values()].filter((one) => one.isFinished).length;
    this.isOver = numFinished === this.#numChoices;
    return isNew;
  }

  /** Its end is that nobody read it for as long as its attach window: to be sent anew. */
  #wasUnread({ finishReason }) {
    if (this.#request === null || this.#way === SEND || finishReason !== 'cancelled') return false;
    return this.#silenceMs >= (this.#request.attachWindowMs ?? 0);
  }

  #choice(index) {
    if (!this.#received.has(index)) this.#received.set(index, new Received());
    return this.#received.get(index);
  }
}

/** With what makes it the same request when it is sent anew. */
function named(request, requestId) {
  const { attachWindowMs = ATTACH_WINDOW_MS, sampling } = request;
  const seed = sampling.seed ?? String(randomBytes(8).readBigUInt64LE());
  return { ...request, requestId, attachWindowMs, sampling: { ...sampling, seed } };
}
