/*
 * The list of conversations: open, search, rename, delete with undo. Shows the data of chats.js; app.js opens a
 * conversation (open).
 */
import { $, el, button, toast } from "./dom.js";
import * as chats from "./chats.js";

const SHOWN = 200;
let open = () => {},
  current = () => null,
  busy = () => false,
  forget = () => {},
  stop = () => {};
let limit = SHOWN,
  renaming = null;

export function setup(actions) {
  ({ open, current, busy, forget, stop } = actions);
  let timer;
  $("search").oninput = () => {
    clearTimeout(timer);
    timer = setTimeout(refresh, 120);
  };
  $("search").onkeydown = e => {
    if (e.key === "Escape" && $("search").value) {
      e.stopPropagation();
      $("search").value = "";
      refresh();
    }
  };
}

let drawing = 0;
export async function refresh() {
  const text = $("search").value.trim(),
    turn = ++drawing;
  const found = text ? await chats.search(text) : (await chats.list()).map(chat => ({ chat }));
  if (turn !== drawing || renaming) return; // a later draw is running
  $("chats").replaceChildren(...found.slice(0, limit).map(item));
  if (found.length > limit)
    $("chats").append(
      el(
        "li",
        {},
        button(`${found.length - limit} more`, () => {
          limit += SHOWN;
          refresh();
        }),
      ),
    );
  if (text && !found.length) $("chats").append(el("li", { class: "none" }, "Nothing found"));
}

function item({ chat, node, line }) {
  const on = chat.id === current();
  const name = button(chats.title(chat), () => open(chat.id, node), {
    class: "name",
    "aria-current": on ? "true" : null,
    title: chats.title(chat),
  });
  if (line) name.append(el("small", {}, line));
  name.ondblclick = () => edit(li, chat);
  name.onkeydown = e => {
    if (e.key === "F2") edit(li, chat);
    else if (e.key === "Delete") remove(chat);
  };
  const li = el(
    "li",
    { class: (on ? "on" : "") + (busy(chat.id) ? " busy" : ""), "data-id": chat.id },
    name,
    button("✎", () => edit(li, chat), {
      class: "small",
      "aria-label": "Rename " + chats.title(chat),
      title: "Rename (F2)",
    }),
    button("×", () => remove(chat), {
      class: "small",
      "aria-label": "Delete " + chats.title(chat),
      title: "Delete",
    }),
  );
  return li;
}

function edit(li, chat) {
  const input = el("input", { "aria-label": "Name of the conversation", maxlength: "200" });
  input.value = chats.title(chat);
  renaming = chat.id;
  let over = false;
  const end = async keep => {
    if (over) return;
    over = true;
    if (keep) await chats.rename(chat.id, input.value);
    renaming = null;
    await refresh();
    if (keep && chat.id === current()) $("title").textContent = input.value.trim() || chats.title(chat);
    $("chats").querySelector(`li[data-id="${chat.id}"] .name`)?.focus();
  };
  input.onkeydown = e => {
    e.stopPropagation();
    if (e.key === "Enter") end(true);
    else if (e.key === "Escape") end(false);
  };
  input.onblur = () => end(true);
  li.replaceChildren(input);
  input.focus();
  input.select();
}

async function remove(chat) {
  stop(chat.id);
  await chats.setDeleted(chat.id, true);
  await refresh();
  if (chat.id === current()) forget();
  toast(
    `Deleted “${chats.title(chat)}”.`,
    {
      text: "Undo",
      run: async () => {
        await chats.setDeleted(chat.id, false);
        await refresh();
        open(chat.id);
      },
    },
    () => chats.purge(),
  );
}
