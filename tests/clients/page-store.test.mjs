// The page, remembering: two tabs, a reload in the middle of an answer, a full disk, long conversations, search, names, undo,
// export and import, of friendly and of hostile files.
import { test, before, after, beforeEach } from "node:test";
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { startWorld, openPage, reload, say, ask, settled, holdNews, takeNews, texts, answers, questions, seed, whole } from "./page.mjs";

let world;
before(async () => { world = await startWorld(); });
after(() => world.stop());
beforeEach(() => { world.fake.script = null; world.fake.every = null; world.fake.bodies.length = 0; });

const until = (page, list) => page.waitForFunction(want => JSON.stringify([...document.querySelectorAll(".msg > .body")].map(b => b.innerText)) === want, JSON.stringify(list));
const importText = async (page, name, text) => {
  if (!await page.isVisible("#settings")) await page.click("#open-settings");
  const chooser = page.waitForEvent("filechooser");
  await page.click("#import");
  await (await chooser).setFiles([{ name, mimeType: "application/json", buffer: Buffer.from(text) }]);
};
const toastSays = (page, text) => page.waitForFunction(t => [...document.querySelectorAll(".toast")].some(e => e.textContent.includes(t)), text);
const download = async (page, click) => {
  const [d] = await Promise.all([page.waitForEvent("download"), click()]);
  return { name: d.suggestedFilename(), text: await readFile(await d.path(), "utf8") };
};

test("two tabs: what one writes the other shows; both at once lose nothing", async () => {
  const { page: a, context } = await world.open();
  let n = 0;
  world.fake.script = (body, s) => { s.text("reply to " + body.messages.at(-1).content); s.end(); n++; };
  await ask(a, "from A");
  const b = await openPage(context, a.url());
  await until(b, ["from A", "reply to from A"]);
  await ask(b, "from B");
  await until(a, ["from A", "reply to from A", "from B", "reply to from B"]);
  // both answer the same message, neither knowing of the other: two branches, four messages, all kept
  await holdNews(a);
  await holdNews(b);
  const gates = [];
  world.fake.script = (body, s) => { s.text("late " + body.messages.at(-1).content); gates.push(() => s.end()); };
  await a.fill("#input", "A again");
  await b.fill("#input", "B again");
  await Promise.all([a.press("#input", "Enter"), b.press("#input", "Enter")]);
  await a.waitForSelector(".msg.live");
  await b.waitForSelector(".msg.live");
  for (const g of gates) g();
  await settled(a);
  await settled(b);
  assert.equal(gates.length, 2);
  await takeNews(a);
  await takeNews(b);
  await reload(a);
  const shown = await texts(a);
  const mine = shown.includes("A again") ? "A" : "B", other = mine === "A" ? "B" : "A";
  assert.deepEqual(shown.slice(-2), [`${mine} again`, `late ${mine} again`]);
  await a.locator(".msg.user").last().getByRole("button", { name: /^(Next|Previous) version$/, disabled: false }).click();
  assert.deepEqual((await texts(a)).slice(-2), [`${other} again`, `late ${other} again`]);
  // a name given in one tab survives a message from the other, and a deletion is seen
  await b.locator("#chats li .name").dblclick();
  await b.fill("#chats input", "Named in B");
  await b.press("#chats input", "Enter");
  world.fake.says("ok");
  await ask(a, "after the name");
  await reload(b);
  assert.equal(await b.textContent("#title"), "Named in B");
  await b.getByRole("button", { name: "Delete Named in B" }).click();
  await a.waitForSelector(".welcome");
  await toastSays(a, "deleted in another tab");
  assert.deepEqual([...a.errors, ...b.errors], []);
  await context.close();
});

