// What else SDKs ask for: objects by every road, allowed tools, the older functions, Azure's client, Instructor, ids of requests.
import { test, before, after } from "node:test";
import assert from "node:assert/strict";
import OpenAI, { AzureOpenAI } from "openai";
import Anthropic from "@anthropic-ai/sdk";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { zodResponseFormat, zodTextFormat, zodFunction } from "openai/helpers/zod";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, streamObject } from "ai";
import { Agent, Runner, OpenAIResponsesModel, tool as agentTool } from "@openai/agents";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";
import { startServer, weather, weatherQuestion } from "./common.mjs";

let server, client;
const model = "steel", content = "Tell me about Jana.", messages = [{ role: "user", content }], ask = [{ role: "user", content: weatherQuestion }];
const Person = z.object({ name: z.string().max(12), age: z.number().int().min(18).max(99), tags: z.array(z.enum(["a", "b"])).max(3) });
const Town = z.object({ town: z.string().describe("The town") });
const sunny = '{"weather": "sunny", "degrees": 21}';
before(async () => { server = await startServer(); client = new OpenAI({ baseURL: server.baseURL, apiKey: "none", maxRetries: 0 }); });
after(() => server.stop());

test("OpenAI: streams that parse", async () => {
  const chat = await client.chat.completions.stream({ model, messages, response_format: zodResponseFormat(Person, "person") }).finalChatCompletion();
  Person.parse(chat.choices[0].message.parsed);
  const r = await client.responses.stream({ model, input: content, text: { format: zodTextFormat(Person, "person") } }).finalResponse();
  Person.parse(r.output_parsed);
});

test("OpenAI: tools that parse, and the runner", async () => {
  const tools = [zodFunction({ name: weather.name, description: weather.description, parameters: Town })];
  const r = await client.chat.completions.parse({ model, messages: ask, tools, temperature: 0 });
  assert.match(r.choices[0].message.tool_calls[0].function.parsed_arguments.town, /Emberton/);
  let asked = null;
  const runner = client.chat.completions.runTools({ model, messages: ask, temperature: 0, tools: [zodFunction({ name: weather.name, description: weather.description, parameters: Town, function: async i => { asked = i; return sunny; } })] });
  assert.match(await runner.finalContent(), /sunny|21/);
  assert.match(asked.town, /Emberton/);
});

test("OpenAI: allowed tools, in both APIs", async () => {
  const tools = [{ type: "function", function: weather }, { type: "function", function: { name: "get_time", description: "The time in a town", parameters: weather.parameters } }];
  const allowed = mode => ({ type: "allowed_tools", allowed_tools: { mode, tools: [{ type: "function", function: { name: "get_weather" } }] } });
  for (const mode of ["auto", "required"]) {
    const r = await client.chat.completions.create({ model, messages: ask, tools, tool_choice: allowed(mode), temperature: 0 });
    assert.deepEqual(r.choices[0].message.tool_calls.map(c => c.function.name), ["get_weather"]);
  }
  const flat = tools.map(t => ({ type: "function", strict: false, ...t.function }));
  const r = await client.responses.create({ model, input: weatherQuestion, tools: flat, tool_choice: { type: "allowed_tools", mode: "required", tools: [{ type: "function", name: "get_weather" }] }, temperature: 0 });
  assert.equal(r.output.find(i => i.type === "function_call").name, "get_weather");
});

test("OpenAI: functions, as before there were tools", async () => {
  const params = { model, messages: ask, functions: [weather], temperature: 0 };
  const r = await client.chat.completions.create(params);
  assert.equal(r.choices[0].finish_reason, "function_call");
  assert.match(JSON.parse(r.choices[0].message.function_call.arguments).town, /Emberton/);
  const streamed = await client.chat.completions.stream(params).finalChatCompletion();
  assert.deepEqual(streamed.choices[0].message.function_call, r.choices[0].message.function_call);
  const done = await client.chat.completions.create({ ...params, messages: [...ask, r.choices[0].message, { role: "function", name: "get_weather", content: sunny }] });
  assert.match(done.choices[0].message.content, /sunny|21/);
});

test("OpenAI: scores of a prompt, as evaluation harnesses ask for them", async () => {
  const r = await client.completions.create({ model, prompt: "Once upon a time there was", echo: true, logprobs: 1, max_tokens: 0 });
  const { tokens, token_logprobs, top_logprobs } = r.choices[0].logprobs;
  assert.equal(r.choices[0].text, "Once upon a time there was");
  assert.equal(tokens.length, r.usage.prompt_tokens);
  assert.equal(token_logprobs.length, tokens.length);
  assert.equal(token_logprobs[0], null);
  assert.ok(token_logprobs.slice(1).every(v => v <= 0) && top_logprobs.slice(1).every(t => Object.keys(t).length === 1));
});

