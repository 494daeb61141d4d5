/*
 * Titles by the model: one short request after the first answer of a conversation, outside the conversation and without
 * its cache. Until a title is there, and where none is usable, the first words stay.
 */
import * as api from "./api.js";
import * as chats from "./chats.js";
import * as db from "./db.js";
import * as models from "./models.js";
import { settings } from "./settings.js";

const SMALLEST = 1e8, // parameters of a model that can write titles
  MOST_TEXT = 1000, // characters of a message
  MOST_TITLE = 60,
  WAIT_MS = 60000;

let ctl = null;
/* Aborts the request: those of the user have priority. */
export const stop = () => ctl?.abort();

/* One line without marks, or "" if the text is no title. */
export function clean(text) {
  const line = text.trim().split("\n")[0];
  const title = line
    .replace(/^\s*(?:title|#+)\s*:?\s*/i, "")
    .replace(/[*_`"“”„«»]+/g, "")
    .replace(/\s+/g, " ")
    .replace(/[.:,;\s]+$/, "")
    .trim();
  return title.length <= MOST_TITLE && /\p{L}/u.test(title) ? title : "";
}

function request(record, path) {
  const part = role => path.find(n => n.role === role && n.content)?.content.slice(0, MOST_TEXT) ?? "";
  const text =
    "Write a title for this conversation: at most six words, in its language, without quotation marks. " +
    `Reply with the title only.\n\nUser: ${part("user")}\n\nAssistant: ${part("assistant")}`;
  return {
    ...models.fields({ model: record.model, effort: "none" }),
    messages: [{ role: "user", content: text }],
    max_tokens: 32,
    temperature: 0.2,
    cache_prompt: false,
  };
}

/* Names the conversation. Asks once, unless the user's next message interrupts it. Resolves to whether there is a title. */
export async function name(conv) {
  if (!conv.record.untitled) return false;
  if (!settings.titles || models.of(conv.record).params < SMALLEST) return false;
  const was = conv.record.title;
  await chats.change(conv, { untitled: false });
  const own = (ctl = new AbortController());
  try {
    const signal = AbortSignal.any([own.signal, AbortSignal.timeout(WAIT_MS)]);
    const reply = await (await api.call("v1/chat/completions", request(conv.record, conv.path()), signal)).json();
    const title = clean(String(reply.choices?.[0]?.message?.content ?? ""));
    const now = await db.get("chats", conv.id);
    if (!title || !now || now.deleted || now.title !== was) return false;
    await chats.change(conv, { title });
    return true;
  } catch {
    if (own.signal.aborted) await chats.change(conv, { untitled: true });
    return false; // the first words are a title
  } finally {
    if (ctl === own) ctl = null;
  }
}
