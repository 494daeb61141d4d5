// The Responses API by those who speak it: the OpenAI SDK, the AI SDK's own OpenAI provider, the Agents SDK, LangChain.
import { test, before, after } from "node:test";
import assert from "node:assert/strict";
import OpenAI from "openai";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, streamText, tool as aiTool, stepCountIs } from "ai";
import { Agent, Runner, OpenAIResponsesModel, tool as agentTool, setTracingDisabled } from "@openai/agents";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";
import { startServer, weather, weatherQuestion } from "./common.mjs";

let server, client;
const model = "steel", input = "Hello! Who are you?";
before(async () => { server = await startServer(); client = new OpenAI({ baseURL: server.baseURL, apiKey: "none", maxRetries: 0 }); setTracingDisabled(true); });
after(() => server.stop());
const tools = [{ type: "function", name: weather.name, description: weather.description, parameters: weather.parameters, strict: false }];
const sunny = '{"weather": "sunny", "degrees": 21}';

test("a response, the same streamed, and kept", async () => {
  const params = { model, input, temperature: 0, max_output_tokens: 200 };
  const whole = await client.responses.create(params);
  assert.equal(whole.status, "completed");
  assert.ok(whole.output_text.length > 0);
  const stream = client.responses.stream(params);
  let text = "";
  stream.on("response.output_text.delta", e => { text += e.delta; });
  const final = await stream.finalResponse();
  assert.equal(text, whole.output_text);
  assert.equal(final.output_text, whole.output_text);
  assert.equal((await client.responses.retrieve(final.id)).output_text, whole.output_text);
  assert.equal((await client.responses.inputItems.list(final.id)).data.length, 1);
  await client.responses.delete(final.id);
  await assert.rejects(client.responses.retrieve(final.id), OpenAI.NotFoundError);
});

test("tools round trip by previous_response_id", async () => {
  const first = await client.responses.create({ model, input: weatherQuestion, tools, temperature: 0 });
  const call = first.output.find(i => i.type === "function_call");
  assert.match(JSON.parse(call.arguments).town, /Emberton/);
  const second = await client.responses.create({ model, tools, temperature: 0, previous_response_id: first.id, input: [{ type: "function_call_output", call_id: call.call_id, output: sunny }] });
  assert.match(second.output_text, /sunny|21/);
});

test("errors are the SDK's own types", async () => {
  await assert.rejects(client.responses.create({ model, input: [{ role: "user", content: [{ type: "input_image", image_url: "x" }] }] }), OpenAI.BadRequestError);
});

test("the AI SDK's default provider: text, stream, tools", async () => {
  const steel = createOpenAI({ baseURL: server.baseURL, apiKey: "none" })(model);
  const whole = await generateText({ model: steel, prompt: input, temperature: 0 });
  assert.ok(whole.text.length > 0 && whole.usage.outputTokens > 0);
  let text = "";
  for await (const part of streamText({ model: steel, prompt: input, temperature: 0 }).textStream) text += part;
  assert.equal(text, whole.text);
  let asked = null;
  const r = await generateText({
    model: steel, prompt: weatherQuestion, temperature: 0, stopWhen: stepCountIs(3),
    tools: { get_weather: aiTool({ description: weather.description, inputSchema: z.object({ town: z.string().describe("The town") }), execute: async i => { asked = i; return { weather: "sunny", degrees: 21 }; } }) },
  });
  assert.match(asked.town, /Emberton/);
  assert.match(r.text, /sunny|21/);
});

test("the Agents SDK runs a tool", async () => {
  let asked = null;
  const get_weather = agentTool({ name: "get_weather", description: weather.description, parameters: z.object({ town: z.string().describe("The town") }), execute: async i => { asked = i; return sunny; } });
  const agent = new Agent({ name: "Steel", instructions: "You are helpful.", model: new OpenAIResponsesModel(client, model), tools: [get_weather], modelSettings: { temperature: 0 } });
  const r = await new Runner({ tracingDisabled: true }).run(agent, weatherQuestion);
  assert.match(asked.town, /Emberton/);
  assert.match(r.finalOutput, /sunny|21/);
});

test("LangChain over the Responses API", async () => {
  const chat = new ChatOpenAI({ model, apiKey: "none", temperature: 0, useResponsesApi: true, configuration: { baseURL: server.baseURL } });
  const r = await chat.invoke(input);
  assert.ok(r.text.length > 0);
  let text = "";
  for await (const chunk of await chat.stream(input)) text += chunk.text;
  assert.equal(text, r.text);
});