test("a reload in the middle of an answer keeps what came and says so; another tab's answer goes on", async () => {
  const { page, context } = await world.open();
  let stream;
  world.fake.script = (body, s) => { stream = s; s.text("The first half of the answer"); };
  await say(page, "Tell me.");
  await page.waitForFunction(() => document.querySelector(".msg.live .body")?.innerText.includes("first half"));
  const watcher = await openPage(context, page.url()); // a second tab looks on
  await watcher.waitForFunction(() => document.querySelector(".msg.assistant .body")?.innerText.includes("first half"));
  await new Promise(r => setTimeout(r, 1000)); // longer than it takes to find out whether anybody writes it
  assert.equal(await watcher.locator(".msg.live").count(), 1);
  stream.text(", and more");
  await watcher.waitForFunction(() => document.querySelector(".msg.assistant .body").innerText.includes("and more"));
  await reload(page);
  await page.waitForFunction(() => document.querySelector(".msg.assistant .figures")?.textContent.includes("interrupted"));
  assert.deepEqual(await texts(page), ["Tell me.", "The first half of the answer, and more"]);
  world.fake.says("The whole answer");
  await page.getByRole("button", { name: "Retry" }).click();
  await until(page, ["Tell me.", "The whole answer"]);
  await settled(page);
  assert.equal(await page.textContent(".msg.assistant .steps"), "‹2/2›"); // the half is still there
  await watcher.close();
  await context.close();
});

test("an answer goes on while another conversation is read", async () => {
  const { page, context } = await world.open();
  let stream;
  world.fake.script = (body, s) => { stream = s; s.text("slow"); };
  await say(page, "Slow one");
  await page.waitForSelector(".msg.live");
  await page.click("#new");
  assert.equal(await page.locator("#chats li.busy").count(), 1);
  assert.equal(await page.textContent("#send"), "Send");
  world.fake.says("quick");
  await ask(page, "Quick one");
  stream.text(" but sure");
  stream.end();
  await page.waitForFunction(() => !document.querySelector("#chats li.busy"));
  await page.getByRole("button", { name: "Slow one", exact: true }).click();
  await until(page, ["Slow one", "slow but sure"]);
  await context.close();
});

test("a conversation that is deleted while it is answered stops, and stays deleted", async () => {
  const { page, context } = await world.open();
  let gone;
  world.fake.script = (body, s) => { s.text("on and on"); gone = s.gone; };
  await say(page, "Endless");
  await page.waitForSelector(".msg.live .body:not(:empty)");
  await page.getByRole("button", { name: "Delete Endless" }).click();
  await page.waitForSelector(".welcome");
  await gone;
  await reload(page);
  assert.equal(await page.locator("#chats li").count(), 0);
  await context.close();
});

test("a full disk is told, nothing is lost while it is full, and it is saved when there is room", async () => {
  const context = await world.browser.newContext(), origin = world.fake.origin;
  const cdp = await context.newCDPSession(await context.newPage());
  const room = quotaSize => cdp.send("Storage.overrideQuotaForOrigin", { origin, quotaSize });
  await room(100000);
  const page = await openPage(context, origin + "/");
  world.fake.says("ok");
  await ask(page, "small");
  world.fake.says("x".repeat(200000));
  await ask(page, "large");
  await page.waitForSelector('.notice[data-kind="storage"]');
  assert.match(await page.textContent('.notice[data-kind="storage"]'), /storage .* is full: \d+ changes? not saved/);
  // it is in this tab, also after a look at another conversation, and can be saved as a file
  await page.click("#new");
  await page.getByRole("button", { name: "small", exact: true }).click();
  await page.waitForFunction(() => document.querySelectorAll(".msg").length === 4);
  const file = await download(page, () => page.locator(".notice").getByRole("button", { name: "Save as JSON" }).click());
  assert.equal(JSON.parse(file.text).chats[0].nodes.length, 4);
  // an import that does not fit is refused whole
  await importText(page, "big.json", JSON.stringify([{ role: "user", content: "y".repeat(500000) }]));
  await toastSays(page, "storage is full");
  assert.equal(await page.locator("#chats li").count(), 1);
  await page.click("#close-settings");
  // whoever leaves now is asked
  const dialog = new Promise(r => page.once("dialog", d => { r(d.type()); d.dismiss(); }));
  page.reload().catch(() => {});
  assert.equal(await dialog, "beforeunload");
  await room(undefined);
  await page.waitForFunction(() => !document.querySelector(".notice"));
  await reload(page);
  const all = await texts(page);
  assert.deepEqual([all.length, all[2], all[3].length], [4, "large", 200000]);
  await context.close();
});

