// node health.mjs [HOST:PORT]: exit status 0 when the server answers requests, else 1 and why.
import { Client } from 'slotwise-client';

const client = new Client(process.argv[2] ?? '127.0.0.1:50051');
try {
  const health = await client.health(undefined, { timeoutMs: 5000 });
  console.log(health);
  if (health !== 'serving') process.exitCode = 1;
} catch (error) {
  console.error(`error: ${error.message}`);
  process.exitCode = 1;
}
