import assert from 'node:assert/strict';
import test from 'node:test';
import { Client } from '../src/client.js';
import { Connection } from '../src/connection.js';
import { CancelledError, InvalidArgumentError, UnavailableError } from '../src/errors.js';

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

test('what a field of any call cannot hold is refused', async () => {
  const client = new Client('127.0.0.1:1');
  for (const [made, field] of [
    [client.tokenize(123), 'text'],
    [client.tokenize('x', { parseControlTokens: 'false' }), 'parse_control_tokens'],
    [client.detokenize('123'), 'token_ids'],
    [client.detokenize([1, 1.5]), 'token_ids[1]'],
    [client.cancel(5), 'request_id'],
  ]) {
    await assert.rejects(made, (error) => {
      assert.ok(error instanceof InvalidArgumentError, String(error));
      assert.equal(error.field, field);
      return true;
    });
  }
});

test('a server that is not there is told in words that say all', async () => {
  await assert.rejects(new Client('127.0.0.1:1').load(), (error) => {
    assert.ok(error instanceof UnavailableError, String(error));
    assert.match(error.message, /^no answer from 127.0.0.1:1: .*ECONNREFUSED 127.0.0.1:1$/);
    return true;
  });
});

test('a client that is closed says so', async () => {
  const client = new Client('127.0.0.1:1');
  await client.close();
  await client.close();
  const isClosed = (error) => error instanceof CancelledError && /is closed/.test(error.message);
  assert.throws(() => client.generate('x'), isClosed);
  await assert.rejects(client.complete('x'), isClosed);
  await assert.rejects(client.load(), isClosed);
});
