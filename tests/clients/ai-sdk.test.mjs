// The Vercel AI SDK over its OpenAI-compatible provider.
import { test, before, after } from "node:test";
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText, tool, stepCountIs } from "ai";
import { z } from "zod";
import { startServer, weather, weatherQuestion } from "./common.mjs";

let server, model;
before(async () => { server = await startServer(); model = createOpenAICompatible({ name: "steel", baseURL: server.baseURL, includeUsage: true })("steel"); });
after(() => server.stop());

test("text, and the same text streamed", async () => {
  const params = { model, prompt: "Hello! Who are you?", temperature: 0, maxOutputTokens: 200 };
  const whole = await generateText(params);
  assert.ok(whole.text.length > 0);
  assert.ok(whole.usage.outputTokens > 0);
  const stream = streamText(params);
  let text = "";
  for await (const part of stream.textStream) text += part;
  assert.equal(text, whole.text);
  assert.ok((await stream.usage).outputTokens > 0);
});

test("a tool is called and its result read back", async () => {
  let asked = null;
  const r = await generateText({
    model, prompt: weatherQuestion, temperature: 0, maxOutputTokens: 300, stopWhen: stepCountIs(3),
    tools: { get_weather: tool({ description: weather.description, inputSchema: z.object({ town: z.string().describe("The town") }), execute: async input => { asked = input; return { weather: "sunny", degrees: 21 }; } }) },
  });
  assert.match(asked.town, /Emberton/);
  assert.match(r.text, /sunny|21/);
});

test("an abort ends the stream", async () => {
  const ctl = new AbortController();
  const stream = streamText({ model, prompt: "Tell me a short story.", temperature: 1, abortSignal: ctl.signal, onError() {} });
  for await (const part of stream.textStream) { if (part) { ctl.abort(); break; } }
  await server.idle();
});
