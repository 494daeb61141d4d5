// The page, talking: answers stream in, stop, fail honestly; branches, keys, settings, files, tools.
import { test, before, after, beforeEach } from "node:test";
import assert from "node:assert/strict";
import { createServer } from "node:http";
import { once } from "node:events";
import { startServer } from "./common.mjs";
import { startWorld, openPage, reload, say, ask, settled, texts, answers, questions, whole, TIMINGS } from "./page.mjs";

let world;
before(async () => { world = await startWorld(); });
after(() => world.stop());
beforeEach(() => { world.fake.script = null; world.fake.every = null; world.fake.bodies.length = 0; });

test("the built-in model's answer streams in, with the server's own figures, and is there after a reload", async () => {
  const { page, errors, context } = await world.open({}, world.server.origin);
  await ask(page, "Hello! Who are you?");
  const [answer] = await answers(page);
  assert.ok(answer.trim().length > 0);
  assert.match(await page.textContent(".msg.assistant .figures"), /\d+ tokens, [\d.]+ tok\/s · prompt \d+/);
  assert.match(await page.textContent("#status"), /of 2,048 tokens of context/);
  await reload(page);
  assert.deepEqual(await answers(page), [answer]);
  assert.equal(await page.textContent("#title"), "Hello! Who are you?");
  assert.deepEqual(errors, []);
  assert.deepEqual(page.outside, []);
  await context.close();
});

test("speeds are those of the server's timings", async () => {
  world.fake.says("seven tokens");
  const { page, context } = await world.open();
  await ask(page, "Hi");
  const said = await page.textContent(".msg.assistant .figures");
  assert.equal(said, `7 tokens, ${TIMINGS.predicted_per_second} tok/s · prompt 100 + 40 cached, 2,000 tok/s`);
  await context.close();
});

test("an answer that was cut says by what", async () => {
  const { page, context } = await world.open();
  world.fake.script = (body, s) => { s.text("and so on"); s.end("length", { prompt_tokens: 2000, completion_tokens: 48 }); };
  await ask(page, "Go on");
  assert.match(await page.textContent(".msg.assistant .figures"), /cut: the context is full/);
  world.fake.script = (body, s) => { s.text("and so on"); s.end("length", { prompt_tokens: 20, completion_tokens: 48 }); };
  await page.click("#new");
  await page.waitForSelector(".welcome");
  await ask(page, "Go on");
  assert.match(await page.textContent(".msg.assistant .figures"), /cut: it reached the longest answer/);
  await context.close();
});

test("Stop and Esc end an answer, keep what came, and free the request", async () => {
  for (const how of ["button", "key"]) {
    const { page, context } = await world.open();
    let gone = null;
    world.fake.script = (body, s) => { s.text("The beginning"); gone = s.gone; };
    await say(page, "Tell me a story.");
    await page.waitForSelector(".msg.live .body:not(:empty)");
    if (how === "button") await page.click("#send"); else await page.press("body", "Escape");
    await settled(page, 1);
    await gone; // the connection was closed
    assert.deepEqual(await answers(page), ["The beginning"]);
    assert.match(await page.textContent(".msg.assistant .figures"), /stopped/);
    await reload(page);
    assert.deepEqual(await answers(page), ["The beginning"]);
    await context.close();
  }
});

test("who types ahead neither stops the answer nor loses the text; another model is noticed", async () => {
  const { page, context } = await world.open();
  let stream;
  world.fake.script = (body, s) => { stream = s; s.text("slowly"); };
  await say(page, "Slow");
  await page.waitForSelector(".msg.live .body:not(:empty)");
  await page.fill("#input", "next");
  await page.press("#input", "Enter");
  assert.equal(await page.inputValue("#input"), "next");
  assert.equal(await page.textContent("#send"), "Stop");
  world.fake.every = (req, res) => {
    if (req.url !== "/v1/models") return false;
    res.writeHead(200, { "Content-Type": "application/json" }).end(JSON.stringify({ data: [{ id: "another", max_model_len: 4096 }] }));
    return true;
  };
  stream.event({ model: "another", choices: [{ index: 0, delta: { content: " done" } }] });
  stream.end();
  await settled(page, 1);
  assert.deepEqual(await answers(page), ["slowly done"]);
  await page.waitForFunction(() => document.querySelector("#model").textContent === "another");
  await page.press("#input", "Enter");
  await page.waitForFunction(() => document.querySelectorAll(".msg.user").length === 2);
  stream.end();
  await context.close();
});

