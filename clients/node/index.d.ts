// What a field means when it is left out is told in protos/slotwise/v1/inference.proto, and in
// docs/api.md. Numbers of 64 bits are BigInts. Durations say their unit.

/** PEM texts, as of `node:tls`. `ca`: who may sign the server's certificate; else the usual. */
export interface TlsOptions {
  ca?: string | Uint8Array;
  /** What this client shows to a server that wants to see a certificate. */
  cert?: string | Uint8Array;
  key?: string | Uint8Array;
  /** The name in the server's certificate, where the address has another one. */
  serverName?: string;
}

export interface ClientOptions {
  /** Without it the connection is not encrypted. */
  tls?: boolean | TlsOptions;
  /** Sent as "authorization: Bearer ..."; to another machine only with TLS or `insecureToken`. */
  token?: string;
  insecureToken?: boolean;
  /** False: a lost stream is an error, and nothing is added to a request. */
  reconnect?: boolean;
  /** For how long a lost stream is tried to go on without news. Default 60,000. */
  reconnectTimeoutMs?: number;
}

export interface CallOptions {
  /** Becomes the deadline of the call, which the server keeps too. */
  timeoutMs?: number;
  /** Ends the call, with the signal's reason as its error; of a request, also at the server. */
  signal?: AbortSignal;
}

export interface ToolCall {
  id?: string;
  name: string;
  /** JSON text, as the model wrote it. */
  argumentsJson?: string;
}

export interface Tool {
  name: string;
  description?: string | null;
  /** A JSON Schema of the arguments. */
  parameters?: object | null;
}

export interface Message {
  /** "system", "user", "assistant" or "tool". */
  role: string;
  content?: string | null;
  toolCalls?: readonly ToolCall[];
  /** Of a tool's message: the call that it answers. */
  toolCallId?: string | null;
  name?: string | null;
  reasoningContent?: string | null;
}

export interface Chat {
  messages: readonly Message[];
  tools?: readonly Tool[];
  /** More variables for the template, `{ enable_thinking: false }` say. */
  templateKwargs?: object;
  omitGenerationPrompt?: boolean;
}

/** A text, token ids, or a chat that is rendered with the model's template. */
export type Prompt = string | readonly number[] | Uint32Array | Chat;

/** At most one of `jsonSchema`, `jsonObject`, `regex`, `grammar` and `choice`. */
export interface GenerateOptions extends CallOptions {
  requestId?: string;
  temperature?: number;
  topP?: number;
  topK?: number;
  minP?: number;
  /** A number above 2^53 has lost bits and is refused: `123n` has all 64. */
  seed?: bigint | number;
  frequencyPenalty?: number;
  presencePenalty?: number;
  repetitionPenalty?: number;
  /** By token id. */
  logitBias?: Readonly<Record<number, number>> | ReadonlyMap<number, number>;
  maxNewTokens?: number;
  minNewTokens?: number;
  stop?: readonly string[];
  stopTokenIds?: readonly number[];
  ignoreEos?: boolean;
  includeStopInOutput?: boolean;
  parseControlTokens?: boolean;
  omitText?: boolean;
  logprobs?: number;
  promptLogprobs?: number;
  /** JSON text, or what it would be parsed to. */
  jsonSchema?: string | object;
  jsonObject?: boolean;
  regex?: string;
  grammar?: string;
  choice?: readonly string[];
  n?: number;
  cacheSalt?: string;
  parseOutput?: boolean;
  attachWindowMs?: number;
}

export interface ChatOptions extends GenerateOptions, Omit<Chat, 'messages'> {
  /** Put before the messages. */
  system?: string;
}

export interface AttachOptions extends CallOptions {
  /** First tokens of choices 1, 2 and so on. */
  otherNextTokenIndices?: readonly number[];
  /** Of prompt logprobs, the index in the prompt. */
  nextPromptTokenIndex?: number;
}

/** First of a stream: the request is valid and queued. */
export interface Accepted {
  type: 'accepted';
  requestId: string;
  promptTokens: number;
  seed: bigint;
  queuePosition: number;
  isJournaled: boolean;
  numChoices: number;
}

/** A token, its log probability, and its place in the order, from 1; `text` is its bytes. */
export interface TokenLogprob {
  tokenId: number;
  logprob: number;
  rank: number;
  text: Uint8Array;
}

/** A token that came, and the most likely ones in its place. */
export interface TokenLogprobs {
  token: TokenLogprob;
  best: TokenLogprob[];
}

export interface PromptLogprobs {
  type: 'promptLogprobs';
  requestId: string;
  firstTokenIndex: number;
  logprobs: TokenLogprobs[];
}

/** The first part of a call has id and name, all have a piece of the arguments. */
export interface ToolCallDelta {
  index: number;
  id: string;
  name: string;
  argumentsJson: string;
}

/** New tokens of choice `index` and the text they complete; never cumulative. */
export interface Delta {
  type: 'delta';
  requestId: string;
  index: number;
  firstTokenIndex: number;
  tokenIds: number[];
  text: string;
  logprobs: TokenLogprobs[];
  reasoningText: string;
  toolCalls: ToolCallDelta[];
}

export interface Usage {
  promptTokens: number;
  completionTokens: number;
  cachedTokens: number;
}

export interface Timings {
  queueNs: bigint;
  prefillNs: bigint;
  decodeNs: bigint;
  timeToFirstTokenNs: bigint;
}

