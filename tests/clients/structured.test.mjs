// Structured output as the SDKs ask for it.
import { test, before, after } from "node:test";
import assert from "node:assert/strict";
import OpenAI from "openai";
import Anthropic from "@anthropic-ai/sdk";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output } from "ai";
import { Agent, Runner, OpenAIResponsesModel } from "@openai/agents";
import { ChatOpenAI } from "@langchain/openai";
import { Ollama } from "ollama";
import { z } from "zod";
import { startServer } from "./common.mjs";

let server, client;
const model = "steel", content = "Tell me about Jana.", messages = [{ role: "user", content }];
const Person = z.object({ name: z.string().max(12), age: z.number().int().min(18).max(99), tags: z.array(z.enum(["a", "b"])).max(3) });
const schema = z.toJSONSchema(Person);
before(async () => { server = await startServer(); client = new OpenAI({ baseURL: server.baseURL, apiKey: "none", maxRetries: 0 }); });
after(() => server.stop());

test("OpenAI: chat.completions.parse and responses.parse", async () => {
  const chat = await client.chat.completions.parse({ model, messages, response_format: zodResponseFormat(Person, "person") });
  Person.parse(chat.choices[0].message.parsed);
  const r = await client.responses.parse({ model, input: content, text: { format: zodTextFormat(Person, "person") } });
  Person.parse(r.output_parsed);
});

test("AI SDK: objects over both providers", async () => {
  for (const m of [createOpenAI({ baseURL: server.baseURL, apiKey: "none" })(model), createOpenAICompatible({ name: "steel", baseURL: server.baseURL, supportsStructuredOutputs: true })(model)]) {
    const r = await generateText({ model: m, prompt: content, output: Output.object({ schema: Person }) });
    Person.parse(r.output);
  }
});

test("LangChain: withStructuredOutput by schema", async () => {
  for (const useResponsesApi of [false, true]) {
    const chat = new ChatOpenAI({ model, apiKey: "none", useResponsesApi, configuration: { baseURL: server.baseURL } });
    Person.parse(await chat.withStructuredOutput(Person, { method: "jsonSchema", name: "person" }).invoke(content));
  }
});

test("Agents: an output type", async () => {
  const agent = new Agent({ name: "Steel", model: new OpenAIResponsesModel(client, model), outputType: Person });
  Person.parse((await new Runner({ tracingDisabled: true }).run(agent, content)).finalOutput);
});

test("Anthropic and ollama", async () => {
  const a = new Anthropic({ baseURL: server.origin, apiKey: "none", maxRetries: 0 });
  const m = await a.messages.create({ model, max_tokens: 2000, messages, output_config: { format: { type: "json_schema", schema } } });
  Person.parse(JSON.parse(m.content.find(b => b.type === "text").text));
  const o = await new Ollama({ host: server.origin }).chat({ model, messages, format: schema });
  Person.parse(JSON.parse(o.message.content));
});