test("without a database the page works in its tab, and says so", async () => {
  const context = await world.browser.newContext();
  await context.addInitScript(() => Object.defineProperty(window, "indexedDB", { value: undefined }));
  const page = await openPage(context, world.fake.origin + "/");
  await page.waitForSelector('.notice[data-kind="storage"]');
  assert.match(await page.textContent('.notice[data-kind="storage"]'), /kept in this tab only/);
  world.fake.says("ok");
  await ask(page, "one");
  await page.click("#new");
  await ask(page, "two");
  await page.getByRole("button", { name: "one", exact: true }).click();
  await until(page, ["one", "ok"]);
  await context.close();
});

test("400 messages: the end is drawn, the rest comes on the way up; time to open", async () => {
  const { page, errors, context } = await world.open();
  await seed(page, 400);
  await reload(page);
  const took = [];
  for (let i = 0; i < 5; i++) {
    await page.click("#new");
    took.push(await page.evaluate(async () => {
      const name = document.querySelector("#chats .name"), start = performance.now();
      name.click();
      while (document.querySelectorAll(".msg").length === 0) await new Promise(r => setTimeout(r));
      await new Promise(r => requestAnimationFrame(() => setTimeout(r))); // it is on the screen
      return performance.now() - start;
    }));
  }
  const sorted = took.toSorted((a, b) => a - b);
  console.log(`400 messages open in ${sorted[2].toFixed(0)} ms (median of ${took.map(t => t.toFixed(0)).join(", ")})`);
  // the work: a screenful and what is drawn ahead of it, not four hundred messages
  const built = await page.evaluate(() => window.steel.work.messages), nodes = await page.evaluate(() => document.querySelectorAll("#log *").length);
  console.log(`drawn: ${built} messages, ${nodes} nodes`);
  assert.ok(built >= 8 && built <= 24, built + " messages");
  assert.equal(await page.locator(".msg").count(), built);
  assert.ok(nodes < built * 150, nodes + " nodes");
  assert.ok(await page.evaluate(() => { const l = document.querySelector("#log"); return l.scrollHeight - l.scrollTop - l.clientHeight < 50; }), "at its end");
  // all of it is there for who goes up, and the reader's place stays
  await whole(page);
  assert.equal(await page.locator(".msg").count(), 400);
  assert.match(await page.locator(".msg").first().innerText(), /^Message 0\./);
  // while an answer streams, its own element is all that is drawn
  await page.getByRole("button", { name: "Seeded 400", exact: true }).click();
  await page.waitForFunction(() => document.querySelectorAll(".msg").length < 400 && document.querySelectorAll(".msg").length > 0);
  await page.waitForTimeout(200); // what is drawn ahead
  world.fake.script = (body, s) => { for (let i = 0; i < 200; i++) s.text("word " + i + "\n\n"); s.end(); };
  const before = await page.evaluate(() => { for (const m of document.querySelectorAll(".msg")) m.dataset.old = "1"; return window.steel.work.messages; });
  await say(page, "More");
  await page.waitForFunction(() => document.querySelector(".msg.assistant:last-of-type")?.innerText.includes("word 199"));
  await settled(page);
  assert.equal(await page.locator(".msg[data-old]").count(), before);
  assert.equal(await page.evaluate(() => window.steel.work.messages), before + 2);
  assert.deepEqual(errors, []);
  await context.close();
});

