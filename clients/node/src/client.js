// The client.

import grpc from '@grpc/grpc-js';
import { Connection, refuseUnknown } from './connection.js';
import { NotFoundError, fromStatus } from './errors.js';
import { gathered } from './gathering.js';
import { CALLS, SERVICE, attachRequest, chat, generateRequest } from './protocol.js';
import { Once, Reading } from './reading.js';
import { Stream } from './stream.js';

// For how long the end of a stream waits until the server knows of it.
const CANCEL_TIMEOUT_MS = 1_000;

/** A connection to one server. Its options and methods are told in index.d.ts. */
export class Client {
  /** Streams that are open. */
  streams = new Set();
  #connection;
  #channel;
  // Requests that are being cancelled.
  #ends = new Set();

  constructor(target = '127.0.0.1:50051', options = {}) {
    this.#connection = new Connection(target, options);
    this.#channel = new grpc.Client(target, this.#connection.credentials, this.#connection.options);
  }

  generate(prompt, { signal, timeoutMs, ...options } = {}) {
    const source = this.#source(generateRequest(prompt, options), 'generate');
    return new Stream(this, source, limits({ signal, timeoutMs }));
  }

  chat(messages, { system, tools, templateKwargs, omitGenerationPrompt, ...options } = {}) {
    const more = { system, tools, templateKwargs, omitGenerationPrompt };
    return this.generate(chat(messages, more), options);
  }

  attach(requestId, nextTokenIndex = 0, { signal, timeoutMs, ...more } = {}) {
    const request = attachRequest({ requestId, nextTokenIndex, ...more });
    const source = this.#source(request, 'attach');
    return new Stream(this, source, limits({ signal, timeoutMs }));
  }

  async complete(prompt, { signal, timeoutMs, ...options } = {}) {
    const within = limits({ signal, timeoutMs });
    const source = this.#source(generateRequest(prompt, options), 'generate');
    let delayMs;
    try {
      return await this.#unary(CALLS.complete, source.first, within);
    } catch (error) {
      if (signal?.aborted) await this.#abandon(source.requestId);
      signal?.throwIfAborted();
      delayMs = source.lost(error);
    }
    return gathered(new Stream(this, source, within, delayMs));
  }

  async cancel(requestId, options) {
    await this.#ask(CALLS.cancel, { requestId }, options);
  }

  tokenize(text, { parseControlTokens = false, ...options } = {}) {
    return this.#ask(CALLS.tokenize, { text, parseControlTokens }, options);
  }

  detokenize(tokenIds, { keepControlTokens = false, ...options } = {}) {
    return this.#ask(CALLS.detokenize, { tokenIds, keepControlTokens }, options);
  }

  modelInfo(options) {
    return this.#ask(CALLS.modelInfo, {}, options);
  }

  load(options) {
    return this.#ask(CALLS.load, {}, options);
  }

  async health(service = SERVICE, options = {}) {
    try {
      return await this.#ask(CALLS.health, { service }, options);
    } catch (error) {
      if (error instanceof NotFoundError) return 'unknown_service';
      throw error;
    }
  }

  async close() {
    this.#connection.isClosed = true;
    for (const stream of [...this.streams]) stream.close();
    await this.ends();
    this.#channel.close();
  }

  /** Opens a call that answers by a stream; what reads `Stream`. */
  stream({ path, serialize, deserialize }, request, until) {
    const { metadata } = this.#connection;
    const options = { deadline: until };
    return this.#channel.makeServerStreamRequest(
      path,
      serialize,
      deserialize,
      request,
      metadata,
      options,
    );
  }

  /** Cancels a request that nobody reads any more, if it is there. */
  end(requestId) {
    // Best effort: what is not heard of is ended by its attach window.
    const within = limits({ timeoutMs: CANCEL_TIMEOUT_MS });
    const done = this.#unary(CALLS.cancel, { requestId }, within)
      .catch(() => undefined)
      .finally(() => this.#ends.delete(done));
    this.#ends.add(done);
  }

  /** Resolves when the server knows of all ends; each takes a second at most. */
  async ends() {
    await Promise.all(this.#ends);
  }

  async #abandon(requestId) {
    if (requestId !== null) this.end(requestId);
    await this.ends();
  }

  #source(request, name) {
    this.#connection.needOpen();
    if (!this.#connection.reconnect) return new Once(this.#connection, CALLS[name], request);
    return name === 'attach'
      ? Reading.attach(this.#connection, request)
      : Reading.send(this.#connection, request);
  }

  async #ask(call, request, options = {}) {
    const within = limits(options);
    const checked = call.request(request);
    this.#connection.needOpen();
    try {
      return await this.#unary(call, checked, within);
    } catch (error) {
      within.signal?.throwIfAborted();
      throw fromStatus(error, this.#connection.target);
    }
  }

  #unary({ path, serialize, deserialize, tell }, request, { signal, deadline: until }) {
    signal?.throwIfAborted();
    const { metadata } = this.#connection;
    return new Promise((resolve, reject) => {
      const done = (error, response) => {
        signal?.removeEventListener('abort', abort);
        if (error !== null) return reject(error);
        this.#connection.wasReached = true;
        return resolve(tell(response));
      };
      const options = { deadline: until };
      const call = this.#channel.makeUnaryRequest(
        path,
        serialize,
        deserialize,
        request,
        metadata,
        options,
        done,
      );
      const abort = () => call.cancel();
      signal?.addEventListener('abort', abort);
    });
  }
}

/** Of a call: its deadline in milliseconds of the epoch, as gRPC wants it, and its signal. */
function limits({ signal, timeoutMs = Infinity, ...unknown }) {
  refuseUnknown(unknown);
  if (typeof timeoutMs !== 'number' || !(timeoutMs >= 0)) {
    throw new TypeError(`timeoutMs: ${String(timeoutMs)} is not possible; milliseconds, 0 or more`);
  }
  return { signal, deadline: Date.now() + timeoutMs };
}
