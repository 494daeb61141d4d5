// Claude Code and Codex and a picture: Claude Code reads a PNG with its own tool, both are given one in a message. With a model that
// reads text only Claude Code's conversation continues; with one that sees, the picture's 1,024 tokens are in the prompt. `make test-all`
// installs the agents; otherwise the tests run only if they are there.
import { test } from "node:test";
import assert from "node:assert/strict";
import { spawn, spawnSync } from "node:child_process";
import { once } from "node:events";
import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import { startServer } from "./common.mjs";

const root = path.resolve(import.meta.dirname, "../..");
const bin = path.join(import.meta.dirname, "agents/node_modules/.bin");
const answer = "Hello from the **scripted** model. All is done.";
const drawPng = `
import struct, sys, zlib
part = lambda name, data: struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
rows = b"".join(b"\\0" + bytes([160, 32, 96]) * 16 for _ in range(16))
with open(sys.argv[1], "wb") as f:
    f.write(b"\\x89PNG\\r\\n\\x1a\\n" + part(b"IHDR", struct.pack(">IIBBBBB", 16, 16, 8, 2, 0, 0, 0)) + part(b"IDAT", zlib.compress(rows)) + part(b"IEND", b""))
`;

// A home, a folder with plum.png, and a server whose model reads that file with the agent's tool.
async function withAgent(t, name, sees, work) {
  const agent = path.join(bin, name);
  if (!fs.existsSync(agent)) return t.skip(`${name} is not installed: make test-all does it`);
  const dir = fs.mkdtempSync(path.join(os.tmpdir(), "steel-image-"));
  const png = path.join(dir, "work/plum.png"), model = path.join(dir, "scripted.gguf");
  fs.mkdirSync(path.join(dir, "work"));
  for (const args of [["-c", drawPng, png], ["tests/script_model.py", model, "Read", JSON.stringify({ file_path: png })]]) {
    const made = spawnSync("python3", args, { cwd: root, env: { ...process.env, ...(sees ? { SEES: "1" } : {}) } });
    assert.equal(made.status, 0, String(made.stderr));
  }
  const server = await startServer(model, "-c", "131072");
  try {
    if (name === "codex") {
      fs.mkdirSync(path.join(dir, ".codex"));
      fs.writeFileSync(path.join(dir, ".codex/config.toml"), `model = "scripted"\nmodel_provider = "steel"\n[model_providers.steel]\nname = "steel"\nbase_url = "${server.baseURL}"\nwire_api = "responses"\n`);
    }
    const run = async (...args) => {
      const child = spawn(agent, name === "codex" ? args : [...args, "--dangerously-skip-permissions"], { cwd: path.join(dir, "work"), stdio: ["ignore", "pipe", "pipe"],
        env: { PATH: process.env.PATH, HOME: dir, TERM: "dumb", NO_COLOR: "1", ANTHROPIC_BASE_URL: server.origin, ANTHROPIC_API_KEY: "x",
          ANTHROPIC_MODEL: "scripted", CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1", IS_SANDBOX: "1" } });
      let out = "";
      child.stdout.on("data", d => { out += d; });
      child.stderr.on("data", d => { out += d; });
      const [code] = await once(child, "close");
      return { code, out };
    };
    await work(run, server, dir);
  } finally {
    await server.stop();
    fs.rmSync(dir, { recursive: true, force: true });
  }
}

// Whether the conversation that Claude Code has stored holds a picture.
const holdsPicture = dir => spawnSync("grep", ["-rqE", '"media_type": ?"image/png"', path.join(dir, ".claude")]).status === 0;

test("claude reads a picture with its tool, and the conversation goes on", t => withAgent(t, "claude", false, async (run, server, dir) => {
  for (const more of [[], ["--continue"], ["--continue"]]) {
    const { code, out } = await run(...more, "-p", "Look at plum.png");
    assert.equal(code, 0, out + server.log());
    assert.ok(out.includes(answer), out + server.log());
  }
  assert.ok(holdsPicture(dir));
  assert.ok(await server.metric("requests_finished_total") >= 6, server.log());
  assert.ok(!/status=[45]\d\d/.test(server.log()), server.log());
}));

test("claude is given a picture in a message, leaves it out, and the conversation goes on", t => withAgent(t, "claude", false, async (run, server, dir) => {
  for (const more of [["-p", "Look at @plum.png"], ["--continue", "-p", "And again"]]) {
    const { code, out } = await run(...more);
    assert.equal(code, 0, out + server.log());
    assert.ok(out.includes(answer), out + server.log());
  }
  assert.ok(holdsPicture(dir));
  assert.match(server.log(), /status=400/); // the error that names the picture, from which the agent recovers
}));

// Prompt lengths of the server's finished requests, in order.
const prompts = server => [...server.log().matchAll(/\bprompt=(\d+)/g)].map(m => Number(m[1]));

test("claude reads a picture with its tool, and a model that sees gets it", t => withAgent(t, "claude", true, async (run, server) => {
  const { code, out } = await run("-p", "Look at plum.png");
  assert.equal(code, 0, out + server.log());
  assert.ok(out.includes(answer), out + server.log());
  const n = prompts(server);
  assert.ok(Math.max(...n) - n[0] > 1024 && Math.max(...n) - n[0] < 2048, server.log());
  assert.ok(!/status=[45]\d\d/.test(server.log()), server.log());
}));

test("claude and codex are given a picture in a message, and a model that sees gets it", async t => {
  for (const [name, without, withIt] of [["claude", ["-p", "Look"], ["-p", "Look at @plum.png"]],
    ["codex", ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "Look"],
      ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-i", "plum.png", "--", "Look"]]])
    await t.test(name, t => withAgent(t, name, true, async (run, server) => {
      const first = await run(...without), seen = prompts(server).length;
      assert.equal(first.code, 0, first.out + server.log());
      const second = await run(...withIt);
      assert.equal(second.code, 0, second.out + server.log());
      const n = prompts(server);
      assert.ok(n[seen] - n[0] >= 1024 && n[seen] - n[0] < 2048, `${n}\n${server.log()}`);
      assert.ok(!/status=[45]\d\d/.test(server.log()), server.log());
    }));
});
