// Answers put together from the events of a stream.

import { status } from '@grpc/grpc-js';
import { InternalError } from './errors.js';

/** The whole answer of a request, in the shape of Complete's. */
export async function gathered(stream) {
  const got = { accepted: null, promptLogprobs: [], choices: [] };
  for await (const event of stream) {
    if (event.type === 'accepted') got.accepted = event;
    else if (event.type === 'promptLogprobs') got.promptLogprobs.push(...event.logprobs);
    else add((got.choices[event.index] ??= empty(event.index)), event);
  }
  if (got.accepted === null || got.choices.length === 0) {
    throw new InternalError('the stream ended before its answer', status.INTERNAL);
  }
  return { requestId: got.accepted.requestId, ...got };
}

function empty(index) {
  return { index, tokenIds: [], text: '', reasoningText: '', toolCalls: [], logprobs: [] };
}

function add(choice, event) {
  if (event.type === 'finished') {
    choice.finished = event;
    return;
  }
  choice.tokenIds.push(...event.tokenIds);
  choice.logprobs.push(...event.logprobs);
  choice.text += event.text;
  choice.reasoningText += event.reasoningText;
  for (const { index, id, name, argumentsJson } of event.toolCalls) {
    choice.toolCalls[index] ??= { id, name, argumentsJson: '' };
    choice.toolCalls[index].argumentsJson += argumentsJson;
  }
}
