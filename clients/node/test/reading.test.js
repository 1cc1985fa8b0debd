import assert from 'node:assert/strict';
import test from 'node:test';
import { Metadata, status } from '@grpc/grpc-js';
import { Connection } from '../src/connection.js';
import { AlreadyExistsError, NotFoundError, UnavailableError, isLoss } from '../src/errors.js';
import { CALLS, generateRequest } from '../src/protocol.js';
import { Reading } from '../src/reading.js';

function connected(options) {
  const connection = new Connection('127.0.0.1:1', options);
  connection.wasReached = true;
  return connection;
}

function failed(code, details = 'words', isServers = true) {
  const metadata = new Metadata();
  if (isServers) metadata.set('grpc-status-details-bin', Buffer.alloc(0));
  return Object.assign(new Error(details), { code, details, metadata });
}

const LOST = failed(status.UNAVAILABLE, 'Connection dropped', false);

function send(options = {}) {
  return Reading.send(connected(), generateRequest('x', options));
}

function accepted(reading, seed) {
  reading.nextCall();
  reading.take({ requestId: reading.requestId, accepted: { seed, numChoices: 1 } });
}

function delta(firstTokenIndex, tokenIds, text) {
  const none = { logprobs: [], reasoningText: '', toolCalls: [] };
  return { delta: { index: 0, firstTokenIndex, tokenIds, text, ...none } };
}

test('a request has an id, a seed and a window from the start', () => {
  const [call, request] = send().nextCall();
  assert.equal(call, CALLS.generate);
  assert.match(request.requestId, /^[0-9a-f-]{36}$/);
  assert.match(request.sampling.seed, /^\d+$/);
  assert.equal(request.attachWindowMs, 30_000);
  const [, own] = send({ requestId: 'mine', seed: 2n ** 64n - 1n, attachWindowMs: 5 }).nextCall();
  assert.deepEqual(
    [own.requestId, own.sampling.seed, own.attachWindowMs],
    ['mine', '18446744073709551615', 5],
  );
});

test('a lost stream is read on behind the tokens that came', () => {
  const reading = send({ seed: 5 });
  accepted(reading, 5n);
  reading.take(delta(0, [1, 2], 'ab'));
  assert.ok(reading.lost(LOST) > 0);
  const [call, request] = reading.nextCall();
  assert.equal(call, CALLS.attach);
  assert.equal(request.nextTokenIndex, 2);
  assert.equal(reading.take({ accepted: { seed: 5n } }), null);
  assert.equal(reading.take(delta(2, [3], 'c')).text, 'c');
});

test('a request that was not accepted is sent again, and found if it had come', () => {
  const reading = send();
  reading.nextCall();
  reading.lost(LOST);
  assert.equal(reading.nextCall()[0], CALLS.generate);
  reading.lost(failed(status.ALREADY_EXISTS));
  assert.equal(reading.nextCall()[0], CALLS.attach);
});

test('a server that knows the request no more is asked anew, and its answer compared', () => {
  const reading = send({ seed: 5 });
  accepted(reading, 5n);
  reading.take(delta(0, [1], 'a'));
  reading.lost(null);
  reading.nextCall();
  reading.lost(failed(status.NOT_FOUND));
  assert.equal(reading.nextCall()[0], CALLS.generate);
  assert.throws(() => reading.take({ accepted: { seed: 6n } }), AlreadyExistsError);
});

test('fewer tokens than came are read from the start', () => {
  const reading = send();
  accepted(reading, 5n);
  reading.take(delta(0, [1], 'a'));
  reading.lost(null);
  reading.nextCall();
  reading.lost(failed(status.OUT_OF_RANGE));
  const [call, request] = reading.nextCall();
  assert.equal(call, CALLS.attach);
  assert.equal(request.nextTokenIndex, undefined);
});

test('delays grow, news makes them short again, and the bound ends the tries', () => {
  const reading = send({ seed: 5 });
  accepted(reading, 5n);
  const delays = [];
  for (let i = 0; i < 7; i++) {
    delays.push(reading.lost(LOST));
    reading.nextCall();
  }
  assert.deepEqual(delays, [100, 200, 400, 800, 1600, 2000, 2000]);
  reading.take({ accepted: { seed: 5n } });
  reading.take(delta(0, [1], 'a'));
  assert.equal(reading.lost(LOST), 100);
  const bounded = Reading.send(connected({ reconnectTimeoutMs: 50 }), generateRequest('x', {}));
  bounded.nextCall();
  assert.throws(() => bounded.lost(LOST), UnavailableError);
  assert.ok(bounded.isOver);
});

test('a server that never answered, a word of its own, and a closed client end a request', () => {
  const never = Reading.send(new Connection('127.0.0.1:1'), generateRequest('x', {}));
  never.nextCall();
  assert.throws(() => never.lost(LOST), /no answer from 127.0.0.1:1/);
  for (const code of [status.INTERNAL, status.RESOURCE_EXHAUSTED, status.PERMISSION_DENIED]) {
    const reading = send();
    reading.nextCall();
    assert.throws(() => reading.lost(failed(code)), { code });
  }
  const attached = Reading.attach(connected(), { requestId: 'x' });
  attached.nextCall();
  assert.throws(() => attached.lost(failed(status.NOT_FOUND)), NotFoundError);
  const connection = connected();
  const closed = Reading.send(connection, generateRequest('x', {}));
  closed.nextCall();
  connection.isClosed = true;
  assert.throws(() => closed.lost(LOST), UnavailableError);
});

test('what is a loss', () => {
  assert.ok(isLoss(null));
  assert.ok(isLoss(LOST));
  assert.ok(isLoss(failed(status.INTERNAL, 'Received RST_STREAM with code 2', false)));
  assert.ok(!isLoss(failed(status.INTERNAL, 'a fault of the server', false)));
  assert.ok(!isLoss(failed(status.UNAVAILABLE, 'the server drains')));
});
