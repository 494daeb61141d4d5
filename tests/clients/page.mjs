// The web page in a real Chromium, for the tests beside this file: a browser, the server it is served by, and a stand-in for
// that server whose answers the tests write themselves (everything else passes through to the real one).
import assert from "node:assert/strict";
import { existsSync, readFileSync } from "node:fs";
import { createServer, request } from "node:http";
import { createRequire } from "node:module";
import { once } from "node:events";
import { chromium } from "playwright-core";
import { startServer } from "./common.mjs";

export const executablePath = ["/usr/bin/chromium", "/usr/bin/google-chrome"].find(existsSync);
export const HANG = 300000; // ms after which a wait is taken for a hang: machines may be busy
const ARGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"];

// A test's own world: the real server, the stand-in, the browser.
export async function startWorld(...serverArgs) {
  const server = await startServer(...serverArgs);
  const fake = await startFake(server);
  const browser = await chromium.launch({ executablePath, args: ARGS, timeout: HANG });
  return {
    server, fake, browser,
    async open(options = {}, origin = fake.origin) {
      const context = await browser.newContext({ acceptDownloads: true, ...options });
      const page = await openPage(context, origin + "/");
      return { context, page, errors: page.errors };
    },
    async stop() { await browser.close(); fake.close(); await server.stop(); },
  };
}

// A page that is ready, and a list of what went wrong in it.
export async function openPage(context, url) {
  context.setDefaultTimeout(HANG);
  const page = await context.newPage();
  page.errors = [];
  page.outside = [];
  page.on("pageerror", e => page.errors.push(String(e)));
  page.on("console", m => { if (m.type() === "error") page.errors.push(m.text()); });
  page.on("request", r => { if (!r.url().startsWith(new URL(url).origin) && !/^(blob|data):/.test(r.url())) page.outside.push(r.url()); });
  await page.addInitScript(() => { // news of other tabs wait while window.held is a list
    const own = Object.getOwnPropertyDescriptor(BroadcastChannel.prototype, "onmessage");
    Object.defineProperty(BroadcastChannel.prototype, "onmessage", { ...own, set(f) {
      own.set.call(this, e => window.held ? window.held.push(() => f(e)) : f(e));
    } });
  });
  await page.goto(url);
  await ready(page);
  return page;
}
export const holdNews = page => page.evaluate(() => { window.held = []; });
export const takeNews = page => page.evaluate(() => { const list = window.held; window.held = null; for (const f of list) f(); });
export const ready = page => page.waitForSelector("html[data-ready]");
export async function reload(page) { await page.reload(); await ready(page); }

async function startFake(server) {
  const sockets = new Set();
  const fake = { script: null, bodies: [], models: null, tools: null, servers: [] };
  const pass = (req, res, body) => {
    const up = request({ host: "127.0.0.1", port: server.port, path: req.url, method: req.method, headers: req.headers }, r => {
      res.writeHead(r.statusCode, r.headers);
      r.pipe(res);
    });
    up.on("error", () => res.destroy());
    res.on("close", () => up.destroy());
    up.end(body);
  };
  const http = createServer(async (req, res) => {
    const parts = [];
    for await (const p of req) parts.push(p);
    const body = Buffer.concat(parts);
    if (fake.every && fake.every(req, res)) return;
    const json = d => { res.writeHead(200, { "Content-Type": "application/json" }).end(JSON.stringify(d)); };
    if (req.url === "/v1/models" && fake.models) { json({ object: "list", data: fake.models }); return; }
    if (req.url === "/mcp/tools" && fake.tools) { json({ tools: fake.tools, servers: fake.servers }); return; }
    if (req.url === "/mcp/call" && fake.call) { json(await fake.call(JSON.parse(body))); return; }
    if (req.url !== "/v1/chat/completions" || !fake.script) { pass(req, res, body); return; }
    const asked = JSON.parse(body);
    fake.bodies.push(asked);
    await fake.script(asked, new Stream(res));
  });
  http.on("connection", s => { sockets.add(s); s.on("close", () => sockets.delete(s)); });
  http.listen(0, "127.0.0.1");
  await once(http, "listening");
  fake.origin = "http://127.0.0.1:" + http.address().port;
  fake.close = () => { for (const s of sockets) s.destroy(); http.close(); };
  fake.cutAll = () => { for (const s of sockets) s.destroy(); };
  // Every answer from now on is this text.
  fake.says = text => { fake.script = (body, s) => { s.text(typeof text === "function" ? text(body) : text); s.end(); }; };
  return fake;
}

