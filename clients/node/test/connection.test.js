import assert from 'node:assert/strict';
import test from 'node:test';
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
});
