/*
 * Generating answers. Each answer is a run: fit the conversation into the context, stream, save the partial text, call
 * tools, continue. A run belongs to its conversation, not to the screen: it continues while another conversation is open.
 * The text received before a stop, an error or a reload is kept.
 */
import * as api from "./api.js";
import * as chats from "./chats.js";
import * as db from "./db.js";
import * as models from "./models.js";
import * as tools from "./tools.js";
import { fit, startOf, TooLong } from "./request.js";
import { requestFields } from "./settings.js";

const SAVE_MS = 300,
  MAX_ROUNDS = 16;

const runs = new Map(); // conversation id -> run
export const runOf = id => runs.get(id);
export const stop = id => runs.get(id)?.stop();
db.onAsk(node => [...runs.values()].some(r => r.node?.id === node));
addEventListener("pagehide", () => {
  for (const r of runs.values()) if (r.node) db.write([db.put("nodes", r.node)]);
});

/* view: { changed(conv, node), ended(conv, node), failed(conv, error), dropped(conv, turns), toolFailed(why),
 * confirm(conv, call, tool, signal) -> Promise of "run", "always" or "" }.
 * Answers the message `parent`, or continues the answer `node`. Throws TooLong if the path can never fit. Every other
 * failure is stored in the answer. */
export async function answer(conv, { parent, node }, model, view) {
  if (runs.has(conv.id)) return;
  const ctl = new AbortController();
  const run = { node: null, stop: () => ctl.abort(), signal: ctl.signal, started: Date.now() };
  runs.set(conv.id, run);
  try {
    await rounds(conv, { parent, node }, model, view, run);
  } finally {
    runs.delete(conv.id);
    view.ended(conv, run.node);
  }
}

async function rounds(conv, { parent, node: begun }, model, view, run) {
  const known = model.capabilities.includes("tools") ? await tools.available() : { found: [], failed: [] };
  for (const why of known.failed) view.toolFailed(why);
  for (let round = 0; round < MAX_ROUNDS; round++) {
    const last = round === MAX_ROUNDS - 1;
    const node = await stream(conv, { parent, begun }, model, view, run, { list: known.found, last });
    begun = null;
    if (node.status !== "done" || !node.calls?.length || !known.found.length || last) return;
    parent = node.id;
    for (const call of node.calls) {
      const text = await runCall(conv, call, known.found, view, run);
      if (run.signal.aborted) return;
      const result = chats.newNode(conv.id, parent, "tool", text, { callId: call.id, name: call.name });
      await chats.add(conv, result);
      view.changed(conv, result);
      parent = result.id;
    }
  }
}

/* Runs a call that the user allows. */
async function runCall(conv, call, found, view, run) {
  const tool = found.find(k => k.name === call.name);
  const allowed = () => conv.record.allow ?? [];
  if (tool?.ask && !allowed().includes(tool.key)) {
    const said = await view.confirm(conv, call, tool, run.signal);
    if (!said) return "error: the user did not allow this call";
    if (said === "always") await chats.change(conv, { allow: [...allowed(), tool.key] });
  }
  return run.signal.aborted ? "" : tools.run(found, call, run.signal);
}

