/*
 * Conversations as files. JSON contains all branches, Markdown the shown path. Imports are untrusted: they are read field
 * by field, get new ids, and do not change existing conversations.
 */
import { Conversation, newId, title } from "./chats.js";
import { userText } from "./request.js";

const FORMAT = "steel-chats",
  LARGEST = 100e6,
  MAX_CHATS = 10000,
  MAX_NODES = 100000;

export function toJson(conversations) {
  return JSON.stringify(
    {
      format: FORMAT,
      version: 1,
      chats: conversations.map(c => ({ ...c.record, nodes: [...c.nodes.values()] })),
    },
    null,
    1,
  );
}

/* A marker before each message makes the file readable again, whatever the text. Markers in the text are escaped. */
const MARK = /^<!-- steel:(user|assistant|tool)(?: ([\w.-]{1,100}))? -->$/;
const hide = text => text.replace(/^(<!-- )(\\*steel:)/gm, "$1\\$2");
const unhide = text => text.replace(/^(<!-- )\\(\\*steel:)/gm, "$1$2");

export function toMarkdown(conv) {
  const out = ["# " + title(conv.record).replace(/\n/g, " ")];
  if (conv.record.system) out.push("<!-- steel:system -->\n**System**\n", hide(conv.record.system));
  for (const n of conv.path()) {
    const who = n.role === "user" ? "You" : n.role === "tool" ? "Tool " + (n.name ?? "") : "Assistant";
    out.push(`<!-- steel:${n.role} -->\n**${who}**\n`, hide(n.role === "user" ? userText(n) : n.content));
    for (const c of n.calls ?? [])
      out.push("```json\n" + JSON.stringify({ call: c.name, arguments: c.arguments }) + "\n```");
  }
  return out.join("\n\n") + "\n";
}

/* Reading: every function keeps known fields and drops the rest. */

const text = (v, most = 10e6) => (typeof v === "string" ? v.slice(0, most) : "");
const count = v => (Number.isFinite(v) && v >= 0 ? v : 0);
const time = v => (Number.isFinite(v) && v > 0 && v < 1e14 ? v : Date.now());

function readCall(c) {
  return { id: text(c?.id, 100) || newId(), name: text(c?.name, 200), arguments: text(c?.arguments) };
}

const IMAGE = /^data:image\/(png|jpeg|webp|gif|bmp);base64,[A-Za-z0-9+/]+=*$/;
function readFile(f) {
  const name = text(f?.name, 200);
  return typeof f?.image === "string" && IMAGE.test(f.image) ? { name, image: f.image } : { name, text: text(f?.text) };
}

function readNode(n, ids, chat) {
  if (!["user", "assistant", "tool"].includes(n?.role) || typeof n.content !== "string") return null;
  const out = {
    id: ids.get(n.id),
    chat,
    parent: ids.get(n.parent) ?? null,
    role: n.role,
    content: text(n.content),
    created: time(n.created),
  };
  if (Array.isArray(n.files))
    out.files = n.files.slice(0, 100).map(readFile);
  if (Array.isArray(n.calls)) out.calls = n.calls.slice(0, 100).map(readCall);
  if (n.role === "tool") Object.assign(out, { callId: text(n.callId, 100), name: text(n.name, 200) });
  if (n.role === "assistant") {
    Object.assign(out, {
      reasoning: text(n.reasoning),
      model: text(n.model, 200),
      status: ["done", "stopped", "failed", "cut"].includes(n.status) ? n.status : "done",
    });
    if (n.edited === true) out.edited = true;
    if (n.finish === "length") out.finish = "length";
    if (n.error) out.error = text(n.error, 2000);
    if (n.usage && typeof n.usage === "object")
      out.usage = { prompt: count(n.usage.prompt), answer: count(n.usage.answer) };
    if (n.timings && typeof n.timings === "object")
      out.timings = Object.fromEntries(
        ["prompt_n", "cache_n", "prompt_ms", "predicted_n", "predicted_ms", "predicted_per_second"].map(k => [
          k,
          count(n.timings[k]),
        ]),
      );
  }
  return out;
}

