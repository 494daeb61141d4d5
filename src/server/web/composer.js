/*
 * The input: text, files, pictures, editing of an earlier message, and the draft, which survives a reload. Sends by
 * act.send. A file is { name, text } or { name, image }, a data: URL.
 */
import { $, el, announce, button, toast, pickFile, number } from "./dom.js";

const LARGEST = 2 << 20; // bytes of a file
const LARGEST_IMAGE = 2 << 20; // larger pictures are made smaller,
const LONGEST_SIDE = 2048; // to this many pixels
const PICTURES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];

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
const dataUrl = blob =>
  new Promise((resolve, reject) => {
    const r = new FileReader();
    r.onload = () => resolve(r.result);
    r.onerror = () => reject(r.error);
    r.readAsDataURL(blob);
  });
/* The picture itself, or a smaller JPEG of it. */
async function picture(f) {
  if (f.size <= LARGEST_IMAGE) return dataUrl(f);
  const image = await createImageBitmap(f);
  const by = Math.min(1, LONGEST_SIDE / Math.max(image.width, image.height));
  const canvas = new OffscreenCanvas(
    Math.max(1, Math.round(image.width * by)),
    Math.max(1, Math.round(image.height * by)),
  );
  const pen = canvas.getContext("2d");
  pen.fillStyle = "white";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(image, 0, 0, canvas.width, canvas.height);
  image.close();
  return dataUrl(await canvas.convertToBlob({ type: "image/jpeg", quality: 0.9 }));
}
async function readPicture(f) {
  if (!act.sees()) return "is a picture, and this model reads text only";
  try {
    const image = await picture(f);
    await createImageBitmap(f).then(b => b.close());
    files.push({ name: (f.name || "picture").slice(0, 200), image });
    return null;
  } catch {
    return "cannot be read as a picture";
  }
}
async function read(f) {
  if (PICTURES.includes(f.type)) return readPicture(f);
  if (f.size > LARGEST) return `${number(f.size)} bytes are too many, ${number(LARGEST)} at most`;
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await f.arrayBuffer());
  } catch {
    text = "\0";
  }
  if (text.includes("\0")) return "is neither a text file nor a picture";
  files.push({ name: f.name.slice(0, 200), text });
  return null;
}
function drawFiles() {
  $("attached").replaceChildren(
    ...files.map(f =>
      el(
        "span",
        { class: f.image ? "chip picture" : "chip" },
        f.image && el("img", { src: f.image, alt: "" }),
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
