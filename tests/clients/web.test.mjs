// The web page in a real Chromium: an answer streams in, stop works, nothing a model writes becomes markup.
import { test, before, after } from "node:test";
import assert from "node:assert/strict";
import { existsSync } from "node:fs";
import { chromium } from "playwright-core";
import { startServer } from "./common.mjs";

const executablePath = ["/usr/bin/chromium", "/usr/bin/google-chrome"].find(existsSync);
const skip = executablePath ? false : "no Chromium here";
let server, browser;
before(async () => {
  if (skip) return;
  server = await startServer();
  browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"] });
});
after(async () => { if (skip) return; await browser.close(); await server.stop(); });

async function open(options = {}) {
  const context = await browser.newContext(options), page = await context.newPage(), errors = [];
  page.on("pageerror", e => errors.push(String(e)));
  page.on("console", m => { if (m.type() === "error") errors.push(m.text()); });
  await page.goto(server.origin + "/");
  return { page, errors, context };
}

test("an answer streams in and the conversation is kept over a reload", { skip }, async () => {
  const { page, errors, context } = await open();
  await page.fill("#input", "Hello! Who are you?");
  await page.press("#input", "Enter");
  await page.waitForSelector(".msg.assistant .meta span");
  const answer = await page.textContent(".msg.assistant .body");
  assert.ok(answer.trim().length > 0);
  assert.match(await page.textContent(".msg.assistant .meta span"), /tok\/s/);
  await page.reload();
  assert.equal(await page.textContent(".msg.assistant .body"), answer);
  assert.deepEqual(errors, []);
  await context.close();
});

test("stop ends an answer and frees the request", { skip }, async () => {
  const { page, context } = await open();
  await page.fill("#input", "Tell me a short story.");
  await page.press("#input", "Enter");
  await page.waitForFunction(() => document.querySelector("#send").textContent === "Stop" || document.querySelector(".msg.assistant .meta span"));
  if (await page.textContent("#send") === "Stop") await page.click("#send");
  await page.waitForFunction(() => document.querySelector("#send").textContent === "Send");
  await server.idle();
  await context.close();
});

test("hostile text stays text", { skip }, async () => {
  const { page, context } = await open();
  const evil = "<img src=x onerror=\"window.hacked=1\"> **bold** `<script>window.hacked=1</scr" + "ipt>` [x](javascript:window.hacked=1) <b>not bold</b>\n```html\n<script>window.hacked=1</scr" + "ipt>\n```";
  await page.evaluate(evil => { const root = document.createElement("div"); root.id = "probe"; document.body.append(root); markdown(root, evil); }, evil);
  assert.equal(await page.evaluate(() => window.hacked), undefined);
  assert.equal(await page.evaluate(() => document.querySelectorAll("#probe img, #probe script, #probe b, #probe a").length), 0);
  assert.equal(await page.evaluate(() => document.querySelector("#probe strong").textContent), "bold");
  await context.close();
});

test("it works on a phone, and the load panel draws", { skip }, async () => {
  const { page, errors, context } = await open({ viewport: { width: 390, height: 780 }, isMobile: true, hasTouch: true });
  assert.equal(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), true);
  await page.click("#menu");
  await page.click("#load > summary");
  await page.waitForFunction(() => document.querySelector("#s-kv").textContent.includes("%"));
  assert.deepEqual(errors, []);
  await context.close();
});

test("lists nest, an asked question can be edited", { skip }, async () => {
  const { page, errors, context } = await open();
  await page.evaluate(() => { const root = document.createElement("div"); root.id = "probe"; document.body.append(root); markdown(root, "- a\n  - b\n    - c\n- d\n\n3. x\n4. y"); });
  assert.equal(await page.evaluate(() => document.querySelectorAll("#probe > ul > li").length), 2);
  assert.equal(await page.evaluate(() => document.querySelector("#probe > ul > li > ul > li > ul").textContent), "c");
  assert.equal(await page.evaluate(() => document.querySelector("#probe > ol").start), 3);
  await page.evaluate(() => document.querySelector("#probe").remove());
  await page.fill("#input", "Hello!");
  await page.press("#input", "Enter");
  await page.waitForSelector(".msg.assistant .meta button");
  await page.click(".msg.user .meta button");
  assert.equal(await page.inputValue("#input"), "Hello!");
  assert.equal(await page.evaluate(() => document.querySelectorAll(".msg").length), 0);
  assert.deepEqual(errors, []);
  await context.close();
});

test("the load panel reads other servers' names of the figures", { skip }, async () => {
  for (const style of ["vllm", "llamacpp"]) {
    const other = await startServer("--metrics-compat", style);
    try {
      const context = await browser.newContext(), page = await context.newPage();
      await page.goto(other.origin + "/");
      await page.click("#load > summary");
      // a first look at the counters, before there is anything to count
      await page.waitForFunction(() => series.rate.length > 0);
      await page.fill("#input", "Tell me a short story.");
      await page.press("#input", "Enter");
      await page.waitForFunction(() => series.rate.some(v => v > 0));
      await context.close();
    } finally {
      await other.stop();
    }
  }
});
