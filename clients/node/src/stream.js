// The events of one request as they come.

import { setTimeout as sleep } from 'node:timers/promises';

/**
 * Accepted, prompt logprobs if asked for, any number of deltas, one "finished" per choice.
 *
 * A lost connection, a server that was restarted and one that sends its clients elsewhere go by
 * unseen: every token and every piece of text comes exactly once.
 *
 * Leaving the loop cancels the request when it still runs; `detach` leaves it.
 */
export class Stream {
  #client;
  #source;
  #deadline;
  #signal;
  #call = null;
  // Of the present call, once it has ended.
  #error = null;
  #delayMs;
  // Aborted when nobody reads any more.
  #closing = new AbortController();
  #events;

  /** `delayMs`: the request was lost already; milliseconds until it is read on. */
  constructor(client, source, { signal, deadline }, delayMs = 0) {
    signal?.throwIfAborted();
    this.#client = client;
    this.#source = source;
    this.#deadline = deadline;
    this.#signal = signal;
    this.#delayMs = delayMs;
    this.#events = this.#read();
    signal?.addEventListener('abort', this.close);
    client.streams.add(this);
    if (delayMs === 0) this.#open();
  }

  /** The request's id; null: it was left to the server, which tells it in each event. */
  get requestId() {
    return this.#source.requestId;
  }

  [Symbol.asyncIterator]() {
    return this;
  }

  next() {
    return this.#events.next();
  }

  /** The loop was left: resolves when the server knows of it, or after a second. */
  async return(value) {
    this.close();
    await this.#client.ends();
    return { done: true, value };
  }

  /** Cancels what still runs; the loop then ends. Safe to call twice. */
  close = () => {
    const isLeft = this.#leave();
    if (isLeft && this.requestId !== null && !this.#source.isOver) this.#client.end(this.requestId);
  };

  /** Stops reading and lets the request run, for its attach window, for `Client.attach`. */
  detach() {
    this.#leave();
  }

  async *#read() {
    try {
      while (!this.#closing.signal.aborted) {
        const response = await this.#next();
        const event = response && this.#source.take(response);
        if (event) yield event;
      }
      if (this.#signal?.aborted) throw this.#signal.reason;
    } finally {
      this.close();
    }
  }

  /** The next message; null where there was none: the stream is over, or a new call goes on. */
  async #next() {
    if (this.#call === null) await this.#reopen();
    if (this.#closing.signal.aborted) return null;
    const { value, done } = await this.#call.messages.next().catch(() => ({ done: true }));
    if (!done) return value;
    if (this.#closing.signal.aborted) return null;
    if (this.#source.isOver || (this.#error === null && this.#source.ended())) this.#leave();
    else this.#delayMs = this.#source.lost(this.#error);
    this.#call = null;
    return null;
  }

  async #reopen() {
    const delay = Math.min(this.#delayMs, Math.max(0, this.#deadline - Date.now()));
    const { signal } = this.#closing;
    await sleep(delay, undefined, { signal }).catch(() => undefined);
    if (!signal.aborted) this.#open();
  }

  #open() {
    const [call, request] = this.#source.nextCall();
    const made = this.#client.stream(call, request, this.#deadline);
    this.#error = null;
    // It may come before anybody reads.
    made.on('error', (error) => {
      this.#error = error;
    });
    this.#call = { messages: made[Symbol.asyncIterator](), cancel: () => made.cancel() };
  }

  /** Stops reading; false: that was so already. */
  #leave() {
    if (this.#closing.signal.aborted) return false;
    this.#closing.abort();
    this.#signal?.removeEventListener('abort', this.close);
    this.#client.streams.delete(this);
    this.#call?.cancel();
    return true;
  }
}
