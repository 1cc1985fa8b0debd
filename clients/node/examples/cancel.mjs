// node cancel.mjs [HOST:PORT]: stops an answer that has begun, in both ways there are.
import { Client } from 'slotwise-client';

const client = new Client(process.argv[2] ?? '127.0.0.1:50051');
const options = { ignoreEos: true };

// By its id, from anywhere: the stream ends and says why.
const stream = client.chat('Tell me a long story.', options);
for await (const event of stream) {
  if (event.type === 'delta' && event.firstTokenIndex === 0) await client.cancel(stream.requestId);
  if (event.type === 'finished') console.log(`by its id: ${event.finishReason}`);
}

// By leaving the loop: the server knows when the loop is left.
for await (const event of client.chat('Tell me a long story.', options)) {
  if (event.type === 'delta') break;
}
const { numRunning } = await client.load();
console.log(`by leaving the loop: ${numRunning} running`);
