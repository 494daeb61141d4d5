// The page and agents: models and adapters, Continue, edited answers, effort of thinking, exports, an
// installable page, titles, and the server's tools, which run only with the user's consent.
import { test, before, after, beforeEach } from "node:test";
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { createServer, request } from "node:http";
import { mkdtempSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { once } from "node:events";
import { tmpdir } from "node:os";
import path from "node:path";
import { startServer } from "./common.mjs";
import { startWorld, openPage, axe, reload, say, ask, settled, texts, answers } from "./page.mjs";

const root = path.resolve(import.meta.dirname, "../..");
let world;
before(async () => { world = await startWorld(); });
after(() => world.stop());
beforeEach(() => Object.assign(world.fake, { script: null, every: null, models: null, tools: null, servers: [], call: null, bodies: [] }));

// An entry of /v1/models.
const model = (id, more = {}) => ({ id, max_model_len: 4096, parent: null, default_sampling: { temperature: 0.7 }, reasoning_efforts: [], capabilities: ["completion", "tools", "thinking"], meta: { n_params: 1e6 }, ...more });
const last = () => world.fake.bodies.at(-1);
const chat = page => page.evaluate(async () => {
  const db = await new Promise(r => { const q = indexedDB.open("steel"); q.onsuccess = () => r(q.result); });
  const all = await new Promise(r => { const q = db.transaction("chats").objectStore("chats").getAll(); q.onsuccess = () => r(q.result); });
  db.close();
  return all.find(c => c.id === location.hash.slice(1));
});
const role = (page, name) => page.getByRole("button", { name, exact: true });
const options = (page, id) => page.locator(id + " option").allTextContents();

const until = async f => { while (!f()) await new Promise(r => setTimeout(r, 20)); };

// The messages on the screen become these.
const shows = (page, want) => page.waitForFunction(w => JSON.stringify([...document.querySelectorAll(".msg > .body")].map(e => e.innerText)) === w, JSON.stringify(want));

/* models */

test("one model is shown, several are a menu, and the choice belongs to the conversation", async () => {
  world.fake.says("ok");
  const { page, context } = await world.open();
  await page.waitForFunction(() => document.querySelector("#model").textContent);
  assert.ok(!await page.isVisible("#pick"));
  await ask(page, "Hello");
  assert.ok(!("model" in last()));
  world.fake.models = [model("base"), model("poems", { parent: "base", default_sampling: undefined, max_model_len: 512 }), model("other"), model("words", { capabilities: ["embedding"] })];
  await reload(page);
  await page.waitForFunction(() => document.querySelector("#model").textContent === "base");
  assert.deepEqual(await options(page, "#pick"), ["base", "poems (adapter of base)", "other"]);
  await ask(page, "And now?");
  assert.equal(last().model, "base");
  await page.getByLabel("Model").selectOption("poems");
  assert.equal(await page.textContent("#model"), "poems");
  assert.match(await page.textContent("#status"), /of 512 tokens/);
  await ask(page, "In verse");
  assert.equal(last().model, "poems");
  await page.click("#open-settings");
  assert.equal(await page.getAttribute("#set-temperature", "placeholder"), "model: 0.7"); // its parent's
  await page.click("#close-settings");
  const first = new URL(page.url()).hash;
  // new conversations begin with it; another choice there does not change this one
  await page.click("#new");
  await page.waitForSelector(".welcome");
  assert.equal(await page.inputValue("#pick"), "poems");
  await page.selectOption("#pick", "other");
  await ask(page, "Hi");
  assert.equal(last().model, "other");
  await page.goto(page.url().split("#")[0] + first);
  await reload(page);
  await page.waitForFunction(() => document.querySelector("#pick").value === "poems");
  // a model that is gone: the first one answers
  world.fake.models = [model("base"), model("other")];
  await reload(page);
  await page.waitForFunction(() => document.querySelector("#pick").value === "base");
  await context.close();
});

test("a real server's adapter is in the menu and answers", async () => {
  const dir = mkdtempSync(path.join(tmpdir(), "steel-page-")), file = path.join(dir, "poems.gguf");
  const make = `import array, random, sys
sys.path.insert(0, "tests")
from gguf_tools import write_gguf
draw, pack = random.Random(1), lambda n: array.array("f", [draw.uniform(-1, 1) for _ in range(n)]).tobytes()
tensors = [(f"blk.{l}.attn_q.weight.lora_{x}", [256, 2] if x == "a" else [2, 256], 0, pack(512)) for l in range(6) for x in "ab"]
write_gguf(sys.argv[1], {"general.type": "adapter", "adapter.type": "lora", "general.architecture": "qwen3moe", "adapter.lora.alpha": 2.0}, tensors)`;
  execFileSync("python3", ["-c", make, file], { cwd: root });
  const other = await startServer("--lora", "poems=" + file);
  try {
    const { page, errors, context } = await world.open({}, other.origin);
    await page.waitForSelector("#pick", { state: "visible" });
    assert.deepEqual(await options(page, "#pick"), ["steel-demo", "poems (adapter of steel-demo)"]);
    await page.click("#open-settings");
    await page.fill("#set-temperature", "0");
    await page.fill("#set-max_tokens", "30");
    await page.click("#close-settings");
    await page.selectOption("#effort", "none");
    await ask(page, "Tell me a short story.");
    const [base] = await answers(page);
    await page.selectOption("#pick", "poems");
    await role(page, "Retry").click();
    await page.waitForFunction(() => document.querySelector(".steps")?.textContent.includes("2/2"));
    await settled(page);
    assert.notEqual((await answers(page))[0], base);
    assert.deepEqual(errors, []);
    await context.close();
  } finally {
    await other.stop();
    rmSync(dir, { recursive: true });
  }
});

test("the models of a folder are in the menu, and are loaded when they are asked", async () => {
  const dir = mkdtempSync(path.join(tmpdir(), "steel-page-"));
  for (const name of ["one", "two"]) symlinkSync(path.join(root, "demo/steel-demo.gguf"), path.join(dir, name + ".gguf"));
  const other = await startServer("--models", dir, "--max-models", "2");
  try {
    const { page, errors, context } = await world.open({}, other.origin);
    await page.waitForSelector("#pick", { state: "visible" });
    const shown = await options(page, "#pick");
    assert.ok(shown.includes("one (not loaded)") && shown.includes("two (not loaded)"), shown);
    await page.click("#open-settings");
    await page.fill("#set-max_tokens", "8");
    await page.click("#close-settings");
    await page.selectOption("#pick", "two");
    await ask(page, "Hello. ".repeat(300)); // more than fits at first sight: its tokens are counted with its own template
    await page.waitForFunction(() => [...document.querySelectorAll("#pick option")].some(o => o.textContent === "two"));
    assert.ok((await options(page, "#pick")).includes("one (not loaded)"));
    assert.equal((await answers(page)).length, 1);
    assert.deepEqual(errors, []);
    await context.close();
  } finally {
    await other.stop();
    rmSync(dir, { recursive: true });
  }
});

/* Continue */

test("Continue goes on where an answer was stopped or cut, in place", async () => {
  const { page, context } = await world.open();
  world.fake.script = (body, s) => { s.think("Let me "); s.think("see."); s.text("Once upon a"); s.end("length"); };
  await ask(page, "A story");
  world.fake.script = (body, s) => { s.text(" time"); s.end("length"); };
  await role(page, "Continue").click();
  await page.waitForFunction(() => document.body.innerText.includes("Once upon a time"));
  await settled(page);
  await shows(page, ["A story", "Once upon a time"]);
  assert.equal(last().continue_final_message, true);
  assert.deepEqual(last().messages.at(-1), { role: "assistant", content: "Once upon a", reasoning_content: "Let me see." });
  assert.equal(await page.locator(".steps").count(), 0);
  assert.match(await page.textContent(".figures"), /^14 tokens, .*cut: it reached the longest answer/); // both pieces
  // stopped in the middle
  world.fake.script = (body, s) => s.text(", there");
  await role(page, "Continue").click();
  await page.waitForFunction(() => document.body.innerText.includes("time, there"));
  await page.press("body", "Escape");
  await settled(page);
  assert.match(await page.textContent(".figures"), /stopped/);
  // over a reload, by the keyboard, to its end
  await reload(page);
  world.fake.script = (body, s) => { s.text(" was."); s.end(); };
  await role(page, "Continue").focus();
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.body.innerText.includes("there was."));
  await settled(page);
  assert.equal(last().messages.at(-1).content, "Once upon a time, there");
  assert.equal(await role(page, "Continue").count(), 0);
  assert.deepEqual(await answers(page), ["Once upon a time, there was."]);
  // an older answer cannot go on: the conversation has
  world.fake.script = (body, s) => { s.text("cut"); s.end("length"); };
  await ask(page, "More");
  assert.equal(await role(page, "Continue").count(), 1);
  world.fake.says("whole");
  await ask(page, "And?");
  assert.equal(await role(page, "Continue").count(), 0);
  await context.close();
});

