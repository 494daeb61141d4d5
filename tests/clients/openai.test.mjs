// The OpenAI Node SDK, unmodified.
import { test, before, after } from "node:test";
import assert from "node:assert/strict";
import OpenAI from "openai";
import { startServer, weather, weatherQuestion } from "./common.mjs";

let server, client;
const model = "steel";
const hello = [{ role: "user", content: "Hello! Who are you?" }];
before(async () => { server = await startServer(); client = new OpenAI({ baseURL: server.baseURL, apiKey: "none", maxRetries: 0 }); });
after(() => server.stop());

test("models are listed", async () => {
  const list = await client.models.list();
  assert.equal(list.data.length, 1);
  assert.equal(list.data[0].object, "model");
  assert.ok(list.data[0].id);
});

test("a chat completion has content, usage and one finish reason", async () => {
  const r = await client.chat.completions.create({ model, messages: hello, temperature: 0, max_tokens: 200 });
  assert.equal(r.object, "chat.completion");
  assert.equal(r.choices.length, 1);
  assert.equal(r.choices[0].message.role, "assistant");
  assert.ok(r.choices[0].message.content.length > 0);
  assert.equal(r.choices[0].finish_reason, "stop");
  assert.equal(r.usage.total_tokens, r.usage.prompt_tokens + r.usage.completion_tokens);
});

test("a stream says the same as one reply: role first, one finish, usage only when asked", async () => {
  const params = { model, messages: hello, temperature: 0, max_tokens: 200 };
  const whole = await client.chat.completions.create(params);
  for (const usage of [false, true]) {
    const stream = await client.chat.completions.create({ ...params, stream: true, ...(usage ? { stream_options: { include_usage: true } } : {}) });
    let text = "", finishes = 0, usages = 0, first = true;
    for await (const chunk of stream) {
      assert.equal(chunk.object, "chat.completion.chunk");
      if (chunk.usage) { usages++; assert.deepEqual(chunk.choices, []); continue; }
      const c = chunk.choices[0];
      if (first) assert.equal(c.delta.role, "assistant");
      first = false;
      assert.equal(finishes, 0, "nothing follows the finish");
      text += c.delta.content ?? "";
      if (c.finish_reason) finishes++;
    }
    assert.equal(finishes, 1);
    assert.equal(usages, usage ? 1 : 0);
    assert.equal(text, whole.choices[0].message.content);
  }
});

test("seeds repeat, n gives several answers", async () => {
  const params = { model, messages: [{ role: "user", content: "Tell me a short story." }], temperature: 1, max_tokens: 40 };
  const a = await client.chat.completions.create({ ...params, seed: 5 });
  const b = await client.chat.completions.create({ ...params, seed: 5 });
  assert.equal(a.choices[0].message.content, b.choices[0].message.content);
  const many = await client.chat.completions.create({ ...params, seed: 5, n: 3 });
  assert.equal(many.choices.length, 3);
  assert.deepEqual(many.choices.map(c => c.index), [0, 1, 2]);
  assert.ok(new Set(many.choices.map(c => c.message.content)).size > 1);
});

test("max_tokens and stop end an answer and say so", async () => {
  const short = await client.chat.completions.create({ model, messages: hello, temperature: 0, max_completion_tokens: 3 });
  assert.equal(short.choices[0].finish_reason, "length");
  assert.equal(short.usage.completion_tokens, 3);
  const full = await client.completions.create({ model, prompt: "Once upon a time", temperature: 0, max_tokens: 30 });
  const word = full.choices[0].text.trim().split(/\s+/)[4];
  const cut = await client.completions.create({ model, prompt: "Once upon a time", temperature: 0, max_tokens: 30, stop: [word] });
  assert.equal(cut.choices[0].finish_reason, "stop");
  assert.equal(cut.choices[0].text, full.choices[0].text.slice(0, full.choices[0].text.indexOf(word)));
});

