/*
 * Conversations. A conversation is a tree of messages: an edited question or a retried answer is another child of the same
 * parent, and nothing is overwritten. The path from the root to `leaf` is shown. Knows the database, not the page.
 */
import * as db from "./db.js";

let last = 0;
/* Siblings are ordered by time, so this tab never uses a time twice. */
const now = () => (last = Math.max(Date.now(), last + 1));
export const newId = () =>
  [...crypto.getRandomValues(new Uint8Array(12))].map(b => b.toString(16).padStart(2, "0")).join("");

/* Messages that this tab is writing. Its copy is newer than the database's. */
const own = new Set();
export function newNode(chat, parent, role, content, more = {}) {
  const node = { id: newId(), chat, parent, role, content, created: now(), ...more };
  own.add(node.id);
  return node;
}

/* From now on this tab writes the message. */
export const claim = node => own.add(node.id);

export class Conversation {
  constructor(record, nodes = []) {
    this.record = record;
    this.nodes = new Map();
    this.children = new Map(); // id or null -> nodes, oldest first
    nodes.sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1));
    for (const n of nodes) this.put(n);
    this.leaf = this.nodes.has(record.leaf) ? record.leaf : this.latest(null);
  }
  get id() {
    return this.record.id;
  }
  put(node) {
    // new, or newer than the local copy
    const old = this.nodes.get(node.id);
    if (old) {
      Object.assign(old, node);
      return old;
    }
    this.nodes.set(node.id, node);
    const parent = node.parent ?? null;
    if (!this.children.has(parent)) this.children.set(parent, []);
    this.children.get(parent).push(node);
    return node;
  }
  drop(id) {
    const n = this.nodes.get(id);
    if (!n) return;
    this.nodes.delete(id);
    const list = this.children.get(n.parent ?? null);
    list.splice(list.indexOf(n), 1);
    if (this.leaf === id) this.leaf = n.parent ?? this.latest(null);
  }
  /* Reads changes of other tabs from the database. */
  merge(now) {
    for (const n of now.nodes.values()) if (!own.has(n.id)) this.put(n);
    for (const id of [...this.nodes.keys()]) if (!now.nodes.has(id) && !own.has(id)) this.drop(id);
    Object.assign(this.record, now.record);
  }
  siblings(node) {
    return this.children.get(node.parent ?? null) ?? [];
  }
  /* The leaf below this message, taking the newest child at every fork. */
  latest(id) {
    for (let kids; (kids = this.children.get(id))?.length;) id = kids.at(-1).id;
    return id;
  }
  path(leaf = this.leaf) {
    const out = [];
    for (let n = this.nodes.get(leaf); n; n = this.nodes.get(n.parent)) out.push(n);
    return out.reverse();
  }
  /* Whether `id` is the leaf or a descendant of it. */
  isBelow(id, ancestor) {
    for (let n = this.nodes.get(id); n; n = this.nodes.get(n.parent)) if (n.id === ancestor) return true;
    return ancestor === null;
  }
}

export async function list() {
  const chats = (await db.all("chats")).filter(c => !c.deleted);
  return chats.sort((a, b) => b.updated - a.updated || (a.id < b.id ? -1 : 1));
}

export async function load(id) {
  const record = await db.get("chats", id);
  return record && !record.deleted ? new Conversation(record, await db.nodesOf(id)) : null;
}

export function create(system, more = {}) {
  const t = now();
  return new Conversation({ id: newId(), title: "", system, created: t, updated: t, leaf: null, ...more });
}

/* The default title, from the first message; `untitled`: the model has not been asked for a better one. */
export const title = record => record.title || "New chat";
export function nameAfter(text) {
  const line = text.trim().split("\n")[0];
  return line.length > 60 ? line.slice(0, 57).trimEnd() + "…" : line;
}

/* Adds messages, each the child of the one before, and makes the last one the leaf. */
export function add(conv, ...nodes) {
  const node = nodes.at(-1);
  for (const n of nodes) conv.put(n);
  conv.leaf = conv.record.leaf = node.id;
  conv.record.updated = Math.max(conv.record.updated, node.created);
  // writing into a conversation that another tab deleted restores it
  const fields = { leaf: node.id, updated: conv.record.updated, deleted: 0 };
  const puts = nodes.map(n => db.put("nodes", n));
  return db.write([db.merge("chats", fields, conv.record), ...puts], { strict: true });
}

/* A changed version of a message, beside it, as a list of messages to add. keep: the messages after it follow as copies. Token counts do not
 * hold for a changed path. */
export function rewrite(conv, node, changes, keep) {
  const path = conv.path(),
    later = keep ? path.slice(path.indexOf(node) + 1) : [],
    ids = new Map();
  const copy = (n, changed) => {
    const { id, parent, role, content, ...more } = { ...n, ...changed };
    for (const field of ["chat", "created", "usage", "error"]) delete more[field];
    if (more.from) more.from = ids.get(more.from) ?? more.from;
    const now = newNode(conv.id, ids.get(parent) ?? parent, role, content, more);
    ids.set(id, now.id);
    return now;
  };
  const first = copy(node, { ...changes, edited: true });
  if (node.role === "assistant") first.status = "done";
  for (const field of ["finish", "full", "timings"]) delete first[field];
  if (!later.length) delete first.calls; // they would have no results
  return [first, ...later.map(n => copy(n))];
}

/* Changes fields of the conversation's record and merges the changes of other tabs. */
export function change(conv, fields) {
  Object.assign(conv.record, fields);
  return db.change("chats", conv.id, fields);
}
export function show(conv, leaf) {
  conv.leaf = leaf;
  return change(conv, { leaf });
}

export async function rename(id, name) {
  if (name.trim()) await db.change("chats", id, { title: name.trim().slice(0, 200), untitled: false });
}

/* Deletes conversations for good, once undo is no longer possible. */
const UNDO_MS = 60000;
export const setDeleted = (id, yes) => db.change("chats", id, { deleted: yes ? Date.now() : 0 });
export async function purge(age = UNDO_MS) {
  const written = await db.chatsOfNodes(); // read first: conversations that another tab begins later are no orphans
  const chats = await db.all("chats"),
    known = new Set(chats.map(c => c.id));
  const dead = chats.filter(c => c.deleted && Date.now() - c.deleted >= age).map(c => c.id);
  for (const id of written) if (!known.has(id)) dead.push(id);
  if (dead.length) await db.remove(dead);
}

/* Conversations with this text in title or messages, newest first: [{ chat, node, line }]. */
const MAX_HITS = 100;
export async function search(text) {
  const want = text.toLowerCase(),
    found = new Map();
  const chats = new Map((await list()).map(c => [c.id, c]));
  for (const c of chats.values()) if (title(c).toLowerCase().includes(want)) found.set(c.id, { chat: c });
  await db.eachNode(n => {
    const at =
      chats.has(n.chat) && !found.get(n.chat)?.node && typeof n.content === "string"
        ? n.content.toLowerCase().indexOf(want)
        : -1;
    if (at >= 0)
      found.set(n.chat, {
        chat: chats.get(n.chat),
        node: n.id,
        line: (at > 20 ? "…" : "") + n.content.slice(Math.max(0, at - 20), at + 60).replace(/\s+/g, " "),
      });
    return found.size >= MAX_HITS;
  });
  return [...found.values()].sort((a, b) => b.chat.updated - a.chat.updated);
}
