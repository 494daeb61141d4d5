// The page, looking: Markdown, code and formulas; nothing a model writes becomes more than text; themes, phone, screen
// readers, no request to anybody else. Takes the screenshots of docs/img when STEEL_SCREENSHOTS is set.
import { test, before, after, beforeEach } from "node:test";
import assert from "node:assert/strict";
import { execFileSync, spawnSync } from "node:child_process";
import { mkdtempSync, readFileSync, readdirSync, rmSync, statSync, existsSync } from "node:fs";
import { tmpdir, networkInterfaces } from "node:os";
import path from "node:path";
import { startServer } from "./common.mjs";
import { startWorld, axe, reload, ask, say, settled, answers, seed } from "./page.mjs";

const root = path.resolve(import.meta.dirname, "../..");
const LIBRARIES = { marked: "/usr/share/javascript/marked", purify: "/usr/share/nodejs/dompurify", katex: "/usr/share/javascript/katex", highlight: "/usr/share/javascript/highlight.js" };
const missing = Object.entries(LIBRARIES).filter(([, p]) => !existsSync(p)).map(([n]) => n);
const skipRich = missing.length ? "the page was built without " + missing.join(", ") : false;
if (skipRich) console.log("skipped: page-look, rendering: " + skipRich);

let world;
before(async () => { world = await startWorld(); });
after(() => world.stop());
beforeEach(() => { world.fake.script = null; world.fake.every = null; world.fake.bodies.length = 0; });

const RICH = `## A plan

Some **bold**, *slanted* and \`inline code\`, a [link](https://example.org/a?b=1&c=2), a vector<int> and H<sub>2</sub>O.

1. first
2. second
   - nested
     - deeper
- [x] done
- [ ] open

> A quote, $5 and $6.

| Name | Value |
|:-----|------:|
| pi   | 3.14  |

\`\`\`python
def add(a, b):
    return a + b  # <script>
\`\`\`

Einstein: $E = mc^2$, and \\(a_1\\), and

$$\\int_0^1 x^2\\,dx = \\frac{1}{3}$$

\\[ \\sqrt{2} \\]
`;

test("a text whose Markdown would take too much work is shown as it is", { skip: skipRich }, async () => {
  const { page } = await world.open();
  for (const mark of ["**a ", "[a](", "<a ", "``a`"]) {
    world.fake.says("Begin. " + mark.repeat(10000) + "The end.");
    await ask(page, "Go on");
    assert.match((await answers(page)).at(-1), /The end\.$/);
    assert.ok(await page.locator(".msg.assistant .body").last().evaluate(e => e.classList.contains("plain")), mark);
  }
});

test("Markdown, code and formulas are rendered; code is copied", { skip: skipRich }, async () => {
  world.fake.says(RICH);
  const { page, errors, context } = await world.open({ permissions: ["clipboard-read", "clipboard-write"] });
  await ask(page, "Show me");
  const count = sel => page.locator(".msg.assistant .body " + sel).count();
  assert.equal(await page.locator(".body h2").innerText(), "A plan");
  assert.equal(await count("strong"), 1);
  assert.equal(await count("ol > li"), 2);
  assert.equal(await count("ul ul > li"), 1);
  assert.equal(await count("sub"), 1);
  assert.match(await page.innerText(".msg.assistant .body"), /a vector<int> and/);
  assert.match(await page.innerText(".msg.assistant .body"), /☑ done/);
  assert.equal(await count("table td"), 2);
  assert.equal(await page.getAttribute(".body a", "href"), "https://example.org/a?b=1&c=2");
  assert.equal(await page.getAttribute(".body a", "rel"), "noopener noreferrer");
  assert.ok(await count(".hljs-keyword") >= 2);
  assert.equal(await page.innerText(".code-head span"), "python");
  assert.equal(await count(".katex"), 4);
  assert.equal(await count(".katex-display"), 2);
  assert.match(await page.innerText(".body blockquote"), /\$5 and \$6/);
  await page.getByRole("button", { name: "Copy code" }).click();
  assert.equal(await page.evaluate(() => navigator.clipboard.readText()), "def add(a, b):\n    return a + b  # <script>");
  assert.deepEqual(errors, []);
  // KaTeX's fonts come from here and load
  assert.ok(await page.evaluate(async () => { await document.fonts.ready; return [...document.fonts].some(f => f.family.startsWith("KaTeX") && f.status === "loaded"); }));
  assert.deepEqual(page.outside, []);
  await context.close();
});

