// Cohere's clients for Node, of both API versions.
import assert from 'node:assert/strict';
import test from 'node:test';
import { CohereClient, CohereClientV2, CohereError } from 'cohere-ai';
import {
  ANSWER, CALLER_TEXTS, CALLERS, checkSame, checkVectors, crowded, CROWDED_URL, DOCUMENTS, dot, EMBED, KEY, MODEL,
  QUESTION, RERANK, TEXTS, URL_ALONE, WIDTH,
} from './facts.js';

const v1 = new CohereClient({ token: KEY, environment: URL_ALONE });
const v2 = new CohereClientV2({ token: KEY, environment: URL_ALONE });
const embedV2 = (texts, embeddingTypes = ['float'], more = {}) =>
  v2.embed({ model: EMBED, texts, inputType: 'search_document', embeddingTypes, ...more });

test('v1 embeds without and with types', async () => {
  const floats = await v1.embed({ model: EMBED, texts: TEXTS, inputType: 'search_document' });
  const typed = await v1.embed({ model: EMBED, texts: TEXTS, inputType: 'search_document', embeddingTypes: ['float'] });
  assert.equal(floats.responseType, 'embeddings_floats');
  assert.equal(typed.responseType, 'embeddings_by_type');
  assert.ok(floats.meta.billedUnits.inputTokens > 0);
  checkVectors(floats.embeddings, { count: TEXTS.length });
  checkSame(floats.embeddings, typed.embeddings.float);
});

test('v2 embeds as every type', async () => {
  const { embeddings, meta } = await embedV2(TEXTS, ['float', 'int8', 'uint8', 'binary', 'ubinary', 'base64']);
  assert.ok(meta.billedUnits.inputTokens > 0);
  checkVectors(embeddings.float, { count: TEXTS.length });
  TEXTS.forEach((_, at) => {
    const bytes = Buffer.from(embeddings.base64[at], 'base64');
    assert.equal(bytes.length, WIDTH * 4);
    assert.ok(Math.abs(bytes.readFloatLE(0) - embeddings.float[at][0]) < 1e-6);
    assert.deepEqual(embeddings.int8[at].map((number) => number + 128), embeddings.uint8[at]);
    assert.deepEqual(embeddings.binary[at].map((number) => number + 128), embeddings.ubinary[at]);
    assert.equal(embeddings.ubinary[at].length, WIDTH / 8);
    assert.equal(embeddings.ubinary[at][0] >> 7, embeddings.float[at][0] > 0 ? 1 : 0);
  });
});

test('v2 equals single calls, and answers only the types asked for', async () => {
  const together = (await embedV2(TEXTS)).embeddings.float;
  const alone = [];
  for (const text of TEXTS) alone.push(...(await embedV2([text])).embeddings.float);
  checkSame(together, alone);
  const bits = (await embedV2(['x'], ['ubinary'])).embeddings;
  assert.equal(bits.ubinary[0].length, WIDTH / 8);
  assert.equal(bits.float, undefined);
});

test('many callers each get their own answer', async () => {
  const answers = await Promise.all(CALLER_TEXTS.map((text) => embedV2([text])));
  const alone = answers.flatMap((answer) => answer.embeddings.float);
  checkVectors(alone, { count: CALLERS });
  checkSame(alone, (await embedV2(CALLER_TEXTS)).embeddings.float);
});

test('both versions rerank', async () => {
  const first = await v1.rerank({ model: RERANK, query: QUESTION, documents: DOCUMENTS, returnDocuments: true });
  const second = await v2.rerank({ model: RERANK, query: QUESTION, documents: DOCUMENTS, topN: 2 });
  assert.equal(first.results.length, DOCUMENTS.length);
  assert.equal(first.results[0].document.text, DOCUMENTS[ANSWER]);
  assert.equal(second.results.length, 2);
  for (const { results } of [first, second]) {
    assert.equal(results[0].index, ANSWER);
    results.forEach(({ relevanceScore }, at) => {
      assert.ok(relevanceScore >= 0 && relevanceScore <= 1);
      assert.ok(at === 0 || relevanceScore <= results[at - 1].relevanceScore);
    });
  }
});

test('the query and the documents share a space', async () => {
  const documents = (await embedV2(DOCUMENTS)).embeddings.float;
  const [query] = (await embedV2([QUESTION], ['float'], { inputType: 'search_query' })).embeddings.float;
  const scores = documents.map((document) => dot(document, query));
  assert.equal(scores.indexOf(Math.max(...scores)), ANSWER);
});

test('classify, tokenize, detokenize, checkApiKey and models', async () => {
  const { classifications } = await v1.classify({
    model: EMBED,
    inputs: ['absolutely lovely, a wonderful thing', 'I hate this awful thing'],
    examples: [
      { text: 'I love this, it is wonderful', label: 'positive' },
      { text: 'What a delightful surprise', label: 'positive' },
      { text: 'This is awful and I hate it', label: 'negative' },
      { text: 'A terrible, broken disappointment', label: 'negative' },
    ],
  });
  assert.deepEqual(classifications.map((one) => one.prediction), ['positive', 'negative']);
  const { tokens } = await v1.tokenize({ model: EMBED, text: 'hello tokenized world' });
  assert.equal((await v1.detokenize({ model: EMBED, tokens })).text, 'hello tokenized world');
  assert.equal((await v1.checkApiKey()).valid, true);
  const listed = await v1.models.list({ endpoint: 'embed' });
  assert.ok(listed.models.some(({ name }) => name === MODEL));
  assert.equal((await v1.models.get(EMBED)).name, EMBED);
});

test('each error has its status and message', async () => {
  const cases = [
    [() => embedV2(['']), 400, /texts\[0\]/],
    [() => v2.rerank({ model: RERANK, query: '', documents: DOCUMENTS }), 400, /query/],
    [() => v2.rerank({ model: 'nobody/knows-it', query: 'x', documents: ['y'] }), 404, /nobody\/knows-it/],
    [() => new CohereClientV2({ token: 'sk-wrong', environment: URL_ALONE }).rerank({ model: RERANK, query: 'x', documents: ['y'] }), 401, /key/i],
  ];
  for (const [call, status, message] of cases) {
    await assert.rejects(call, (error) => {
      assert.ok(error instanceof CohereError);
      assert.equal(error.statusCode, status);
      assert.match(error.body.message, message);
      return true;
    });
  }
});

test('an overload is retried, and then raised or served', async () => {
  const small = new CohereClientV2({ token: KEY, environment: CROWDED_URL });
  const embed = (maxRetries) =>
    small.embed({ model: 'quick', texts: ['x'], inputType: 'clustering', embeddingTypes: ['float'] }, { maxRetries });
  await crowded(async () => {
    await assert.rejects(embed(1), (error) => error.statusCode === 503);
    assert.equal((await embed(60)).embeddings.float.length, 1);
  });
});