export const TIMINGS = { queue_ms: 0.1, prompt_n: 100, cache_n: 40, prompt_ms: 50, predicted_n: 7, predicted_ms: 48, predicted_per_second: 123.4 };

// One answer of the stand-in, as the server would stream it.
class Stream {
  constructor(res) { this.res = res; this.open = false; this.gone = new Promise(r => res.on("close", r)); }
  event(d) {
    if (!this.open) this.res.writeHead(200, { "Content-Type": "text/event-stream" });
    this.open = true;
    this.res.write("data: " + JSON.stringify(d) + "\n\n");
  }
  delta(delta, finish = null) { this.event({ choices: [{ index: 0, delta, finish_reason: finish }] }); }
  text(content) { this.delta({ content }); }
  think(reasoning_content) { this.delta({ reasoning_content }); }
  call(name, args) { this.delta({ tool_calls: [{ index: 0, id: "call_1", type: "function", function: { name, arguments: JSON.stringify(args) } }] }); }
  end(finish = "stop", usage = { prompt_tokens: 140, completion_tokens: 7 }) {
    this.delta({}, finish);
    this.event({ choices: [], usage, timings: TIMINGS });
    this.res.end("data: [DONE]\n\n");
  }
  fail(status, error, headers = {}) { this.res.writeHead(status, { "Content-Type": "application/json", ...headers }).end(JSON.stringify({ error })); }
  cut() { this.res.destroy(); }
}

// What axe has to say about the page: nothing.
const axeSource = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
export async function axe(page, where) {
  await page.evaluate(axeSource + ";0");
  const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  assert.deepEqual(violations.map(v => `${where}: ${v.id}: ${v.nodes.map(n => n.target.join(" ") + " " + (n.any[0]?.message ?? n.failureSummary)).slice(0, 3).join("; ")}`), []);
}

/* What users do. */

export async function say(page, text) {
  await page.fill("#input", text);
  await page.press("#input", "Enter");
}
// Sends and waits for the answer's end.
export async function ask(page, text) {
  const n = await page.locator(".msg.assistant").count();
  await say(page, text);
  await settled(page, n + 1);
}
export async function settled(page, n) {
  if (n) await page.waitForFunction(k => document.querySelectorAll(".msg.assistant:not(.live)").length >= k, n);
  await page.waitForFunction(() => document.querySelector("#send").textContent === "Send" && !document.querySelector(".msg.live"));
}
export const texts = (page, what = ".msg") => page.locator(what + " > .body").allInnerTexts();
export const answers = page => texts(page, ".msg.assistant");
export const questions = page => texts(page, ".msg.user");

// Goes up until all of the conversation is drawn.
export const whole = page => page.waitForFunction(() => {
  document.querySelector("#log").scrollTop = 0;
  return !document.querySelector(".earlier");
}, null, { polling: 50, timeout: HANG });

// A conversation of n messages, straight into the database.
export async function seed(page, n, more = {}) {
  return page.evaluate(async ({ n, more }) => {
    const db = await new Promise(r => { const q = indexedDB.open("steel"); q.onsuccess = () => r(q.result); });
    const tx = db.transaction(["chats", "nodes"], "readwrite"), id = "seeded" + n + Math.random().toString(36).slice(2);
    const text = i => `Message ${i}. ` + "Some **bold** words, a `bit of code` and $x^2$.\n\n```python\nfor i in range(10):\n    print(i)\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n";
    for (let i = 0; i < n; i++)
      tx.objectStore("nodes").put({ id: id + "-" + i, chat: id, parent: i ? id + "-" + (i - 1) : null, role: i % 2 ? "assistant" : "user", content: text(i), created: 1e12 + i, status: "done" });
    tx.objectStore("chats").put({ id, title: `Seeded ${n}`, system: "", created: 1e12, updated: 1e12 + n, leaf: id + "-" + (n - 1), ...more });
    await new Promise((ok, no) => { tx.oncomplete = ok; tx.onabort = no; });
    db.close();
    return id;
  }, { n, more });
}
