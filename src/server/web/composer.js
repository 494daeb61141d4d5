/*
 * The input: text, files, editing of an earlier message, and the draft, which survives a reload. Sends by act.send.
 */
import { $, el, announce, button, toast, pickFile, number } from "./dom.js";

const LARGEST = 2 << 20; // bytes of a file

let act = null,
  files = [],
  editing = null,
  where = "";

export function setup(actions) {
  act = actions;
  const input = $("input");
  input.oninput = () => {
    fit();
    keepDraft();
  };
  input.onkeydown = e => {
    if (e.key === "Enter" && !e.shiftKey && !e.isComposing) {
      e.preventDefault();
      // typing ahead must not stop the answer
      if (act.busy()) announce("The answer is still being generated; Escape stops it.");
      else submit();
    }
    if (e.key === "ArrowUp" && !input.value && !files.length) {
      e.preventDefault();
      act.editLast();
    }
    if (e.key === "ArrowDown" && editing && input.selectionStart === input.value.length) {
      e.preventDefault();
      cancelEdit();
    }
  };
  input.onpaste = e => {
    if (e.clipboardData.files.length) {
      e.preventDefault();
      attach([...e.clipboardData.files]);
    }
  };
  $("form").onsubmit = e => {
    e.preventDefault();
    submit();
  };
  $("attach").onclick = async () => attach(await pickFile("", true));
  $("cancel-edit").onclick = cancelEdit;
  $("save-edit").onclick = () => {
    const text = $("input").value.trim();
    if (act.busy() || (!text && !files.length)) return;
    const message = { text, files, editing };
    clear();
    act.saveEdit(message);
  };
  addEventListener("dragover", e => e.preventDefault());
  addEventListener("drop", e => {
    e.preventDefault();
    attach([...e.dataTransfer.files]);
  });
}

const fit = () => {
  const t = $("input");
  t.style.height = "auto";
  t.style.height = Math.min(t.scrollHeight + 2, innerHeight * 0.4) + "px";
};
const keepDraft = () => {
  try {
    sessionStorage.setItem("steel.draft." + where, $("input").value);
  } catch {
    /* losing a draft is harmless */
  }
};

/* Shows the draft of this conversation ("" = a new conversation). */
export function openDraft(id) {
  where = id;
  cancelEdit();
  files = [];
  drawFiles();
  try {
    $("input").value = sessionStorage.getItem("steel.draft." + where) ?? "";
  } catch {
    $("input").value = "";
  }
  fit();
}

function submit() {
  if (act.busy()) {
    act.stop();
    return;
  }
  const text = $("input").value.trim();
  if (!text && !files.length) return;
  const message = { text, files, editing };
  clear();
  act.send(message);
}
function clear() {
  $("input").value = "";
  keepDraft();
  files = [];
  setEditing(null);
  drawFiles();
  fit();
}
/* Puts a message that could not be sent back into the input. */
export function restore({ text, files: f, editing: e }) {
  $("input").value = text;
  files = f;
  setEditing(e);
  drawFiles();
  fit();
  keepDraft();
}

/* Editing */

function setEditing(node) {
  editing = node;
  $("editing").hidden = !node;
  $("save-edit").hidden = !node || !act.later(node);
}
export function edit(node) {
  restore({ text: node.content, files: [...(node.files ?? [])], editing: node });
  $("input").focus();
  $("input").setSelectionRange($("input").value.length, $("input").value.length);
}
export function cancelEdit() {
  if (!editing) return false;
  clear();
  return true;
}

/* Files */

async function attach(list) {
  for (const f of list) {
    const why = await read(f);
    if (why) toast(`${f.name}: ${why}`);
  }
  drawFiles();
  $("input").focus();
}
async function read(f) {
  if (f.size > LARGEST) return `${number(f.size)} bytes are too many, ${number(LARGEST)} at most`;
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await f.arrayBuffer());
  } catch {
    text = "\0";
  }
  if (text.includes("\0")) return "is not a text file; images and other files cannot be read";
  files.push({ name: f.name.slice(0, 200), text });
  return null;
}
function drawFiles() {
  $("attached").replaceChildren(
    ...files.map(f =>
      el(
        "span",
        { class: "chip" },
        f.name,
        button(
          "×",
          () => {
            files = files.filter(x => x !== f);
            drawFiles();
          },
          { "aria-label": "Remove " + f.name },
        ),
      ),
    ),
  );
}
