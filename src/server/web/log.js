/*
 * The messages of the conversation on the screen. Only the end of a long one is drawn; the rest comes as the reader goes
 * up. While an answer streams only its own element changes, at most once a frame and never more than a third of the
 * time, and who has scrolled up stays there.
 */
import { $, el, button, number } from "./dom.js";
import { draw, redraw } from "./message.js";
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
/* What was built for the conversation on the screen: the tests count work, not time. */
export const work = { messages: 0 };

const log = () => $("log");
const elementOf = id => log().querySelector(`article[data-id="${CSS.escape(id)}"]`);

export function setup(actions) {
  act = actions;
  log().onscroll = ahead;
  addEventListener("resize", ahead);
}
/* Draws ahead of who goes up, a few messages at a time. */
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

/* What the model no longer sees is said where it begins. */
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
  box.scrollTop = box.scrollHeight - bottom; // the reader's place stays
}

const toEnd = () => {
  log().scrollTop = log().scrollHeight;
};
const atEnd = () => log().scrollHeight - log().scrollTop - log().clientHeight < NEAR;

/* Shows a conversation, at its end or at one message. */
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
/* A message is new or has changed. Elements that are there change in place. */
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

/* The path that is shown goes on with further messages; any other change of it is shown anew. */
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
  drawn += now.length - path.length;
  path = now;
  divider();
}

/* Asks, below the last message, whether a call may run. The question waits where its conversation is not on the screen. */
const asks = new Map(); // conversation id -> element
export function confirm(conversation, text, signal) {
  return new Promise(resolve => {
    const done = yes => {
      box.remove();
      asks.delete(conversation.id);
      resolve(yes);
    };
    const box = el(
      "div",
      { class: "ask", role: "group", "aria-label": "Tool call" },
      el("span", {}, text),
      button("Run", () => done(true), { class: "main" }),
      button("Do not run", () => done(false)),
    );
    signal.addEventListener("abort", () => done(false));
    asks.set(conversation.id, box);
    if (conversation !== conv) return;
    flush(); // the call itself stands above the question
    log().append(box);
    toEnd();
    box.querySelector("button").focus();
  });
}