test("tools: a call, its result read back, the same when streamed", async () => {
  const tools = [{ type: "function", function: weather }];
  const messages = [{ role: "user", content: weatherQuestion }];
  const params = { model, messages, tools, temperature: 0, max_tokens: 200 };
  const r = await client.chat.completions.create(params);
  assert.equal(r.choices[0].finish_reason, "tool_calls");
  const call = r.choices[0].message.tool_calls[0];
  assert.equal(call.function.name, "get_weather");
  assert.match(JSON.parse(call.function.arguments).town, /Emberton/);

  let name = "", args = "", id = "", finish = "";
  for await (const chunk of await client.chat.completions.create({ ...params, stream: true })) {
    const c = chunk.choices[0];
    for (const t of c.delta.tool_calls ?? []) { name += t.function?.name ?? ""; args += t.function?.arguments ?? ""; id += t.id ?? ""; }
    finish ||= c.finish_reason;
  }
  assert.deepEqual([name, JSON.parse(args), finish], ["get_weather", JSON.parse(call.function.arguments), "tool_calls"]);
  assert.ok(id);

  const answer = await client.chat.completions.create({ model, tools, temperature: 0, max_tokens: 200, messages: [...messages, r.choices[0].message, { role: "tool", tool_call_id: call.id, content: '{"weather": "sunny", "degrees": 21}' }] });
  assert.match(answer.choices[0].message.content, /sunny|21/);

  const none = await client.chat.completions.create({ ...params, tool_choice: "none" });
  assert.equal(none.choices[0].message.tool_calls, undefined);
  const forced = await client.chat.completions.create({ ...params, tool_choice: { type: "function", function: { name: "get_weather" } } });
  assert.equal(forced.choices[0].message.tool_calls[0].function.name, "get_weather");
});

test("logprobs come with the alternatives", async () => {
  const r = await client.chat.completions.create({ model, messages: hello, temperature: 0, max_tokens: 5, logprobs: true, top_logprobs: 3 });
  const content = r.choices[0].logprobs.content;
  assert.ok(content.length > 0);
  for (const t of content) {
    assert.ok(t.logprob <= 0);
    assert.equal(t.top_logprobs.length, 3);
    assert.ok(t.top_logprobs[0].logprob >= t.top_logprobs[2].logprob);
  }
});

test("an abort frees the request", async () => {
  const stream = await client.chat.completions.create({ model, messages: [{ role: "user", content: "Tell me a short story." }], stream: true, max_tokens: 2000, temperature: 1 });
  for await (const chunk of stream) { if (chunk) { stream.controller.abort(); break; } }
  await server.idle();
});

test("errors are the SDK's own types, with param and message", async () => {
  const bad = (body, param) => assert.rejects(client.chat.completions.create({ model, messages: hello, ...body }), e => {
    assert.ok(e instanceof OpenAI.BadRequestError, String(e));
    if (param) assert.equal(e.param, param);
    return e.status === 400;
  });
  await bad({ temperature: "hot" }, "temperature");
  await bad({ messages: "hello" }, "messages");
  await bad({ max_tokens: -2 }, "max_tokens");
  await bad({ response_format: { type: "xml" } }, "response_format.type");
  await assert.rejects(client.chat.completions.create({ model, messages: [{ role: "user", content: "word ".repeat(20000) }] }), e => {
    assert.ok(e instanceof OpenAI.BadRequestError);
    assert.match(e.message, /\d{4,}.*\d{3,}/s, "both numbers are named");
    return true;
  });
  await assert.rejects(client.get("/nowhere"), e => e instanceof OpenAI.NotFoundError);
});

test("an API key is asked for where one is set", async () => {
  const locked = await startServer("--api-key", "secret");
  try {
    const wrong = new OpenAI({ baseURL: locked.baseURL, apiKey: "wrong", maxRetries: 0 });
    await assert.rejects(wrong.chat.completions.create({ model, messages: hello }), e => e instanceof OpenAI.AuthenticationError);
    const right = new OpenAI({ baseURL: locked.baseURL, apiKey: "secret", maxRetries: 0 });
    assert.equal((await right.models.list()).data.length, 1);
  } finally { await locked.stop(); }
});
