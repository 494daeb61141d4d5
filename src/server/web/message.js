/*
 * One message as an element: text, thinking, tool calls, files, statistics and buttons. Renders and updates it; knows
 * neither its position nor what the buttons do (act).
 */
import { $, el, button, copyText, number, plural } from "./dom.js";
import { render } from "./render.js";

const WHO = { user: "You", assistant: "Assistant", tool: "Tool" };

function figures(n) {
  const t = n.timings,
    out = [];
  if (t) {
    if (t.predicted_per_second > 0)
      out.push(`${number(t.predicted_n)} tokens, ${t.predicted_per_second.toFixed(1)} tok/s`);
    else out.push(`${number(t.predicted_n)} tokens`);
    const read = t.prompt_n,
      rate = t.prompt_ms > 0 ? (read / t.prompt_ms) * 1000 : 0;
    out.push(
      `prompt ${number(read)}${t.cache_n ? " + " + number(t.cache_n) + " cached" : ""}${rate && read > 1 ? `, ${number(Math.round(rate))} tok/s` : ""}`,
    );
  }
  if (n.edited && n.role === "assistant") out.push("edited");
  if (n.status === "stopped") out.push("stopped");
  if (n.status === "cut") out.push("interrupted: the page was closed or reloaded");
  if (n.status === "done" && n.finish === "length")
    out.push(n.full ? "cut: the context is full" : "cut: it reached the longest answer allowed");
  return out.join(" · ");
}

export function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

function drawCall(c) {
  return el(
    "details",
    { class: "tool" },
    el("summary", {}, "Calls ", el("b", {}, c.name)),
    el("pre", { tabindex: "0" }, pretty(c.arguments)),
  );
}

function drawThinking(box, n) {
  const over = n.content || n.calls?.length || n.status !== "streaming";
  const label = !over
    ? "Thinking…"
    : n.thoughtMs
      ? `Thought for ${(n.thoughtMs / 1000).toFixed(1)} s`
      : "Thought about it";
  let d = box.querySelector(":scope > .think");
  if (!d) {
    d = el("details", { class: "think" }, el("summary"), el("div"));
    box.querySelector(".body").before(d);
  }
  d.firstChild.textContent = label;
  d.lastChild.textContent = n.reasoning;
}

/* act: { edit(n), later(n), saveAnswer(n, text, keep), retry(n), resume(n), mayContinue(n), step(n, by), siblings(n) } */
function drawMeta(n, act, live) {
  const meta = el("div", { class: "meta" });
  const all = act.siblings(n),
    at = all.indexOf(n);
  if (all.length > 1 && !live)
    meta.append(
      el(
        "span",
        { class: "steps" },
        button("‹", () => act.step(n, -1), { "aria-label": "Previous version", disabled: at === 0 }),
        el(
          "span",
          { "aria-label": `Version ${at + 1} of ${all.length}`, role: "img" },
          `${at + 1}/${all.length}`,
        ),
        button("›", () => act.step(n, 1), { "aria-label": "Next version", disabled: at === all.length - 1 }),
      ),
    );
  if (n.role === "assistant" && figures(n)) meta.append(el("span", { class: "figures" }, figures(n)));
  if (live) return meta;
  const actions = el("span", { class: "actions" });
  meta.append(actions);
  if (n.role === "assistant" && act.mayContinue(n))
    actions.append(button("Continue", () => act.resume(n), { title: "Continue where the answer ended" }));
  if (n.role === "assistant") actions.append(button("Retry", () => act.retry(n)));
  const edit = button("Edit", () => (n.role === "user" ? act.edit(n) : openEditor(n, act)), { class: "edit" });
  if (n.role === "user" || n.content) actions.append(edit);
  const copy = button("Copy", () => copyText(n.content, copy), { "aria-label": "Copy message" });
  if (n.content) actions.append(copy);
  return meta;
}

/* An editor in place of the answer's text. */
function openEditor(n, act) {
  const box = $("log").querySelector(`article[data-id="${CSS.escape(n.id)}"]`),
    later = act.later(n);
  if (box.classList.contains("editing")) return;
  const close = () => {
    form.remove();
    box.classList.remove("editing");
    box.querySelector(":scope > .meta .edit")?.focus();
  };
  const text = el("textarea", { "aria-label": "Text of the answer", rows: 4 });
  const save = keep => act.saveAnswer(n, text.value, keep);
  const follow = later ? `${plural(later, "message")} ${later === 1 ? "follows" : "follow"}. ` : "";
  const form = el(
    "div",
    { class: "editor", role: "group", "aria-label": "Edit the answer" },
    text,
    el("p", {}, follow + "The old version stays as another branch."),
    button(later ? "Save, keep later messages" : "Save", () => save(true), { class: "main" }),
    later ? button("Save without them", () => save(false)) : null,
    button("Cancel", close),
  );
  text.value = n.content;
  form.onkeydown = e => {
    if (e.key === "Escape") {
      e.stopPropagation();
      close();
    } else if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) save(true);
  };
  box.classList.add("editing");
  box.querySelector(":scope > .body").after(form);
  text.style.height = Math.min(text.scrollHeight + 4, innerHeight * 0.6) + "px";
  text.focus();
}

export function draw(n, act) {
  const box = el("article", { class: "msg " + n.role, "data-id": n.id, "aria-label": WHO[n.role] });
  if (n.role === "tool") {
    box.append(
      el(
        "details",
        { class: "tool" },
        el("summary", {}, "Result of ", el("b", {}, n.name || "the tool")),
        el("pre", { tabindex: "0" }, n.content),
      ),
    );
    return box;
  }
  for (const f of n.files ?? [])
    box.append(
      f.image
        ? el("img", { class: "picture", src: f.image, alt: f.name, title: f.name })
        : el(
            "details",
            { class: "file" },
            el("summary", {}, f.name + ", " + number(f.text.length) + " characters"),
            el("pre", { tabindex: "0" }, f.text),
          ),
    );
  box.append(
    el("div", { class: "body" }),
    el("div", { class: "calls" }),
    el("div", { class: "error", role: "note" }),
    el("div", { class: "meta" }),
  );
  redraw(box, n, act);
  return box;
}

/* Updates the element after the message has changed. */
export function redraw(box, n, act) {
  if (n.role === "tool") return;
  const live = n.status === "streaming",
    part = name => box.querySelector(":scope > ." + name);
  box.classList.toggle("live", live);
  if (n.reasoning) drawThinking(box, n);
  if (n.role === "user")
    part("body").textContent = n.content; // user text is not Markdown
  else render(part("body"), n.content);
  if (live) part("editor")?.remove();
  if (part("calls").children.length !== (n.calls?.length ?? 0) || live)
    part("calls").replaceChildren(...(n.calls ?? []).filter(Boolean).map(drawCall));
  part("error").textContent = n.error ?? "";
  part("meta").replaceWith(drawMeta(n, act, live));
}
