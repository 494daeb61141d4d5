// The page and a model that reads pictures (a small one that speaks nonsense): pictures are pasted, dropped and chosen, shown as
// thumbnails, sent as the files' bytes, kept over a reload, and made smaller where they are large.
import { test, before, after, beforeEach } from "node:test";
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import os from "node:os";
import path from "node:path";
import { startWorld, reload, ask, axe } from "./page.mjs";

const root = path.resolve(import.meta.dirname, "../..");
const dir = mkdtempSync(path.join(os.tmpdir(), "steel-pictures-"));
const png = readFileSync(path.join(root, "tests/golden_images/qwen3_vl/a.png"));
const jpeg = readFileSync(path.join(root, "tests/golden_images/b.jpg"));
let world;
before(async () => {
  const made = spawnSync("python3", ["-c", "import sys; sys.path.insert(0, 'tests'); import vision_model; vision_model.make(sys.argv[1])", dir], { cwd: root });
  assert.equal(made.status, 0, String(made.stderr));
  world = await startWorld(dir, "-c", "4096");
});
after(async () => { await world.stop(); rmSync(dir, { recursive: true }); });
beforeEach(() => { world.fake.script = null; world.fake.bodies.length = 0; });

const dataUrl = (type, bytes) => `data:${type};base64,${bytes.toString("base64")}`;

// What a paste or a drop of files does in a browser.
const give = (page, kind, files) => page.evaluate(([kind, files]) => {
  const all = new DataTransfer();
  for (const f of files) all.items.add(new File([Uint8Array.from(atob(f.data), c => c.charCodeAt(0))], f.name, { type: f.type }));
  const event = kind === "paste" ? new ClipboardEvent("paste", { clipboardData: all, bubbles: true, cancelable: true })
    : new DragEvent("drop", { dataTransfer: all, bubbles: true, cancelable: true });
  document.querySelector("#input").dispatchEvent(event);
}, [kind, files.map(f => ({ ...f, data: f.data.toString("base64") }))]);
// Pictures that the browser has really decoded.
const drawn = (page, what, n) => page.waitForFunction(([what, n]) => {
  const all = [...document.querySelectorAll(what)];
  return all.length === n && all.every(i => i.complete && i.naturalWidth > 0);
}, [what, n]);

test("a picture is pasted and another one dropped; thumbnails; the model gets both, and a reload keeps them", async () => {
  world.fake.says("seen");
  const { page, errors, context } = await world.open();
  await give(page, "paste", [{ name: "a.png", type: "image/png", data: png }]);
  await drawn(page, ".chip img", 1);
  await give(page, "drop", [{ name: "b.jpg", type: "image/jpeg", data: jpeg }, { name: "notes.txt", type: "text/plain", data: Buffer.from("a note") }]);
  await drawn(page, ".chip img", 2);
  assert.equal(await page.locator(".chip").count(), 3);
  await axe(page, "thumbnails");
  await ask(page, "What is this?");
  assert.deepEqual(world.fake.bodies[0].messages.at(-1), { role: "user", content: [
    { type: "image_url", image_url: { url: dataUrl("image/png", png) } },
    { type: "image_url", image_url: { url: dataUrl("image/jpeg", jpeg) } },
    { type: "text", text: "File notes.txt:\n```\na note\n```\n\nWhat is this?" }] });
  assert.equal(await page.locator(".chip").count(), 0);
  await drawn(page, ".msg.user img.picture", 2);
  await reload(page);
  await drawn(page, ".msg.user img.picture", 2);
  assert.equal(await page.getAttribute(".msg.user img.picture", "alt"), "a.png");
  await axe(page, "a message with pictures");
  assert.deepEqual(errors, []);
  assert.deepEqual(page.outside, []);
  await context.close();
});

test("the server itself answers; a picture alone is a message, too; its tokens count", async () => {
  const { page, errors, context } = await world.open({}, world.server.origin);
  const read = async () => Number((await page.textContent(".msg.assistant:last-of-type .figures")).match(/prompt ([\d,]+)/)[1].replaceAll(",", ""));
  await ask(page, "Hi");
  const text = await read();
  await page.click("#new");
  await give(page, "paste", [{ name: "a.png", type: "image/png", data: png }]);
  await drawn(page, ".chip img", 1);
  await page.click("#send");
  await page.waitForSelector(".msg.assistant .figures");
  const { content } = await page.evaluate(async url => {
    const r = await fetch("v1/chat/completions", { method: "POST", body: JSON.stringify({ max_tokens: 1, messages: [{ role: "user", content: [{ type: "image_url", image_url: { url } }] }] }) });
    return { content: (await r.json()).usage.prompt_tokens };
  }, dataUrl("image/png", png));
  assert.ok(content > text, `${content} tokens with the picture, ${text} without`);
  assert.deepEqual(errors, []);
  await context.close();
});

test("a large picture is made smaller; what is no picture is refused; one can be taken out again", async () => {
  world.fake.says("seen");
  const { page, context } = await world.open();
  const large = await page.evaluate(async () => {
    const c = new OffscreenCanvas(3000, 1500), pen = c.getContext("2d"), d = pen.createImageData(3000, 1500);
    for (let i = 0, r = 1; i < d.data.length; i++) {
      r = Math.imul(r, 1664525) + 1013904223 | 0;
      d.data[i] = i % 4 === 3 ? 255 : r >>> 24;
    }
    pen.putImageData(d, 0, 0);
    const bytes = new Uint8Array(await (await c.convertToBlob()).arrayBuffer());
    let s = "";
    for (let i = 0; i < bytes.length; i += 8192) s += String.fromCharCode(...bytes.subarray(i, i + 8192));
    return btoa(s);
  });
  assert.ok(large.length > 3 << 20, `${large.length}`);
  await give(page, "drop", [{ name: "broken.png", type: "image/png", data: Buffer.from("no picture") }]);
  await page.waitForSelector(".toast");
  assert.match(await page.textContent(".toast"), /broken\.png: cannot be read as a picture/);
  await give(page, "drop", [{ name: "large.png", type: "image/png", data: Buffer.from(large, "base64") }, { name: "a.png", type: "image/png", data: png }]);
  await drawn(page, ".chip img", 2);
  await page.click("[aria-label='Remove a.png']");
  await drawn(page, ".chip img", 1);
  await ask(page, "And this?");
  const [part] = world.fake.bodies[0].messages.at(-1).content;
  assert.match(part.image_url.url, /^data:image\/jpeg;base64,/);
  await drawn(page, ".msg.user img.picture", 1);
  assert.deepEqual(await page.evaluate(() => { const i = document.querySelector(".msg.user img.picture"); return [i.naturalWidth, i.naturalHeight]; }), [2048, 1024]);
  await context.close();
});