/** Last of a choice. `matchedStop` is the stop string or the id that matched. */
export interface Finished {
  type: 'finished';
  requestId: string;
  index: number;
  finishReason: 'stop' | 'length' | 'cancelled' | 'unspecified';
  matchedStop: string | number | null;
  usage: Usage;
  timings: Timings;
}

export type Event = Accepted | PromptLogprobs | Delta | Finished;

export interface Choice {
  index: number;
  tokenIds: number[];
  text: string;
  reasoningText: string;
  toolCalls: Required<ToolCall>[];
  logprobs: TokenLogprobs[];
  finished: Finished;
}

export interface Completion {
  requestId: string;
  accepted: Accepted;
  choices: Choice[];
  promptLogprobs: TokenLogprobs[];
}

export interface ModelInfo {
  name: string;
  modelType: string;
  architectures: string[];
  vocabSize: number;
  maxSeqLen: number;
  maxPromptTokens: number;
  endTokenIds: number[];
  bosTokenId?: number;
  hasChatTemplate: boolean;
  defaultSampling?: Record<string, unknown>;
  fingerprint: string;
  outputFormat: string;
}

export interface Load {
  numRunning: number;
  numWaiting: number;
  numSlots: number;
  maxRunning: number;
  numUsedTokens: bigint;
  maxTotalTokens: bigint;
  numPendingPrefillTokens: bigint;
  requests?: Record<string, bigint>;
  numPromptTokens: bigint;
  numGeneratedTokens: bigint;
  engineSilenceNs: bigint;
  numSteps: bigint;
  prefillStepNs: bigint;
  decodeStepNs: bigint;
  prefixCache?: Record<string, bigint>;
  numUnread: number;
  numRecoveries: bigint;
  numResumed: bigint;
}

export type Health = 'serving' | 'not_serving' | 'unknown_service';

/**
 * The events of one request. Lost connections and restarted servers go by unseen: every token and
 * every piece of text comes exactly once.
 *
 * Leaving a `for await` loop cancels the request when it still runs; `detach` leaves it.
 */
export class Stream implements AsyncIterableIterator<Event> {
  private constructor();
  /** Null with `reconnect: false` and no id: the server makes one, and tells it in each event. */
  readonly requestId: string | null;
  next(): Promise<IteratorResult<Event, undefined>>;
  return(): Promise<IteratorResult<Event, undefined>>;
  [Symbol.asyncIterator](): this;
  /** Cancels what still runs; the loop then ends. */
  close(): void;
  /** Stops reading and lets the request run, for its attach window, for `Client.attach`. */
  detach(): void;
}

/** A connection to one server. Every call fails with a subclass of SlotwiseError. */
export class Client {
  /** Nothing is sent yet. Throws for a token or TLS options that cannot be used. */
  constructor(target?: string, options?: ClientOptions);
  /** Starts a request at once; its events come as they are read. */
  generate(prompt: Prompt, options?: GenerateOptions): Stream;
  /** The same for a question, or for a conversation so far. */
  chat(messages: string | readonly Message[], options?: ChatOptions): Stream;
  /** The whole answer at once. */
  complete(prompt: Prompt, options?: GenerateOptions): Promise<Completion>;
  /** Reads a request on, from any connection: one that runs, or ended not long ago. */
  attach(requestId: string, nextTokenIndex?: number, options?: AttachOptions): Stream;
  /** Stops a request of any client by its id; its stream ends with reason "cancelled". */
  cancel(requestId: string, options?: CallOptions): Promise<void>;
  /** Of the model's service, of the process (""), or of "slotwise.worker/<rank>". */
  health(service?: string, options?: CallOptions): Promise<Health>;
  tokenize(
    text: string,
    options?: CallOptions & { parseControlTokens?: boolean },
  ): Promise<number[]>;
  detokenize(
    tokenIds: readonly number[] | Uint32Array,
    options?: CallOptions & { keepControlTokens?: boolean },
  ): Promise<string>;
  modelInfo(options?: CallOptions): Promise<ModelInfo>;
  /** How busy the server is; cheap enough to poll. */
  load(options?: CallOptions): Promise<Load>;
  /** Cancels running streams and closes the connection. */
  close(): Promise<void>;
}

/** A call failed. `message` is the server's sentence, `code` the number of the gRPC status. */
export class SlotwiseError extends Error {
  constructor(message: string, code: number);
  readonly code: number;
}

export interface FieldViolation {
  field: string;
  description: string;
}

/** The request was refused. Do not send it again unchanged. */
export class InvalidArgumentError extends SlotwiseError {
  constructor(message: string, violations?: FieldViolation[]);
  readonly violations: FieldViolation[];
  /** The first refused field, as the API names it: "max_new_tokens". */
  readonly field: string | null;
}

/** The queue is full; try again after `retryAfterMs`. */
export class QueueFullError extends SlotwiseError {
  constructor(message: string, retryAfterMs?: number | null);
  readonly retryAfterMs: number | null;
}

/** A message was larger than the transport allows (64 MiB). */
export class MessageTooLargeError extends SlotwiseError {}
/** No server there, or it drains, or its workers are down. Another server may answer. */
export class UnavailableError extends SlotwiseError {}
/** The call's timeout passed; the server has stopped working on it. */
export class DeadlineError extends SlotwiseError {}
/** The call was cancelled on its way, or the client is closed. */
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