test("Continue keeps what was there when the server fails, and goes on with thinking", async () => {
  const { page, context } = await world.open();
  world.fake.script = (body, s) => { s.think("Let me"); s.end("length"); };
  await ask(page, "Why?");
  world.fake.script = (body, s) => s.fail(400, { message: "no such luck" });
  await role(page, "Continue").click();
  await page.waitForFunction(() => document.querySelector(".msg.assistant .error").textContent === "no such luck");
  await settled(page);
  world.fake.script = (body, s) => { s.think(" see."); s.text("Because."); s.end(); };
  await role(page, "Continue").click();
  await page.waitForFunction(() => document.body.innerText.includes("Because."));
  await settled(page);
  assert.deepEqual(last().messages.at(-1), { role: "assistant", content: "", reasoning_content: "Let me" });
  assert.equal(await page.textContent(".think > div"), "Let me see.");
  assert.equal(await page.textContent(".msg.assistant .error"), "");
  await context.close();
});

test("the real server goes on in the middle of a word", async () => {
  const { page, errors, context } = await world.open({}, world.server.origin);
  await page.click("#open-settings");
  await page.fill("#set-temperature", "0");
  await page.fill("#set-max_tokens", "40");
  await page.click("#close-settings");
  await page.getByLabel("Thinking").selectOption("none");
  await ask(page, "Tell me a short story.");
  const [whole] = await answers(page);
  await page.click("#open-settings");
  await page.fill("#set-max_tokens", "9");
  await page.click("#close-settings");
  await role(page, "Retry").click();
  await page.waitForFunction(() => document.querySelector(".steps")?.textContent.includes("2/2"));
  await settled(page);
  const [begin] = await answers(page);
  assert.ok(whole.startsWith(begin) && begin.length < whole.length, begin);
  await role(page, "Continue").click();
  await page.waitForFunction(n => document.querySelector(".msg.assistant .body").innerText.length > n, begin.length);
  await settled(page);
  const [more] = await answers(page);
  assert.ok(whole.startsWith(more), more);
  // through the end of thinking
  await page.getByLabel("Thinking").selectOption("");
  await role(page, "Retry").click();
  await page.waitForFunction(() => document.querySelector(".steps")?.textContent.includes("3/3"));
  await settled(page);
  assert.match(await page.textContent(".think > div"), /story/);
  for (let n = 0; !(await answers(page))[0] && n < 4; n++) {
    const was = await page.textContent(".figures");
    await role(page, "Continue").click();
    await page.waitForFunction(w => !document.querySelector(".msg.live") && document.querySelector(".figures").textContent !== w, was);
    await settled(page);
  }
  assert.ok(whole.startsWith((await answers(page))[0]), await page.innerText(".msg.assistant"));
  assert.deepEqual(errors, []);
  await context.close();
});

