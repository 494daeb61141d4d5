/*
 * From a conversation to a request body. If the messages exceed the context, the oldest turns are dropped, many at once,
 * because every other prefix misses the server's prefix cache. The system prompt is always sent. A last message that
 * does not fit alone can never be answered: TooLong.
 */
import * as api from "./api.js";

export class TooLong extends Error {
  constructor(tokens, context) {
    super(`${tokens} tokens`);
    this.tokens = tokens;
    this.context = context;
  }
}

/* A fence longer than any in the text, so that a file cannot close its own block. */
function fenced(file) {
  const longest = Math.max(2, ...[...file.text.matchAll(/`+/g)].map(m => m[0].length));
  const fence = "`".repeat(longest + 1);
  return `File ${file.name}:\n${fence}\n${file.text}\n${fence}`;
}
const texts = n => (n.files ?? []).filter(f => !f.image);
const pictures = n => (n.files ?? []).filter(f => f.image);
/* A user's message as text; a picture is its name. */
export const userText = n =>
  [...pictures(n).map(f => `[picture ${f.name}]`), ...texts(n).map(fenced), n.content].filter(Boolean).join("\n\n");

/* The same as the API's content: a string, or parts where there are pictures. */
function userContent(n) {
  const text = [...texts(n).map(fenced), n.content].filter(Boolean).join("\n\n"),
    parts = pictures(n).map(f => ({ type: "image_url", image_url: { url: f.image } }));
  return parts.length ? [...parts, ...(text ? [{ type: "text", text }] : [])] : text;
}
const joined = (a, b) => {
  if (typeof a === "string" && typeof b === "string") return a + "\n\n" + b;
  const parts = c => (typeof c === "string" ? [{ type: "text", text: c }] : c);
  return [...parts(a), ...parts(b)];
};

/* Whether a message has content for the model. */
const spoken = n => n.role !== "assistant" || n.content || n.calls?.length;

/* continued: the last message is an answer that the model continues. */
export function messages(path, system, continued) {
  const out = system ? [{ role: "system", content: system }] : [];
  const lastUser = path.findLastIndex(n => n.role === "user");
  path.forEach((n, i) => {
    if (!spoken(n) && !(continued && i === path.length - 1)) return;
    if (n.role === "user") {
      // two user messages in a row, after a failed answer: many templates need alternating roles
      if (out.at(-1)?.role === "user") out.at(-1).content = joined(out.at(-1).content, userContent(n));
      else out.push({ role: "user", content: userContent(n) });
    } else if (n.role === "tool") {
      out.push({ role: "tool", tool_call_id: n.callId, content: n.content });
    } else {
      const m = { role: "assistant", content: n.content };
      if (n.calls?.length)
        m.tool_calls = n.calls.map(c => ({
          id: c.id,
          type: "function",
          function: { name: c.name, arguments: c.arguments },
        }));
      if (n.reasoning && i > lastUser) m.reasoning_content = n.reasoning; // between tool calls of one turn
      out.push(m);
    }
  });
  return out;
}

/* The start of the sent part of a path, as stored in its newest message. */
export function startOf(path) {
  const from = path.findLast(n => n.from)?.from,
    at = from ? path.findIndex(n => n.id === from) : 0;
  return Math.max(0, at);
}

const bytes = s => new TextEncoder().encode(s ?? "").length;
const BYTES_A_TURN = 64; // upper bound of what a template adds per message
const TOKENS_A_PICTURE = 4200; // by default; the server refuses what does not fit

/* Upper bound of the tokens: the server's last count, plus one token per byte since. */
function atMost(path, start, extra) {
  const known = path.findLastIndex(
    (n, i) => i >= start && n.usage && startOf(path.slice(0, i + 1)) === start,
  );
  let n = known >= 0 ? path[known].usage.prompt + path[known].usage.answer : bytes(extra);
  for (const m of path.slice(known >= 0 ? known + 1 : start))
    n += bytes(userText(m)) + pictures(m).length * TOKENS_A_PICTURE + bytes(JSON.stringify(m.calls ?? "")) + BYTES_A_TURN;
  return n;
}

/*
 * The part of the path that is sent: { start, body }. `body` is the request without messages. full: the server has refused
 * a request that atMost() allowed.
 */
export async function fit(path, system, body, context, { full = false, signal } = {}) {
  const start = startOf(path),
    room = Math.min(body.max_tokens ?? Infinity, Math.ceil(context / 4));
  const extra = system + JSON.stringify(body.tools ?? "");
  const continued = body.continue_final_message;
  const whole = at => ({ start: at, body: { ...body, messages: messages(path.slice(at), system, continued) } });
  if (!full && atMost(path, start, extra) + room <= context) return whole(start);
  const count = async at => {
    const fields = ["model", "messages", "tools", "tool_choice", "reasoning_effort", "continue_final_message"],
      all = whole(at).body;
    return api.countTokens(Object.fromEntries(fields.filter(f => f in all).map(f => [f, all[f]])), signal);
  };
  const first = await count(start);
  if (first + Math.min(room, 64) <= context) return whole(start); // it fits if the answer is short
  // candidates for the first turn; the last is the message itself
  const turns = path.map((n, i) => (n.role === "user" && i > start ? i : -1)).filter(i => i >= 0);
  if (!turns.length) turns.push(start);
  const alone = turns.at(-1) === start ? first : await count(turns.at(-1));
  if (alone >= context) throw new TooLong(alone, context);
  let lo = -1,
    hi = turns.length - 1; // hi fits, lo does not
  while (hi - lo > 1) {
    const mid = lo + Math.floor((hi - lo) / 2);
    if ((await count(turns[mid])) + room <= context) hi = mid;
    else lo = mid;
  }
  return whole(turns[hi]);
}