test("text that comes in pieces ends like text that comes at once, and finished blocks are not drawn again", { skip: skipRich }, async () => {
  const { page, context } = await world.open();
  let go;
  const marked = new Promise(r => { go = r; });
  world.fake.script = async (body, s) => {
    for (let i = 0; i < RICH.length; i += 7) {
      s.text(RICH.slice(i, i + 7));
      if (i % 70 === 0) await new Promise(r => setTimeout(r, 5));
      if (i === 210) await marked;
    }
    s.end();
  };
  await say(page, "In pieces");
  await page.waitForSelector(".msg.live .block:nth-child(3)");
  await page.evaluate(() => { document.querySelector(".msg.live .block").dataset.old = "1"; });
  go();
  await settled(page, 1);
  assert.equal(await page.locator(".block[data-old]").count(), 1);
  const pieces = await page.evaluate(() => { delete document.querySelector(".block").dataset.old; return document.querySelector(".msg.assistant .body").innerHTML; });
  await reload(page);
  assert.equal(await page.evaluate(() => document.querySelector(".msg.assistant .body").innerHTML), pieces);
  await context.close();
});

const EVIL = [
  "<img src=x onerror=\"window.hacked=1\">", "<script>window.hacked=1</script>", "<svg onload=window.hacked=1>", "<svg><script>window.hacked=1</script></svg>",
  "[x](javascript:window.hacked=1)", "[x](JaVaScRiPt&#58;window.hacked=1)", "[x](data:text/html,<script>window.hacked=1</script>)", "[x](vbscript:x)", "<a href=\"javascript:window.hacked=1\">x</a>",
  "<iframe srcdoc=\"<script>parent.hacked=1</script>\"></iframe>", "<math><mtext><table><mglyph><style><!--</style><img title=\"--&gt;&lt;img src=1 onerror=window.hacked=1&gt;\">",
  "<form><math><mtext></form><form><mglyph><style></math><img src onerror=window.hacked=1>", "<b onmouseover=window.hacked=1>hover</b>", "<style>body{display:none}</style>",
  "<base href=//evil.example>", "<meta http-equiv=refresh content=\"0;url=//evil.example\">", "<object data=javascript:window.hacked=1>", "<link rel=stylesheet href=//evil.example/x.css>",
  "![alt](https://evil.example/track.png)", "![\" onerror=\"window.hacked=1](x)", "```html\n<script>window.hacked=1</script>\n```", "```\"><img src=x onerror=window.hacked=1>\ncode\n```",
  "$\\href{javascript:window.hacked=1}{x}$", "$\\url{javascript:window.hacked=1}$", "$\\includegraphics{https://evil.example/x.png}$", "$\\htmlClass{x}{y}$", "$\\def\\a{\\a\\a}\\a$", "$\\rule{1000em}{1000em}$",
  "<input id=input name=body autofocus onfocus=window.hacked=1>", "<kbd><img src=x onerror=window.hacked=1></kbd>", "<script><img src=x onerror=window.hacked=1>", "[a]: javascript:window.hacked=1\n\n[a]", "<https://evil.example/<script>>",
  "<div id=send class=notice data-math=inline>\\href{javascript:x}{y}</div>", "<details open ontoggle=window.hacked=1>", ">".repeat(3000) + " deep", "- ".repeat(2000) + "deep", "[".repeat(5000), "$".repeat(3000), "\\(".repeat(3000), "*".repeat(4000), "<b>".repeat(3000),
];

test("hostile text stays text: as answer, thinking, tool call, question, file name, title", { skip: skipRich }, async () => {
  const { page, errors, context } = await world.open();
  for (const evil of [...EVIL, EVIL.slice(0, 35).join("\n\n")]) {
    world.fake.script = (body, s) => { s.think(evil); s.text(evil); s.call(evil.slice(0, 100), { x: evil }); s.end(); };
    await page.click("#new");
    await page.waitForSelector(".welcome");
    await ask(page, evil.slice(0, 2000));
    await page.evaluate(() => { for (const e of document.querySelectorAll("#log *, #chats *")) e.dispatchEvent(new MouseEvent("mouseover", { bubbles: true })); });
    const bad = await page.evaluate(() => ({
      hacked: window.hacked,
      tags: [...document.querySelectorAll("#log img, #log script, #log iframe, #log form, #log input, #log style, #log object, #log link, #log meta, #log base, #log embed, #log video, #chats img")].map(e => e.outerHTML.slice(0, 80)),
      links: [...document.querySelectorAll("#log a")].map(a => a.getAttribute("href")).filter(h => h && !/^(https?|mailto):/i.test(h)),
      attributes: [...document.querySelectorAll("#log *")].flatMap(e => [...e.attributes]).filter(a => a.name.startsWith("on") || a.name === "id").map(a => a.name + "=" + a.value.slice(0, 40)),
      composer: document.querySelectorAll("#input, #send").length,
    }));
    assert.deepEqual(bad, { hacked: undefined, tags: [], links: [], attributes: [], composer: 2 }, evil.slice(0, 100));
    assert.deepEqual(errors, [], evil.slice(0, 100));
    assert.deepEqual(page.outside, [], evil.slice(0, 100));
  }
  await context.close();
});

