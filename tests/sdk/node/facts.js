// What the clients' tests know of the appliance, and what they ask of it.
import assert from 'node:assert/strict';
import net from 'node:net';

export const MODEL = 'sentence-transformers/all-MiniLM-L6-v2';
export const ALIAS = 'text-embedding-3-small';
export const EMBED = 'embed-english-v3.0';
export const RERANK = 'rerank-v3.5';
export const GPT = 'gpt-4o-mini'; // what the default chat model is known by to OpenAI's clients
export const CHAT = 'command-a-03-2025'; // and to Cohere's
export const WIDTH = 384;
export const BASE_URL = process.env.OPENAI_BASE_URL; // ends in /v1, as OpenAI's clients want it
export const URL_ALONE = process.env.CO_API_URL; // as Cohere's clients want it
export const KEY = process.env.OPENAI_API_KEY;
export const CROWDED_URL = process.env.CROWDED_URL; // takes one request at a time
export const CALLERS = 64;
const SETTLED = 50; // just settled requests, so that a refusal says that a second's patience will do
const CROWD_MS = 30_000;

export const TEXTS = [
  'The cat sleeps on the warm windowsill.',
  'Quarterly revenue rose by eleven percent.',
  'emoji 🦀 and Ünïcödé, 漢字, עברית',
  'line\nbreaks, "quotes" and \\ backslashes',
  'word '.repeat(150),
];
export const QUESTION = 'Where is the Eiffel Tower?';
export const DOCUMENTS = [
  'Photosynthesis turns light into chemical energy.',
  'The Eiffel Tower stands in Paris, the capital of France.',
  'Bread is made of flour, water, salt and yeast.',
];
export const ANSWER = 1; // the document that answers QUESTION
export const CALLER_TEXTS = Array.from({ length: CALLERS }, (_, index) => `the answer to caller ${index}`);

/** Checks number, width and length one. */
export function checkVectors(rows, { count, width = WIDTH }) {
  assert.equal(rows.length, count);
  for (const row of rows) {
    assert.equal(row.length, width);
    assert.ok(Math.abs(Math.hypot(...row) - 1) < 1e-3);
  }
  return rows;
}

export function dot(left, right) {
  return left.reduce((sum, number, at) => sum + number * right[at], 0);
}

/** Checks that the rows are the same vectors in the same order. */
export function checkSame(left, right) {
  assert.equal(left.length, right.length);
  left.forEach((row, at) => assert.ok(dot(row, right[at]) > 0.9999, `row ${at} differs`));
}

/** Runs `work` while the crowded appliance is busy with another's request, for some seconds, and refuses more. */
export async function crowded(work) {
  for (let settled = 0; settled < SETTLED; settled += 1) assert.equal(await isRefused(), false);
  const deadline = Date.now() + CROWD_MS;
  while (Date.now() < deadline) {
    const other = othersRequest();
    try {
      // Answered early it was itself one too many: try again.
      while (other.bytesRead === 0) if (await isRefused()) return await work();
    } finally {
      other.destroy();
    }
  }
  assert.fail('the crowded appliance never refused a request');
}

/** A connection on which a slow request was sent. */
function othersRequest() {
  const { hostname, port, host } = new URL(CROWDED_URL);
  const body = JSON.stringify({ model: 'slow', input: 'x' });
  const other = net.connect(Number(port), hostname).resume();
  other.write(
    `POST /v1/embeddings HTTP/1.1\r\nhost: ${host}\r\nauthorization: Bearer ${KEY}\r\n` +
      `content-type: application/json\r\ncontent-length: ${body.length}\r\n\r\n${body}`,
  );
  return other;
}

/** Whether one more request is, for being one too many. */
async function isRefused() {
  const answer = await fetch(`${CROWDED_URL}/v1/embeddings`, {
    method: 'POST',
    headers: { authorization: `Bearer ${KEY}`, 'content-type': 'application/json' },
    body: JSON.stringify({ model: 'quick', input: 'x' }),
  });
  const text = await answer.text();
  assert.ok([200, 503].includes(answer.status), text);
  return answer.status === 503;
}
