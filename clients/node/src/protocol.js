// The protocol: calls, requests made from what a program says, events made from responses.

import { fileURLToPath } from 'node:url';
import protobuf from 'protobufjs';
import { message, refuse, snake, told } from './fields.js';

export const SERVICE = 'slotwise.v1.Inference';

const PROTO = new URL('../protos/slotwise/v1/inference.proto', import.meta.url);
const ROOT = protobuf.loadSync(fileURLToPath(PROTO));

// grpc.health.v1, as far as it is used.
ROOT.addJSON({
  HealthCheckRequest: { fields: { service: { type: 'string', id: 1 } } },
  HealthCheckResponse: { fields: { status: { type: 'uint32', id: 1 } } },
});

const HEALTH = ['not_serving', 'serving', 'not_serving', 'unknown_service'];

const REQUEST = ROOT.lookupType('slotwise.v1.GenerateRequest');
const SAMPLING = ROOT.lookupType('slotwise.v1.SamplingParams');
const CONSTRAINTS = REQUEST.oneofs.constraint.oneof;
// Set by the prompt, or part of `sampling`.
const NOT_OPTIONS = ['text', 'tokenIds', 'chat', 'sampling'];

export const CALLS = {
  generate: inference('Generate', event),
  attach: inference('Attach', event),
  complete: inference('Complete', completion),
  cancel: inference('Cancel', () => undefined),
  tokenize: inference('Tokenize', (response) => response.tokenIds),
  detokenize: inference('Detokenize', (response) => response.text),
  modelInfo: inference('GetModelInfo', (response) => response),
  load: inference('GetLoad', (response) => response),
  health: call(
    '/grpc.health.v1.Health/Check',
    ROOT.lookupType('HealthCheckRequest'),
    ROOT.lookupType('HealthCheckResponse'),
    ({ status }) => HEALTH[status] ?? 'not_serving',
  ),
};

/** The request for a prompt: a text, token ids, or a chat. */
export function generateRequest(prompt, options) {
  const request = { ...input(prompt), sampling: {} };
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null) continue;
    if (Object.hasOwn(SAMPLING.fields, name)) request.sampling[name] = value;
    else if (NOT_OPTIONS.includes(name) || !Object.hasOwn(REQUEST.fields, name)) {
      throw new TypeError(`unknown option ${JSON.stringify(name)}`);
    } else if (CONSTRAINTS.includes(name)) constrain(request, name, value);
    else request[name] = value;
  }
  const sampling = message(SAMPLING, request.sampling, 'sampling.');
  const { sampling: _, ...rest } = request;
  return { ...message(REQUEST, rest), sampling };
}

/** The request to read on; InvalidArgumentError for a value that its field cannot hold. */
export function attachRequest(values) {
  return message(ROOT.lookupType('slotwise.v1.AttachRequest'), values);
}

/** A question, or a conversation so far, after an optional system message. */
export function chat(messages, { system, tools, templateKwargs, omitGenerationPrompt } = {}) {
  const turns = typeof messages === 'string' ? [{ role: 'user', content: messages }] : messages;
  if (!Array.isArray(turns)) throw new TypeError('a chat is a question, or an array of messages');
  const first = system === undefined ? [] : [{ role: 'system', content: system }];
  return { messages: [...first, ...turns], tools, templateKwargs, omitGenerationPrompt };
}

function input(prompt) {
  if (typeof prompt === 'string') return { text: prompt };
  if (Array.isArray(prompt) || ArrayBuffer.isView(prompt)) return { tokenIds: { ids: prompt } };
  if (typeof prompt !== 'object' || prompt === null) {
    throw new TypeError('a prompt is a text, an array of token ids, or a chat');
  }
  const { tools, templateKwargs, ...rest } = prompt;
  const made = { ...rest, templateKwargsJson: json(templateKwargs) };
  made.tools = Array.isArray(tools) ? tools.map(tool) : tools;
  return { chat: made };
}

function tool(told) {
  if (typeof told !== 'object' || told === null) return told;
  const { parameters, ...rest } = told;
  return { ...rest, parametersJson: json(parameters) };
}

function constrain(request, name, value) {
  if (name === 'jsonObject' && value === false) return;
  const before = CONSTRAINTS.find((other) => other in request);
  if (before !== undefined) {
    refuse(snake(name), value, `${snake(before)} is set already; a request has one constraint`);
  }
  if (name === 'jsonObject' && value !== true) refuse('json_object', value, 'true is wanted');
  if (name === 'jsonObject') request[name] = {};
  else if (name === 'choice') request[name] = { texts: value };
  else request[name] = name === 'jsonSchema' && typeof value === 'object' ? json(value) : value;
}

function json(value) {
  return value === undefined || value === null ? undefined : JSON.stringify(value);
}

/** One message of a stream; null for a kind of event that this client does not know. */
export function event({ requestId, ...rest }) {
  const [type] = Object.keys(rest);
  if (type === 'finished') return finished(requestId, rest.finished);
  return type === undefined ? null : { type, requestId, ...rest[type] };
}

function finished(requestId, { matchedTokenId, matchedStopString, ...rest }) {
  const matchedStop = matchedTokenId ?? matchedStopString ?? null;
  return { type: 'finished', requestId, ...rest, matchedStop };
}

function completion({ requestId, accepted, choices, promptLogprobs }) {
  return {
    requestId,
    accepted: event({ requestId, accepted }),
    choices: choices.map((one) => ({ ...one, finished: finished(requestId, one.finished) })),
    promptLogprobs,
  };
}

function inference(name, tell) {
  const { requestType, responseType } = ROOT.lookupService(SERVICE).methods[name];
  const find = (type) => ROOT.lookupType(`slotwise.v1.${type}`);
  return call(`/${SERVICE}/${name}`, find(requestType), find(responseType), tell);
}

function call(path, request, response, tell) {
  return {
    path,
    tell,
    request: (values) => message(request, values),
    serialize: (values) => Buffer.from(request.encode(request.fromObject(values)).finish()),
    deserialize: (bytes) => told(response, response.decode(bytes)),
  };
}
