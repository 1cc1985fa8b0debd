// The details of google.rpc that a server sends with a status, in its trailing metadata.

import protobuf from 'protobufjs';

const KEY = 'grpc-status-details-bin';

const ROOT = protobuf.Root.fromJSON({
  nested: {
    Status: { fields: { details: { rule: 'repeated', type: 'Any', id: 3 } } },
    Any: { fields: { type_url: { type: 'string', id: 1 }, value: { type: 'bytes', id: 2 } } },
    BadRequest: { fields: { violations: { rule: 'repeated', type: 'FieldViolation', id: 1 } } },
    FieldViolation: {
      fields: { field: { type: 'string', id: 1 }, description: { type: 'string', id: 2 } },
    },
    RetryInfo: { fields: { delay: { type: 'Duration', id: 1 } } },
    Duration: { fields: { seconds: { type: 'int64', id: 1 }, nanos: { type: 'int32', id: 2 } } },
    ErrorInfo: { fields: { reason: { type: 'string', id: 1 } } },
  },
});

/** `{isThere, violations, retryAfterMs, reason}` of an error of gRPC; null and "" for none. */
export function details(error) {
  const found = { isThere: false, violations: [], retryAfterMs: null, reason: '' };
  for (const packed of error.metadata?.get(KEY) ?? []) {
    found.isThere = true;
    for (const { type_url: url, value } of ROOT.lookupType('Status').decode(packed).details) {
      add(found, url.split('.').at(-1), value);
    }
  }
  return found;
}

function add(found, name, bytes) {
  if (!['BadRequest', 'RetryInfo', 'ErrorInfo'].includes(name)) return;
  const type = ROOT.lookupType(name);
  const detail = type.toObject(type.decode(bytes), { longs: Number, defaults: true });
  if (name === 'BadRequest') found.violations.push(...(detail.violations ?? []));
  if (name === 'ErrorInfo') found.reason = detail.reason;
  if (name === 'RetryInfo' && detail.delay) {
    found.retryAfterMs = detail.delay.seconds * 1e3 + detail.delay.nanos / 1e6;
  }
}
