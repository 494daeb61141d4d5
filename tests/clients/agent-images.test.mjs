// Claude Code and a picture: it reads a PNG with its own tool, and it is given one in a message. The model reads text only; the
// conversation goes on in both cases. `make test-all` installs the agent; otherwise the tests run only if it is there.
import { test } from "node:test";
import assert from "node:assert/strict";
import { spawn, spawnSync } from "node:child_process";
import { once } from "node:events";
import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import { startServer } from "./common.mjs";

const root = path.resolve(import.meta.dirname, "../..");
const claude = path.join(import.meta.dirname, "agents/node_modules/.bin/claude");
const answer = "Hello from the **scripted** model. All is done.";
const drawPng = `
import struct, sys, zlib
part = lambda name, data: struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
rows = b"".join(b"\\0" + bytes([160, 32, 96]) * 16 for _ in range(16))
with open(sys.argv[1], "wb") as f:
    f.write(b"\\x89PNG\\r\\n\\x1a\\n" + part(b"IHDR", struct.pack(">IIBBBBB", 16, 16, 8, 2, 0, 0, 0)) + part(b"IDAT", zlib.compress(rows)) + part(b"IEND", b""))
`;

// A home, a folder with plum.png, and a server whose model reads that file with the agent's tool. The server's requests are kept.
async function withClaude(t, work) {
  if (!fs.existsSync(claude)) return t.skip("claude is not installed: make test-all does it");
  const dir = fs.mkdtempSync(path.join(os.tmpdir(), "steel-image-"));
  const png = path.join(dir, "work/plum.png"), model = path.join(dir, "scripted.gguf");
  fs.mkdirSync(path.join(dir, "work"));
  for (const args of [["-c", drawPng, png], ["tests/script_model.py", model, "Read", JSON.stringify({ file_path: png })]]) {
    const made = spawnSync("python3", args, { cwd: root });
    assert.equal(made.status, 0, String(made.stderr));
  }
  const server = await startServer(model, "-c", "131072");
  try {
    const run = async (...args) => {
      const child = spawn(claude, [...args, "--dangerously-skip-permissions"], { cwd: path.join(dir, "work"), stdio: ["ignore", "pipe", "pipe"],
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

test("claude reads a picture with its tool, and the conversation goes on", t => withClaude(t, async (run, server, dir) => {
  for (const more of [[], ["--continue"], ["--continue"]]) {
    const { code, out } = await run(...more, "-p", "Look at plum.png");
    assert.equal(code, 0, out + server.log());
    assert.ok(out.includes(answer), out + server.log());
  }
  assert.ok(holdsPicture(dir));
  assert.ok(await server.metric("requests_finished_total") >= 6, server.log());
  assert.ok(!/status=[45]\d\d/.test(server.log()), server.log());
}));

test("claude is given a picture in a message, leaves it out, and the conversation goes on", t => withClaude(t, async (run, server, dir) => {
  for (const more of [["-p", "Look at @plum.png"], ["--continue", "-p", "And again"]]) {
    const { code, out } = await run(...more);
    assert.equal(code, 0, out + server.log());
    assert.ok(out.includes(answer), out + server.log());
  }
  assert.ok(holdsPicture(dir));
  assert.match(server.log(), /status=400/); // the error that names the picture, from which the agent recovers
}));