test("requests have ids, and errors carry them", async () => {
  const r = await client.chat.completions.create({ model, messages, max_tokens: 3 });
  assert.match(r._request_id, /^req_/);
  await assert.rejects(client.chat.completions.create({ model, messages: "x" }), e => /^req_/.test(e.requestID));
  const a = new Anthropic({ baseURL: server.origin, apiKey: "none", maxRetries: 0 });
  await assert.rejects(a.messages.create({ model, max_tokens: 3, messages: "x" }), e => /^req_/.test(e.requestID));
});

test("Azure's client", async () => {
  const locked = await startServer("--api-key", "secret");
  try {
    const make = apiKey => new AzureOpenAI({ endpoint: locked.origin, apiKey, apiVersion: "2024-10-21", deployment: "steel", maxRetries: 0 });
    assert.ok((await make("secret").chat.completions.create({ model, messages, max_tokens: 5 })).choices.length);
    await assert.rejects(make("wrong").chat.completions.create({ model, messages }), OpenAI.AuthenticationError);
  } finally { await locked.stop(); }
});

test("Anthropic: models, thinking where it is asked for, objects, a prompt that is too long", async () => {
  const a = new Anthropic({ baseURL: server.origin, apiKey: "none", maxRetries: 0 });
  const list = await a.models.list();
  assert.ok(list.data[0].display_name && list.data[0].type === "model" && !list.hasNextPage());
  const params = { model, max_tokens: 300, temperature: 0, messages: [{ role: "user", content: "What is 17 + 25?" }] };
  const quiet = await a.messages.create(params);
  assert.match(quiet.content[0].text, /42/);
  const loud = await a.messages.create({ ...params, thinking: { type: "enabled", budget_tokens: 1024 } });
  assert.deepEqual(loud.content.map(b => b.type), ["thinking", "text"]);
  // its helper keeps bounds of numbers from the server, and checks them itself
  const Plain = z.object({ kind: z.enum(["cat", "dog"]), old: z.boolean(), legs: z.array(z.enum(["left", "right"])) });
  const m = await a.messages.parse({ model, max_tokens: 2000, temperature: 0, messages, output_config: { format: zodOutputFormat(Plain) } });
  Plain.parse(m.parsed_output);
  await assert.rejects(a.messages.create({ ...params, messages: [{ role: "user", content: "word ".repeat(20000) }] }), /prompt is too long: \d+ tokens > \d+ maximum/);
});

test("AI SDK: generateObject and streamObject over both providers", async () => {
  for (const m of [createOpenAI({ baseURL: server.baseURL, apiKey: "none" })(model), createOpenAICompatible({ name: "steel", baseURL: server.baseURL, supportsStructuredOutputs: true })(model)]) {
    Person.parse((await generateObject({ model: m, prompt: content, schema: Person })).object);
    const s = streamObject({ model: m, prompt: content, schema: Person });
    for await (const part of s.partialObjectStream) assert.equal(typeof part, "object");
    Person.parse(await s.object);
  }
});

test("LangChain: withStructuredOutput in every mode, over both APIs", async () => {
  for (const useResponsesApi of [false, true]) {
    const chat = new ChatOpenAI({ model, apiKey: "none", temperature: 0, useResponsesApi, configuration: { baseURL: server.baseURL } });
    Person.parse(await chat.withStructuredOutput(Person, { method: "jsonSchema", name: "person" }).invoke(content));
    assert.equal(typeof await chat.withStructuredOutput(z.looseObject({}), { method: "jsonMode" }).invoke("Answer in JSON: " + content), "object");
    const called = await chat.withStructuredOutput(Town, { method: "functionCalling", name: "get_weather" }).invoke(weatherQuestion);
    assert.match(called.town, /Emberton/);
  }
});

test("Agents: a tool, then an agent with an output type", async () => {
  let asked = null;
  const get_weather = agentTool({ name: "get_weather", description: weather.description, parameters: Town, execute: async i => { asked ??= i; return sunny; } });
  const responses = new OpenAIResponsesModel(client, model);
  const writer = new Agent({ name: "Writer", model: responses, outputType: Person });
  const agent = new Agent({ name: "Steel", instructions: "You are helpful.", model: responses, tools: [get_weather], modelSettings: { temperature: 0 } });
  const runner = new Runner({ tracingDisabled: true });
  const first = await runner.run(agent, weatherQuestion, { stream: true });
  let text = "";
  for await (const piece of first.toTextStream()) text += piece;
  await first.completed;
  assert.match(asked.town, /Emberton/);
  assert.match(text, /sunny|21/);
  Person.parse((await runner.run(writer, content)).finalOutput);
  // both at once: calls while they are wanted, then an object
  const both = new Agent({ name: "Both", instructions: "You are helpful.", model: responses, tools: [get_weather], outputType: Person, modelSettings: { temperature: 0 } });
  asked = null;
  Person.parse((await runner.run(both, weatherQuestion)).finalOutput);
  assert.match(asked.town, /Emberton/);
});