test("an image of somebody else is a link, not a request", { skip: skipRich }, async () => {
  world.fake.says("![a cat](https://evil.example/cat.png)");
  const { page, context } = await world.open();
  await ask(page, "Show a cat");
  assert.equal(await page.innerText(".body a"), "image: a cat");
  assert.deepEqual(page.outside, []);
  await context.close();
});

test("the policy forbids scripts of others, markup made elsewhere, and requests outside", async () => {
  const { page, context } = await world.open();
  const found = await page.evaluate(async () => {
    const tried = {};
    await fetch("https://evil.example/").then(() => { tried.fetch = "went"; }, () => { tried.fetch = "refused"; });
    const s = document.createElement("script");
    try { s.text = "window.hacked = 1"; document.body.append(s); } catch { /* trusted types */ }
    try { const d = document.createElement("div"); d.innerHTML = "<b>x</b>"; tried.markup = d.children.length ? "made" : "refused"; } catch { tried.markup = "refused"; }
    tried.script = window.hacked ? "ran" : "refused";
    const img = new Image();
    tried.image = await new Promise(r => { img.onload = () => r("loaded"); img.onerror = () => r("refused"); img.src = "https://evil.example/x.png"; });
    return tried;
  });
  assert.deepEqual(found, { fetch: "refused", markup: "refused", script: "refused", image: "refused" });
  const r = await fetch(world.server.origin + "/");
  const policy = r.headers.get("content-security-policy");
  for (const part of ["default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'", "require-trusted-types-for 'script'"]) assert.ok(policy.includes(part), part);
  assert.ok(!policy.includes("unsafe") && !policy.includes("http"));
  // only origins can be added to it
  for (const bad of ["localhost:3000", "http://a; script-src *", "http://a b", "http://", "https://x/path", "*"]) {
    const run = spawnSync(path.resolve(root, process.env.STEEL || "build/steel"), ["serve", "--page-connect", bad], { encoding: "utf8" });
    assert.equal(run.status, 2, bad);
    assert.match(run.stderr, /--page-connect/);
  }
  await context.close();
});

test("files are served compressed, asked for once, and all of the page's own are preloaded", async () => {
  const get = (p, headers = {}) => fetch(world.server.origin + p, { headers });
  const index = await (await get("/")).text(), manifest = await (await get("/web/manifest.webmanifest")).text(), dir = path.join(root, "src/server/web");
  for (const f of readdirSync(dir).filter(f => f !== "index.html" && !f.endsWith(".c"))) {
    const r = await get("/web/" + f);
    assert.equal(r.status, 200, f);
    assert.equal(r.headers.get("content-encoding"), f.endsWith(".png") ? null : "gzip");
    assert.deepEqual(Buffer.from(await r.arrayBuffer()), readFileSync(path.join(dir, f)));
    assert.ok(index.includes(`web/${f}"`) || manifest.includes(`"${f}"`), f + " is not in index.html");
    const again = await get("/web/" + f, { "If-None-Match": r.headers.get("etag") });
    assert.equal(again.status, 304);
  }
  assert.equal((await get("/web/nothing.js")).status, 404);
  assert.equal((await get("/web/..%2f..%2fetc%2fpasswd")).status, 404);
  assert.match(await (await get("/web/licences.txt")).text(), /MIT/);
});

test("built without the libraries the page is plain text, and asks for nothing that is not there", async () => {
  const out = mkdtempSync(path.join(tmpdir(), "steel-web-"));
  try {
    execFileSync("sh", ["tools/web.sh", out], { cwd: root, env: { ...process.env, WEB_ROOT: "/nowhere" }, stdio: "pipe" });
    const index = readFileSync(path.join(out, "index.html"), "utf8");
    for (const name of ["marked", "purify", "katex", "highlight"]) {
      assert.ok(!index.includes(`web/${name}`), name);
      assert.ok(!existsSync(path.join(out, name + ".js")), name);
    }
    world.fake.every = (req, res) => { if (req.url !== "/") return false; res.writeHead(200, { "Content-Type": "text/html" }).end(index); return true; };
    world.fake.says("**plain**\n<b>text</b>\n```\ncode\n```");
    const { page, errors, context } = await world.open();
    await ask(page, "Hello");
    assert.deepEqual(await answers(page), ["**plain**\n<b>text</b>\n```\ncode\n```"]);
    assert.equal(await page.locator(".body *").count(), 0);
    assert.deepEqual(errors, []);
    await context.close();
  } finally {
    rmSync(out, { recursive: true });
  }
});