/* Sends one request and streams its response, to a new answer or the end of one that has begun. */
async function stream(conv, { parent, begun }, model, view, run, { list, last }) {
  const path = conv.path(begun ? begun.id : parent);
  const body = {
    stream: true,
    stream_options: { include_usage: true },
    ...requestFields(),
    ...models.fields(conv.record),
    ...(list.length ? { tools: list.map(tools.describe) } : {}),
    ...(list.length && last ? { tool_choice: "none" } : {}),
    ...(begun ? { continue_final_message: true } : {}),
  };
  const node =
    begun ??
    chats.newNode(conv.id, parent, "assistant", "", { reasoning: "", status: "streaming", model: model.id });
  let response,
    start = startOf(path);
  const before = start;
  Object.assign(run, { timings: null, thoughtMs: 0, thinking: 0 });
  try {
    let sent = await fit(path, conv.record.system, body, model.context, { signal: run.signal });
    try {
      response = await api.call("v1/chat/completions", sent.body, run.signal);
    } catch (e) {
      if (e.kind !== "context") throw e;
      await models.load(); // the server has just loaded it, with another context
      model = models.of(conv.record);
      sent = await fit(path, conv.record.system, body, model.context, { signal: run.signal, full: true });
      response = await api.call("v1/chat/completions", sent.body, run.signal);
    }
    start = sent.start;
    if (start) node.from = path[start].id;
  } catch (e) {
    if (e instanceof TooLong) throw e;
    return end(conv, node, view, run, e, !begun);
  }
  if (start > before) view.dropped(conv, path.slice(before, start).filter(n => n.role === "user").length);
  run.node = node;
  if (begun) reopen(node, run);
  await chats.add(conv, node);
  view.changed(conv, node);
  let saving = 0,
    failure = null;
  const save = () => {
    saving = 0;
    db.write([db.put("nodes", node)]);
  };
  try {
    for await (const event of api.events(response)) {
      take(node, event, run);
      view.changed(conv, node);
      saving ||= setTimeout(save, SAVE_MS);
    }
  } catch (e) {
    failure = e;
  }
  clearTimeout(saving);
  if (node.calls) node.calls = node.calls.filter(c => !isBroken(c, node.content));
  if (node.finish === "length" && node.usage)
    node.full = node.usage.prompt + node.usage.answer >= model.context;
  return end(conv, node, view, run, failure, false);
}

/* Prepares an answer that had ended for more text. */
function reopen(node, run) {
  chats.claim(node);
  node.status = "streaming";
  for (const field of ["error", "finish", "full", "usage"]) delete node[field];
  run.timings = node.timings;
  run.thoughtMs = node.thoughtMs ?? 0;
  if (node.reasoning && !node.content) run.thinking = performance.now();
}

/* The timings of an answer written in several pieces. */
function addTimings(old, t) {
  if (!old) return t;
  const n = old.predicted_n + t.predicted_n,
    ms = old.predicted_ms + t.predicted_ms;
  return { ...old, predicted_n: n, predicted_ms: ms, predicted_per_second: ms > 0 ? (n / ms) * 1000 : 0 };
}

/* A malformed tool call after its start was received: its text follows in the answer. */
function isBroken(call, content) {
  try {
    JSON.parse(call.arguments);
    return false;
  } catch {
    return content.includes(call.arguments);
  }
}

function take(node, event, run) {
  if (event.usage) node.usage = { prompt: event.usage.prompt_tokens, answer: event.usage.completion_tokens };
  if (event.timings) node.timings = addTimings(run.timings, event.timings);
  if (event.model) node.model = event.model;
  const choice = event.choices?.[0],
    delta = choice?.delta;
  if (choice?.finish_reason) node.finish = choice.finish_reason;
  if (!delta) return;
  const thought = delta.reasoning_content ?? delta.reasoning ?? "";
  if (thought && !node.reasoning) run.thinking = performance.now();
  node.reasoning += thought;
  if ((delta.content || delta.tool_calls) && run.thinking) {
    node.thoughtMs = Math.round(run.thoughtMs + performance.now() - run.thinking);
    run.thinking = 0;
  }
  node.content += delta.content ?? "";
  for (const t of delta.tool_calls ?? []) {
    const call = ((node.calls ??= [])[t.index] ??= { id: t.id ?? chats.newId(), name: "", arguments: "" });
    call.name += t.function?.name ?? "";
    call.arguments += t.function?.arguments ?? "";
  }
}

async function end(conv, node, view, run, failure, fresh) {
  node.status = !failure ? "done" : failure.name === "AbortError" ? "stopped" : "failed";
  if (node.status === "failed") {
    node.error = failure instanceof api.ServerError ? failure.message : String(failure);
    view.failed(conv, failure);
  }
  // stopped before the first token: nothing to keep
  if (fresh && node.status === "stopped") return node;
  if (fresh) await chats.add(conv, node);
  else await db.write([db.put("nodes", node)], { strict: true });
  view.changed(conv, node);
  run.node = node;
  return node;
}
