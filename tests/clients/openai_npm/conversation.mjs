// What a user's program does with the official package: node conversation.mjs BASE_URL NAME.
// It ends with an error when something is not as the API of OpenAI promises it.

import assert from 'node:assert/strict';
import { createInterface } from 'node:readline';
import OpenAI from 'openai';
import { zodFunction, zodResponseFormat } from 'openai/helpers/zod';
import { z } from 'zod';

const [baseURL, name] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: 'none', maxRetries: 0 });
const { completions } = client.chat;

const Weather = z.object({ city: z.enum(['Köln', 'Paris']), days: z.int().min(1).max(9) });
const WEATHER = zodFunction({ name: 'weather', parameters: Weather });
const QUESTION = [{ role: 'user', content: 'What is the weather in Köln?' }];
const GREEDY = { model: 'tiny', temperature: 0, max_tokens: 24 };
// The model's weights are random: of what a grammar allows, its greedy choice is a tab, for ever.
const DRAWN = { model: 'tiny', temperature: 1, seed: 0, max_tokens: 400 };
// Long enough that nothing but its reader can have ended it.
const LONG = { model: 'tiny', max_tokens: 3500, ignore_eos: true };

/** Lines from whoever started this. */
const told = createInterface({ input: process.stdin })[Symbol.asyncIterator]();

/** Says a word, and waits until that was heard. */
async function say(word) {
  console.log(JSON.stringify(word));
  await told.next();
}

async function refused(kind, promise) {
  try {
    await promise;
  } catch (error) {
    assert.ok(error instanceof kind, `${error.constructor.name}: ${error.message}`);
    return error;
  }
  return assert.fail(`no ${kind.name}`);
}