/* editing */

test("an answer is edited, with the later messages or without them", async () => {
  let n = 0;
  world.fake.script = (body, s) => { s.text("answer " + ++n); s.end(); };
  const { page, context } = await world.open();
  await ask(page, "one");
  await ask(page, "two");
  const edit = async (i, text) => {
    await page.locator(".msg.assistant").nth(i).getByRole("button", { name: "Edit" }).click();
    await page.getByLabel("Text of the answer").fill(text);
  };
  await edit(0, "nothing");
  assert.match(await page.textContent(".editor p"), /2 messages follow/);
  await page.keyboard.press("Escape");
  await shows(page, ["one", "answer 1", "two", "answer 2"]);
  assert.equal(await page.evaluate(() => document.activeElement.textContent), "Edit");
  await edit(0, "my answer");
  await role(page, "Save, keep later messages").click();
  await shows(page, ["one", "my answer", "two", "answer 2"]);
  assert.match(await page.locator(".figures").first().textContent(), /edited/);
  assert.equal(await page.locator(".steps").first().textContent(), "‹2/2›");
  assert.equal(world.fake.bodies.length, 2); // nothing was asked
  await reload(page);
  await shows(page, ["one", "my answer", "two", "answer 2"]);
  await ask(page, "three");
  assert.deepEqual(last().messages.map(m => m.content), ["one", "my answer", "two", "answer 2", "three"]);
  await edit(1, "short");
  await role(page, "Save without them").click();
  await shows(page, ["one", "my answer", "two", "short"]);
  // the last one: there is nothing to keep, and the model can go on from it
  await edit(1, "The end is");
  await page.keyboard.press("Control+Enter");
  await page.waitForFunction(() => document.body.innerText.includes("The end is"));
  world.fake.says(" near.");
  await role(page, "Continue").click();
  await page.waitForFunction(() => document.body.innerText.includes("The end is near."));
  await settled(page);
  assert.equal(last().messages.at(-1).content, "The end is");
  // nothing is lost: the old versions are branches
  await page.locator(".msg.assistant").first().getByRole("button", { name: "Previous version" }).click();
  await shows(page, ["one", "answer 1", "two", "answer 2"]);
  await context.close();
});

test("a question is changed without asking again; an answer with tool calls keeps its results", async () => {
  world.fake.says("an answer");
  const { page, context } = await world.open();
  await ask(page, "teh question");
  await page.locator(".msg.user").getByRole("button", { name: "Edit" }).click();
  await page.fill("#input", "the question");
  await role(page, "Save without sending").click();
  await shows(page, ["the question", "an answer"]);
  assert.ok(!await page.isVisible("#editing"));
  assert.equal(await page.inputValue("#input"), "");
  assert.equal(world.fake.bodies.length, 1);
  // with its results the call stays, without them it goes
  world.fake.tools = TOOLS;
  world.fake.call = () => ({ content: [{ type: "text", text: "ok" }] });
  await reload(page);
  await page.waitForSelector("#tools-button:not([hidden])");
  await switchOn(page, "read");
  let round = 0;
  world.fake.script = (body, s) => { if (++round === 1) { s.text("I look."); s.call("read", {}); s.end("tool_calls"); } else { s.text("Seen."); s.end(); } };
  await say(page, "Look");
  await role(page, "Run").click();
  await page.waitForFunction(() => document.body.innerText.includes("Seen."));
  await settled(page);
  const edit = async how => {
    await page.locator(".msg.assistant").nth(1).getByRole("button", { name: "Edit" }).click();
    await page.getByLabel("Text of the answer").fill("I look again.");
    await role(page, how).click();
    await page.waitForFunction(() => !document.querySelector(".editor"));
    await ask(page, "Next");
    return last().messages.slice(2, 5).map(m => m.role + (m.tool_calls ? " calls" : ""));
  };
  assert.deepEqual(await edit("Save, keep later messages"), ["user", "assistant calls", "tool"]);
  assert.deepEqual(await edit("Save without them"), ["user", "assistant", "user"]);
  await context.close();
});

/* thinking */

