// The Anthropic SDK against /v1/messages.
import { test, before, after } from "node:test";
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { startServer, weather, weatherQuestion } from "./common.mjs";

let server, client;
const model = "steel";
before(async () => { server = await startServer(); client = new Anthropic({ baseURL: server.origin, apiKey: "none", maxRetries: 0 }); });
after(() => server.stop());
const text = m => m.content.filter(b => b.type === "text").map(b => b.text).join("");

test("a message, and the same streamed", async () => {
  const params = { model, max_tokens: 200, temperature: 0, messages: [{ role: "user", content: "Hello! Who are you?" }] };
  const whole = await client.messages.create(params);
  assert.equal(whole.type, "message");
  assert.equal(whole.role, "assistant");
  assert.equal(whole.stop_reason, "end_turn");
  assert.ok(whole.usage.input_tokens > 0 && whole.usage.output_tokens > 0);
  const streamed = await client.messages.stream(params).finalMessage();
  assert.equal(text(streamed), text(whole));
  assert.equal(streamed.stop_reason, "end_turn");
});

test("tools round trip", async () => {
  const tools = [{ name: weather.name, description: weather.description, input_schema: weather.parameters }];
  const messages = [{ role: "user", content: weatherQuestion }];
  const r = await client.messages.stream({ model, max_tokens: 200, temperature: 0, tools, messages }).finalMessage();
  assert.equal(r.stop_reason, "tool_use");
  const use = r.content.find(b => b.type === "tool_use");
  assert.equal(use.name, "get_weather");
  assert.match(use.input.town, /Emberton/);
  const done = await client.messages.create({ model, max_tokens: 200, temperature: 0, tools, messages: [...messages, { role: "assistant", content: r.content }, { role: "user", content: [{ type: "tool_result", tool_use_id: use.id, content: '{"weather": "sunny", "degrees": 21}' }] }] });
  assert.match(text(done), /sunny|21/);
});

test("errors are the SDK's own types", async () => {
  await assert.rejects(client.messages.create({ model, max_tokens: 10, messages: "hello" }), e => e instanceof Anthropic.BadRequestError);
});