test("search finds titles and texts and goes to the message; rename; delete with undo", async () => {
  const { page, context } = await world.open();
  await seed(page, 60, { title: "Sixty" });
  world.fake.says("The Zanzibar answer");
  await ask(page, "A question");
  await page.fill("#search", "zanziBAR");
  await page.waitForFunction(() => document.querySelectorAll("#chats li").length === 1);
  assert.match(await page.textContent("#chats .name"), /A question.*Zanzibar/);
  await page.fill("#search", "message 7.");
  await page.waitForFunction(() => document.querySelector("#chats .name")?.textContent.startsWith("Sixty"));
  await page.click("#chats .name");
  await page.waitForSelector(".msg.found");
  assert.match(await page.textContent(".msg.found"), /^Message 7\./);
  await page.fill("#search", "no such thing");
  await page.waitForSelector("#chats .none");
  await page.press("#search", "Escape");
  await page.waitForFunction(() => document.querySelectorAll("#chats li").length === 2);
  // rename by key and by button
  await page.getByRole("button", { name: "Sixty", exact: true }).focus();
  await page.keyboard.press("F2");
  await page.keyboard.type("Renamed <b>");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelector("#title").textContent === "Renamed <b>");
  await page.getByRole("button", { name: "Rename A question" }).click();
  await page.keyboard.press("Escape"); // leaves it
  await page.waitForFunction(() => [...document.querySelectorAll("#chats .name")].some(n => n.textContent === "A question"));
  // delete, undo, delete, wait
  await page.getByRole("button", { name: "Delete Renamed <b>" }).click();
  await page.waitForSelector(".welcome");
  assert.equal(await page.locator("#chats li").count(), 1);
  await page.getByRole("button", { name: "Undo" }).click();
  await page.waitForFunction(() => document.querySelectorAll(".msg").length > 0);
  assert.equal(await page.textContent("#title"), "Renamed <b>");
  await page.getByRole("button", { name: "Delete Renamed <b>" }).click();
  await page.waitForSelector(".welcome");
  await reload(page);
  assert.equal(await page.locator("#chats li").count(), 1);
  const left = () => page.evaluate(async () => {
    const db = await new Promise(r => { const q = indexedDB.open("steel"); q.onsuccess = () => r(q.result); });
    const count = await new Promise(r => { const q = db.transaction("nodes").objectStore("nodes").count(); q.onsuccess = () => r(q.result); });
    const tx = db.transaction("chats", "readwrite"), all = tx.objectStore("chats").getAll();
    all.onsuccess = () => { for (const c of all.result) if (c.deleted) tx.objectStore("chats").put({ ...c, deleted: 1 }); }; // long ago
    await new Promise(r => { tx.oncomplete = r; });
    db.close();
    return count;
  });
  assert.equal(await left(), 62); // it could still come back
  await reload(page);
  await page.waitForFunction(() => document.documentElement.dataset.ready);
  assert.equal(await left(), 2);
  await context.close();
});

async function exported(page, what) {
  await page.click("#export");
  await page.click(what);
}

