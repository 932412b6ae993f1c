// LangChain for JavaScript: batches of 512 strings.
import assert from 'node:assert/strict';
import test from 'node:test';
import { OpenAIEmbeddings } from '@langchain/openai';
import { ALIAS, ANSWER, BASE_URL, checkSame, checkVectors, DOCUMENTS, dot, QUESTION, TEXTS } from './facts.js';

const embeddings = new OpenAIEmbeddings({ model: ALIAS, configuration: { baseURL: BASE_URL } });

test('documents and queries are embedded alike, in order', async () => {
  const texts = Array.from({ length: 1100 }, (_, index) => `text number ${index}`);
  const rows = checkVectors(await embeddings.embedDocuments(texts), { count: texts.length });
  for (const at of [0, 511, 512, 1099]) checkSame([rows[at]], [await embeddings.embedQuery(texts[at])]);
  checkVectors(await embeddings.embedDocuments(TEXTS), { count: TEXTS.length });
});

test('the right document is found', async () => {
  const query = await embeddings.embedQuery(QUESTION);
  const scores = (await embeddings.embedDocuments(DOCUMENTS)).map((row) => dot(row, query));
  assert.equal(scores.indexOf(Math.max(...scores)), ANSWER);
});
