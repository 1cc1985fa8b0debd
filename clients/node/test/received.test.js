import assert from 'node:assert/strict';
import test from 'node:test';
import { DifferenceError, Received } from '../src/received.js';

/** Deltas of an answer of `tokens`, each [id, text], cut at `sizes`, from token `begin` on. */
function deltas(tokens, begin, sizes, tail = '') {
  const made = [];
  let at = begin;
  for (const size of sizes) {
    const part = tokens.slice(at, at + size);
    made.push(
      delta(
        at,
        part.map(([id]) => id),
        part.map(([, text]) => text).join(''),
      ),
    );
    at += size;
  }
  if (tail) made.push(delta(at, [], tail));
  return made;
}

function delta(firstTokenIndex, tokenIds, text, more = {}) {
  const none = { logprobs: [], reasoningText: '', toolCalls: [] };
  return { index: 0, firstTokenIndex, tokenIds, text, ...none, ...more };
}

const TOKENS = [
  [5, 'The'],
  [6, ''],
  [7, ' sky'],
  [8, ' is'],
  [9, ' blue'],
];

/** What a reader is told of streams, the later ones from where the former ended or from 0. */
function read(streams) {
  const received = new Received();
  const told = { ids: [], text: '' };
  streams.forEach(({ toStart, parts }, i) => {
    if (i > 0) received.rewind(toStart);
    for (const part of parts) {
      received.take(part);
      assert.equal(
        part.firstTokenIndex,
        part.tokenIds.length ? told.ids.length : part.firstTokenIndex,
      );
      told.ids.push(...part.tokenIds);
      told.text += part.text;
    }
  });
  return told;
}

test('each token and each piece of text comes once, wherever a stream was cut', () => {
  const whole = { ids: [5, 6, 7, 8, 9], text: 'The sky is blue!' };
  for (let cut = 0; cut <= 6; cut++) {
    for (const sizes of [[1, 1, 1, 1, 1], [2, 2, 1], [5]]) {
      for (const toStart of [true, false]) {
        const first = deltas(TOKENS, 0, [1, 1, 1, 1, 1], '!').slice(0, cut);
        const begin = toStart ? 0 : Math.min(cut, 5);
        const rest = toStart ? sizes : Array(5 - begin).fill(1);
        const parts = deltas(TOKENS, begin, rest, '!');
        assert.deepEqual(read([{ parts: first }, { toStart, parts }]), whole, `cut ${cut}`);
      }
    }
  }
});

test('logprobs are cut with their tokens', () => {
  const received = new Received();
  received.take(delta(0, [5, 6], 'ab', { logprobs: ['l5', 'l6'] }));
  received.rewind(true);
  const again = delta(0, [5, 6, 7], 'abc', { logprobs: ['l5', 'l6', 'l7'] });
  assert.ok(received.take(again));
  assert.deepEqual([again.firstTokenIndex, again.tokenIds, again.text], [2, [7], 'c']);
  assert.deepEqual(again.logprobs, ['l7']);
});

test('tool calls keep their first id', () => {
  const part = (id, name, argumentsJson) => [{ index: 0, id, name, argumentsJson }];
  const received = new Received();
  received.take(delta(0, [5], '', { toolCalls: part('a', 'find', '{"x"') }));
  received.rewind(true);
  const again = delta(0, [5], '', { toolCalls: part('b', 'find', '{"x": 1}') });
  received.take(again);
  assert.deepEqual(again.toolCalls, part('', '', ': 1}'));
  received.rewind(true);
  assert.throws(
    () => received.take(delta(0, [5], '', { toolCalls: part('c', 'seek', '{') })),
    DifferenceError,
  );
});

test('what differs and what is missing is an error', () => {
  const received = new Received();
  received.take(delta(0, [5, 6], 'ab'));
  received.rewind(true);
  assert.throws(() => received.take(delta(0, [5, 9], 'ab')), /token 1 is 9 and was 6/);
  received.rewind(true);
  assert.throws(() => received.take(delta(0, [5, 6], 'ax')), /"ax" where it had "ab"/);
  received.rewind(false);
  assert.throws(() => received.take(delta(3, [7], 'c')), /goes on at 3 and had come to 2/);
});

test('an attached answer begins where it is told', () => {
  const received = new Received(40);
  assert.equal(received.numTokens, 40);
  received.take(delta(40, [1, 2], 'ab'));
  assert.equal(received.numTokens, 42);
});