// Browsers keep some of what they can do (clipboard, storage estimates) to pages of this machine and of https.
const address = Object.values(networkInterfaces()).flat().find(a => a.family === "IPv4" && !a.internal)?.address;
const skipAddress = skipRich || (address ? false : "this machine has no address but its own");
if (!address) console.log("skipped: page-look, from another machine: no network address here");

test("over plain HTTP, as from another machine, it renders, copies and keeps all the same", { skip: skipAddress }, async () => {
  const far = await startServer("--host", "0.0.0.0", "--api-key", "k");
  try {
    const origin = `http://${address}:${far.port}`;
    const { page, context } = await world.open({}, origin);
    assert.equal(await page.evaluate(() => window.isSecureContext), false);
    await page.fill("#key", "k");
    await page.evaluate(() => document.querySelector("#key").blur());
    await page.click("#close-settings");
    await page.waitForFunction(() => document.querySelector("#model").textContent);
    await page.route("**/v1/chat/completions", r => r.fulfill({ contentType: "text/event-stream", body: `data: ${JSON.stringify({ choices: [{ delta: { content: RICH }, finish_reason: "stop" }] })}\n\ndata: [DONE]\n\n` }));
    await ask(page, "Show me");
    assert.equal(await page.locator(".body strong").count(), 1);
    assert.ok(await page.locator(".body .katex").count() > 0);
    await page.getByRole("button", { name: "Copy code" }).click();
    await page.waitForFunction(() => [...document.querySelectorAll("button")].some(b => b.textContent === "Copied"));
    await page.unroute("**/v1/chat/completions");
    await ask(page, "Hello! Who are you?"); // the real server takes it
    await reload(page);
    assert.equal((await answers(page)).length, 2);
    await context.close();
  } finally {
    await far.stop();
  }
});

test("the theme is switched, kept, and follows the system otherwise", async () => {
  const { page, context } = await world.open({ colorScheme: "dark" });
  const back = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const dark = await back();
  await page.emulateMedia({ colorScheme: "light" });
  const light = await back();
  assert.notEqual(dark, light);
  assert.equal(await page.textContent("#theme"), "Theme: system");
  await page.click("#theme");
  assert.equal(await page.textContent("#theme"), "Theme: light");
  await page.click("#theme");
  assert.equal(await back(), dark);
  await reload(page);
  assert.equal(await back(), dark);
  assert.equal(await page.textContent("#theme"), "Theme: dark");
  await page.click("#theme");
  assert.equal(await back(), light);
  await context.close();
});

test("axe finds nothing: empty, conversation, branches, settings, errors, search, phone; light and dark", async () => {
  for (const colorScheme of ["light", "dark"]) {
    const { page, context } = await world.open({ colorScheme });
    await axe(page, "empty");
    world.fake.script = (body, s) => { s.think("thought"); s.text(RICH); s.call("get_weather", { town: "x" }); s.end(); };
    await ask(page, "Show me");
    await page.getByRole("button", { name: "Retry" }).click();
    await page.waitForSelector(".steps");
    await settled(page);
    for (const d of await page.locator("#log details > summary").all()) await d.click();
    await page.click("#system-button");
    await axe(page, "conversation");
    await page.click("#load > summary");
    await page.fill("#search", "plan");
    await page.waitForSelector("#chats small");
    await axe(page, "search");
    world.fake.script = (body, s) => s.fail(500, { message: "it broke" });
    await ask(page, "Break");
    await seed(page, 100);
    await page.getByRole("button", { name: "Rename Show me" }).click();
    await axe(page, "error and rename");
    await page.keyboard.press("Escape");
    await page.click("#open-settings");
    await page.click("#add-http");
    await page.click("#add-mcp");
    await axe(page, "settings");
    await page.click("#close-settings");
    await page.getByRole("button", { name: "Delete Show me" }).click();
    await page.waitForSelector(".toast");
    await axe(page, "toast");
    await context.close();
    const { page: phone, context: small } = await world.open({ colorScheme, viewport: { width: 390, height: 780 }, isMobile: true, hasTouch: true });
    world.fake.says(RICH);
    await ask(phone, "Show me");
    await axe(phone, "phone");
    await phone.click("#menu");
    await phone.waitForFunction(() => document.getAnimations().every(a => a.playState === "finished")); // it slides in
    await axe(phone, "phone's menu");
    await small.close();
  }
});

