import assert from 'node:assert/strict';
import test from 'node:test';
import { InvalidArgumentError } from '../src/errors.js';
import { CALLS, chat, generateRequest } from '../src/protocol.js';

/** What a server reads: the request over the wire and back. */
function sent(prompt, options) {
  return CALLS.generate.serialize(generateRequest(prompt, options)).toString('hex');
}

function refused(prompt, options, field, words) {
  assert.throws(
    () => generateRequest(prompt, options),
    (error) => {
      assert.ok(error instanceof InvalidArgumentError, String(error));
      assert.equal(error.field, field);
      assert.match(error.message, words);
      return true;
    },
  );
}

test('a seed keeps all 64 bits', () => {
  // Field 5 of SamplingParams, a varint.
  assert.match(sent('x', { seed: 2n ** 64n - 1n }), /28ffffffffffffffffff01/);
  assert.match(sent('x', { seed: 2n ** 53n + 1n }), /288180808080808010/);
  assert.equal(sent('x', { seed: 7 }), sent('x', { seed: 7n }));
  refused('x', { seed: 2 ** 60 }, 'sampling.seed', /lost bits/);
  refused('x', { seed: -1n }, 'sampling.seed', /0 to 18446744073709551615/);
  refused('x', { seed: 2n ** 64n }, 'sampling.seed', /0 to/);
});

test('what a field cannot hold is refused by its name', () => {
  refused('x', { maxNewTokens: '5' }, 'max_new_tokens', /integer/);
  refused('x', { maxNewTokens: -1 }, 'max_new_tokens', /0 to 4294967295/);
  refused('x', { maxNewTokens: 2 ** 32 }, 'max_new_tokens', /4294967295/);
  refused('x', { maxNewTokens: 1.5 }, 'max_new_tokens', /integer/);
  refused('x', { topK: -(2 ** 31) - 1 }, 'sampling.top_k', /-2147483648/);
  refused('x', { temperature: '0' }, 'sampling.temperature', /number/);
  refused('x', { stop: 'END' }, 'stop', /array/);
  refused('x', { ignoreEos: 1 }, 'ignore_eos', /boolean/);
  refused('x', { logitBias: [1] }, 'sampling.logit_bias', /object/);
  refused('x', { logitBias: { a: 1 } }, 'sampling.logit_bias', /integer/);
  refused('\ud800', {}, 'text', /half a character/);
  refused([1, 'x'], {}, 'token_ids.ids[1]', /integer/);
  const turn = { role: 'user', contents: 'x' };
  refused({ messages: [turn] }, {}, 'chat.messages[0].contents', /no such field/);
  refused({ messages: [{ role: 'user' }, 'x'] }, {}, 'chat.messages[1]', /object/);
  refused({ messages: [null] }, {}, 'chat.messages[0]', /object/);
  refused({ messages: [], tools: {} }, {}, 'chat.tools', /array/);
  refused({ messages: [], tools: [null] }, {}, 'chat.tools[0]', /object/);
});

test('an option that is not there is refused', () => {
  for (const name of ['maxTokens', 'max_new_tokens', 'sampling', 'chat', 'constructor']) {
    assert.throws(
      () => generateRequest('x', { [name]: 1 }),
      new RegExp(`unknown option "${name}"`),
    );
  }
  assert.throws(() => generateRequest(5, {}), /a prompt is/);
});

test('a chat is a question or its messages', () => {
  for (const wrong of [undefined, 5, { role: 'user', content: 'x' }]) {
    assert.throws(() => chat(wrong), /an array of messages/);
  }
});

test('unset is not zero', () => {
  const unset = { temperature: undefined, maxNewTokens: null };
  assert.equal(sent('x', unset), sent('x', {}));
  assert.notEqual(sent('x', { temperature: 0 }), sent('x', {}));
});

test('a request has one constraint', () => {
  refused('x', { regex: 'a', choice: ['b'] }, 'choice', /regex is set already/);
  refused('x', { jsonObject: 1 }, 'json_object', /true/);
  assert.equal(sent('x', { jsonObject: false, regex: 'a' }), sent('x', { regex: 'a' }));
  const schema = { type: 'object' };
  assert.equal(
    sent('x', { jsonSchema: schema }),
    sent('x', { jsonSchema: JSON.stringify(schema) }),
  );
});
