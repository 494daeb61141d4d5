/*
 * The messages of the open conversation. Only the end of a long conversation is rendered; earlier messages are added while
 * scrolling up. A streaming answer updates only its own element, at most once per frame and for a third of the time. The
 * scroll position is kept if the user has scrolled up.
 */
import { $, el, announce, button, number } from "./dom.js";
import { draw, pretty, redraw } from "./message.js";
import { startOf } from "./request.js";

const FIRST = 8,
  MORE = 8,
  NEAR = 80,
  AHEAD = 600; // messages; pixels

let conv = null,
  path = [],
  drawn = 0,
  act = null,
  context = 0;
/* Counts rendered elements, for the tests. */
export const work = { messages: 0 };

const log = () => $("log");
const elementOf = id => log().querySelector(`article[data-id="${CSS.escape(id)}"]`);

export function setup(actions) {
  act = actions;
  log().onscroll = ahead;
  addEventListener("resize", ahead);
}
/* Renders earlier messages before the user scrolls to them, a few at a time. */
let filling = 0;
function ahead() {
  if (filling || drawn >= path.length || log().scrollTop >= AHEAD) return;
  filling = setTimeout(() => {
    filling = 0;
    earlier();
    ahead();
  });
}

function drawOne(n) {
  work.messages++;
  return draw(n, act);
}

/* Shows where the messages that are sent to the model begin. */
function divider() {
  log().querySelector(".divider")?.remove();
  const start = startOf(path),
    box = start > 0 && elementOf(path[start].id);
  if (box)
    box.before(
      el(
        "div",
        { class: "divider", role: "note" },
        `The messages above no longer fit the context of ${number(context)} tokens: the model does not see them. The system prompt still goes with every message.`,
      ),
    );
}

function earlierButton() {
  log().querySelector(".earlier")?.remove();
  if (drawn < path.length)
    log().prepend(button(`Earlier messages (${path.length - drawn})`, earlier, { class: "earlier" }));
}

function earlier() {
  if (!conv || drawn >= path.length) return;
  const from = Math.max(0, path.length - drawn - MORE),
    box = log(),
    bottom = box.scrollHeight - box.scrollTop;
  box.querySelector(".earlier").after(...path.slice(from, path.length - drawn).map(drawOne));
  drawn = path.length - from;
  earlierButton();
  divider();
  box.scrollTop = box.scrollHeight - bottom; // keep the scroll position
}

const toEnd = () => {
  log().scrollTop = log().scrollHeight;
};
const atEnd = () => log().scrollHeight - log().scrollTop - log().clientHeight < NEAR;
/* Runs `change`, which changes the log's size. If the end was in view, it stays there. */
export function resize(change) {
  const follow = atEnd();
  change();
  if (follow) toEnd();
}

/* Shows a conversation, scrolled to its end or to a message. */
export function show(conversation, contextSize, welcome, at) {
  conv = conversation;
  context = contextSize;
  path = conv.path();
  work.messages = 0;
  drawn = 0;
  log().replaceChildren();
  if (!path.length) {
    log().append(welcome());
    return;
  }
  const where = at ? path.findIndex(n => n.id === at) : -1;
  drawn = Math.min(path.length, Math.max(FIRST, where < 0 ? 0 : path.length - where + 5));
  log().append(...path.slice(path.length - drawn).map(drawOne));
  if (asks.has(conv.id)) log().append(asks.get(conv.id));
  earlierButton();
  divider();
  const box = where >= 0 && elementOf(at);
  if (box) {
    box.scrollIntoView({ block: "start" });
    box.classList.add("found");
  } else toEnd();
  ahead();
}

let queued = new Map(),
  waiting = false,
  last = 0;
/* A message is new or has changed. Existing elements are updated in place. */
export function update(conversation, node) {
  if (conversation !== conv) return;
  queued.set(node.id, node);
  if (waiting) return;
  waiting = true;
  setTimeout(() => requestAnimationFrame(flush), last * 2);
}
function flush() {
  const start = performance.now(),
    follow = atEnd();
  waiting = false;
  for (const n of queued.values()) {
    const box = elementOf(n.id);
    if (box) redraw(box, n, act);
    else if (conv.isBelow(conv.leaf, n.id) && !path.includes(n)) extend();
  }
  queued = new Map();
  if (follow) toEnd();
  last = performance.now() - start;
}

/* Appends messages to the shown path; after any other change it is rendered again. */
function extend() {
  const now = conv.path();
  if (path.length && now[path.length - 1] !== path.at(-1)) {
    show(conv, context, () => el("div"));
    return;
  }
  log().querySelector(".welcome")?.remove();
  const fresh = now.slice(path.length).map(drawOne),
    question = asks.get(conv.id);
  if (question?.isConnected) question.before(...fresh);
  else log().append(...fresh);
  const before = path.at(-1),
    box = before && elementOf(before.id);
  if (box) redraw(box, before, act); // it is no longer the last one
  drawn += now.length - path.length;
  path = now;
  divider();
}

/* Asks below the last message whether a tool call may run: "run", "always" or "". The question waits until its
 * conversation is open. */
const asks = new Map(); // conversation id -> element
export function confirm(conversation, call, tool, signal) {
  return new Promise(resolve => {
    const done = said => {
      box.remove();
      asks.delete(conversation.id);
      resolve(said);
    };
    const box = el(
      "div",
      { class: "ask", role: "group", "aria-label": "Tool call", tabindex: "-1" },
      el("p", {}, "Run ", el("b", {}, tool.remote), tool.server ? ` of ${tool.server}` : "", "?"),
      el("pre", { tabindex: "0", "aria-label": "Arguments" }, pretty(call.arguments || "{}")),
      button("Run", () => done("run"), { class: "main" }),
      button("Always allow in this conversation", () => done("always")),
      button("Deny", () => done("")),
    );
    signal.addEventListener("abort", () => done(""));
    asks.set(conversation.id, box);
    if (conversation !== conv) return;
    flush(); // render the call above the question
    log().append(box);
    toEnd();
    announce(`The model wants to run ${tool.remote}.`);
    // the focus is not on a button: a key press meant for the input must not allow a call
    if (!$("input").value) box.focus();
  });
}