/* A message whose parent is missing or its own descendant becomes a root. */
function breakCycles(nodes) {
  const by = new Map(nodes.map(n => [n.id, n])),
    good = new Set();
  for (const n of nodes) {
    const way = new Set();
    for (let x = n; x && !good.has(x.id); x = by.get(x.parent)) {
      if (way.has(x.id)) {
        x.parent = null;
        break;
      }
      way.add(x.id);
      if (!by.has(x.parent)) x.parent = null;
    }
    for (const id of way) good.add(id);
  }
}

function readChat(c) {
  if (!c || typeof c !== "object" || !Array.isArray(c.nodes))
    throw new Error("a conversation has no messages");
  if (c.nodes.length > MAX_NODES) throw new Error("a conversation has more than " + MAX_NODES + " messages");
  const id = newId(),
    ids = new Map();
  for (const n of c.nodes) if (typeof n?.id === "string") ids.set(n.id, newId());
  for (const n of c.nodes)
    if (n && typeof n === "object" && typeof n.id !== "string") {
      n.id = newId();
      ids.set(n.id, n.id);
    }
  const nodes = c.nodes.map(n => readNode(n, ids, id)).filter(Boolean),
    seen = new Set();
  for (const n of nodes) {
    // a repeated id gets a new one
    if (seen.has(n.id)) n.id = newId();
    seen.add(n.id);
  }
  breakCycles(nodes);
  const record = {
    id,
    title: text(c.title, 200),
    system: text(c.system),
    created: time(c.created),
    updated: time(c.updated),
    leaf: ids.get(c.leaf) ?? null,
    model: text(c.model, 200),
    effort: text(c.effort, 20),
  };
  const conv = new Conversation(record, nodes);
  record.leaf = conv.leaf;
  return { record, nodes };
}

function linear(name, system, list) {
  const t = Date.now();
  return readChat({
    title: name,
    system,
    created: t,
    updated: t,
    leaf: String(list.length - 1),
    nodes: list.map((m, i) => ({ ...m, id: String(i), parent: i ? String(i - 1) : null, created: t + i })),
  });
}

function fromMarkdown(source, name) {
  const list = [];
  let system = "",
    head = "",
    now = null;
  const close = () => {
    if (!now) return;
    const said = unhide(now.lines.join("\n"))
      .replace(/^\s*\*\*[^*\n]*\*\*\n/, "")
      .trim();
    if (now.role === "system") system = said;
    else list.push({ role: now.role, content: said });
  };
  for (const line of source.split(/\r?\n/)) {
    const m = MARK.exec(line),
      sys = line === "<!-- steel:system -->";
    if (m || sys) {
      close();
      now = { role: sys ? "system" : m[1], lines: [] };
    } else if (now) now.lines.push(line);
    else if (!head && line.startsWith("# ")) head = line.slice(2).trim();
  }
  close();
  if (!list.length) throw new Error("it has no messages that this page wrote");
  return [linear(head || name, system, list)];
}

/* Parses a file to [{ record, nodes }]; throws an error that says what is wrong. */
export function parse(source, name) {
  if (source.length > LARGEST) throw new Error("it is larger than 100 MB");
  if (!/^\s*[[{]/.test(source)) return fromMarkdown(source, name);
  let d;
  try {
    d = JSON.parse(source);
  } catch {
    throw new Error("it is neither JSON nor Markdown that this page wrote");
  }
  // a list of messages, as in a request to the API
  const plain = Array.isArray(d) ? d : Array.isArray(d.messages) ? d.messages : null;
  if (plain) {
    const said = plain.filter(m => typeof m?.content === "string");
    const system = said
      .filter(m => m.role === "system")
      .map(m => m.content)
      .join("\n\n");
    const list = said
      .filter(m => ["user", "assistant", "tool"].includes(m.role))
      .map(({ role, content }) => ({ role, content }));
    if (!list.length) throw new Error("it has no messages");
    return [linear(name, system, list)];
  }
  if (d.format !== FORMAT || !Array.isArray(d.chats)) throw new Error("it is not an export of this page");
  if (d.chats.length > MAX_CHATS) throw new Error("it has more than " + MAX_CHATS + " conversations");
  return d.chats.map(readChat);
}
