// What the server keeps for the Responses API, with the OpenAI SDK: background responses and conversations.
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

test("a conversation is made, continued, read in pages, changed and deleted", async () => {
  const made = await client.conversations.create({ metadata: { topic: "x" }, items: [{ type: "message", role: "user", content: "My name is Ann." }] });
  assert.equal(made.object, "conversation");
  assert.deepEqual((await client.conversations.retrieve(made.id)).metadata, { topic: "x" });
  const first = await client.responses.create({ model, input, temperature, conversation: made.id });
  assert.deepEqual(first.conversation, { id: made.id });
  const second = await client.responses.create({ model, input: "Go on.", temperature, conversation: { id: made.id } });
  const flat = await client.responses.create({ model, temperature, input: [{ role: "user", content: "My name is Ann." }, { role: "user", content: input }, ...first.output, { role: "user", content: "Go on." }] });
  assert.equal(second.output_text, flat.output_text);
  const ids = [];
  for await (const item of client.conversations.items.list(made.id, { limit: 2, order: "asc" })) ids.push(item.id);
  assert.equal(ids.length, 3 + first.output.length + second.output.length);
  assert.equal(new Set(ids).size, ids.length);
  const added = await client.conversations.items.create(made.id, { items: [{ type: "message", role: "user", content: [{ type: "input_text", text: "more" }] }] });
  assert.equal(added.data[0].content[0].text, "more");
  assert.equal((await client.conversations.items.retrieve(added.first_id, { conversation_id: made.id })).id, added.last_id);
  assert.equal((await client.conversations.items.delete(added.first_id, { conversation_id: made.id })).id, made.id);
  await assert.rejects(client.conversations.items.retrieve(added.first_id, { conversation_id: made.id }), OpenAI.NotFoundError);
  assert.deepEqual((await client.conversations.update(made.id, { metadata: { topic: "y" } })).metadata, { topic: "y" });
  assert.deepEqual(await client.conversations.delete(made.id), { id: made.id, object: "conversation.deleted", deleted: true });
  await assert.rejects(client.responses.create({ model, input, conversation: made.id }), OpenAI.NotFoundError);
  const inputs = [];
  for await (const item of client.responses.inputItems.list(flat.id, { limit: 1, order: "asc" })) inputs.push(item.type);
  assert.equal(inputs.length, 3 + first.output.length);
});