test("export and import: JSON keeps all branches, Markdown what is shown", async () => {
  const { page, context } = await world.open();
  let n = 0;
  world.fake.script = (body, s) => { s.think("a thought"); s.text(`answer ${++n}\n\n<!-- steel:user -->\n# not a title`); s.end(); };
  await page.click("#system-button");
  await page.fill("#system", "Be brief.");
  await ask(page, "Question");
  await page.getByRole("button", { name: "Retry" }).click();
  await page.waitForSelector(".steps");
  await settled(page);
  const json = await download(page, () => exported(page, "#export-json")), md = await download(page, () => exported(page, "#export-md"));
  assert.equal(json.name, "Question.json");
  assert.equal(md.name, "Question.md");
  assert.match(md.text, /^# Question\n/);
  await importText(page, "again.json", json.text);
  await toastSays(page, "Imported 1 conversation.");
  await page.waitForFunction(() => document.querySelectorAll("#chats li").length === 2);
  assert.equal(await page.textContent(".msg.assistant .steps"), "‹2/2›");
  assert.match(await page.textContent(".think"), /a thought/);
  const was = await texts(page);
  await page.getByRole("button", { name: "Previous version" }).click();
  assert.match((await answers(page))[0], /answer 1/);
  await importText(page, "again.md", md.text);
  await page.waitForFunction(() => document.querySelectorAll("#chats li").length === 3);
  assert.deepEqual(await texts(page), was);
  assert.equal(await page.inputValue("#system"), "Be brief.");
  // everything at once, into another browser
  await page.click("#open-settings");
  const all = await download(page, () => page.click("#export-all"));
  await page.click("#close-settings");
  const { page: fresh, context: other } = await world.open();
  await importText(fresh, "all.json", all.text);
  await toastSays(fresh, "Imported 3 conversations.");
  await fresh.waitForFunction(() => document.querySelectorAll("#chats li").length === 3);
  // a request's messages, as people have them
  await importText(fresh, "api.json", JSON.stringify({ messages: [{ role: "system", content: "S" }, { role: "user", content: "U" }, { role: "assistant", content: "A" }] }));
  await until(fresh, ["U", "A"]);
  await other.close();
  await context.close();
});

test("hostile files: refused with a reason, or tamed; what is here is not touched", async () => {
  const { page, errors, context } = await world.open();
  world.fake.says("mine");
  await ask(page, "Mine");
  const mine = page.url().split("#")[1];
  for (const [name, text, why] of [["a.json", "{", "neither JSON"], ["b.json", "{\"format\":\"other\"}", "not an export"], ["c.md", "just text", "no messages"],
    ["d.json", "{\"format\":\"steel-chats\",\"chats\":[7]}", "no messages"], ["e.json", "[]", "no messages"], ["f.json", "[{\"role\":\"evil\",\"content\":\"x\"}]", "no messages"]]) {
    await importText(page, name, text);
    await toastSays(page, name + " was not imported: ");
    await toastSays(page, why);
  }
  const evil = "<img src=x onerror=\"window.hacked=1\"><script>window.hacked=1</scr" + "ipt>[x](javascript:window.hacked=1)";
  await importText(page, "evil.json", JSON.stringify({ format: "steel-chats", version: 1, chats: [{
    id: mine, title: evil, system: 7, leaf: "c", created: "x", updated: -1, deleted: 5, extra: "field", nodes: [
      { id: "a", parent: "c", role: "user", content: evil, created: 1, onclick: "x" }, // a ring
      { id: "b", parent: "a", role: "assistant", content: evil, reasoning: evil, created: 2, status: "streaming", timings: { predicted_n: evil, predicted_per_second: "NaN" }, calls: [{ name: evil, arguments: evil }] },
      { id: "c", parent: "b", role: "user", content: "end", created: 3, files: [{ name: evil, text: evil }, null] },
      { id: "c", parent: "b", role: "user", content: "twin", created: 4 },
      { id: "d", parent: "nowhere", role: "user", content: { evil: 1 } }, null, 5, { role: "system", content: "x" },
      { id: "__proto__", parent: "constructor", role: "assistant", content: "lost", created: 5 }] }] }));
  await page.waitForFunction(() => document.querySelectorAll("#chats li").length === 2);
  await page.waitForSelector(".msg.user");
  assert.ok((await texts(page)).includes("end") || (await texts(page)).includes("twin"));
  assert.equal(await page.evaluate(() => window.hacked), undefined);
  assert.equal(await page.locator("#log img, #log script, #chats img, #log .body a[href]").count(), 0);
  assert.equal(await page.locator(".msg.live").count(), 0);
  await page.getByRole("button", { name: "Mine", exact: true }).click();
  await until(page, ["Mine", "mine"]);
  assert.deepEqual(errors, []);
  await context.close();
});

test("conversations of the page's first version move into the database", async () => {
  const context = await world.browser.newContext();
  await context.addInitScript(() => {
    if (sessionStorage.getItem("once")) return;
    sessionStorage.setItem("once", "1");
    localStorage.setItem("steel.chats", JSON.stringify([{ id: "1-a", title: "Old one", messages: [{ role: "user", content: "old question" }, { role: "assistant", content: "old answer", stats: "x" }] }, { id: "2", title: "Empty", messages: [] }]));
  });
  const page = await openPage(context, world.fake.origin + "/");
  await page.getByRole("button", { name: "Old one", exact: true }).click();
  await until(page, ["old question", "old answer"]);
  await reload(page);
  assert.equal(await page.locator("#chats li").count(), 1);
  await context.close();
});

test("a draft outlives a reload, and so does a conversation that has not begun", async () => {
  const { page, context } = await world.open();
  world.fake.says("ok");
  await ask(page, "An older one");
  await page.click("#new");
  await page.fill("#input", "not yet sent");
  await reload(page);
  assert.equal(await page.inputValue("#input"), "not yet sent");
  assert.deepEqual(await questions(page), []);
  await context.close();
});
