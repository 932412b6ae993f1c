// Vercel's AI SDK with its providers for OpenAI, for servers like it, and for Cohere.
import assert from 'node:assert/strict';
import test from 'node:test';
import { createCohere } from '@ai-sdk/cohere';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { APICallError, cosineSimilarity, embed, embedMany, rerank } from 'ai';
import {
  ALIAS, ANSWER, BASE_URL, checkSame, checkVectors, crowded, CROWDED_URL, DOCUMENTS, EMBED, KEY, QUESTION, RERANK,
  TEXTS, URL_ALONE,
} from './facts.js';

const openai = createOpenAI({ baseURL: BASE_URL, apiKey: KEY });
const compatible = createOpenAICompatible({ name: 'appliance', baseURL: BASE_URL, apiKey: KEY });
const cohere = createCohere({ baseURL: `${URL_ALONE}/v2`, apiKey: KEY });
const MODELS = {
  openai: openai.embedding(ALIAS),
  'openai-compatible': compatible.embeddingModel(ALIAS),
  cohere: cohere.embedding(EMBED),
};

for (const [provider, model] of Object.entries(MODELS)) {
  test(`${provider}: embed and embedMany`, async () => {
    const { embeddings, usage } = await embedMany({ model, values: TEXTS });
    checkVectors(embeddings, { count: TEXTS.length });
    assert.ok(usage.tokens > 0);
    for (const [at, value] of TEXTS.entries()) checkSame([embeddings[at]], [(await embed({ model, value })).embedding]);
  });

  test(`${provider}: more values than one call takes`, async () => {
    const values = Array.from({ length: 250 }, (_, index) => `text number ${index}`);
    const { embeddings } = await embedMany({ model, values });
    checkVectors(embeddings, { count: values.length });
    for (const at of [0, 97, 249]) checkSame([embeddings[at]], [(await embed({ model, value: values[at] })).embedding]);
  });

  test(`${provider}: the right document is found`, async () => {
    const { embedding } = await embed({ model, value: QUESTION });
    const { embeddings } = await embedMany({ model, values: DOCUMENTS });
    const scores = embeddings.map((row) => cosineSimilarity(row, embedding));
    assert.equal(scores.indexOf(Math.max(...scores)), ANSWER);
  });
}

test('rerank texts and objects', async () => {
  const model = cohere.reranking(RERANK);
  const texts = await rerank({ model, query: QUESTION, documents: DOCUMENTS, topN: 2 });
  assert.equal(texts.ranking.length, 2);
  assert.equal(texts.rerankedDocuments[0], DOCUMENTS[ANSWER]);
  const objects = await rerank({ model, query: QUESTION, documents: DOCUMENTS.map((text) => ({ text })) });
  assert.equal(objects.ranking[0].originalIndex, ANSWER);
});

test('errors carry the message, and are not retried when that cannot help', async () => {
  const wrong = createOpenAI({ baseURL: BASE_URL, apiKey: 'sk-wrong' });
  const cases = [
    [() => embed({ model: openai.embedding('nobody/knows-it'), value: 'x' }), 404, /nobody\/knows-it/],
    [() => embed({ model: compatible.embeddingModel(ALIAS), value: '' }), 400, /input/],
    [() => embed({ model: cohere.embedding('nobody/knows-it'), value: 'x' }), 404, /nobody\/knows-it/],
    [() => embed({ model: wrong.embedding(ALIAS), value: 'x' }), 401, /key/i],
  ];
  for (const [call, status, message] of cases) {
    await assert.rejects(call, (error) => {
      assert.ok(APICallError.isInstance(error), `${error}`);
      assert.equal(error.statusCode, status);
      assert.match(error.message, message);
      assert.equal(error.isRetryable, false);
      return true;
    });
  }
});

test('an overload is retried, and then raised or served', async () => {
  const model = createOpenAI({ baseURL: `${CROWDED_URL}/v1`, apiKey: KEY }).embedding('quick');
  await crowded(async () => {
    await assert.rejects(embed({ model, value: 'x', maxRetries: 1 }), (error) => {
      assert.equal(error.reason, 'maxRetriesExceeded');
      assert.equal(error.lastError.statusCode, 503);
      return true;
    });
    assert.equal((await embed({ model, value: 'x', maxRetries: 60 })).embedding.length, 8);
  });
});
