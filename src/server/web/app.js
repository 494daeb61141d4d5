/*
 * Starts the page and connects its parts: the open conversation, the actions of its buttons, changes from other tabs, and
 * notices (server gone, key missing, storage full).
 */
import { $, el, button, announce, notice, toast, saveFile, number, plural } from "./dom.js";
import * as answers from "./answer.js";
import * as api from "./api.js";
import * as chats from "./chats.js";
import * as composer from "./composer.js";
import * as db from "./db.js";
import * as dialog from "./dialog.js";
import * as load from "./load.js";
import * as log from "./log.js";
import * as models from "./models.js";
import * as sidebar from "./sidebar.js";
import * as titles from "./titles.js";
import * as tools from "./tools.js";
import * as transfer from "./transfer.js";
import { startOf, TooLong } from "./request.js";
import * as settings from "./settings.js";

let conv = null; // the open conversation; not in the database before its first message
let fresh = true; // conv is not in the database yet
let model = models.of({}); // of the open conversation

/* The server: its models and its state */

let asking = null;
async function greet() {
  clearTimeout(asking);
  try {
    await models.load();
    drawMenus();
    notice("server", "");
    if (fresh) redraw();
    tools.loadServerTools();
    return true;
  } catch (e) {
    trouble(e);
    return false;
  }
}
/* The menus below the input, and what they choose. */
function drawMenus() {
  model = models.of(conv.record);
  log.resize(() => {
    models.draw(conv.record);
    drawToolsButton();
  });
}
function drawToolsButton() {
  const n = tools.count();
  $("tools-button").textContent = "Tools: " + (n || "none on");
  const any = n || tools.serverTools().length || tools.missingServers().length;
  $("tools-button").hidden = !model.capabilities.includes("tools") || !any;
}
/* Shows what is wrong with the server, and polls until it is available. */
function trouble(e) {
  if (e.kind === "key") {
    dialog.open(model, e.message);
    notice(
      "server",
      e.message,
      button("Settings", () => dialog.open(model, e.message)),
    );
  } else if (e.kind === "gone" || e.kind === "loading") {
    notice(
      "server",
      e.kind === "gone" ? e.message + " Trying again…" : `The model is loading: ${e.percent} %`,
    );
    clearTimeout(asking);
    asking = setTimeout(greet, 1000);
  } else if (e.kind) {
    notice(
      "server",
      e.message,
      button("Dismiss", () => notice("server", "")),
    );
  }
}

/* The screen */

const STARTERS = ["Hello! Who are you?", "What is 23 + 48?", "Tell me a short story."];
function welcome() {
  return el(
    "div",
    { class: "welcome" },
    el("p", { class: "mark", "aria-hidden": "true" }, "Steel"),
    el("p", {}, model.id ? `${model.id}, ${number(model.context)} tokens of context` : "Ask something."),
    ...STARTERS.map(s => button(s, () => send({ text: s, files: [], editing: null }))),
  );
}

const busy = () => !!answers.runOf(conv?.id);
function drawState() {
  $("send").textContent = busy() ? "Stop" : "Send";
  $("title").textContent = chats.title(conv.record);
  document.title = fresh ? "Steel" : chats.title(conv.record) + " · Steel";
  $("export").disabled = fresh;
  const path = conv.path(),
    t = path.findLast(n => n.usage)?.usage;
  $("status").textContent =
    (t && model.context
      ? `${number(t.prompt + t.answer)} of ${number(model.context)} tokens of context`
      : "") + (startOf(path) ? " · the oldest messages no longer fit" : "");
}
function redraw(at) {
  log.show(conv, model.context, welcome, at);
  drawState();
}

async function show(conversation, isFresh, at) {
  conv = conversation;
  fresh = isFresh;
  history.replaceState(null, "", fresh ? "#" : "#" + conv.id);
  composer.openDraft(fresh ? "" : conv.id);
  drawSystem();
  drawMenus();
  redraw(at);
  closeMenu();
  sidebar.refresh();
  for (const n of conv.nodes.values()) if (n.status === "streaming") settle(conv, n);
}
const newChat = () => {
  show(chats.create(settings.presetText(), models.defaults()), true);
  $("input").focus();
};
async function open(id, at) {
  const found = await chats.load(id);
  if (!found) {
    newChat();
    return;
  }
  if (at && !found.path().some(n => n.id === at)) await chats.show(found, found.latest(at));
  await show(answers.runOf(id)?.conv ?? found, false, at);
}

