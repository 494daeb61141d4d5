// What the server keeps for the Responses API, with the OpenAI SDK: background responses.
import { test, before, after } from "node:test";
import assert from "node:assert/strict";
import OpenAI from "openai";
import { startServer } from "./common.mjs";

let server, client;
const model = "steel", input = "Hello! Who are you?", temperature = 0;
before(async () => { server = await startServer("-np", "1"); client = new OpenAI({ baseURL: server.baseURL, apiKey: "none", maxRetries: 0 }); });
after(() => server.stop());

async function ended(response) {
  while (response.status === "queued" || response.status === "in_progress") {
    await new Promise(r => setTimeout(r, 20));
    response = await client.responses.retrieve(response.id);
  }
  return response;
}

test("a background response is polled, and is the one of a client that waits", async () => {
  const first = await client.responses.create({ model, input, temperature, background: true });
  assert.equal(first.status, "queued");
  const done = await ended(first), whole = await client.responses.create({ model, input, temperature });
  assert.equal(done.status, "completed");
  assert.equal(done.output_text, whole.output_text);
  assert.deepEqual((await client.responses.cancel(done.id)).output, done.output); // it is over: nothing changes
});

test("a background response is cancelled", async () => {
  const all = [];
  for (let i = 0; i < 8; i++) all.push(await client.responses.create({ model, input, temperature: 2, background: true, ignore_eos: true, max_output_tokens: 1000 }));
  for (const r of all.reverse()) await client.responses.cancel(r.id);
  assert.equal((await client.responses.retrieve(all[0].id)).status, "cancelled");
  await assert.rejects(client.responses.cancel("resp_none"), OpenAI.NotFoundError);
});

test("a background stream is left and continued", async () => {
  const params = { model, input, temperature, max_output_tokens: 200 };
  const stream = await client.responses.create({ ...params, background: true, stream: true });
  const types = [];
  let id, last, text = "";
  for await (const e of stream) {
    types.push(e.type);
    if (e.response) id = e.response.id;
    if (e.type === "response.output_text.delta") text += e.delta;
    last = e.sequence_number;
    if (text.length > 4) break;
  }
  assert.deepEqual(types.slice(0, 3), ["response.created", "response.queued", "response.in_progress"]);
  let final;
  for await (const e of await client.responses.retrieve(id, { stream: true, starting_after: last })) {
    assert.equal(e.sequence_number, ++last);
    if (e.type === "response.output_text.delta") text += e.delta;
    final = e;
  }
  assert.equal(final.type, "response.completed");
  assert.equal(text, (await client.responses.retrieve(id)).output_text);
  // the SDK's own helper
  const again = client.responses.stream({ response_id: id, starting_after: 0 });
  let seen = 0;
  again.on("event", () => seen++);
  for await (const e of again) assert.ok(e.sequence_number > 0);
  assert.ok(seen > 4);
});
