// OpenAI's Node client and Vercel's AI SDK chat, ask for responses, stream, call tools and give objects of a schema.
// The model is small and often wrong: the answers are held to their form and to each other, not to what they say.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { createCohere } from '@ai-sdk/cohere';
import { generateObject, generateText, streamText, tool } from 'ai';
import OpenAI from 'openai';
import { zodResponseFormat } from 'openai/helpers/zod';
import { z } from 'zod';
import { BASE_URL, CHAT, GPT, KEY, URL_ALONE } from './facts.js';

const messages = [{ role: 'user', content: 'What is the capital of France?' }];
const City = z.object({ city: z.enum(['Paris', 'Oslo']) });
const greedy = { model: GPT, temperature: 0, max_tokens: 64 };
const weather = {
  type: 'function',
  function: {
    name: 'weather',
    parameters: {
      type: 'object',
      properties: { city: { type: 'string', enum: ['Paris', 'Oslo'] } },
      required: ['city'],
      additionalProperties: false,
    },
  },
};
const openai = new OpenAI();

test('openai: a stream says what the answer says', async () => {
  const whole = await openai.chat.completions.create({ messages, ...greedy });
  let said = '';
  for await (const chunk of await openai.chat.completions.create({ messages, ...greedy, stream: true })) {
    said += chunk.choices[0].delta.content ?? '';
  }
  assert.equal(said, whole.choices[0].message.content);
});

test('openai: what is parsed is of its schema', async () => {
  const parsed = await openai.chat.completions.parse({
    messages,
    ...greedy,
    response_format: zodResponseFormat(City, 'city'),
  });
  assert.ok(City.parse(parsed.choices[0].message.parsed));
});

test('openai: a tool is called, whole and streamed', async () => {
  const forced = { messages, ...greedy, tools: [weather], tool_choice: { type: 'function', function: { name: 'weather' } } };
  const whole = await openai.chat.completions.create(forced);
  const streamed = await openai.chat.completions.stream(forced).finalChatCompletion();
  const [call] = whole.choices[0].message.tool_calls;
  assert.ok(City.parse(JSON.parse(call.function.arguments)));
  assert.equal(streamed.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
});

test('openai: responses, whole and streamed', async () => {
  const whole = await openai.responses.create({ model: GPT, input: 'Say hello.', max_output_tokens: 16 });
  assert.ok(whole.output_text);
  const kinds = [];
  for await (const event of await openai.responses.create({
    model: GPT,
    input: 'Say hello.',
    max_output_tokens: 16,
    stream: true,
  })) {
    kinds.push(event.type);
  }
  assert.equal(kinds[0], 'response.created');
  assert.match(kinds.at(-1), /^response\.(completed|incomplete)$/);
});

test('openai: an abort ends the stream', async () => {
  const stream = await openai.chat.completions.create({
    messages,
    model: GPT,
    stream: true,
    max_tokens: 2000,
    logit_bias: { 2: -100 },
  });
  for await (const chunk of stream) {
    if (chunk.choices[0].delta.content) stream.controller.abort();
  }
  assert.ok(stream.controller.signal.aborted);
});

const provider = createOpenAI({ baseURL: BASE_URL, apiKey: KEY });
const models = {
  'responses, its default': provider(GPT),
  'chats': provider.chat(GPT),
  'openai-compatible': createOpenAICompatible({
    name: 'appliance',
    baseURL: BASE_URL,
    apiKey: KEY,
    supportsStructuredOutputs: true,
  })(GPT),
  'cohere': createCohere({ baseURL: `${URL_ALONE}/v2`, apiKey: KEY })(CHAT),
};
const tools = { weather: tool({ description: 'The weather of a city', inputSchema: City }) };

for (const [name, model] of Object.entries(models)) {
  test(`AI SDK, ${name}: text, whole and streamed`, async () => {
    const asked = { model, prompt: 'Say hello.', maxOutputTokens: 16, maxRetries: 0 };
    const whole = await generateText(asked);
    assert.ok(whole.text);
    assert.ok(whole.usage.outputTokens > 0);
    let said = '';
    for await (const part of streamText(asked).textStream) said += part;
    assert.ok(said);
  });

  test(`AI SDK, ${name}: an object of a schema`, async () => {
    const { object } = await generateObject({ model, schema: City, prompt: 'Name a city.', maxRetries: 0 });
    assert.ok(City.parse(object));
  });

  test(`AI SDK, ${name}: a tool is called`, async () => {
    const { toolCalls } = await generateText({
      model,
      tools,
      toolChoice: 'required',
      prompt: 'What is the weather in Oslo?',
      maxOutputTokens: 100,
      maxRetries: 0,
    });
    assert.equal(toolCalls[0].toolName, 'weather');
    assert.ok(City.parse(toolCalls[0].input));
  });
}

for (const [name, model] of Object.entries(models)) {
  test(`AI SDK, ${name}: a conversation goes on`, async () => {
    // The default model refers to its earlier answers by their ids, unless it is told that they are not stored.
    const providerOptions = { openai: { store: false } };
    const asked = { model, maxOutputTokens: 8, maxRetries: 0, providerOptions };
    const first = await generateText({ ...asked, prompt: 'Say hello.' });
    const messages = [{ role: 'user', content: 'Say hello.' }, ...first.response.messages, { role: 'user', content: 'Again.' }];
    const second = await generateText({ ...asked, messages });
    assert.ok(second.usage.inputTokens > first.usage.inputTokens);
  });
}