async function all(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

function content(chunks) {
  return chunks.map((chunk) => chunk.choices[0]?.delta.content ?? '').join('');
}

const CHECKS = {
  async whole() {
    const { data, request_id: id } = await completions
      .create({ ...GREEDY, messages: QUESTION })
      .withResponse();
    const [choice] = data.choices;
    assert.equal(data.object, 'chat.completion');
    assert.equal(data.model, 'tiny');
    assert.ok(data.id.startsWith('chatcmpl-') && data.id.includes(id));
    assert.equal(choice.message.role, 'assistant');
    assert.equal(choice.finish_reason, 'length');
    assert.equal(data.usage.completion_tokens, 24);
    assert.equal(data.usage.total_tokens, data.usage.prompt_tokens + 24);
    await say(choice.message.content);
  },

  async stream() {
    const chunks = await all(
      await completions.create({ ...GREEDY, messages: QUESTION, stream: true }),
    );
    assert.ok(chunks.length > 2);
    assert.deepEqual(chunks.map((chunk) => chunk.choices[0].delta.role).filter(Boolean), [
      'assistant',
    ]);
    assert.equal(chunks[0].choices[0].delta.role, 'assistant');
    const reasons = chunks.map((chunk) => chunk.choices[0].finish_reason);
    assert.equal(reasons.pop(), 'length');
    assert.ok(reasons.every((reason) => reason === null));
    assert.equal(new Set(chunks.map(({ id, created }) => `${id} ${created}`)).size, 1);
    assert.ok(chunks.every(({ object }) => object === 'chat.completion.chunk'));
    await say(content(chunks));
  },

  /** The package's own reader of streams, which checks what it puts together. */
  async events() {
    const stream = completions.stream({ ...GREEDY, messages: QUESTION });
    let text = '';
    stream.on('content', (part) => {
      text += part;
    });
    assert.equal(await stream.finalContent(), text);
    await say(text);
  },

  async turns() {
    const messages = [{ role: 'developer', content: 'Be short.' }];
    for (const question of ['Hello!', 'And now?', 'Good bye.']) {
      messages.push({ role: 'user', content: [{ type: 'text', text: question }] });
      const { choices } = await completions.create({ ...GREEDY, messages });
      messages.push(choices[0].message);
    }
    await say(messages.filter(({ role }) => role === 'assistant').map((turn) => turn.content));
  },

  async usage() {
    const options = { ...GREEDY, messages: QUESTION };
    await completions.create(options);
    const whole = await completions.create(options);
    const asked = { ...options, stream: true, stream_options: { include_usage: true } };
    const chunks = await all(await completions.create(asked));
    const last = chunks.pop();
    assert.deepEqual(last.choices, []);
    assert.deepEqual(last.usage, whole.usage);
    assert.ok(last.usage.prompt_tokens_details.cached_tokens > 0);
    assert.ok(chunks.every(({ usage }) => !usage));
  },

  /** A call is made, answered, and the talk goes on; streamed it is the same call. */
  async tools() {
    const options = { ...DRAWN, tools: [WEATHER], parallel_tool_calls: false };
    const asked = { ...options, tool_choice: 'required', messages: QUESTION };
    const whole = await completions.create(asked);
    const [{ message, finish_reason: reason }] = whole.choices;
    assert.equal(reason, 'tool_calls');
    const [call] = message.tool_calls;
    assert.deepEqual([call.type, call.function.name], ['function', 'weather']);
    Weather.parse(JSON.parse(call.function.arguments));
    const stream = completions.stream(asked);
    const streamed = await stream.finalChatCompletion();
    const calls = (answer) =>
      answer.choices[0].message.tool_calls.map((one) => one.function.arguments);
    assert.deepEqual(calls(streamed), calls(whole));
    const results = message.tool_calls.map(({ id }) => ({
      role: 'tool',
      tool_call_id: id,
      content: 'sunny',
    }));
    const messages = [...QUESTION, message, ...results];
    const next = await completions.create({
      ...options,
      max_tokens: 8,
      tool_choice: 'none',
      messages,
    });
    assert.equal(next.usage.completion_tokens, 8);
  },

  /** The package runs the function that the model calls. */
  async runner() {
    const ran = [];
    const tool = {
      type: 'function',
      function: {
        name: 'weather',
        parameters: WEATHER.function.parameters,
        parse: JSON.parse,
        function: (given) => {
          ran.push(Weather.parse(given));
          return 'sunny';
        },
      },
    };
    const choice = { type: 'function', function: { name: 'weather' } };
    const more = { tools: [tool], parallel_tool_calls: false };
    const asked = { ...DRAWN, messages: QUESTION, ...more };
    const runner = completions.runTools({ ...asked, tool_choice: choice });
    await runner.done();
    assert.ok(ran.length > 0);
    assert.equal(runner.messages.at(-1).content, 'sunny');
  },

  async schema() {
    const form = zodResponseFormat(Weather, 'weather');
    const asked = { ...DRAWN, messages: QUESTION, response_format: form };
    const whole = await completions.parse(asked);
    const { parsed, content: text } = whole.choices[0].message;
    assert.deepEqual(Weather.parse(JSON.parse(text)), parsed);
    const streamed = await completions.stream(asked).finalChatCompletion();
    assert.deepEqual(streamed.choices[0].message.parsed, parsed);
    const object = { ...asked, response_format: { type: 'json_object' } };
    const any = await completions.create(object);
    assert.match(any.choices[0].message.content, /^\s*\{/);
  },

  async many() {
    const ask = async (number) => {
      const messages = [{ role: 'user', content: `Number ${number}?` }];
      const asked = { ...GREEDY, temperature: 1, seed: number, max_tokens: 40, messages };
      return content(await all(await completions.create({ ...asked, stream: true })));
    };
    const numbers = Array.from({ length: 8 }, (_, number) => number);
    const alone = [];
    for (const number of numbers) alone.push(await ask(number));
    assert.deepEqual(await Promise.all(numbers.map(ask)), alone);
    assert.equal(new Set(alone).size, 8);
  },

  async legacy() {
    const asked = { ...GREEDY, prompt: 'the sea and' };
    const whole = await client.completions.create(asked);
    assert.equal(whole.object, 'text_completion');
    const chunks = await all(await client.completions.create({ ...asked, stream: true }));
    assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(''), whole.choices[0].text);
    await say(whole.choices[0].text);
  },

  async logprobs() {
    const asked = { ...GREEDY, max_tokens: 4, logprobs: true, top_logprobs: 2, messages: QUESTION };
    const { choices } = await completions.create(asked);
    const rows = choices[0].logprobs.content;
    assert.equal(rows.length, 4);
    for (const { logprob, top_logprobs: best } of rows) {
      assert.equal(best.length, 2);
      assert.equal(best[0].logprob, logprob);
    }
  },

  async models() {
    const ids = [];
    for await (const model of client.models.list()) ids.push(model.id);
    assert.deepEqual(ids, ['tiny']);
    assert.equal((await client.models.retrieve('tiny')).object, 'model');
  },

  async errors() {
    const bad = (fields) => completions.create({ ...GREEDY, messages: QUESTION, ...fields });
    const cases = {
      top_p: { top_p: 1.5 },
      max_tokens: { max_tokens: 100_000 },
      'messages.0.content': { messages: [{ role: 'user', content: 5 }] },
      no_such_field: { no_such_field: 1 },
    };
    for (const [param, fields] of Object.entries(cases)) {
      for (const stream of [false, true]) {
        const error = await refused(OpenAI.BadRequestError, bad({ ...fields, stream }));
        assert.equal(error.param, param);
        assert.deepEqual([error.status, error.type], [400, 'invalid_request_error']);
        assert.ok(error.requestID);
        assert.ok(error.message.includes(param), error.message);
      }
    }
    const missing = await refused(OpenAI.NotFoundError, bad({ model: 'gpt-5' }));
    assert.deepEqual([missing.code, missing.param], ['model_not_found', 'model']);
    const nobody = new OpenAI({ baseURL: 'http://127.0.0.1:9/v1', apiKey: 'x', maxRetries: 0 });
    await refused(OpenAI.APIConnectionError, nobody.models.list());
  },

  /** One kind after another, as the server is told to refuse. */
  async statuses() {
    const kinds = {
      AuthenticationError: [401, 'authentication_error'],
      PermissionDeniedError: [403, 'permission_error'],
      RateLimitError: [429, 'rate_limit_error'],
      InternalServerError: [503, 'service_unavailable'],
    };
    const asked = { model: 'script', messages: QUESTION };
    for (const [kind, [status, type]] of Object.entries(kinds)) {
      await say(kind);
      for (const stream of [false, true]) {
        const error = await refused(OpenAI[kind], completions.create({ ...asked, stream }));
        assert.deepEqual([error.status, error.type], [status, type]);
        if (status === 429) assert.equal(error.headers.get('retry-after'), '2');
      }
    }
  },

  async left() {
    const stream = await completions.create({ ...LONG, messages: QUESTION, stream: true });
    for await (const chunk of stream) {
      if (chunk.choices[0].delta.content) break;
    }
    await say('left');
  },

  async aborted() {
    const stream = await completions.create({ ...LONG, messages: QUESTION, stream: true });
    let count = 0;
    for await (const chunk of stream) {
      count += 1;
      if (chunk.choices[0].delta.content) stream.controller.abort();
    }
    assert.ok(count < 3000);
    await say('aborted');
  },

  async aborted_whole() {
    const controller = new AbortController();
    const { signal } = controller;
    const asked = completions.create({ ...LONG, messages: QUESTION }, { signal });
    const error = refused(OpenAI.APIUserAbortError, asked);
    await say('asked');
    controller.abort();
    await error;
    await say('aborted');
  },
};

await CHECKS[name]();
process.exit(0);