test("the effort of thinking is chosen beside the input and remembered by the conversation", async () => {
  world.fake.says("ok");
  world.fake.models = [model("thinker")];
  const { page, context } = await world.open();
  await page.waitForFunction(() => document.querySelector("#model").textContent);
  assert.deepEqual(await options(page, "#effort"), ["Default", "Off", "Low", "Medium", "High"]);
  await ask(page, "One");
  assert.ok(!("reasoning_effort" in last()) && !("reasoning_budget" in last()));
  const sent = async effort => {
    await page.getByLabel("Thinking").selectOption({ label: effort });
    await ask(page, "Again");
    return [last().reasoning_effort, last().reasoning_budget];
  };
  assert.deepEqual(await sent("Off"), ["none", undefined]);
  assert.deepEqual(await sent("Low"), ["low", 512]); // an eighth of 4,096
  assert.deepEqual(await sent("Medium"), ["medium", 1024]);
  assert.deepEqual(await sent("High"), ["high", undefined]);
  const first = page.url();
  await page.click("#new");
  await page.waitForSelector(".welcome");
  assert.equal(await page.inputValue("#effort"), "high");
  await page.selectOption("#effort", "none");
  await ask(page, "Hi");
  assert.equal(last().reasoning_effort, "none");
  await page.goto(first);
  await reload(page);
  assert.equal(await page.inputValue("#effort"), "high");
  // the words of the model's own template, without a budget; words it lacks are kept
  world.fake.models = [model("words", { reasoning_efforts: ["low", "max"] })];
  await reload(page);
  await page.waitForFunction(() => document.querySelector("#model").textContent === "words");
  assert.deepEqual(await options(page, "#effort"), ["Default", "Off", "Low", "Maximum", "High"]);
  assert.deepEqual(await sent("Low"), ["low", undefined]);
  // a model that does not think has no menu, and gets no such field
  world.fake.models = [model("plain", { capabilities: ["completion"] })];
  await reload(page);
  await page.waitForFunction(() => document.querySelector("#model").textContent === "plain");
  assert.ok(!await page.isVisible("#effort"));
  await ask(page, "Hi");
  assert.ok(!("reasoning_effort" in last()));
  await context.close();
});

test("the newer samplers are in the settings, with the server's defaults", async () => {
  world.fake.says("ok");
  const { page, context } = await world.open();
  await page.waitForFunction(() => document.querySelector("#model").textContent);
  const own = (await (await fetch(world.server.baseURL + "/models")).json()).data[0].default_sampling;
  await page.click("#open-settings");
  assert.ok(!await page.isVisible("#set-typical_p"));
  await page.click("#advanced > summary");
  const set = { typical_p: 0.5, top_n_sigma: 2, dynatemp_range: 1, dynatemp_exponent: 2, xtc_probability: 0.5, xtc_threshold: 0.2, dry_multiplier: 0.8, dry_base: 1.5, dry_allowed_length: 3, dry_penalty_last_n: 100, repeat_last_n: 32, mirostat: 2, mirostat_tau: 4, mirostat_eta: 0.2 };
  for (const [name, value] of Object.entries(set)) {
    assert.equal(await page.getAttribute("#set-" + name, "placeholder"), "model: " + own[name], name);
    await page.fill("#set-" + name, String(value));
  }
  await page.click("#close-settings");
  await ask(page, "Hi");
  for (const [name, value] of Object.entries(set)) assert.equal(last()[name], value, name);
  // the real server takes them
  const sent = Object.fromEntries(Object.keys(set).map(k => [k, last()[k]]));
  const r = await fetch(world.server.baseURL + "/chat/completions", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ ...sent, max_tokens: 2, messages: [{ role: "user", content: "Hi" }] }) });
  assert.equal(r.status, 200, await r.text());
  await page.click("#open-settings");
  assert.ok(await page.isVisible("#set-typical_p")); // open: something is set
  await page.click("#close-settings");
  await context.close();
});

/* Export */

test("exports say what they are, by mouse and keyboard", async () => {
  world.fake.says("ok");
  const { page, context } = await world.open({ viewport: { width: 360, height: 640 } });
  assert.ok(await page.isDisabled("#export"));
  await ask(page, "Hi");
  await page.locator("#export").focus();
  await page.keyboard.press("Enter");
  assert.ok(await page.getByRole("button", { name: /^Export as Markdown/ }).isVisible());
  const box = await page.locator("#export-menu").boundingBox();
  assert.ok(box.x >= 0 && box.x + box.width <= 360, JSON.stringify(box));
  await page.keyboard.press("Tab");
  await page.keyboard.press("Tab");
  const file = page.waitForEvent("download");
  await page.keyboard.press("Enter");
  assert.equal((await file).suggestedFilename(), "Hi.json");
  assert.ok(!await page.locator("#export-menu").isVisible());
  await context.close();
});

/* installable */

// What a proxy with a path of its own does.
async function behindPrefix(server, prefix) {
  const http = createServer((req, res) => {
    if (!req.url.startsWith(prefix)) { res.writeHead(404).end(); return; }
    const up = request({ host: "127.0.0.1", port: server.port, path: req.url.slice(prefix.length - 1), method: req.method, headers: req.headers }, r => { res.writeHead(r.statusCode, r.headers); r.pipe(res); });
    up.on("error", () => res.destroy());
    req.pipe(up);
  }).listen(0, "127.0.0.1");
  await once(http, "listening");
  return { url: `http://127.0.0.1:${http.address().port}${prefix}`, close: () => { http.closeAllConnections(); http.close(); } };
}

