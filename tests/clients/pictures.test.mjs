// Pictures from the SDKs to the built-in model that sees: a blue circle, in every API and as a tool's result.
import { test, before, after } from "node:test";
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import path from "node:path";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import Anthropic from "@anthropic-ai/sdk";
import { generateText, streamText } from "ai";
import { Ollama } from "ollama";
import OpenAI from "openai";
import { startServer } from "./common.mjs";

const root = path.resolve(import.meta.dirname, "../..");
const drawCircle = `
import sys; sys.path.insert(0, "demo/see"); sys.dont_write_bytecode = True
import pictures as p
c = p.Canvas(200, 150, (255, 255, 255))
c.fill(p.turn(p.outline("circle"), 90, 70, 40, 40, 0), p.COLOURS["blue"])
sys.stdout.buffer.write(p.png(200, 150, bytes(c.rgb)))`;
const question = "What is this?", answer = "A blue circle.";
let server, png, url;
before(async () => {
  const drawn = spawnSync("python3", ["-c", drawCircle], { cwd: root });
  assert.equal(drawn.status, 0, String(drawn.stderr));
  png = drawn.stdout;
  url = `data:image/png;base64,${png.toString("base64")}`;
  server = await startServer("builtin-see");
});
after(() => server.stop());

test("the AI SDK: chat completions and Responses, whole and streamed", async () => {
  const models = [createOpenAICompatible({ name: "steel", baseURL: server.baseURL })("steel"),
    createOpenAI({ baseURL: server.baseURL, apiKey: "x" }).responses("steel")];
  for (const model of models)
    for (const image of [png, url]) {
      const messages = [{ role: "user", content: [{ type: "image", image }, { type: "text", text: question }] }];
      assert.equal((await generateText({ model, messages, temperature: 0 })).text, answer);
      let text = "";
      for await (const part of streamText({ model, messages, temperature: 0 }).textStream) text += part;
      assert.equal(text, answer);
    }
});

test("OpenAI's SDK: chat completions and Responses, with details", async () => {
  const client = new OpenAI({ baseURL: server.baseURL, apiKey: "x" });
  for (const detail of ["auto", "low", "high"]) {
    const chat = await client.chat.completions.create({ model: "steel", temperature: 0,
      messages: [{ role: "user", content: [{ type: "image_url", image_url: { url, detail } }, { type: "text", text: question }] }] });
    assert.equal(chat.choices[0].message.content, answer);
    const r = await client.responses.create({ model: "steel", temperature: 0,
      input: [{ role: "user", content: [{ type: "input_image", image_url: url, detail }, { type: "input_text", text: question }] }] });
    assert.equal(r.output_text, answer);
  }
  const bad = client.chat.completions.create({ model: "steel",
    messages: [{ role: "user", content: [{ type: "image_url", image_url: { url: url.slice(0, 300) } }] }] });
  await assert.rejects(bad, e => e instanceof OpenAI.BadRequestError && /messages\[0\]\.content\[0\]/.test(e.message));
});

test("Anthropic's SDK and Ollama's", async () => {
  const client = new Anthropic({ baseURL: server.origin, apiKey: "x" });
  const image = { type: "image", source: { type: "base64", media_type: "image/png", data: png.toString("base64") } };
  const r = await client.messages.create({ model: "steel", max_tokens: 30, temperature: 0, messages: [{ role: "user", content: [image, { type: "text", text: question }] }] });
  assert.equal(r.content[0].text, answer);
  const ollama = new Ollama({ host: server.origin });
  const said = await ollama.chat({ model: "builtin-see", messages: [{ role: "user", content: question, images: [png] }], options: { temperature: 0 } });
  assert.equal(said.message.content, answer);
});