test("the real server's request ends with a stop", async () => {
  const { page, context } = await world.open({}, world.server.origin);
  await say(page, "Tell me a short story.");
  await page.waitForFunction(() => document.querySelector("#send").textContent === "Stop" || document.querySelector(".msg.assistant .figures"));
  await page.press("body", "Escape");
  await settled(page);
  await world.server.idle();
  await context.close();
});

test("edit and retry make branches to step through, over a reload", async () => {
  const { page, context } = await world.open();
  let n = 0;
  world.fake.script = (body, s) => { s.text("answer " + ++n); s.end(); };
  await ask(page, "one");
  await ask(page, "two");
  await page.locator(".msg.assistant").nth(1).getByRole("button", { name: "Retry" }).click();
  await page.waitForFunction(() => document.body.innerText.includes("answer 3"));
  await settled(page);
  assert.deepEqual(await answers(page), ["answer 1", "answer 3"]);
  assert.equal(await page.textContent(".msg.assistant:last-child .steps"), "‹2/2›");
  // the first question asked anew: its old answers stay behind it
  await page.locator(".msg.user").first().getByRole("button", { name: "Edit" }).click();
  assert.equal(await page.inputValue("#input"), "one");
  await say(page, "uno");
  await page.waitForFunction(() => document.body.innerText.includes("answer 4"));
  await settled(page);
  assert.deepEqual(await texts(page), ["uno", "answer 4"]);
  assert.deepEqual(world.fake.bodies.at(-1).messages, [{ role: "user", content: "uno" }]);
  await reload(page);
  assert.deepEqual(await texts(page), ["uno", "answer 4"]);
  await page.getByRole("button", { name: "Previous version" }).first().click();
  assert.deepEqual(await texts(page), ["one", "answer 1", "two", "answer 3"]);
  await page.locator(".msg.assistant").last().getByRole("button", { name: "Previous version" }).click();
  assert.deepEqual(await texts(page), ["one", "answer 1", "two", "answer 2"]);
  // going on from there sends that branch
  await ask(page, "three");
  assert.deepEqual(world.fake.bodies.at(-1).messages.map(m => m.content), ["one", "answer 1", "two", "answer 2", "three"]);
  await context.close();
});

test("keys: / goes to the message, arrow up edits the last one, arrow down and Esc leave it", async () => {
  world.fake.says("ok");
  const { page, context } = await world.open();
  await ask(page, "first");
  await ask(page, "second");
  await page.locator("#log").focus();
  await page.keyboard.press("/");
  assert.equal(await page.evaluate(() => document.activeElement.id), "input");
  assert.equal(await page.inputValue("#input"), "");
  await page.keyboard.press("ArrowUp");
  assert.equal(await page.inputValue("#input"), "second");
  assert.ok(await page.isVisible("#editing"));
  await page.keyboard.press("ArrowDown");
  assert.equal(await page.inputValue("#input"), "");
  assert.ok(!await page.isVisible("#editing"));
  await page.keyboard.press("ArrowUp");
  await page.keyboard.press("Escape");
  assert.equal(await page.inputValue("#input"), "");
  await page.keyboard.press("ArrowUp");
  await page.keyboard.type(" edited");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelector(".steps"));
  await settled(page);
  assert.deepEqual(await questions(page), ["first", "second edited"]);
  await page.keyboard.press("Control+k");
  assert.equal(await page.evaluate(() => document.activeElement.id), "search");
  await context.close();
});

test("thinking is folded away, and sent back only within its turn", async () => {
  world.fake.script = (body, s) => { s.think("hmm, "); s.think("well"); s.text("forty-two"); s.end(); };
  const { page, context } = await world.open();
  await ask(page, "Why?");
  assert.match(await page.textContent(".think summary"), /Thought/);
  assert.ok(!await page.isVisible(".think > div"));
  await page.click(".think summary");
  assert.equal(await page.innerText(".think > div"), "hmm, well");
  await ask(page, "And?");
  assert.deepEqual(world.fake.bodies.at(-1).messages[1], { role: "assistant", content: "forty-two" });
  await context.close();
});

