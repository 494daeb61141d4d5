/*
 * DOM helpers: elements, messages to the user (toast, notice, live region for screen readers), copying, saving files.
 * Text is only inserted as text; no function here accepts markup.
 */
export const $ = id => document.getElementById(id);

/* el("button", { class: "x", onclick: f, "aria-label": "…" }, child, "text", …) */
export function el(tag, props = {}, ...children) {
  const e = document.createElement(tag);
  for (const [k, v] of Object.entries(props)) {
    if (v === undefined || v === null || v === false) continue;
    if (k.startsWith("on")) e[k] = v;
    else if (k === "class") e.className = v;
    else e.setAttribute(k, v === true ? "" : v);
  }
  e.append(...children.filter(c => c !== null && c !== undefined && c !== false));
  return e;
}

export const button = (text, onclick, props = {}) =>
  el("button", { type: "button", onclick, ...props }, text);

/* Announces text to screen readers, also if it is the same text again. */
export function announce(text) {
  const live = $("live");
  live.textContent = "";
  setTimeout(() => {
    live.textContent = text;
  }, 50);
}

const TOAST_MS = 12000;
/* A message that disappears after a time without pointer or focus on it. `done` runs if its button was not used. */
export function toast(text, action, done) {
  let timer;
  const box = el("div", { class: "toast" }, el("span", {}, text));
  const close = used => {
    clearTimeout(timer);
    box.remove();
    if (!used && done) done();
  };
  const start = () => {
    clearTimeout(timer);
    timer = setTimeout(close, TOAST_MS, false);
  };
  const hold = () => clearTimeout(timer);
  if (action)
    box.append(
      button(action.text, () => {
        close(true);
        action.run();
      }),
    );
  box.append(button("×", () => close(false), { "aria-label": "Dismiss" }));
  box.onmouseenter = box.onfocus = hold;
  box.onmouseleave = start;
  box.addEventListener("focusin", hold);
  box.addEventListener("focusout", start);
  $("toasts").append(box);
  announce(text);
  start();
}

/* A persistent message above the input, one of each kind. */
export function notice(kind, text, ...actions) {
  const old = $("notices").querySelector(`[data-kind="${kind}"]`);
  if (!text) {
    old?.remove();
    return;
  }
  const said = old?.querySelector("span").textContent;
  const box = el("div", { class: "notice", "data-kind": kind }, el("span", {}, text), ...actions);
  if (old) old.replaceWith(box);
  else $("notices").append(box);
  if (said !== text) announce(text);
}

/* Pages from another machine have no clipboard object over plain HTTP. */
export async function copyText(text, from) {
  let ok = false;
  if (navigator.clipboard) {
    ok = await navigator.clipboard.writeText(text).then(
      () => true,
      () => false,
    );
  } else {
    const t = el("textarea", { class: "hidden", "aria-hidden": "true" });
    t.value = text;
    document.body.append(t);
    t.select();
    try {
      ok = document.execCommand("copy");
    } catch {
      /* not supported */
    }
    t.remove();
    from.focus();
  }
  const was = from.textContent;
  from.textContent = ok ? "Copied" : "Not copied";
  announce(from.textContent);
  setTimeout(() => {
    from.textContent = was;
  }, 1500);
}

export function saveFile(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: url, download: name.replace(/[^\p{L}\p{N} ._-]+/gu, "-").slice(0, 80) }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/* Opens a file picker; resolves to the file or null. */
export function pickFile(accept, multiple = false) {
  return new Promise(resolve => {
    const input = el("input", { type: "file", accept, multiple, class: "hidden" });
    input.onchange = () => {
      resolve([...input.files]);
      input.remove();
    };
    input.oncancel = () => {
      resolve([]);
      input.remove();
    };
    document.body.append(input);
    input.click();
  });
}

export const number = n => Number(n).toLocaleString("en");
export const plural = (n, word) => number(n) + " " + word + (n === 1 ? "" : "s");
