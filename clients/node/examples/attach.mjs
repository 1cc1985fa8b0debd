// node attach.mjs [HOST:PORT] [REQUEST_ID] [TOKEN]: reads a request on from one of its tokens.
// Without an id it asks, leaves after five tokens, and reads on over a new connection.
import { Client } from 'slotwise-client';

const [address = '127.0.0.1:50051', requestId, token = 0] = process.argv.slice(2);

async function leave() {
  const client = new Client(address);
  const options = { temperature: 0, maxNewTokens: 32 };
  const stream = client.chat('What is the capital of France?', options);
  let next = 0;
  for await (const event of stream) {
    if (event.type !== 'delta') continue;
    process.stdout.write(event.text);
    next = event.firstTokenIndex + event.tokenIds.length;
    if (next >= 5) stream.detach();
  }
  await client.close();
  return [stream.requestId, next];
}

const [id, next] = requestId ? [requestId, Number(token)] : await leave();
for await (const event of new Client(address).attach(id, next)) {
  if (event.type === 'delta') process.stdout.write(event.text);
}
console.log();