test("the page can be installed, behind a path and with a key, too", async () => {
  const locked = await startServer("--api-key", "sesame"), proxy = await behindPrefix(locked, "/some/where/");
  try {
    const context = await world.browser.newContext(), page = await openPage(context, proxy.url);
    const cdp = await context.newCDPSession(page);
    const { url, errors, data } = await cdp.send("Page.getAppManifest");
    assert.equal(url, proxy.url + "web/manifest.webmanifest");
    assert.deepEqual(errors, []);
    const manifest = JSON.parse(data);
    assert.equal(new URL(manifest.start_url, url).href, proxy.url);
    assert.equal(new URL(manifest.scope, url).href, proxy.url);
    const { installabilityErrors } = await cdp.send("Page.getInstallabilityErrors");
    assert.deepEqual(installabilityErrors.filter(e => e.errorId !== "in-incognito"), []);
    const type = async u => { const r = await fetch(u); assert.equal(r.status, 200, u); return r.headers.get("content-type"); };
    assert.equal(await type(url), "application/manifest+json");
    for (const icon of manifest.icons) assert.equal(await type(new URL(icon.src, url)), icon.type);
    const sizes = await page.evaluate(async base => Object.fromEntries(await Promise.all([192, 512].map(async n => {
      const i = new Image();
      i.src = `${base}web/icon-${n}.png`;
      await i.decode();
      return [n, [i.naturalWidth, i.naturalHeight]];
    }))), proxy.url);
    assert.deepEqual(sizes, { 192: [192, 192], 512: [512, 512] });
    for (const link of await page.locator("head link[rel~=icon], head link[rel=apple-touch-icon]").all())
      assert.match(await type(new URL(await link.getAttribute("href"), proxy.url)), /^image\//);
    // and it talks to the server through that path
    await page.fill("#key", "sesame");
    await page.evaluate(() => document.querySelector("#key").blur());
    await page.click("#close-settings");
    await page.waitForFunction(() => document.querySelector("#model").textContent);
    await ask(page, "Hello!");
    assert.ok((await answers(page))[0].length > 0);
    await context.close();
  } finally {
    proxy.close();
    await locked.stop();
  }
});

/* titles */

// Answers, and titles: requests that are no part of a conversation.
function titled(title) {
  const asked = [];
  world.fake.models = [model("large", { meta: { n_params: 7e9 } })];
  world.fake.script = async (body, s) => {
    if (body.stream) { s.text("The answer is **here**."); s.end(); return; }
    asked.push(body);
    const said = typeof title === "function" ? await title(body, s) : title;
    if (said === null) s.fail(500, { message: "no" });
    else if (said !== undefined) s.res.writeHead(200, { "Content-Type": "application/json" }).end(JSON.stringify({ choices: [{ message: { role: "assistant", content: said } }] }));
  };
  return asked;
}

test("the model writes the title, once, outside the conversation", async () => {
  const asked = titled('Title: "A **Fine** Question"\nAnd more.');
  const { page, errors, context } = await world.open();
  await ask(page, "What is " + "very ".repeat(500) + "long?");
  await page.waitForFunction(() => document.querySelector("#title").textContent === "A Fine Question");
  assert.equal(await page.textContent("#chats .name"), "A Fine Question");
  const [b] = asked;
  assert.ok(b.max_tokens <= 64 && b.messages.length === 1 && b.messages[0].content.length < 2500);
  assert.deepEqual([b.cache_prompt, b.reasoning_effort, b.stream], [false, "none", undefined]);
  assert.match(b.messages[0].content, /User: What is very[^]*Assistant: The answer is/);
  assert.deepEqual(await answers(page), ["The answer is here."]);
  await ask(page, "And?");
  assert.deepEqual(last().messages.map(m => m.role), ["user", "assistant", "user"]);
  await reload(page);
  assert.equal(await page.textContent("#title"), "A Fine Question");
  assert.equal(asked.length, 1);
  assert.deepEqual(errors, []);
  await context.close();
});

test("a title leaves the conversation's cache as it is", async () => {
  const real = (await (await fetch(world.server.baseURL + "/models")).json()).data[0];
  const sent = [], { page, context } = await world.open();
  page.on("request", r => { if (r.url().endsWith("/v1/chat/completions")) sent.push(JSON.parse(r.postData())); });
  await page.click("#open-settings");
  await page.fill("#set-max_tokens", "8");
  await page.click("#close-settings");
  const cached = [];
  for (const params of [1e6, 7e9]) { // without a title, with one
    world.fake.models = [{ ...real, meta: { n_params: params } }];
    await reload(page);
    await page.waitForFunction(() => document.querySelector("#model").textContent);
    await page.click("#new");
    await page.waitForSelector(".welcome");
    await ask(page, `${params}: ` + "the red fox walks over the old bridge ".repeat(30));
    if (params > 1e8) await until(() => sent.some(b => b.cache_prompt === false));
    await world.server.idle();
    await ask(page, "And then?");
    cached.push(Number(/\+ (\d+) cached/.exec(await page.locator(".figures").last().textContent())[1]));
  }
  assert.equal(sent.filter(b => b.cache_prompt === false).length, 1);
  assert.ok(cached[0] > 250 && cached[1] === cached[0], String(cached));
  await context.close();
});

test("without a usable title the first words stay; the user's own title is never changed", async () => {
  titled("");
  const { page, context } = await world.open();
  for (const said of [null, "", "…!?", "x".repeat(100)]) {
    const asked = titled(said);
    await page.click("#new");
    await page.waitForSelector(".welcome");
    await ask(page, "Some words");
    await until(() => asked.length);
    await page.waitForFunction(async () => (await new Promise(r => { const q = indexedDB.open("steel"); q.onsuccess = () => { const g = q.result.transaction("chats").objectStore("chats").get(location.hash.slice(1)); g.onsuccess = () => { q.result.close(); r(g.result); }; }; })).untitled === false);
    assert.equal(await page.textContent("#title"), "Some words");
  }
  // renamed while the model thinks about it
  let give;
  const late = new Promise(r => { give = r; });
  const asked = titled(() => late);
  await page.click("#new");
  await page.waitForSelector(".welcome");
  await ask(page, "Some words");
  await until(() => asked.length);
  await page.locator("#chats li.on .name").focus();
  await page.keyboard.press("F2");
  await page.keyboard.type("Mine");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelector("#title").textContent === "Mine");
  const replied = page.waitForResponse(r => r.url().endsWith("/v1/chat/completions"));
  give("Theirs");
  await (await replied).finished();
  await ask(page, "More");
  assert.equal((await chat(page)).title, "Mine");
  await context.close();
});

