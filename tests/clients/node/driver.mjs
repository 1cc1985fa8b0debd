// Plays calls that come as JSON, one a line, and answers each with one line of what came of it.

import { createInterface } from 'node:readline';
import { Client } from 'slotwise-client';

/** "123n" is a BigInt. */
function revive(_, value) {
  return typeof value === 'string' && /^\d+n$/.test(value) ? BigInt(value.slice(0, -1)) : value;
}

function plain(_, value) {
  if (typeof value === 'bigint') return `${value}n`;
  return value?.type === 'Buffer' ? Buffer.from(value.data).toString('latin1') : value;
}

/** What a program saw of a call: its events or its answer, and its error. */
async function play({ target, client: settings, call, args, leave, abort }) {
  const client = new Client(target, settings);
  const seen = { events: [] };
  const controller = new AbortController();
  try {
    if (settings.reconnect !== false) await client.health('');
    const words = abort ? [args[0], { ...args[1], signal: controller.signal }] : args;
    const made = client[call](...words);
    if (made[Symbol.asyncIterator] === undefined) {
      if (abort) controller.abort();
      seen.value = await made;
    } else {
      for await (const event of made) {
        seen.events.push(event);
        if (event.type === 'delta' && leave) break;
        if (event.type === 'delta' && abort) controller.abort();
      }
    }
  } catch ({ name, message, field, code, retryAfterMs }) {
    seen.error = { name, message, field, code, retryAfterMs };
  }
  // What is told when the call is over, before the client closes.
  console.log(JSON.stringify(seen, plain));
  await client.close();
}

for await (const line of createInterface({ input: process.stdin })) {
  await play(JSON.parse(line, revive));
}