test("a screen reader hears the answer once, when it is there, and what goes wrong", async () => {
  const { page, context } = await world.open();
  await page.evaluate(() => {
    window.heard = [];
    new MutationObserver(() => { const t = document.querySelector("#live").textContent; if (t) window.heard.push(t); }).observe(document.querySelector("#live"), { childList: true, characterData: true, subtree: true });
  });
  assert.equal(await page.getAttribute("#live", "aria-live"), "polite");
  world.fake.script = async (body, s) => { for (const w of ["The ", "sky ", "is ", "blue."]) { s.text(w); await new Promise(r => setTimeout(r, 80)); } s.end(); };
  await ask(page, "Why?");
  await page.waitForFunction(() => window.heard.some(t => t.startsWith("Answer: ")));
  assert.deepEqual(await page.evaluate(() => window.heard.filter(t => t.includes("sky"))), ["Answer: The sky is blue."]);
  world.fake.script = (body, s) => s.fail(500, { message: "it broke" });
  await ask(page, "And?");
  await page.waitForFunction(() => window.heard.some(t => t.includes("it broke")));
  // the log itself is no live region: it would be read word by word
  assert.equal(await page.locator("#log[aria-live], #log[role=log]").count(), 0);
  await context.close();
});

test("on a phone nothing is wider than the screen, and the menu opens and closes", async () => {
  world.fake.says(RICH);
  const { page, errors, context } = await world.open({ viewport: { width: 390, height: 780 }, isMobile: true, hasTouch: true });
  const fits = () => page.evaluate(() => document.documentElement.scrollWidth <= innerWidth);
  assert.ok(await fits());
  assert.ok(!await page.isVisible("#new"));
  await ask(page, "Show me");
  assert.ok(await fits());
  await page.tap("#menu");
  await page.waitForSelector("#new", { state: "visible" });
  assert.equal(await page.getAttribute("#menu", "aria-expanded"), "true");
  await page.tap("#new");
  await page.waitForSelector("#new", { state: "hidden" });
  await page.tap("#menu");
  await page.tap("#open-settings");
  assert.ok(await fits());
  assert.deepEqual(errors, []);
  await context.close();
});

const PICTURE = `The area under $x^2$ from 0 to 1 is

$$\\int_0^1 x^2\\,dx = \\frac{1}{3}$$

and here is a program that agrees:

\`\`\`python
def area(n):
    """The middle of each of n strips."""
    return sum(((i + 0.5) / n) ** 2 for i in range(n)) / n

print(area(1000))  # 0.33333325
\`\`\`

| strips | area | error |
|-------:|-----:|------:|
| 10 | 0.33250 | 8.3e-4 |
| 1000 | 0.33333 | 8.3e-8 |
`;

test("screenshots: light, dark, phone", { skip: skipRich }, async () => {
  const out = process.env.STEEL_SCREENSHOTS ? path.join(root, "docs/img") : mkdtempSync(path.join(tmpdir(), "steel-shots-"));
  const wide = { viewport: { width: 1100, height: 720 } };
  for (const [name, options] of [["light", { ...wide, colorScheme: "light" }], ["dark", { ...wide, colorScheme: "dark" }],
    ["phone", { viewport: { width: 390, height: 780 }, isMobile: true, hasTouch: true, colorScheme: "light" }]]) {
    const { page, context } = await world.open(options);
    // the answer is written for the picture, so it has no figures
    for (const q of ["Tell me a short story.", "What is the capital of the island?"]) { await ask(page, q); await page.evaluate(() => document.querySelector("#new").click()); }
    world.fake.script = (body, s) => { s.think("A parabola: integrate, then check with a sum."); s.text(PICTURE); s.delta({}, "stop"); s.res.end("data: [DONE]\n\n"); };
    await ask(page, "What is the area under x² between 0 and 1? Check it in Python.");
    await page.evaluate(() => { document.activeElement.blur(); document.querySelector("#log").scrollTop = 0; });
    await page.evaluate(() => document.fonts.ready);
    const file = path.join(out, `page-${name}.png`);
    await page.screenshot({ path: file });
    const size = statSync(file).size;
    assert.ok(size > 10000 && size < 150000, `${file}: ${size} bytes`);
    world.fake.script = null;
    await context.close();
  }
  if (!process.env.STEEL_SCREENSHOTS) rmSync(out, { recursive: true });
});
