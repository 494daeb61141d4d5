// LangChain's ChatOpenAI.
import { test, before, after } from "node:test";
import assert from "node:assert/strict";
import { ChatOpenAI } from "@langchain/openai";
import { startServer, weather, weatherQuestion } from "./common.mjs";

let server, chat;
before(async () => { server = await startServer(); chat = new ChatOpenAI({ model: "steel", temperature: 0, maxTokens: 200, maxRetries: 0, apiKey: "none", configuration: { baseURL: server.baseURL } }); });
after(() => server.stop());

test("invoke and stream agree", async () => {
  const whole = await chat.invoke("Hello! Who are you?");
  assert.ok(whole.content.length > 0);
  assert.ok(whole.usage_metadata.output_tokens > 0);
  let text = "";
  for await (const chunk of await chat.stream("Hello! Who are you?")) text += chunk.content;
  assert.equal(text, whole.content);
});

test("bound tools are called", async () => {
  const r = await chat.bindTools([{ type: "function", function: weather }]).invoke(weatherQuestion);
  assert.equal(r.tool_calls[0].name, "get_weather");
  assert.match(r.tool_calls[0].args.town, /Emberton/);
});

test("errors carry the status", async () => {
  const wrong = new ChatOpenAI({ model: "steel", maxRetries: 0, apiKey: "none", configuration: { baseURL: server.baseURL }, modelKwargs: { temperature: "hot" } });
  await assert.rejects(wrong.invoke("hello"), e => e.status === 400);
});
