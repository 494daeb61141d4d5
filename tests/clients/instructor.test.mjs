// Instructor in its JSON_SCHEMA mode. It knows version 3 of zod, which comes inside version 4.
import { test, before, after } from "node:test";
import assert from "node:assert/strict";
import OpenAI from "openai";
import Instructor from "@instructor-ai/instructor";
import { z } from "zod/v3";
import { startServer } from "./common.mjs";

let server;
before(async () => { server = await startServer(); });
after(() => server.stop());

test("an object by its schema", async () => {
  const oai = new OpenAI({ baseURL: server.baseURL, apiKey: "none", maxRetries: 0 });
  const Person = z.object({ name: z.string().max(12), age: z.number().int().min(18).max(99) });
  const client = Instructor({ client: oai, mode: "JSON_SCHEMA" });
  const p = await client.chat.completions.create({ model: "steel", messages: [{ role: "user", content: "Tell me about Jana." }], response_model: { schema: Person, name: "Person" }, max_retries: 0 });
  assert.ok(Person.parse(p).age >= 18);
});
