/*
 * Storage in this browser: IndexedDB, one record per message, so that tabs do not overwrite each other.
 *
 * Invariants:
 *  1. write() never loses data. Changes that the database rejects (full disk, quota) are queued in this tab, visible to
 *     every read here, and retried; the user is notified while changes are queued (onTrouble).
 *  2. A record that several tabs change (merge) is read and written in one transaction, field by field.
 *  3. Other tabs are notified of every change (onChange).
 * Without a database (forbidden, private windows of some browsers) all changes stay queued in this tab.
 */
const STORES = { chats: "id", nodes: "id", kv: "key" };
const RETRY_MS = 3000;

let db = null;
const waiting = new Map(); // "store/key" -> change
let troubled = () => {},
  changed = () => {};
const channel = "BroadcastChannel" in window ? new BroadcastChannel("steel") : null;

export const onTrouble = f => {
  troubled = f;
};
export const onChange = f => {
  changed = f;
};
export const unsaved = () => waiting.size;

const asked = new Map(); // node -> resolve: whether another tab is writing it
let writes = () => false;
/* f(node): whether this tab is writing that answer. */
export const onAsk = f => {
  writes = f;
};
/* Whether another open tab is writing this answer. */
export function writtenElsewhere(node) {
  if (!channel) return Promise.resolve(false);
  return new Promise(resolve => {
    asked.set(node, resolve);
    channel.postMessage({ ask: node });
    setTimeout(() => {
      asked.delete(node);
      resolve(false);
    }, 700);
  });
}
if (channel) {
  channel.onmessage = ({ data }) => {
    if (data.ask) {
      if (writes(data.ask)) channel.postMessage({ mine: data.ask });
    } else if (data.mine) {
      asked.get(data.mine)?.(true);
      asked.delete(data.mine);
    } else changed(data);
  };
}

function request(r) {
  return new Promise((resolve, reject) => {
    r.onsuccess = () => resolve(r.result);
    r.onerror = () => reject(r.error);
  });
}

/* Runs a transaction; resolves when it is committed. */
function transact(stores, mode, body, durability = "default") {
  return new Promise((resolve, reject) => {
    const tx = db.transaction(stores, mode, { durability });
    let result;
    tx.oncomplete = () => resolve(result);
    tx.onabort = () => reject(tx.error || new Error("the browser aborted the transaction"));
    try {
      result = body(tx);
      if (result instanceof Promise)
        result.then(
          r => {
            result = r;
          },
          () => {},
        );
    } catch (e) {
      tx.abort();
      reject(e);
    }
  });
}

export async function open() {
  if (!window.indexedDB) throw new Error("this browser stores no data for this page");
  const r = indexedDB.open("steel", 1);
  r.onupgradeneeded = () => {
    for (const [name, keyPath] of Object.entries(STORES)) r.result.createObjectStore(name, { keyPath });
    r.transaction.objectStore("nodes").createIndex("chat", "chat");
  };
  db = await request(r);
  db.onversionchange = () => db.close();
  db.onclose = () => {
    db = null;
    open().catch(e => troubled(e));
  }; // the user cleared the site data
}

/* Changes for write(). merge: `fields` are merged into the record, or into `base` if there is none. */
export const put = (store, value) => ({ store, key: value[STORES[store]], value });
export const del = (store, key) => ({ store, key });
export const merge = (store, fields, base) => ({ store, key: base[STORES[store]], fields, base });

const idOf = c => c.store + "/" + c.key;
const valueOf = (c, old) => (c.fields ? { ...(old ?? c.base), ...c.fields } : c.value);
function apply(tx, c) {
  const store = tx.objectStore(c.store);
  if (c.fields) store.get(c.key).onsuccess = e => store.put(valueOf(c, e.target.result));
  else if (c.value) store.put(c.value);
  else store.delete(c.key);
}
/* Combines a change with a queued one. */
function after(c) {
  const w = waiting.get(idOf(c));
  if (!w || !c.fields) return c;
  return w.fields ? { ...c, fields: { ...w.fields, ...c.fields } } : put(c.store, valueOf(c, w.value));
}