/* An unfinished answer without a writer was interrupted: its tab was closed or reloaded. Its text is kept. */
async function settle(c, n) {
  if (answers.runOf(c.id)?.node?.id === n.id || (await db.writtenElsewhere(n.id))) return;
  const now = await db.get("nodes", n.id);
  if (now?.status !== "streaming") return;
  await db.write([db.put("nodes", { ...now, status: "cut" })]);
  c.put({ ...now, status: "cut" });
  log.update(c, c.nodes.get(n.id));
}

/* Messages */

const view = {
  changed(c, n) {
    log.update(c, n);
    if (c === conv && n.role === "tool") drawState();
  },
  toolFailed: why => toast(why),
  dropped(c, n) {
    toast(`The conversation outgrew the context: the oldest ${plural(n, "turn")} are no longer sent to the model.`);
  },
  failed(c, e) {
    if (e.kind) trouble(e);
  },
  confirm: log.confirm,
  ended(c, n) {
    if (c === conv) drawState();
    sidebar.refresh();
    // the server was restarted with another model, or has loaded this one
    if (n?.model && (!models.known(n.model) || !models.loaded(n.model))) greet();
    if (n?.status === "done") {
      announce("Answer: " + n.content.slice(0, 4000));
      nameIt(c);
    }
    else if (n?.role === "assistant") announce(n.status === "stopped" ? "Answer stopped." : "The answer failed: " + n.error);
  },
};

async function nameIt(c) {
  if (!(await titles.name(c))) return;
  if (c === conv) drawState();
  sidebar.refresh();
}

/* to: { parent } is answered, { node } is continued */
async function ask(c, to) {
  titles.stop();
  const pending = answers.answer(c, to, models.of(c.record), view);
  const run = answers.runOf(c.id);
  if (run) run.conv = c;
  drawState();
  sidebar.refresh();
  await pending;
}

async function send(message) {
  if (busy()) return;
  if (!model.id && !(await greet())) {
    composer.restore(message);
    return;
  } // nothing is lost; a notice above the input shows the reason
  const c = conv,
    edited = message.editing,
    was = c.leaf,
    first = fresh;
  const node = chats.newNode(
    c.id,
    edited ? edited.parent : c.leaf,
    "user",
    message.text,
    message.files.length ? { files: message.files } : {},
  );
  if (!c.record.title) {
    c.record.title = chats.nameAfter(message.text || message.files[0].name);
    c.record.untitled = true;
  }
  fresh = false;
  notice("refused", "");
  await chats.add(c, node);
  history.replaceState(null, "", "#" + c.id);
  if (first) navigator.storage?.persist?.().catch(() => {}); // so that the browser does not evict it
  if (edited) redraw();
  else log.update(c, node);
  announce("Answering.");
  try {
    await ask(c, { parent: node.id });
  } catch (e) {
    if (!(e instanceof TooLong)) throw e;
    // it can never be answered: remove it from the conversation
    await db.write([db.del("nodes", node.id)]);
    c.drop(node.id);
    if (first) await db.remove([c.id]);
    else await chats.show(c, was);
    if (c === conv) {
      fresh = first;
      if (first) c.record.title = "";
      composer.restore(message);
      redraw();
    }
    notice(
      "refused",
      `This message has ${number(e.tokens)} tokens with its system prompt; the context holds ${number(e.context)}, the answer included. It was not kept: shorten it.`,
      button("Dismiss", () => notice("refused", "")),
    );
    sidebar.refresh();
  }
}

const tooLong = e =>
  notice(
    "refused",
    `This no longer fits the context: ${number(e.tokens)} tokens of ${number(e.context)}.`,
    button("Dismiss", () => notice("refused", "")),
  );

async function retry(n) {
  if (busy()) return;
  const c = conv;
  let parent = n.parent;
  // an answer that failed before its first token has no branch to return to
  if (n.status === "failed" && !n.content && !n.reasoning && !c.children.get(n.id)?.length) {
    await db.write([db.del("nodes", n.id)]);
    c.drop(n.id);
  }
  c.leaf = parent;
  redraw();
  try {
    await ask(c, { parent });
  } catch (e) {
    if (!(e instanceof TooLong)) throw e;
    tooLong(e);
    await chats.show(c, c.latest(parent));
    redraw();
  }
}

/* Continues an answer where it ended. */
const mayContinue = n =>
  n.id === conv.leaf &&
  !n.calls?.length &&
  !!(n.content || n.reasoning) &&
  (n.status !== "done" || n.finish === "length" || !!n.edited);
