// MCP servers that others made (over stdio and streamable HTTP), whose tools /v1/responses runs, and OpenAI's SDK as its client.
import { test } from "node:test";
import assert from "node:assert/strict";
import { spawn, spawnSync } from "node:child_process";
import { once } from "node:events";
import fs from "node:fs";
import { createServer } from "node:net";
import os from "node:os";
import path from "node:path";
import OpenAI from "openai";
import { startServer } from "./common.mjs";

const root = path.resolve(import.meta.dirname, "../..");
const bin = path.join(import.meta.dirname, "mcp/node_modules/.bin");
const answer = "Hello from the **scripted** model. All is done.";
const here = spawnSync("sh", ["install.sh", "mcp"], { cwd: import.meta.dirname }).status === 0;
const skip = here ? false : "npm cannot install the pinned MCP servers here";

// A server with a model that calls `tool`, and the MCP servers.
async function withServers(servers, tool, args, work) {
  const dir = fs.mkdtempSync(path.join(os.tmpdir(), "steel-mcp-"));
  const model = path.join(dir, "scripted.gguf"), config = path.join(dir, "mcp.json");
  const made = spawnSync("python3", ["tests/script_model.py", model, tool, JSON.stringify(args)], { cwd: root });
  assert.equal(made.status, 0, String(made.stderr));
  fs.writeFileSync(config, JSON.stringify({ mcpServers: servers }));
  const s = await startServer(model, "-c", "65536", "--mcp-config", config);
  try {
    for (let i = 0; ; i++) {
      const { servers: states } = await (await fetch(s.origin + "/mcp/tools")).json();
      if (states.every(v => v.state === "running")) break;
      assert.ok(i < 3000, "the MCP servers do not start:\n" + s.log());
      await new Promise(r => setTimeout(r, 100));
    }
    await work(s, new OpenAI({ baseURL: s.baseURL, apiKey: "x", maxRetries: 0 }));
  } finally {
    await s.stop();
    fs.rmSync(dir, { recursive: true, force: true });
  }
}

const call = async (s, server, name, args = {}) =>
  (await fetch(s.origin + "/mcp/call", { method: "POST", body: JSON.stringify({ server, name, arguments: args }) })).json();

test("server-filesystem: the SDK gets a file's text, streamed and not, with and without approval", { skip }, async () => {
  const folder = fs.mkdtempSync(path.join(os.tmpdir(), "steel-notes-"));
  fs.writeFileSync(path.join(folder, "note.txt"), "The word is plum.\n");
  const servers = { files: { command: path.join(bin, "mcp-server-filesystem"), args: [folder] } };
  await withServers(servers, "files__read_text_file", { path: path.join(folder, "note.txt") }, async (s, client) => {
    const tools = [{ type: "mcp", server_label: "files", allowed_tools: ["read_text_file"], require_approval: "never" }];
    const r = await client.responses.create({ model: "scripted", input: "Read the note.", tools });
    assert.deepEqual(r.output.map(i => i.type), ["mcp_list_tools", "reasoning", "mcp_call", "message"]);
    assert.match(r.output[2].output, /The word is plum/);
    assert.equal(r.output_text, answer);
    const stream = client.responses.stream({ model: "scripted", input: "Read the note.", tools });
    const types = [];
    for await (const e of stream) types.push(e.type);
    assert.ok(["response.mcp_list_tools.completed", "response.mcp_call.in_progress", "response.mcp_call_arguments.done", "response.mcp_call.completed"].every(t => types.includes(t)), types.join());
    assert.deepEqual((await stream.finalResponse()).output.map(i => i.type), r.output.map(i => i.type));
    const asks = [{ ...tools[0], require_approval: "always" }];
    const first = await client.responses.create({ model: "scripted", input: "Read the note.", tools: asks });
    const request = first.output.at(-1);
    assert.equal(request.type, "mcp_approval_request");
    const second = await client.responses.create({ model: "scripted", previous_response_id: first.id, tools: asks,
      input: [{ type: "mcp_approval_response", approval_request_id: request.id, approve: true }] });
    assert.match(second.output[0].output, /The word is plum/);
    assert.equal(second.output_text, answer);
    const outside = await call(s, "files", "read_text_file", { path: "/etc/hostname" });
    assert.ok(outside.isError && /denied/i.test(outside.content[0].text), JSON.stringify(outside));
  });
  fs.rmSync(folder, { recursive: true, force: true });
});

test("server-everything, over stdio and HTTP", { skip }, async () => {
  const free = createServer().listen(0, "127.0.0.1");
  await once(free, "listening");
  const { port } = free.address();
  free.close();
  await once(free, "close");
  const web = spawn(path.join(bin, "mcp-server-everything"), ["streamableHttp"], { env: { ...process.env, PORT: String(port) }, stdio: "ignore" });
  try {
    await withServers({ all: { command: path.join(bin, "mcp-server-everything"), args: ["stdio"] }, web: { url: `http://127.0.0.1:${port}/mcp` } },
      "all__echo", { message: "hello" }, async (s, client) => {
        for (const server of ["all", "web"]) {
          const { tools } = await (await fetch(s.origin + "/mcp/tools")).json();
          assert.ok(tools.filter(t => t.server === server).length > 5, server);
          const echo = await call(s, server, "echo", { message: "again" });
          assert.deepEqual(echo, { content: [{ type: "text", text: "Echo: again" }], isError: false });
          const wrong = await call(s, server, "echo", { message: 7 });
          assert.ok(wrong.isError, JSON.stringify(wrong));
        }
        const r = await client.responses.create({ model: "scripted", input: "Echo.", tools: [{ type: "mcp", server_label: "all", require_approval: "never" }] });
        assert.equal(r.output.find(i => i.type === "mcp_call").output, "Echo: hello");
        assert.equal(r.output_text, answer);
      });
  } finally {
    web.kill();
  }
});