/* Atomic. keep: a change that cannot be written is queued in this tab; else it fails. strict: flushed to disk. */
export async function write(changes, { strict = false, keep = true } = {}) {
  const list = changes.map(after);
  try {
    if (!db) throw new Error("this browser stores no data for this page");
    await transact(
      [...new Set(list.map(c => c.store))],
      "readwrite",
      tx => {
        for (const c of list) apply(tx, c);
      },
      strict ? "strict" : "default",
    );
    for (const c of list) waiting.delete(idOf(c));
    if (!waiting.size) troubled(null);
    tell(list);
    return true;
  } catch (e) {
    if (!keep) throw e;
    for (const c of list) waiting.set(idOf(c), c);
    troubled(e);
    return false;
  }
}
const tell = list =>
  channel?.postMessage({ changes: list.map(c => ({ store: c.store, key: c.key, chat: c.value?.chat })) });

/* Retries queued changes one by one: small ones may fit where large ones do not. */
async function retry() {
  if (!db || !waiting.size) return;
  for (const [id, c] of [...waiting]) {
    try {
      await transact([c.store], "readwrite", tx => apply(tx, c));
      if (waiting.get(id) === c) waiting.delete(id);
      tell([c]);
    } catch (e) {
      troubled(e);
      return;
    }
  }
  troubled(null);
}
setInterval(retry, RETRY_MS);

/* Updates fields of a record if it exists. */
export async function change(store, key, fields) {
  const old = await get(store, key);
  if (old) await write([merge(store, fields, old)]);
}

export async function get(store, key) {
  const w = waiting.get(store + "/" + key);
  if (w && !w.fields) return w.value;
  const old = db
    ? await transact([store], "readonly", tx => request(tx.objectStore(store).get(key)))
    : undefined;
  return w ? valueOf(w, old) : old;
}

function overlay(store, records, fits = () => true) {
  const mine = [...waiting.values()].filter(c => c.store === store);
  if (!mine.length) return records;
  const by = new Map(records.map(r => [r[STORES[store]], r]));
  for (const c of mine) {
    const value = valueOf(c, by.get(c.key));
    if (value === undefined) by.delete(c.key);
    else if (fits(value)) by.set(c.key, value);
  }
  return [...by.values()];
}

export async function all(store) {
  return overlay(
    store,
    db ? await transact([store], "readonly", tx => request(tx.objectStore(store).getAll())) : [],
  );
}

export async function nodesOf(chat) {
  const found = db
    ? await transact(["nodes"], "readonly", tx => request(tx.objectStore("nodes").index("chat").getAll(chat)))
    : [];
  return overlay("nodes", found, n => n.chat === chat);
}

/* Calls f(node) for every message until it returns true. */
export async function eachNode(f) {
  for (const c of waiting.values()) if (c.store === "nodes" && c.value && f(c.value)) return;
  if (!db) return;
  await transact(
    ["nodes"],
    "readonly",
    tx =>
      new Promise((resolve, reject) => {
        const r = tx.objectStore("nodes").openCursor();
        r.onerror = () => reject(r.error);
        r.onsuccess = () => {
          if (!r.result || f(r.result.value)) resolve();
          else r.result.continue();
        };
      }),
  );
}

/* Deletes conversations with their messages. */
export async function remove(chats) {
  const gone = new Set(chats);
  for (const [id, c] of [...waiting]) if (gone.has(c.key) || gone.has(c.value?.chat)) waiting.delete(id);
  if (!db) return;
  await transact(["chats", "nodes"], "readwrite", tx => {
    for (const id of chats) {
      tx.objectStore("chats").delete(id);
      const r = tx.objectStore("nodes").index("chat").openKeyCursor(IDBKeyRange.only(id));
      r.onsuccess = () => {
        if (r.result) {
          tx.objectStore("nodes").delete(r.result.primaryKey);
          r.result.continue();
        }
      };
    }
  });
  tell(chats.map(key => ({ store: "chats", key })));
  await retry(); // space was freed
}

/* Ids of conversations that have messages, to find messages whose conversation another tab deleted. */
export async function chatsOfNodes() {
  const found = [];
  if (!db) return found;
  await transact(
    ["nodes"],
    "readonly",
    tx =>
      new Promise((resolve, reject) => {
        const r = tx.objectStore("nodes").index("chat").openKeyCursor(null, "nextunique");
        r.onerror = () => reject(r.error);
        r.onsuccess = () => {
          if (r.result) {
            found.push(r.result.key);
            r.result.continue();
          } else resolve();
        };
      }),
  );
  return found;
}
