// Embeddings through the OpenAI SDK, LangChain, LlamaIndex and ollama's client, unmodified: the built-in model makes them.
import { test, before, after } from "node:test";
import assert from "node:assert/strict";
import OpenAI from "openai";
import { OpenAIEmbeddings } from "@langchain/openai";
import { OpenAIEmbedding } from "@llamaindex/openai";
import { Ollama } from "ollama";
import { startServer } from "./common.mjs";

const texts = ["The weather is fine today.", "What is 17 + 25?", "The weather is nice today."];
const NAME = "text-embedding-3-small"; // LlamaIndex takes names of OpenAI's alone
let server, openai;
before(async () => {
  server = await startServer("--embedding", "text-embedding-3-small=builtin");
  openai = new OpenAI({ baseURL: server.baseURL, apiKey: "none" });
});
after(() => server.stop());

const close = (a, b) => a.length === b.length && a.every((x, i) => Math.abs(x - b[i]) < 1e-4);
const length = v => Math.sqrt(v.reduce((s, x) => s + x * x, 0));

test("OpenAI: base64 as the SDK asks for it, floats, dimensions", async () => {
  const coded = await openai.embeddings.create({ model: NAME, input: texts });
  const plain = await openai.embeddings.create({ model: NAME, input: texts, encoding_format: "float" });
  assert.equal(coded.data.length, 3);
  assert.ok(coded.usage.total_tokens > 10);
  coded.data.forEach((d, i) => { assert.equal(d.index, i); assert.ok(close([...d.embedding], plain.data[i].embedding)); assert.ok(Math.abs(length(plain.data[i].embedding) - 1) < 1e-4); });
  const short = await openai.embeddings.create({ model: NAME, input: texts[0], dimensions: 16, encoding_format: "float" });
  assert.equal(short.data[0].embedding.length, 16);
  await assert.rejects(openai.embeddings.create({ model: NAME, input: [] }), e => e.status === 400 && e.param === "input");
});

test("LangChain: queries and documents", async () => {
  const e = new OpenAIEmbeddings({ model: NAME, apiKey: "none", configuration: { baseURL: server.baseURL } });
  const all = await e.embedDocuments(texts);
  assert.equal(all.length, 3);
  assert.ok(close(await e.embedQuery(texts[1]), all[1]));
});

test("LlamaIndex: texts and a query", async () => {
  const e = new OpenAIEmbedding({ model: NAME, apiKey: "none", baseURL: server.baseURL, additionalSessionOptions: { baseURL: server.baseURL } });
  const all = await e.getTextEmbeddingsBatch(texts);
  assert.equal(all.length, 3);
  const plain = await openai.embeddings.create({ model: NAME, input: texts, encoding_format: "float" });
  assert.ok(close(await e.getTextEmbedding(texts[2]), plain.data[2].embedding));
});

test("ollama: embed", async () => {
  const ollama = new Ollama({ host: server.origin });
  const r = await ollama.embed({ model: NAME, input: texts });
  const plain = await openai.embeddings.create({ model: NAME, input: texts, encoding_format: "float" });
  assert.ok(r.prompt_eval_count > 10 && r.embeddings.every((v, i) => close(v, plain.data[i].embedding)));
  const old = await ollama.embeddings({ model: NAME, prompt: texts[0] });
  assert.ok(close(old.embedding, plain.data[0].embedding));
});
