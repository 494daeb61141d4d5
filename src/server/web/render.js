/*
 * Markdown to DOM nodes. Model output is untrusted: marked converts it to markup, DOMPurify keeps only the tags and
 * attributes below, and everything else becomes text. The page's policy (Trusted Types) forbids any other markup.
 * highlight.js highlights code and KaTeX renders formulas. Without a library its part stays plain text.
 *
 * Nothing is loaded from elsewhere: an image is shown as a link.
 */
import { el, button, copyText } from "./dom.js";
import { begin, tokenizer } from "./effort.js";
import { math } from "./math.js";

const { marked, DOMPurify, katex, hljs } = window;
const LONGEST = 1 << 20,
  LONGEST_CODE = 100000;

const CLEAN = {
  ALLOWED_TAGS: [
    "a",
    "b",
    "blockquote",
    "br",
    "code",
    "del",
    "div",
    "em",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "hr",
    "i",
    "kbd",
    "li",
    "mark",
    "ol",
    "p",
    "pre",
    "s",
    "span",
    "strong",
    "sub",
    "sup",
    "table",
    "tbody",
    "td",
    "th",
    "thead",
    "tr",
    "u",
    "ul",
  ],
  ALLOWED_ATTR: ["href", "title", "start", "align", "class", "data-math"],
  ADD_URI_SAFE_ATTR: ["start", "align", "data-math"],
  ALLOW_DATA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};
const CLEAN_CODE = {
  ALLOWED_TAGS: ["span"],
  ALLOWED_ATTR: ["class"],
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
/* HTML tags that a model may use. Others are shown as text (vector<int>, <think>). */
const OWN_TAGS = /^\s*<\/?(?:b|br|i|kbd|mark|s|sub|sup|u)\s*\/?>\s*$/i;

/* If DOMPurify does not work in this browser, only text is shown. */
function purifies() {
  try {
    const f = DOMPurify.sanitize(
      '<p><b title="t">x</b><img src="data:,"></p><a href="javascript:x">y</a>',
      CLEAN,
    );
    return f.textContent === "xy" && !f.querySelector("img, [href]") && f.querySelector("b").title === "t";
  } catch {
    return false;
  }
}
let rich = !!marked && !!DOMPurify?.isSupported && purifies();
if (!rich && marked && DOMPurify?.isSupported && !("shadowNode" in window)) {
  // Debian 12's security update of DOMPurify 2.4.1 looks at a variable that another function owns; an empty one does
  window.shadowNode = Object.freeze({});
  rich = purifies();
}

if (rich)
  marked.use({
    gfm: true,
    breaks: true,
    mangle: false,
    headerIds: false,
    tokenizer,
    ...(katex ? { extensions: math } : {}),
  });

const escape = s => s.replace(/[&<>"']/g, c => "&#" + c.charCodeAt(0) + ";");
const asText = (token, text) =>
  Object.assign(token, { type: "text", text: escape(text), escaped: true, tokens: undefined });

function tame(token) {
  if (token.type === "html" && !OWN_TAGS.test(token.raw)) {
    const text = token.raw.replace(/\n+$/, "");
    if (token.block || /\n/.test(token.raw))
      Object.assign(token, { type: "paragraph", tokens: [asText({ raw: token.raw }, text)] });
    else asText(token, text);
  } else if (token.type === "text" && !token.tokens && /[<>]/.test(token.text)) {
    token.text = token.text.replace(/[<>]/g, escape); // marked does not escape inside <kbd> or <script>
  } else if (token.type === "image") {
    const text = "image: " + (token.text || token.href);
    Object.assign(token, { type: "link", text, tokens: [asText({ raw: text }, text)] });
  } else if (token.type === "list") {
    for (const item of token.items) {
      // a checkbox in the text, not a form
      if (item.task) item.tokens.unshift(asText({ raw: "" }, item.checked ? "☑ " : "☐ "));
      item.task = false;
    }
  }
}

/* Renders `text` into root. Called again with a longer text, it changes only the blocks that differ. */
export function render(root, text) {
  let tokens = null;
  if (root.hard && text.length < root.hard) root.hard = 0; // another text
  if (rich && text.length <= LONGEST && !root.hard) {
    try {
      begin();
      tokens = marked.lexer(text);
      marked.walkTokens(tokens, tame);
      tokens = tokens.filter(t => t.type !== "space" && t.type !== "def");
    } catch {
      tokens = null; // nested too deeply, or too much work: not tried again as the text grows
      root.hard = text.length;
    }
  }
  root.classList.toggle("plain", !tokens);
  if (!tokens) {
    root.textContent = text;
    root.blocks = null;
    return;
  }
  const old = root.blocks ?? [],
    blocks = tokens.map(t => t.raw);
  if (!root.blocks) root.replaceChildren();
  let same = 0;
  while (same < blocks.length && blocks[same] === old[same]) same++;
  while (root.children.length > same) root.lastChild.remove();
  for (const t of tokens.slice(same)) root.append(block(t));
  root.blocks = blocks;
}

function block(token) {
  const box = el("div", { class: "block" });
  try {
    box.append(DOMPurify.sanitize(marked.parser([token]), CLEAN));
    finish(box);
  } catch {
    box.classList.add("plain");
    box.textContent = token.raw;
  }
  return box;
}

function finish(box) {
  for (const a of box.querySelectorAll("a")) {
    a.target = "_blank";
    a.rel = "noopener noreferrer";
  }
  for (const m of box.querySelectorAll("[data-math]")) setMath(m);
  for (const t of box.querySelectorAll("table")) {
    const wide = el("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Table" });
    t.replaceWith(wide);
    wide.append(t);
    for (const th of t.querySelectorAll("th")) if (!th.textContent.trim()) th.replaceWith(el("td"));
  }
  for (const code of box.querySelectorAll("pre > code")) dressCode(code);
}

/* A formula that KaTeX rejects stays text (KaTeX's own error display needs styles that the policy forbids). */
function setMath(m) {
  const tex = m.textContent;
  try {
    katex.render(tex, m, {
      displayMode: m.dataset.math !== "inline",
      trust: false,
      strict: "ignore",
      maxSize: 50,
      maxExpand: 300,
    });
  } catch (e) {
    m.textContent = tex;
    m.classList.add("tex");
    m.title = e.message;
  }
}

function dressCode(code) {
  const name = /language-([\w+#.-]+)/.exec(code.className)?.[1] ?? "",
    text = code.textContent;
  const pre = code.parentNode,
    frame = el("div", { class: "code" });
  code.className = "hljs";
  if (hljs && text.length <= LONGEST_CODE && hljs.getLanguage(name))
    code.replaceChildren(DOMPurify.sanitize(hljs.highlight(name, text, true).value, CLEAN_CODE));
  pre.tabIndex = 0;
  pre.replaceWith(frame);
  const copy = button("Copy", () => copyText(text.replace(/\n$/, ""), copy), { "aria-label": "Copy code" });
  frame.append(el("div", { class: "code-head" }, el("span", {}, name), copy), pre);
}