async function resume(n) {
  if (busy() || (!model.id && !(await greet()))) return;
  announce("Continuing.");
  try {
    await ask(conv, { node: n });
  } catch (e) {
    if (!(e instanceof TooLong)) throw e;
    tooLong(e);
    redraw();
  }
}

/* Saves a version of a message without asking the model. */
async function rewrite(n, changes, keep) {
  const c = conv;
  if (busy()) return toast("An answer is being generated; stop it first.");
  const nodes = chats.rewrite(c, n, changes, keep);
  const saved = chats.add(c, ...nodes);
  redraw(nodes[0].id);
  const box = $("log").querySelector(`article[data-id="${nodes[0].id}"]`);
  box?.classList.remove("found");
  box?.querySelector(".edit")?.focus();
  announce("Saved.");
  await saved;
  sidebar.refresh();
}
const later = n => conv.path().length - 1 - conv.path().indexOf(n);

function step(n, by) {
  if (busy()) return;
  const all = conv.siblings(n),
    to = all[all.indexOf(n) + by];
  if (!to) return;
  chats.show(conv, conv.latest(to.id));
  redraw();
  const box = $("log").querySelector(`article[data-id="${to.id}"]`),
    steps = [...(box?.querySelectorAll(".steps button") ?? [])];
  box?.scrollIntoView({ block: "nearest" });
  ((by < 0 ? steps[0] : steps[1])?.disabled
    ? steps.find(b => !b.disabled)
    : by < 0
      ? steps[0]
      : steps[1]
  )?.focus(); // the button the user pressed
  announce(`Version ${all.indexOf(to) + 1} of ${all.length}`);
}

function editLast() {
  const n = conv.path().findLast(x => x.role === "user");
  if (n && !busy()) composer.edit(n);
}

/* The system prompt of this conversation */

function drawSystem() {
  $("system").value = conv.record.system ?? "";
  $("system-preset").replaceChildren(
    el("option", { value: "" }, "choose…"),
    ...settings.settings.presets.map(p => el("option", { value: p.id }, p.name)),
  );
  $("system-button").classList.toggle("set", !!conv.record.system);
}
function setSystem(text) {
  $("system").value = text;
  $("system-button").classList.toggle("set", !!text);
  if (fresh) conv.record.system = text;
  else chats.change(conv, { system: text });
}

/* Other tabs */

const follow = new Map(); // conversations whose records changed in another tab -> timer
db.onChange(({ changes }) => {
  if (changes.some(c => c.store === "chats")) sidebar.refresh();
  if (changes.some(c => c.store === "kv")) settings.load().then(drawMenus);
  if (fresh || !changes.some(c => c.key === conv.id || c.chat === conv.id)) return;
  clearTimeout(follow.get(conv.id));
  follow.set(conv.id, setTimeout(merge, 60, conv));
});
/* Messages that another tab added. The view follows them if they continue the shown path. */
async function merge(c) {
  const now = await chats.load(c.id);
  if (c !== conv) return;
  if (!now) {
    if (!busy()) {
      newChat();
      toast("This conversation was deleted in another tab.");
    }
    return;
  }
  const shown = c.leaf;
  c.merge(now);
  if (!busy() && c.isBelow(now.record.leaf, shown)) c.leaf = now.record.leaf;
  if (c.leaf !== shown) redraw();
  else log.update(c, c.nodes.get(shown));
  drawState();
  if (document.activeElement !== $("system")) drawSystem();
  drawMenus();
}

/* Event handlers */

function closeMenu() {
  document.body.classList.remove("menu");
  $("menu").setAttribute("aria-expanded", "false");
}

const THEMES = ["system", "light", "dark"];
function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("steel.theme", theme);
  } catch {
    /* no storage: only for this visit */
  }
  $("theme").textContent = "Theme: " + theme;
}

function keys(e) {
  if ($("settings").open) return;
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(e.target.tagName);
  if (e.key === "Escape") {
    if (busy()) answers.stop(conv.id);
    else if (!composer.cancelEdit()) closeMenu();
  } else if (e.key === "/" && !typing && !e.ctrlKey && !e.metaKey && !e.altKey) {
    e.preventDefault();
    $("input").focus();
  } else if (e.key === "k" && (e.ctrlKey || e.metaKey)) {
    e.preventDefault();
    document.body.classList.add("menu");
    $("search").focus();
  }
}

