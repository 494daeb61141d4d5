// Coding agents as they are installed, in their non-interactive forms: each reads a file with a tool of its own and gets
// the answer of a scripted model. `make test-all` installs them; otherwise they run only if they are there.
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
const command = "cat hello.txt | tee seen.txt", readFile = { command };

// What each agent is told: files of its home, environment, arguments; the tool it runs commands with.
const agents = {
  claude: {
    tool: "Bash", args: readFile,
    env: s => ({ ANTHROPIC_BASE_URL: s.origin, ANTHROPIC_API_KEY: "x", ANTHROPIC_MODEL: "scripted", CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1", IS_SANDBOX: "1" }),
    run: ["-p", "Read hello.txt", "--dangerously-skip-permissions"],
  },
  codex: {
    tool: "exec_command", args: { cmd: command },
    env: s => ({ CODEX_OSS_BASE_URL: s.baseURL }),
    files: (s, model) => ({ ".codex/config.toml": `model = "${model}"\nmodel_provider = "steel"\n[model_providers.steel]\nname = "steel"\nbase_url = "${s.baseURL}"\nwire_api = "responses"\n` }),
    run: ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "Read hello.txt"],
  },
  opencode: {
    tool: "bash", args: { ...readFile, description: "Reads it" },
    files: s => ({ ".config/opencode/opencode.json": JSON.stringify({ model: "steel/scripted", provider: { steel: {
      npm: "@ai-sdk/openai-compatible", name: "Steel", options: { baseURL: s.baseURL, apiKey: "x" }, models: { scripted: { name: "scripted", limit: { context: 200000, output: 8000 } } } } } }) }),
    run: ["run", "Read hello.txt"],
  },
  qwen: {
    tool: "run_shell_command", args: { ...readFile, is_background: false },
    env: s => ({ OPENAI_API_KEY: "x", OPENAI_BASE_URL: s.baseURL, OPENAI_MODEL: "scripted" }),
    run: ["--auth-type", "openai", "-p", "Read hello.txt", "--yolo"],
  },
  pi: {
    tool: "bash", args: readFile,
    files: s => ({ ".pi/agent/models.json": JSON.stringify({ providers: { steel: { baseUrl: s.baseURL, api: "openai-completions", apiKey: "x", models: [{ id: "scripted", contextWindow: 200000, maxTokens: 8000 }] } } }) }),
    run: ["-p", "--provider", "steel", "--model", "scripted", "Read hello.txt"],
  },
  cn: { // Continue
    tool: "Bash", args: readFile,
    env: () => ({ CONTINUE_TELEMETRY_ENABLED: "0" }),
    files: s => ({ ".continue/config.yaml": `name: steel\nversion: 1.0.0\nschema: v1\nmodels:\n  - name: scripted\n    provider: openai\n    model: scripted\n    apiBase: ${s.baseURL}\n    apiKey: x\n    roles: [chat]\n    capabilities: [tool_use]\n` }),
    run: ["-p", "--auto", "--config", "../.continue/config.yaml", "Read hello.txt"],
  },
  copilot: { // GitHub's
    tool: "bash", args: { ...readFile, description: "Reads it" },
    env: s => ({ COPILOT_PROVIDER_BASE_URL: s.baseURL, COPILOT_MODEL: "scripted", COPILOT_OFFLINE: "true", COPILOT_AUTO_UPDATE: "false" }),
    run: ["-p", "Read hello.txt", "--allow-all-tools"],
  },
  cline: {
    tool: "run_commands", args: { commands: [command] },
    files: s => ({ ".cline/data/settings/providers.json": JSON.stringify({ version: 1, lastUsedProvider: "openai-compatible", modes: {}, providers: {
      "openai-compatible": { settings: { provider: "openai-compatible", apiKey: "x", model: "scripted", baseUrl: s.baseURL }, updatedAt: "2026-01-01T00:00:00Z", tokenSource: "manual" } } }) }),
    run: ["-P", "openai-compatible", "-m", "scripted", "Read hello.txt"],
  },
  grok: {
    tool: "bash", args: readFile,
    env: s => ({ GROK_BASE_URL: s.baseURL, GROK_API_KEY: "x" }),
    run: ["-m", "scripted", "-p", "Read hello.txt"],
  },
};

// A home of its own, a folder with the file, and a server with a model that calls the agent's tool.
async function withAgent(t, name, work, { context = 131072, model = "scripted", ...own } = {}) {
  if (!fs.existsSync(path.join(bin, name))) return t.skip(`${name} is not installed: make test-all does it`);
  const dir = fs.mkdtempSync(path.join(os.tmpdir(), "steel-agent-"));
  const { tool, args, files, env } = { ...agents[name], ...own }, file = path.join(dir, model + ".gguf");
  const made = spawnSync("python3", ["tests/script_model.py", file, tool, JSON.stringify(args)], { cwd: root });
  assert.equal(made.status, 0, String(made.stderr));
  fs.mkdirSync(path.join(dir, "work"));
  fs.writeFileSync(path.join(dir, "work/hello.txt"), "The word is plum.\n");
  const server = await startServer(file, "-c", String(context));
  try {
    for (const [file, text] of Object.entries(files?.(server, model) ?? {})) {
      fs.mkdirSync(path.join(dir, path.dirname(file)), { recursive: true });
      fs.writeFileSync(path.join(dir, file), text);
    }
    const run = async (...more) => {
      const child = spawn(path.join(bin, name), more, { cwd: path.join(dir, "work"), stdio: ["ignore", "pipe", "pipe"],
        env: { PATH: process.env.PATH, HOME: dir, TERM: "dumb", NO_COLOR: "1", ...env?.(server) } });
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

for (const name of Object.keys(agents))
  test(`${name} finishes a tool loop`, t => withAgent(t, name, async (run, server, dir) => {
    const { code, out } = await run(...agents[name].run);
    assert.equal(code, 0, out + server.log());
    assert.ok(out.includes(answer), out + server.log());
    assert.equal(fs.readFileSync(path.join(dir, "work/seen.txt"), "utf8"), "The word is plum.\n", out);
    // one request called the tool, a later one had its result
    assert.ok(await server.metric("requests_finished_total") >= 2, server.log());
    assert.ok(!/status=[45]\d\d/.test(server.log()), server.log());
  }));

test("codex exec --output-schema", t => withAgent(t, "codex", async (run, server, dir) => {
  const schema = { type: "object", properties: { word: { enum: ["plum", "pear"] } }, required: ["word"], additionalProperties: false };
  fs.writeFileSync(path.join(dir, "schema.json"), JSON.stringify(schema));
  const [exec, ...rest] = agents.codex.run;
  const last = path.join(dir, "last.txt");
  const { code, out } = await run(exec, "--output-schema", path.join(dir, "schema.json"), "-o", last, ...rest);
  assert.equal(code, 0, out);
  assert.ok(["plum", "pear"].includes(JSON.parse(fs.readFileSync(last, "utf8")).word), out);
}));

test("codex --oss finds Ollama", t => withAgent(t, "codex", async (run, server) => {
  const [exec, ...rest] = agents.codex.run;
  const { code, out } = await run(exec, "--oss", "--local-provider", "ollama", "-m", "scripted", ...rest);
  assert.equal(code, 0, out + server.log());
  assert.ok(out.includes(answer), out);
}));

// For OpenAI's models Codex has a custom tool whose input follows a Lark grammar.
const patch = "*** Begin Patch\n*** Add File: made.txt\n+\"plum\"\n*** Delete File: hello.txt\n*** End Patch";
test("codex applies a patch of its own grammar", t => withAgent(t, "codex", async (run, server, dir) => {
  const { code, out } = await run(...agents.codex.run);
  assert.equal(code, 0, out + server.log());
  assert.equal(fs.readFileSync(path.join(dir, "work/made.txt"), "utf8"), '"plum"\n', out);
  assert.ok(!fs.existsSync(path.join(dir, "work/hello.txt")), out);
}, { model: "gpt-5.5", tool: "apply_patch", args: { input: patch } }));

/* A prompt over the context, as each agent detects it itself. */

test("codex knows a prompt that is over the context", t => withAgent(t, "codex", async (run, server) => {
  const { code, out } = await run(...agents.codex.run);
  assert.notEqual(code, 0, out);
  assert.match(out, /ran out of room in the model's context window/, out + server.log());
}, { context: 4096 }));

const modules = path.join(import.meta.dirname, "agents/node_modules");
// The regular expressions of a list, from the code that an agent is shipped as.
function listOf(file, first) {
  const code = fs.readFileSync(path.join(modules, file)), from = code.lastIndexOf("[", code.indexOf(first));
  assert.ok(from > 0, `${file} has no ${first}`);
  const list = /^\[(?:\s*\/(?:[^\/\\\n[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+\/i,?)+\s*\]/.exec(code.subarray(from, from + 8192).toString())?.[0];
  const rules = new Function("return " + list)();
  assert.ok(rules.length > 5 && rules.every(r => r instanceof RegExp));
  return rules;
}
const detects = {
  pi: async () => {
    const { isContextOverflow } = await import(path.join(modules, "@earendil-works/pi-ai/dist/utils/overflow.js"));
    return errorMessage => isContextOverflow({ stopReason: "error", errorMessage });
  },
  opencode: () => {
    const list = listOf("opencode-linux-x64/bin/opencode", "/prompt is too long/i,/request_too_large/i");
    return text => list.some(r => r.test(text));
  },
  qwen: () => {
    const list = listOf("@qwen-code/qwen-code/cli.js", "/\\bcontext[_\\s-]?length[_\\s-]?exceeded\\b/i");
    return text => list.some(r => r.test(text));
  },
};
for (const name of Object.keys(detects))
  test(`${name} knows a prompt that is over the context`, async t => {
    if (!fs.existsSync(path.join(bin, name))) return t.skip(`${name} is not installed: make test-all does it`);
    const detect = await detects[name](), server = await startServer("-c", "2048");
    try {
      assert.ok(!detect("The server is busy.") && !detect("model 'x' was not found"));
      const messages = [{ role: "user", content: "word ".repeat(4000) }];
      for (const [at, body] of [["/v1/chat/completions", { messages }], ["/v1/responses", { input: messages }], ["/v1/messages", { messages, max_tokens: 5 }]]) {
        const r = await fetch(server.origin + at, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ model: "m", ...body }) });
        const { error } = await r.json();
        assert.equal(r.status, 400);
        assert.ok(detect(`400 ${error.message}`), `${at}: ${error.message}`);
      }
    } finally {
      await server.stop();
    }
  });
