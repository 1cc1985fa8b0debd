// How a client reaches its server: the address, TLS, a token, and what it does after a loss.

import { isIP } from 'node:net';
import { Metadata, credentials, status } from '@grpc/grpc-js';
import { CancelledError } from './errors.js';

const MAX_MESSAGE_BYTES = 64 * 1024 * 1024;

// Pings find a dead peer behind a silent connection; dialling again starts fast, so that waiting
// for a server that is just starting does not overshoot by a long back-off.
const CHANNEL_OPTIONS = {
  'grpc.max_send_message_length': MAX_MESSAGE_BYTES,
  'grpc.max_receive_message_length': MAX_MESSAGE_BYTES,
  'grpc.keepalive_time_ms': 10_000,
  'grpc.keepalive_timeout_ms': 10_000,
  'grpc.initial_reconnect_backoff_ms': 100,
  'grpc.max_reconnect_backoff_ms': 2_000,
};

/** What a client knows of its server. Error for a token or TLS files that cannot be used. */
export class Connection {
  // It has answered once: what is lost now may come back.
  wasReached = false;
  isClosed = false;

  constructor(target, options = {}) {
    const { tls = false, token, insecureToken = false, ...rest } = options;
    const { reconnect = true, reconnectTimeoutMs = 60_000, ...unknown } = rest;
    refuseUnknown(unknown);
    if (token !== undefined && !tls && !insecureToken && !isLocal(target)) {
      throw new Error(
        `the token would go to ${target} unencrypted; use TLS, or allow it (insecureToken: true) ` +
          'where the network is trusted',
      );
    }
    this.target = target;
    this.reconnect = reconnect;
    this.reconnectTimeoutMs = reconnectTimeoutMs;
    this.metadata = metadata(token);
    this.credentials = tls ? secure(tls) : credentials.createInsecure();
    this.options = { ...CHANNEL_OPTIONS, ...naming(tls) };
  }

  /** CancelledError once the client is closed. */
  needOpen() {
    if (this.isClosed) throw new CancelledError('the client is closed', status.CANCELLED);
  }
}

/** TypeError for options that are left when the known ones are taken. */
export function refuseUnknown(options) {
  const [name] = Object.keys(options);
  if (name !== undefined) throw new TypeError(`unknown option ${JSON.stringify(name)}`);
}

function metadata(token) {
  const made = new Metadata();
  if (token === undefined) return made;
  // The token itself is never shown.
  if (!/^[!-~]+$/.test(token)) {
    throw new Error('the token is empty, or has characters besides printable ASCII');
  }
  made.set('authorization', `Bearer ${token}`);
  return made;
}

function secure(tls) {
  const { ca, cert, key, serverName: _, ...unknown } = tls === true ? {} : tls;
  refuseUnknown(unknown);
  const [root, chain, secret] = [ca, cert, key].map((pem) => (pem ? Buffer.from(pem) : null));
  return credentials.createSsl(root, secret, chain);
}

function naming({ serverName }) {
  return serverName === undefined ? {} : { 'grpc.ssl_target_name_override': serverName };
}

/** The address stays on this machine. What is not understood does not. */
function isLocal(target) {
  if (target.startsWith('unix:')) return true;
  const address = target
    .split('/')
    .at(-1)
    .replace(/^(dns|ipv4|ipv6):/, '');
  const host = address.replace(/:\d+$/, '').replace(/^\[|\]$/g, '');
  if (host === 'localhost') return true;
  return isIP(host) === 4 ? host.startsWith('127.') : host === '::1';
}
