import assert from 'node:assert/strict';
import test from 'node:test';
import { Client } from '../src/client.js';
import { Connection } from '../src/connection.js';

test('a token goes to this machine, or encrypted, or where it is allowed', () => {
  const token = 'secret';
  for (const target of [
    '127.0.0.1:1',
    'localhost:1',
    '[::1]:1',
    'unix:/tmp/x',
    'dns:localhost:1',
  ]) {
    assert.deepEqual(new Connection(target, { token }).metadata.get('authorization'), [
      'Bearer secret',
    ]);
  }
  for (const target of ['example.com:1', '10.0.0.1:1', '127.example.com:1', '[::2]:1']) {
    assert.throws(() => new Connection(target, { token }), /unencrypted/);
    assert.ok(new Connection(target, { token, tls: true }));
    assert.ok(new Connection(target, { token, insecureToken: true }));
  }
});

test('a token that cannot be sent is refused and not shown', () => {
  for (const token of ['', 'two words', 'caf\u00e9', 'line\n']) {
    assert.throws(
      () => new Connection('127.0.0.1:1', { token }),
      (error) =>
        error.message.includes('printable ASCII') && !(token && error.message.includes(token)),
    );
  }
});

test('an option that is not there is refused', () => {
  assert.throws(() => new Connection('127.0.0.1:1', { retry: true }), /unknown option "retry"/);
  assert.throws(
    () => new Connection('127.0.0.1:1', { tls: { root: 'x' } }),
    /unknown option "root"/,
  );
  const client = new Client('127.0.0.1:1');
  assert.throws(() => client.generate('x', { timeout: 1 }), /unknown option "timeout"/);
  assert.throws(() => client.attach('x', 0, { next: 1 }), /AttachRequest has no such field/);
});

test('limits of a call that cannot be are refused', async () => {
  const client = new Client('127.0.0.1:1');
  await assert.rejects(client.load({ timeout: 1 }), /unknown option "timeout"/);
  for (const timeoutMs of [-1, NaN, '5', null]) {
    assert.throws(() => client.generate('x', { timeoutMs }), /timeoutMs: .* is not possible/);
    await assert.rejects(client.load({ timeoutMs }), /timeoutMs: .* is not possible/);
  }
});