test("a title waits for the user's messages, and can be turned off; small models write none", async () => {
  let hang = true;
  const asked = titled(() => (hang ? undefined : "Late But There"));
  const { page, context } = await world.open();
  await ask(page, "First");
  await until(() => asked.length);
  hang = false;
  await ask(page, "Second"); // interrupts it
  await page.waitForFunction(() => document.querySelector("#title").textContent === "Late But There");
  assert.equal(asked.length, 2);
  await page.click("#open-settings");
  await page.getByLabel("The model writes their titles").uncheck();
  await page.click("#close-settings");
  await page.click("#new");
  await page.waitForSelector(".welcome");
  await ask(page, "No title please");
  await ask(page, "Really");
  assert.equal(await page.textContent("#title"), "No title please");
  assert.equal(asked.length, 2);
  await context.close();
  world.fake.models = [model("small")];
  const { page: other, context: c2 } = await world.open();
  await ask(other, "First");
  await ask(other, "Second");
  assert.equal(asked.length, 2);
  await c2.close();
});

/* the server's tools */

const TOOLS = [
  { server: "files", name: "read", description: "Reads a file", parameters: { type: "object", properties: { path: { type: "string" } } } },
  { server: "web", name: "read", description: "Reads a page", parameters: { type: "object", properties: {} } },
  { server: "web", name: "se arch", description: "<b>Searches</b>", parameters: { type: "object", properties: {} } },
];
const switchOn = async (page, ...names) => {
  await page.click("#tools-button");
  for (const n of names) await page.locator(".server-tools").getByLabel(n, { exact: true }).first().check();
  await page.click("#close-settings");
};

test("the server's tools are listed, switched on, asked for, run, and their results shown", async () => {
  world.fake.tools = TOOLS;
  const calls = [];
  world.fake.call = body => { calls.push(body); return { content: [{ type: "text", text: "line one <script>" }, { type: "image", data: "x" }], isError: false }; };
  world.fake.says("no tools");
  const { page, errors, context } = await world.open();
  await page.waitForSelector("#tools-button:not([hidden])");
  assert.equal(await page.textContent("#tools-button"), "Tools: none on");
  await ask(page, "Before");
  assert.ok(!("tools" in last()));
  await switchOn(page, "read");
  await page.waitForFunction(() => document.querySelector("#tools-button").textContent === "Tools: 1");
  let round = 0;
  world.fake.script = (body, s) => {
    if (++round === 1) { s.call("read", { path: "/etc/<b>hosts" }); s.end("tool_calls"); }
    else { s.text("done"); s.end(); }
  };
  await say(page, "Read it");
  await page.waitForSelector(".ask");
  assert.match(await page.textContent(".ask p"), /Run read of files\?/);
  assert.equal(await page.textContent(".ask pre"), '{\n  "path": "/etc/<b>hosts"\n}');
  assert.equal(await page.evaluate(() => document.activeElement.className), "ask");
  await page.keyboard.press("Enter"); // allows nothing
  await page.keyboard.press("Tab");
  await page.keyboard.press("Tab");
  assert.equal(await page.evaluate(() => document.activeElement.textContent), "Run");
  assert.deepEqual(calls, []);
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.body.innerText.includes("done"));
  await settled(page);
  assert.deepEqual(calls, [{ server: "files", name: "read", arguments: { path: "/etc/<b>hosts" } }]);
  assert.deepEqual(world.fake.bodies[1].tools, [{ type: "function", function: { name: "read", description: "Reads a file", parameters: TOOLS[0].parameters } }]);
  assert.deepEqual(last().messages.at(-1), { role: "tool", tool_call_id: "call_1", content: "line one <script>\n[image]" });
  assert.match(await page.textContent(".msg.tool summary"), /Result of read/);
  assert.ok(!await page.isVisible(".msg.tool pre")); // folded
  await page.click(".msg.tool summary");
  assert.equal(await page.innerText(".msg.tool pre"), "line one <script>\n[image]");
  // the choice is kept
  await reload(page);
  await page.waitForFunction(() => document.querySelector("#tools-button").textContent === "Tools: 1");
  assert.deepEqual(errors, []);
  await context.close();
});

