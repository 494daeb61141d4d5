// The ollama client, unmodified.
import { test, before, after } from "node:test";
import assert from "node:assert/strict";
import { Ollama } from "ollama";
import { startServer, weather, weatherQuestion } from "./common.mjs";

let server, ollama;
const model = "steel", messages = [{ role: "user", content: "Hello! Who are you?" }], options = { temperature: 0 };
before(async () => { server = await startServer(); ollama = new Ollama({ host: server.origin }); });
after(() => server.stop());

test("chat, whole and streamed", async () => {
  const whole = await ollama.chat({ model, messages, options });
  assert.ok(whole.message.content.length > 0 && whole.done && whole.eval_count > 0);
  let text = "", last;
  for await (const part of await ollama.chat({ model, messages, options, stream: true })) { text += part.message.content; last = part; }
  assert.equal(text, whole.message.content);
  assert.equal(last.done_reason, "stop");
});

test("generate, and thinking apart", async () => {
  const r = await ollama.generate({ model, prompt: "What is 17 + 25?", options, think: true });
  assert.match(r.thinking, /carry/);
  assert.match(r.response, /42/);
  const quiet = await ollama.generate({ model, prompt: "What is 17 + 25?", options, think: false });
  assert.ok(!quiet.thinking);
});

test("tools round trip", async () => {
  const tools = [{ type: "function", function: { name: weather.name, description: weather.description, parameters: weather.parameters } }];
  const ask = [{ role: "user", content: weatherQuestion }];
  const r = await ollama.chat({ model, messages: ask, tools, options });
  assert.match(r.message.tool_calls[0].function.arguments.town, /Emberton/);
  const done = await ollama.chat({ model, tools, options, messages: [...ask, r.message, { role: "tool", tool_name: "get_weather", content: '{"weather": "sunny", "degrees": 21}' }] });
  assert.match(done.message.content, /sunny|21/);
});

test("what it tells of itself", async () => {
  assert.equal((await ollama.list()).models.length, 1);
  assert.ok((await ollama.show({ model })).capabilities.includes("completion"));
  assert.ok((await ollama.ps()).models[0].context_length > 0);
  await assert.rejects(ollama.generate({ model, prompt: "x", suffix: "y" }), /suffix/);
});