function save(ending, type, text) {
  $("export-menu").hidePopover();
  saveFile(chats.title(conv.record) + ending, type, text);
}

function wire() {
  log.setup({
    edit: n => {
      if (!busy()) composer.edit(n);
    },
    later,
    saveAnswer: (n, content, keep) => rewrite(n, { content }, keep),
    retry,
    resume,
    mayContinue,
    step,
    siblings: n => conv.siblings(n),
  });
  sidebar.setup({
    open,
    current: () => (fresh ? null : conv.id),
    busy: id => !!answers.runOf(id),
    forget: newChat,
    stop: answers.stop,
  });
  composer.setup({
    send,
    busy,
    stop: () => answers.stop(conv.id),
    editLast,
    later,
    sees: () => model.capabilities?.includes("vision") ?? false,
    saveEdit: ({ text, files, editing }) => rewrite(editing, { content: text, files }, true),
  });
  models.setup({
    current: () => ({ conv, fresh }),
    changed() {
      drawMenus();
      redraw();
    },
  });
  dialog.setup({ keyChanged: greet, imported: open });
  tools.onServerTools(() => {
    drawMenus();
    dialog.drawServerTools();
  });
  load.setup();
  $("new").onclick = newChat;
  $("menu").onclick = () =>
    $("menu").setAttribute("aria-expanded", String(document.body.classList.toggle("menu")));
  $("log").onclick = closeMenu;
  $("open-settings").onclick = () => dialog.open(model);
  $("tools-button").onclick = () => dialog.open(model, "", "tools");
  $("settings").onclose = () => {
    drawSystem();
    drawMenus();
  };
  $("theme").onclick = () =>
    setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "system") + 1) % 3]);
  setTheme(document.documentElement.dataset.theme ?? "system");
  $("system-button").onclick = () => {
    $("system-box").hidden = !$("system-box").hidden;
    $("system-button").setAttribute("aria-expanded", String(!$("system-box").hidden));
  };
  $("system-preset").onchange = () => {
    const p = settings.settings.presets.find(x => x.id === $("system-preset").value);
    if (p) setSystem(p.text);
  };
  $("system").onchange = () => setSystem($("system").value);
  $("export-md").onclick = () => save(".md", "text/markdown", transfer.toMarkdown(conv));
  $("export-json").onclick = () => save(".json", "application/json", transfer.toJson([conv]));
  addEventListener("keydown", keys);
  addEventListener("hashchange", () => {
    if (location.hash.slice(1) !== (fresh ? "" : conv.id)) open(location.hash.slice(1));
  });
  addEventListener("beforeunload", e => {
    if (db.unsaved() && hasDatabase) e.preventDefault();
  });
}

let hasDatabase = true;
db.onTrouble(e => {
  if (!e) {
    notice("storage", "");
    return;
  }
  const full = e.name === "QuotaExceededError";
  notice(
    "storage",
    full
      ? `This browser's storage for this page is full: ${plural(db.unsaved(), "change")} not saved yet, kept in this tab only. Delete conversations, free disk space, or save this one as a file.`
      : `Nothing can be saved in this browser (${e.message}): conversations are kept in this tab only.`,
    button("Save as JSON", () => $("export-json").click()),
  );
});

/* Imports conversations from localStorage, which an earlier version used. */
async function migrate() {
  let old;
  try {
    old = JSON.parse(localStorage.getItem("steel.chats"));
  } catch {
    return;
  }
  if (!Array.isArray(old)) return;
  for (const c of old) {
    if (!c?.messages?.length) continue;
    const t = Date.now();
    const [{ record, nodes }] = transfer.parse(
      JSON.stringify(c.messages.map(m => ({ ...m, content: m.content ?? "" }))),
      String(c.title ?? ""),
    );
    await db.write(
      [db.put("chats", { ...record, created: t, updated: t }), ...nodes.map(n => db.put("nodes", n))],
      { keep: false },
    );
  }
  localStorage.removeItem("steel.chats"); // now in the database
}

async function start() {
  wire();
  try {
    await db.open();
    await migrate();
    await chats.purge();
  } catch (e) {
    hasDatabase = false;
    notice(
      "storage",
      `Nothing can be saved in this browser (${e.message}): conversations are kept in this tab only.`,
    );
  }
  await settings.load();
  const id = location.hash.slice(1);
  if (id) await open(id);
  else newChat();
  await sidebar.refresh();
  greet();
  document.documentElement.dataset.ready = "true";
}

/* Counters for the tests. */
window.steel = { work: log.work };
start();