test("a denied call does not run, the model hears of it, and errors are results", async () => {
  world.fake.tools = TOOLS;
  let calls = 0, reply = { content: [{ type: "text", text: "no such file" }], isError: true };
  world.fake.call = () => { calls++; return reply; };
  const { page, context } = await world.open();
  await page.waitForSelector("#tools-button:not([hidden])");
  await switchOn(page, "read");
  let round = 0;
  world.fake.script = (body, s) => { if (++round % 2) { s.call("read", {}); s.end("tool_calls"); } else { s.text("done " + round); s.end(); } };
  await say(page, "Read it");
  await role(page, "Deny").click();
  await page.waitForFunction(() => document.body.innerText.includes("done 2"));
  await settled(page);
  assert.equal(calls, 0);
  assert.equal(last().messages.at(-1).content, "error: the user did not allow this call");
  await say(page, "Read it again");
  await role(page, "Run").click();
  await page.waitForFunction(() => document.body.innerText.includes("done 4"));
  await settled(page);
  assert.equal(calls, 1);
  assert.equal(last().messages.at(-1).content, "error: no such file");
  // Esc while the question is open: the call does not run, and the request is not sent
  const before = world.fake.bodies.length;
  let open;
  world.fake.script = (body, s) => { round++; open = s; };
  await say(page, "Once more");
  await until(() => open);
  await page.keyboard.type("typing"); // the question takes no focus from who types
  open.call("read", {});
  open.end("tool_calls");
  await page.waitForSelector(".ask");
  assert.equal(await page.evaluate(() => document.activeElement.id), "input");
  await page.keyboard.press("Escape");
  await settled(page);
  assert.equal(await page.locator(".ask").count(), 0);
  assert.deepEqual([calls, world.fake.bodies.length], [1, before + 1]);
  await context.close();
});

test("Always allow holds in this conversation, for this tool", async () => {
  world.fake.tools = TOOLS;
  const calls = [];
  world.fake.call = body => { calls.push(body.server + "/" + body.name); return { content: [{ type: "text", text: "ok" }] }; };
  const { page, context } = await world.open();
  await page.waitForSelector("#tools-button:not([hidden])");
  await page.click("#tools-button");
  for (const box of await page.locator(".server-tools input").all()) await box.check();
  await page.click("#close-settings");
  let next = [];
  world.fake.script = (body, s) => { const c = next.shift(); if (c) { s.call(c, {}); s.end("tool_calls"); } else { s.text("done"); s.end(); } };
  next = ["read", "read"];
  await say(page, "Go");
  await role(page, "Always allow in this conversation").click();
  await settled(page, 3);
  assert.deepEqual(calls, ["files/read", "files/read"]);
  // names are unique and allowed by the API; another server's tool of that name asks
  assert.deepEqual(last().tools.map(t => t.function.name), ["read", "web_read", "se_arch"]);
  await reload(page);
  await page.waitForSelector("#tools-button:not([hidden])");
  next = ["read", "web_read"];
  await say(page, "Go on");
  await page.waitForSelector(".ask");
  assert.match(await page.textContent(".ask p"), /Run read of web\?/);
  await role(page, "Run").click();
  await settled(page, 6);
  assert.deepEqual(calls, ["files/read", "files/read", "files/read", "web/read"]);
  // another conversation asks again
  await page.click("#new");
  await page.waitForSelector(".welcome");
  next = ["read"];
  await say(page, "Go");
  await page.waitForSelector(".ask");
  await role(page, "Deny").click();
  await settled(page, 2);
  assert.equal(calls.length, 4);
  // an imported conversation brings no permission
  await page.click("#open-settings");
  const chooser = page.waitForEvent("filechooser");
  await page.click("#import");
  const permitted = { format: "steel-chats", version: 1, chats: [{ id: "x", title: "Imported", allow: TOOLS.map(t => `server:${t.server}/${t.name}`), leaf: "m", nodes: [{ id: "m", parent: null, role: "user", content: "Hello" }] }] };
  await (await chooser).setFiles([{ name: "x.json", mimeType: "application/json", buffer: Buffer.from(JSON.stringify(permitted)) }]);
  await page.waitForFunction(() => document.querySelector("#title").textContent === "Imported");
  next = ["read"];
  await say(page, "Go");
  await page.waitForSelector(".ask");
  assert.equal(calls.length, 4);
  await page.keyboard.press("Escape");
  await context.close();
});

test("a model that only calls tools comes to an end", async () => {
  world.fake.tools = TOOLS;
  let calls = 0;
  world.fake.call = () => { calls++; return { content: [{ type: "text", text: "ok" }] }; };
  const { page, context } = await world.open();
  await page.waitForSelector("#tools-button:not([hidden])");
  await switchOn(page, "read");
  world.fake.script = (body, s) => { s.call("read", {}); s.end("tool_calls"); };
  await say(page, "Go");
  await role(page, "Always allow in this conversation").click();
  await settled(page, 16);
  assert.deepEqual([calls, world.fake.bodies.length], [15, 16]);
  assert.equal(last().tool_choice, "none");
  assert.ok(world.fake.bodies.slice(0, -1).every(b => !("tool_choice" in b)));
  await context.close();
});

