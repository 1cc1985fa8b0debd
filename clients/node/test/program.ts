// Compiled against index.d.ts, and run by tests/clients/node: what the types allow is what the
// client takes. Prints what came, as JSON with BigInts as strings.

import {
  Client,
  InvalidArgumentError,
  type CallOptions,
  type Completion,
  type Delta,
  type Event,
  type GenerateOptions,
  type Health,
} from 'slotwise-client';

type Constraint = 'jsonSchema' | 'jsonObject' | 'regex' | 'grammar' | 'choice';

// All of them: an option that the types or the proto lack is an error here or there.
const ALL: Required<Omit<GenerateOptions, Constraint | keyof CallOptions>> = {
  requestId: 'typed',
  temperature: 0.5,
  topP: 0.9,
  topK: -1,
  minP: 0.1,
  seed: 2n ** 64n - 1n,
  frequencyPenalty: 0.5,
  presencePenalty: 0.25,
  repetitionPenalty: 1.5,
  logitBias: { 3: -1.5 },
  maxNewTokens: 5,
  minNewTokens: 1,
  stop: ['END'],
  stopTokenIds: [7],
  ignoreEos: true,
  includeStopInOutput: true,
  parseControlTokens: true,
  omitText: true,
  logprobs: 1,
  promptLogprobs: 2,
  n: 2,
  cacheSalt: 'salt',
  parseOutput: true,
  attachWindowMs: 1000,
};
const CONSTRAINTS: Pick<GenerateOptions, Constraint>[] = [
  { jsonSchema: { type: 'object' } },
  { jsonSchema: '{}' },
  { jsonObject: true },
  { regex: 'a+' },
  { grammar: 'start: "a"' },
  { choice: ['yes', 'no'] },
];

function show(value: unknown): void {
  const text = (_: string, part: unknown) => (typeof part === 'bigint' ? String(part) : part);
  console.log(JSON.stringify(value, text));
}

const client = new Client(process.argv[2], { token: 'secret', reconnect: true });
const controller = new AbortController();
const events: Event[] = [];
for await (const event of client.generate('Hi', { ...ALL, signal: controller.signal }))
  events.push(event);
show(events);
for (const constraint of CONSTRAINTS) {
  const { choices }: Completion = await client.complete([1, 2], {
    ...constraint,
    timeoutMs: 60_000,
  });
  const [first] = choices;
  if (first === undefined || first.finished.timings.queueNs !== 1n) throw new Error('no answer');
}
const told: Delta[] = [];
const turns = [
  { role: 'assistant', content: null, toolCalls: [{ id: 'c', name: 'find', argumentsJson: '{}' }] },
  { role: 'tool', content: 'none', toolCallId: 'c' },
];
const tools = [{ name: 'find', parameters: { type: 'object' } }];
const templateKwargs = { enable_thinking: false };
for await (const event of client.chat(turns, { system: 'Be brief.', tools, templateKwargs })) {
  if (event.type === 'delta') told.push(event);
}
show(told.map((delta) => delta.text).join(''));
const health: Health = await client.health();
show([health, await client.tokenize('ab'), await client.detokenize([97, 98])]);
show([await client.modelInfo(), await client.load()]);
try {
  client.generate('Hi', { seed: 2 ** 60 });
} catch (error) {
  if (error instanceof InvalidArgumentError) show(error.field);
}
await client.close();
