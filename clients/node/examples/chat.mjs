// node chat.mjs [HOST:PORT] [QUESTION]: streams an answer.
import { Client } from 'slotwise-client';

const [address = '127.0.0.1:50051', question = 'What is the capital of France?'] =
  process.argv.slice(2);
const client = new Client(address);
for await (const event of client.chat(question, { temperature: 0, maxNewTokens: 32 })) {
  if (event.type === 'delta') process.stdout.write(event.text);
}
console.log();