test("tools of servers that were starting or had failed appear when they are up", async () => {
  world.fake.tools = [];
  world.fake.servers = [{ name: "files", state: "starting" }, { name: "web", state: "failed", error: "HTTP status 401" }];
  const { page, context } = await world.open();
  await page.waitForSelector("#tools-button:not([hidden])");
  await page.click("#tools-button");
  assert.match(await page.innerText("#server-tools"), /files: starting[^]*web: HTTP status 401/);
  // beside the open settings, by itself; the focus stays
  world.fake.tools = TOOLS.slice(0, 1);
  world.fake.servers = [{ name: "files", state: "running" }, { name: "web", state: "starting" }];
  await page.waitForSelector(".server-tools");
  assert.match(await page.innerText("#server-tools"), /web: starting/);
  await page.focus(".server-tools input");
  world.fake.servers = [{ name: "files", state: "running" }, { name: "web", state: "failed", error: "HTTP status 401" }];
  await page.waitForFunction(() => document.querySelector("#server-tools").innerText.includes("401"));
  assert.ok(await page.evaluate(() => document.activeElement.matches(".server-tools input")));
  // when the settings open
  await page.click("#close-settings");
  world.fake.servers = [{ name: "files", state: "running" }];
  await page.click("#tools-button");
  await page.waitForFunction(() => !document.querySelector("#server-tools").innerText.includes("401"));
  await context.close();
});

test("a server without tools shows none", async () => {
  const { page, errors, context } = await world.open({}, world.server.origin);
  await page.waitForFunction(() => document.querySelector("#model").textContent);
  await page.click("#open-settings");
  assert.equal(await page.locator(".server-tools").count(), 0);
  await page.click("#close-settings");
  assert.ok(!await page.isVisible("#tools-button"));
  assert.deepEqual(errors, []);
  await context.close();
});

test("a scripted model calls a tool of a real MCP server with consent, with a key, and answers", async () => {
  const dir = mkdtempSync(path.join(tmpdir(), "steel-page-")), file = path.join(dir, "scripted.gguf"), config = path.join(dir, "mcp.json");
  execFileSync("python3", [path.join(root, "tests/script_model.py"), file, "echo", '{"text": "<i>milk</i>"}', "The tool has answered."], { cwd: root });
  const late = `until [ -e go ]; do sleep 0.1; done; exec python3 "$0"`; // it starts when it is told to
  writeFileSync(config, JSON.stringify({ mcpServers: { shop: { command: "sh", args: ["-c", late, path.join(root, "tests/mcp_server.py")], cwd: dir } } }));
  const was = process.env.STEEL_TEST_MODEL;
  process.env.STEEL_TEST_MODEL = file;
  const other = await startServer("--mcp-config", config, "--api-key", "sesame");
  if (was === undefined) delete process.env.STEEL_TEST_MODEL; else process.env.STEEL_TEST_MODEL = was;
  try {
    const { page, context } = await world.open({}, other.origin);
    await page.fill("#key", "sesame");
    await page.evaluate(() => document.querySelector("#key").blur());
    await page.click("#close-settings");
    await page.waitForSelector("#tools-button:not([hidden])");
    await page.click("#tools-button");
    assert.match(await page.innerText("#server-tools"), /shop: starting/);
    writeFileSync(path.join(dir, "go"), "");
    await page.getByLabel("echo", { exact: true }).check();
    await page.click("#close-settings");
    await say(page, "What shall I buy?");
    await page.waitForSelector(".ask");
    assert.match(await page.textContent(".ask"), /Run echo of shop\?[^]*<i>milk<\/i>/);
    await role(page, "Run").click();
    await page.waitForFunction(() => document.body.innerText.includes("The tool has answered."));
    await settled(page);
    assert.match(await page.textContent(".think > div"), /wants me to use a tool/);
    await page.click(".msg.tool summary");
    assert.equal(await page.innerText(".msg.tool pre"), "echo: <i>milk</i>");
    await context.close();
  } finally {
    await other.stop();
    rmSync(dir, { recursive: true });
  }
});

test("axe finds nothing in any of it, and a phone shows it whole; light and dark", async () => {
  const shots = process.env.STEEL_LOOK; // a folder for pictures
  for (const colorScheme of ["light", "dark"])
    for (const size of [{}, { viewport: { width: 360, height: 740 }, isMobile: true, hasTouch: true }]) {
      world.fake.models = [model("a-model-with-a-long-name-30b-instruct-q4_k_m"), model("poems", { parent: "a-model-with-a-long-name-30b-instruct-q4_k_m" })];
      world.fake.tools = TOOLS;
      world.fake.call = () => ({ content: [{ type: "text", text: "ok" }] });
      const { page, context } = await world.open({ colorScheme, ...size });
      const look = async where => {
        await axe(page, where);
        assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), where + ": too wide");
        if (shots) await page.screenshot({ path: path.join(shots, `${where}-${colorScheme}-${size.isMobile ? "phone" : "desk"}.png`) });
      };
      await page.waitForSelector("#tools-button:not([hidden])");
      await switchOn(page, "read");
      await look("menus");
      world.fake.script = (body, s) => { s.text("The beginning of an answer that is"); s.end("length"); };
      await ask(page, "A question");
      await look("continue");
      await page.locator(".msg.assistant").getByRole("button", { name: "Edit" }).click();
      await look("editor");
      await page.keyboard.press("Escape");
      await page.click("#export");
      await look("export");
      await page.keyboard.press("Escape");
      world.fake.script = (body, s) => { s.call("read", { path: "/a/very/long/path/".repeat(20) }); s.end("tool_calls"); };
      await say(page, "Read");
      await page.waitForSelector(".ask");
      await look("consent");
      await page.keyboard.press("Escape");
      await settled(page);
      await page.locator(".msg.user").first().getByRole("button", { name: "Edit" }).click();
      await look("question");
      await page.keyboard.press("Escape");
      await page.click("#tools-button");
      await look("tools");
      await page.click("#advanced > summary");
      await look("advanced");
      await context.close();
    }
});