test("sampling starts from the model's own values; what is chosen is sent", async () => {
  world.fake.says("ok");
  const { page, context } = await world.open();
  const own = (await (await fetch(world.server.baseURL + "/models")).json()).data[0].default_sampling;
  assert.ok(own.temperature >= 0 && own.top_k >= 0);
  await page.click("#open-settings");
  assert.equal(await page.getAttribute("#set-temperature", "placeholder"), "model: " + own.temperature);
  assert.equal(await page.getAttribute("#set-top_k", "placeholder"), "model: " + own.top_k);
  await page.click("#close-settings");
  await ask(page, "plain");
  for (const f of ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"]) assert.ok(!(f in world.fake.bodies[0]), f);
  await page.click("#open-settings");
  await page.fill("#set-temperature", "0");
  await page.fill("#set-seed", "7");
  await page.click("#close-settings");
  await reload(page);
  await ask(page, "chosen");
  const b = world.fake.bodies[1];
  assert.deepEqual([b.temperature, b.seed], [0, 7]);
  await page.click("#open-settings");
  await page.getByRole("button", { name: "Reset to defaults" }).click();
  assert.equal(await page.inputValue("#set-temperature"), "");
  await context.close();
});

test("system prompts are presets; each conversation keeps its own", async () => {
  world.fake.says("ok");
  const { page, context } = await world.open();
  await page.click("#open-settings");
  await page.click("#add-preset");
  const last = page.locator("fieldset", { hasText: "New prompt" });
  await last.getByLabel("Name").fill("Pirate");
  await last.getByLabel("Text").fill("Talk like a pirate.");
  await last.getByRole("radio").check();
  await page.click("#close-settings");
  await page.click("#new");
  await ask(page, "Hello");
  assert.deepEqual(world.fake.bodies[0].messages[0], { role: "system", content: "Talk like a pirate." });
  await page.click("#system-button");
  await page.selectOption("#system-preset", { label: "Short answers" });
  await ask(page, "Again");
  assert.equal(world.fake.bodies[1].messages[0].content, "Answer in one or two sentences.");
  await reload(page);
  await page.click("#system-button");
  assert.equal(await page.inputValue("#system"), "Answer in one or two sentences.");
  await context.close();
});

test("text files go with a message; what is no text is refused", async () => {
  world.fake.says("read");
  const { page, context } = await world.open();
  const pick = async files => {
    const chooser = page.waitForEvent("filechooser");
    await page.click("#attach");
    await (await chooser).setFiles(files);
  };
  await pick([{ name: "notes.txt", mimeType: "text/plain", buffer: Buffer.from("line one\n```\nnot the end\n````\n") }]);
  await page.waitForSelector(".chip");
  await pick([{ name: "cat.png", mimeType: "image/png", buffer: Buffer.from([137, 80, 78, 71, 0, 1, 2, 255]) }]);
  await page.waitForSelector(".toast");
  assert.match(await page.textContent(".toast"), /cat\.png: is a picture, and this model reads text only/);
  assert.equal(await page.locator(".chip").count(), 1);
  await ask(page, "What does it say?");
  assert.equal(world.fake.bodies[0].messages[0].content, "File notes.txt:\n`````\nline one\n```\nnot the end\n````\n\n`````\n\nWhat does it say?");
  await reload(page);
  assert.match(await page.textContent(".msg.user .file summary"), /notes\.txt, \d+ characters/);
  await context.close();
});

test("a server that is gone, and comes back, is told; the message is kept", async () => {
  const { page, context } = await world.open();
  await page.waitForFunction(() => document.querySelector("#model").textContent);
  world.fake.every = (req, res) => { res.destroy(); return true; };
  await say(page, "Anybody?");
  await page.waitForSelector(".notice");
  assert.match(await page.textContent(".notice"), /does not respond/);
  await settled(page, 1);
  assert.match(await page.textContent(".msg.assistant .error"), /does not respond/);
  assert.deepEqual(await questions(page), ["Anybody?"]);
  world.fake.every = null;
  world.fake.says("Here I am");
  await page.waitForFunction(() => !document.querySelector(".notice"));
  await page.getByRole("button", { name: "Retry" }).click();
  await page.waitForFunction(() => document.body.innerText.includes("Here I am"));
  await settled(page);
  assert.equal(await page.locator(".steps").count(), 0); // the failure left no branch
  await context.close();
});

test("a connection lost in the middle is an error beside what came", async () => {
  let cut;
  world.fake.script = (body, s) => { s.text("Half an ans"); cut = () => s.cut(); };
  const { page, context } = await world.open();
  await say(page, "Go on");
  await page.waitForFunction(() => document.querySelector("#log").innerText.includes("Half an ans")); // a reset may overtake it
  cut();
  await settled(page, 1);
  assert.deepEqual(await answers(page), ["Half an ans"]);
  assert.match(await page.textContent(".msg.assistant .error"), /lost in the middle/);
  world.fake.script = (body, s) => { s.text("So"); s.event({ error: { message: "the engine failed" } }); s.res.end(); };
  await ask(page, "And now?");
  assert.equal(await page.locator(".msg.assistant .error").last().textContent(), "the engine failed");
  await context.close();
});

test("a full server and a model that loads are told", async () => {
  const { page, context } = await world.open();
  world.fake.script = (body, s) => s.fail(429, { message: "the queue is full; try again later", code: "queue_full" }, { "Retry-After": "3" });
  await ask(page, "Now?");
  assert.match(await page.locator(".msg.assistant .error").textContent(), /queue is full.*in 3 s/);
  world.fake.every = (req, res) => {
    if (req.url !== "/v1/models") return false;
    res.writeHead(503, { "Content-Type": "application/json" }).end(JSON.stringify({ error: { message: "the model is loading: 40 %" }, status: "loading", percent: 40 }));
    return true;
  };
  const other = await openPage(context, world.fake.origin + "/");
  await other.waitForSelector(".notice");
  assert.match(await other.textContent(".notice"), /loading: 40 %/);
  world.fake.every = null;
  await other.waitForFunction(() => !document.querySelector(".notice") && document.querySelector("#model").textContent);
  await context.close();
});

test("a missing key leads to the settings, and the message is not lost", async () => {
  const locked = await startServer("--api-key", "sesame");
  try {
    const { page, context } = await world.open({}, locked.origin);
    await page.waitForSelector("#settings[open]");
    assert.match(await page.textContent("#key-why"), /needs an API key/);
    assert.equal(await page.evaluate(() => document.activeElement.id), "key");
    await page.keyboard.press("Escape");
    await say(page, "Hello!");
    await page.waitForSelector("#settings[open]");
    assert.equal(await page.inputValue("#input"), "Hello!");
    await page.fill("#key", "sesame");
    await page.press("#key", "Enter").catch(() => {});
    await page.evaluate(() => document.querySelector("#key").blur());
    await page.click("#close-settings");
    await page.waitForFunction(() => document.querySelector("#model").textContent);
    await page.press("#input", "Enter");
    await settled(page, 1);
    assert.ok((await answers(page))[0].length > 0);
    assert.equal(await page.locator(".notice").count(), 0);
    await context.close();
  } finally {
    await locked.stop();
  }
});

test("when the context is full the oldest turns stay behind, the system prompt goes on, and it is said", async () => {
  const small = await startServer("-c", "400");
  try {
    const { page, context } = await world.open({}, small.origin);
    const sent = [];
    page.on("request", r => { if (r.url().endsWith("/v1/chat/completions")) sent.push(JSON.parse(r.postData())); });
    await page.click("#open-settings");
    await page.fill("#set-max_tokens", "24");
    await page.click("#close-settings");
    await page.click("#system-button");
    await page.fill("#system", "You live on the island.");
    for (let i = 0; i < 12; i++) await ask(page, `Question ${i}: the red fox walks over the old bridge to the market and looks at the stars?`);
    assert.deepEqual(await page.locator(".msg.assistant .error:not(:empty)").allTextContents(), []);
    const last = sent.at(-1).messages;
    assert.deepEqual(last[0], { role: "system", content: "You live on the island." });
    assert.ok(last.length < 24, "something was left out: " + last.length);
    assert.match(last.at(-1).content, /^Question 11/);
    assert.equal(last[1].role, "user");
    assert.match(await page.textContent(".divider"), /no longer fit the context of 400 tokens/);
    assert.equal(await page.locator(".msg.user").count(), 12); // all of it is still here to read
    // in bites, not turn by turn: most requests begin like the one before
    const begins = sent.map(b => b.messages[1].content.slice(0, 12)), moved = begins.filter((b, i) => i && b !== begins[i - 1]).length;
    assert.ok(moved >= 1 && moved <= 6, `the beginning moved ${moved} times`);
    await reload(page);
    assert.match(await page.textContent("#status"), /oldest messages no longer fit/);
    await whole(page);
    assert.equal(await page.locator(".divider").count(), 1);
    // never to be answered: refused, back in the input, not in the conversation
    const long = "the red fox and the old bridge ".repeat(200);
    await say(page, long);
    await page.waitForSelector('.notice[data-kind="refused"]');
    assert.match(await page.textContent('.notice[data-kind="refused"]'), /[\d,]+ tokens .* holds 400.*not kept/);
    assert.equal(await page.inputValue("#input"), long.trim());
    await whole(page);
    assert.equal(await page.locator(".msg.user").count(), 12);
    await reload(page);
    await whole(page);
    assert.equal(await page.locator(".msg.user").count(), 12);
    await ask(page, "Still here?");
    assert.deepEqual(await page.locator(".msg.assistant .error:not(:empty)").allTextContents(), []);
    // the same in a conversation that it would have begun: there is none
    await page.click("#new");
    await say(page, long);
    await page.waitForSelector('.notice[data-kind="refused"]');
    assert.equal(await page.locator("#chats li").count(), 1);
    await context.close();
  } finally {
    await small.stop();
  }
});

test("tool calls of the model are shown", async () => {
  world.fake.script = (body, s) => { s.call("get_weather", { town: "Emberton <b>" }); s.end("tool_calls"); };
  const { page, context } = await world.open();
  await ask(page, "Weather?");
  assert.match(await page.textContent(".tool summary"), /Calls get_weather/);
  await page.click(".tool summary");
  assert.match(await page.innerText(".tool pre"), /"town": "Emberton <b>"/);
  await context.close();
});

test("a call that was cut short is text", async () => {
  world.fake.script = (body, s) => {
    s.delta({ tool_calls: [{ index: 0, id: "call_1", type: "function", function: { name: "get_weather", arguments: '{"town": "Emb' } }] });
    s.text('<tool_call>{"name": "get_weather", "arguments": {"town": "Emb');
    s.end("length");
  };
  const { page, context } = await world.open();
  await ask(page, "Weather?");
  assert.equal(await page.locator(".tool").count(), 0);
  assert.match(await page.innerText(".msg.assistant"), /get_weather.*Emb/);
  world.fake.says("Yes.");
  await ask(page, "Go on");
  const sent = world.fake.bodies.at(-1).messages;
  assert.equal(sent[1].tool_calls, undefined);
  assert.match(sent[1].content, /^<tool_call>/);
  await context.close();
});

// A tool server of the user: an HTTP endpoint and an MCP server.
async function startTools() {
  const seen = [];
  const http = createServer(async (req, res) => {
    const cors = { "Access-Control-Allow-Origin": "*", "Access-Control-Allow-Headers": "*", "Access-Control-Expose-Headers": "Mcp-Session-Id" };
    if (req.method === "OPTIONS") { res.writeHead(204, cors).end(); return; }
    let text = "";
    for await (const p of req) text += p;
    const body = JSON.parse(text);
    seen.push({ url: req.url, body, auth: req.headers.authorization, session: req.headers["mcp-session-id"] });
    if (req.url === "/weather") { res.writeHead(200, cors).end("rain in " + body.town); return; }
    const result = { initialize: { protocolVersion: "2025-06-18", capabilities: { tools: {} }, serverInfo: { name: "t", version: "1" } },
      "tools/list": { tools: [{ name: "add", description: "Adds", inputSchema: { type: "object", properties: { a: { type: "number" }, b: { type: "number" } } } }] },
      "tools/call": { content: [{ type: "text", text: String(body.params?.arguments?.a + body.params?.arguments?.b) }] } }[body.method];
    if (!result) { res.writeHead(202, cors).end(); return; }
    const reply = JSON.stringify({ jsonrpc: "2.0", id: body.id, result });
    if (body.method === "tools/call") res.writeHead(200, { ...cors, "Content-Type": "text/event-stream" }).end(`event: message\ndata: ${reply}\n\n`);
    else res.writeHead(200, { ...cors, "Content-Type": "application/json", "Mcp-Session-Id": "s1" }).end(reply);
  }).listen(0, "127.0.0.1");
  await once(http, "listening");
  return { origin: "http://127.0.0.1:" + http.address().port, seen, close: () => { http.closeAllConnections(); http.close(); } };
}

test("user-defined HTTP tools and MCP servers are called, asked for first, and only where the server allows it", async () => {
  const tools = await startTools(), other = await startWorld("--page-connect", tools.origin);
  try {
    const { page, context } = await other.open();
    await page.waitForFunction(() => document.querySelector("#model").textContent);
    await page.click("#open-settings");
    await page.click("#add-http");
    await page.locator(".tool-row").nth(0).getByLabel("URL").fill(tools.origin + "/weather");
    await page.click("#add-mcp");
    const mcp = page.locator(".tool-row").nth(1);
    await mcp.getByLabel("URL").fill(tools.origin + "/mcp");
    await mcp.getByLabel("Authorization").fill("Bearer t");
    await mcp.getByLabel("ask before each call").uncheck();
    await mcp.getByRole("button", { name: "Connect" }).click();
    await page.waitForFunction(() => [...document.querySelectorAll(".said")].some(e => e.textContent === "Has: add"));
    await page.click("#close-settings");
    let round = 0;
    other.fake.script = (body, s) => {
      if (++round === 1) { s.call("get_weather", { town: "Emberton" }); s.end("tool_calls"); }
      else if (round === 2) { s.call("add", { a: 2, b: 3 }); s.end("tool_calls"); }
      else { s.text("done"); s.end(); }
    };
    await say(page, "Weather and sum?");
    await page.waitForSelector(".ask");
    assert.equal(tools.seen.filter(x => x.url === "/weather").length, 0);
    assert.match(await page.textContent(".ask"), /get_weather[^]*Emberton/);
    // the question waits for who looks at another conversation meanwhile
    await page.click("#new");
    await page.waitForSelector(".welcome");
    await page.click("#chats li.busy .name");
    await page.waitForSelector(".ask");
    assert.equal(tools.seen.filter(x => x.url === "/weather").length, 0);
    await page.getByRole("button", { name: "Run", exact: true }).click();
    await page.waitForFunction(() => document.body.innerText.includes("done"));
    await settled(page);
    assert.deepEqual(other.fake.bodies[0].tools.map(t => t.function.name), ["get_weather", "add"]);
    assert.deepEqual(other.fake.bodies[1].messages.at(-1), { role: "tool", tool_call_id: "call_1", content: "rain in Emberton" });
    assert.equal(other.fake.bodies[2].messages.at(-1).content, "5");
    const call = tools.seen.find(x => x.body.method === "tools/call");
    assert.deepEqual([call.auth, call.session, call.body.params.name], ["Bearer t", "s1", "add"]);
    await reload(page);
    assert.equal(await page.locator(".msg.tool").count(), 2);
    // declined: the model hears so
    round = 0;
    await say(page, "Again?");
    await page.getByRole("button", { name: "Deny" }).click();
    await page.waitForFunction(() => document.querySelectorAll(".msg.tool").length >= 4);
    await settled(page);
    assert.match(other.fake.bodies[4].messages.at(-1).content, /did not allow/);
    assert.deepEqual(page.errors, []);
    await context.close();
  } finally {
    await other.stop();
  }
  // a server that was not started for it: the policy holds, and the page says what to do
  try {
    const { page, context } = await world.open();
    await page.waitForFunction(() => document.querySelector("#model").textContent);
    const before = tools.seen.length;
    await page.click("#open-settings");
    await page.click("#add-mcp");
    await page.locator(".tool-row").getByLabel("URL").fill(tools.origin + "/mcp");
    await page.locator(".tool-row").getByRole("button", { name: "Connect" }).click();
    await page.waitForFunction(() => document.querySelector(".said")?.textContent.includes("--page-connect"));
    assert.equal(tools.seen.length, before);
    await context.close();
  } finally {
    tools.close();
  }
});

test("the load panel draws, with whichever names the figures have", async () => {
  for (const style of ["steel", "vllm", "llamacpp"]) {
    const other = await startServer("--metrics-compat", style);
    try {
      const { page, context } = await world.open({}, other.origin);
      await page.click("#load > summary");
      await page.waitForFunction(() => document.querySelector("#s-rate").dataset.most !== undefined);
      await say(page, "Tell me a short story.");
      await page.waitForFunction(() => Number(document.querySelector("#s-rate").dataset.most) > 0);
      assert.match(await page.textContent("#s-kv"), /%/);
      await context.close();
    } finally {
      await other.stop();
    }
  }
});
