// What came of one answer, and where in it the present stream is.

import { status } from '@grpc/grpc-js';
import { InternalError } from './errors.js';

/** A stream repeats what came otherwise. */
export class DifferenceError extends Error {}

/**
 * Tokens, text, reasoning and tool calls of one choice.
 *
 * A stream that begins again, at the first token or behind the last one that came, repeats a part;
 * `take` compares it and leaves it out. A server's text behind a token depends on the tokens up to
 * it alone; what was held back until the end comes after the last token.
 */
export class Received {
  isFinished = false;
  #first;
  #tokenIds = [];
  // Tokens of the present stream, in the same count.
  #token;
  #text = new Text();
  #reasoning = new Text();
  #calls = [];

  /** `first`: the first token that is looked at; those before it are not known. */
  constructor(first = 0) {
    this.#first = first;
    this.#token = first;
  }

  /** Tokens that came, those before the first one included. */
  get numTokens() {
    return this.#first + this.#tokenIds.length;
  }

  /** Another stream follows: from the start, or from token `numTokens` on. */
  rewind(toStart) {
    this.#token = toStart ? this.#first : this.numTokens;
    for (const part of this.#parts()) part.rewind(toStart);
  }

  /**
   * Cuts a delta to what is new; whether anything is. DifferenceError when the rest is not what
   * came, InternalError when something is missing.
   */
  take(delta) {
    const hasTokens = delta.tokenIds.length > 0;
    if (hasTokens) this.#takeTokens(delta);
    delta.text = this.#text.take(delta.text, 'text');
    delta.reasoningText = this.#reasoning.take(delta.reasoningText, 'reasoning');
    delta.toolCalls = delta.toolCalls.filter((part) => this.#takeCall(part, delta.index));
    if (hasTokens && this.#token === this.numTokens) {
      for (const part of this.#parts()) part.mark();
    }
    return Boolean(
      delta.tokenIds.length || delta.text || delta.reasoningText || delta.toolCalls.length,
    );
  }

  /** Its last message came; false: once more. */
  finish() {
    const isNew = !this.isFinished;
    this.isFinished = true;
    return isNew;
  }

  #takeTokens(delta) {
    if (delta.firstTokenIndex !== this.#token) {
      throw new InternalError(
        `tokens are missing in the stream of choice ${delta.index}: it goes on at ` +
          `${delta.firstTokenIndex} and had come to ${this.#token}`,
        status.INTERNAL,
      );
    }
    const numKnown = Math.min(this.numTokens - this.#token, delta.tokenIds.length);
    for (let i = 0; i < numKnown; i++) {
      const old = this.#tokenIds[this.#token - this.#first + i];
      if (delta.tokenIds[i] === old) continue;
      const place = `token ${this.#token + i}`;
      throw new DifferenceError(`${place} is ${delta.tokenIds[i]} and was ${old}`);
    }
    this.#token += delta.tokenIds.length;
    delta.tokenIds.splice(0, numKnown);
    delta.logprobs.splice(0, numKnown);
    delta.firstTokenIndex += numKnown;
    this.#tokenIds.push(...delta.tokenIds);
  }

  #takeCall(part, choice) {
    if (part.index > this.#calls.length) {
      throw new InternalError(
        `a tool call is missing in the stream of choice ${choice}: part of call ${part.index} ` +
          `came and call ${this.#calls.length} had not`,
        status.INTERNAL,
      );
    }
    if (part.index === this.#calls.length) this.#calls.push(new Call(part.name));
    return this.#calls[part.index].take(part);
  }

  *#parts() {
    yield this.#text;
    yield this.#reasoning;
    yield* this.#calls;
  }
}

/** A text as it came, how far the present stream is in it, and how far the last token's was. */
class Text {
  #pieces = [];
  #length = 0;
  #at = 0;
  #mark = 0;

  /** The last token came with what the present stream has told. */
  mark() {
    this.#mark = this.#at;
  }

  rewind(toStart) {
    this.#at = toStart ? 0 : this.#mark;
  }

  /** What is new of the stream's next piece. */
  take(piece, name) {
    const numKnown = Math.min(this.#length - this.#at, piece.length);
    if (numKnown > 0) this.#compare(piece.slice(0, numKnown), name);
    const fresh = piece.slice(numKnown);
    this.#at += piece.length;
    this.#length += fresh.length;
    if (fresh) this.#pieces.push(fresh);
    return fresh;
  }

  #compare(piece, name) {
    this.#pieces = [this.#pieces.join('')];
    const known = this.#pieces[0].slice(this.#at, this.#at + piece.length);
    if (piece === known) return;
    const [is, was] = [piece, known].map((text) => JSON.stringify(text));
    throw new DifferenceError(`the ${name} has ${is} where it had ${was}`);
  }
}

/** A tool call as it came. */
class Call {
  #name;
  #arguments = new Text();
  #wasTold = false;
  // The present stream has told of it; and had when the last token came.
  #isOpen = false;
  #mark = false;

  constructor(name) {
    this.#name = name;
  }

  mark() {
    this.#mark = this.#isOpen;
    this.#arguments.mark();
  }

  rewind(toStart) {
    this.#isOpen = !toStart && this.#mark;
    this.#arguments.rewind(toStart);
  }

  /** Cuts a part to what is new; whether anything is. The id that came first stays. */
  take(part) {
    const isNew = !this.#wasTold;
    if (this.#wasTold && !this.#isOpen) {
      if (part.name !== this.#name) {
        const [is, was] = [part.name, this.#name].map((name) => JSON.stringify(name));
        throw new DifferenceError(`tool call ${part.index} is ${is} and was ${was}`);
      }
      part.id = '';
      part.name = '';
    }
    this.#isOpen = true;
    this.#wasTold = true;
    part.argumentsJson = this.#arguments.take(part.argumentsJson, 'tool call');
    return isNew || part.argumentsJson !== '';
  }
}
