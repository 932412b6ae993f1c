// OpenAI's client for Node. It knows the appliance by OPENAI_BASE_URL and OPENAI_API_KEY alone.
import assert from 'node:assert/strict';
import test from 'node:test';
import { getEncoding } from 'js-tiktoken';
import OpenAI, { AzureOpenAI } from 'openai';
import {
  ALIAS, CALLER_TEXTS, CALLERS, checkSame, checkVectors, crowded, CROWDED_URL, KEY, MODEL, TEXTS, URL_ALONE, WIDTH,
} from './facts.js';

const client = new OpenAI();
const small = (maxRetries) => new OpenAI({ baseURL: `${CROWDED_URL}/v1`, maxRetries });

async function vectorsOf(input, more = {}) {
  const answer = await client.embeddings.create({ model: ALIAS, input, ...more });
  assert.deepEqual(answer.data.map((row) => row.index), answer.data.map((_, index) => index));
  return answer.data.map((row) => row.embedding);
}

test('texts keep their order and equal single calls', async () => {
  const together = checkVectors(await vectorsOf(TEXTS), { count: TEXTS.length });
  const alone = [];
  for (const text of TEXTS) alone.push(...(await vectorsOf(text)));
  checkSame(together, alone);
});

test('base64, which the client asks for by itself, and floats are the same numbers', async () => {
  checkSame(await vectorsOf(TEXTS), await vectorsOf(TEXTS, { encoding_format: 'float' }));
  const [row] = await vectorsOf(TEXTS[0], { encoding_format: 'base64' });
  assert.equal(Buffer.from(row, 'base64').length, WIDTH * 4);
});

test('token arrays equal their texts', async () => {
  const encoding = getEncoding('cl100k_base');
  const ids = TEXTS.map((text) => encoding.encode(text));
  checkSame(await vectorsOf(ids), await vectorsOf(TEXTS));
  checkSame(await vectorsOf(ids[0]), await vectorsOf(TEXTS[0]));
});

test('usage is additive', async () => {
  const whole = await client.embeddings.create({ model: ALIAS, input: TEXTS });
  let sum = 0;
  for (const input of TEXTS) sum += (await client.embeddings.create({ model: ALIAS, input })).usage.prompt_tokens;
  assert.ok(sum > 0);
  assert.equal(whole.usage.prompt_tokens, sum);
  assert.equal(whole.usage.total_tokens, sum);
});

test('many callers each get their own answer', async () => {
  const alone = (await Promise.all(CALLER_TEXTS.map((text) => vectorsOf(text)))).flat();
  checkVectors(alone, { count: CALLERS });
  checkSame(alone, await vectorsOf(CALLER_TEXTS));
});

test('the own width may be asked for, an alias may pad, and other widths are refused', async () => {
  checkVectors(await vectorsOf('x', { dimensions: WIDTH }), { count: 1 });
  const padded = await client.embeddings.create({ model: 'padded-to-1536', input: 'x' });
  checkVectors([padded.data[0].embedding], { count: 1, width: 1536 });
  await assert.rejects(vectorsOf('x', { dimensions: 256 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, 'dimensions');
    return true;
  });
});

test('Azure\'s client finds its deployments', async () => {
  const azure = new AzureOpenAI({ baseURL: null, endpoint: URL_ALONE, apiKey: KEY, apiVersion: '2024-10-21' });
  const answer = await azure.embeddings.create({ model: ALIAS, input: TEXTS });
  checkSame(answer.data.map((row) => row.embedding), await vectorsOf(TEXTS));
});

test('models are listed and found', async () => {
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  assert.ok(names.includes(MODEL) && names.includes(ALIAS));
  assert.equal((await client.models.retrieve(MODEL)).id, MODEL);
});

test('each error is of its class, with code and request id', async () => {
  const cases = [
    [() => client.embeddings.create({ model: ALIAS, input: '' }), OpenAI.BadRequestError, 400, undefined, 'input'],
    [() => client.embeddings.create({ model: ALIAS, input: [] }), OpenAI.BadRequestError, 400, undefined, 'input'],
    [() => client.embeddings.create({ model: ALIAS, input: '\ud800' }), OpenAI.BadRequestError, 400, undefined, undefined],
    [() => client.embeddings.create({ model: 'nobody/knows-it', input: 'x' }), OpenAI.NotFoundError, 404, 'model_not_found', 'model'],
    [() => client.models.retrieve('nobody/knows-it'), OpenAI.NotFoundError, 404, 'model_not_found', 'model'],
    [() => new OpenAI({ apiKey: 'sk-wrong' }).embeddings.create({ model: ALIAS, input: 'x' }), OpenAI.AuthenticationError, 401, 'invalid_api_key', undefined],
    [() => small(0).embeddings.create({ model: 'quick', input: 'x'.repeat(2_000_000) }), OpenAI.APIError, 413, 'request_too_large', undefined],
  ];
  for (const [call, kind, status, code, param] of cases) {
    await assert.rejects(call, (error) => {
      assert.ok(error instanceof kind, `${error}`);
      assert.equal(error.status, status);
      assert.ok(error.requestID);
      assert.doesNotMatch(error.message, /no body/);
      if (code) assert.equal(error.code, code);
      if (param) assert.equal(error.param, param);
      return true;
    });
  }
});

test('an overload is retried, and then raised or served', async () => {
  await crowded(async () => {
    await assert.rejects(small(1).embeddings.create({ model: 'quick', input: 'x' }), (error) => {
      assert.ok(error instanceof OpenAI.InternalServerError);
      assert.equal(error.status, 503);
      assert.equal(error.code, 'overloaded');
      return true;
    });
    const answer = await small(60).embeddings.create({ model: 'quick', input: 'x' });
    assert.equal(answer.data.length, 1);
  });
});
