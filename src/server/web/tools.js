/*
 * Tools of the model. The server's own (`steel serve --mcp-config`) run on the server. User-defined tools are HTTP
 * endpoints (JSON arguments in, text out) and MCP servers (streamable HTTP). The browser calls those, and only where the
 * page's policy allows it: this server, and the origins of `steel serve --page-connect`. Results are text for the model
 * and are never executed or rendered as markup.
 *
 * A tool in the settings: { id, kind: "http" | "mcp", name, url, auth, ask, description, parameters }
 */
import * as api from "./api.js";
import { settings } from "./settings.js";

const LONGEST_RESULT = 200000,
  WAIT_MS = 60000;

/* A request that the policy blocks fails like one to a dead server. The securitypolicyviolation event tells them
 * apart. */
const forbidden = new Set();
document.addEventListener("securitypolicyviolation", e => {
  if (e.effectiveDirective === "connect-src")
    try {
      forbidden.add(new URL(e.blockedURI).origin);
    } catch {
      /* not a URL */
    }
});

async function request(tool, body, headers = {}, signal = null) {
  const origin = new URL(tool.url, location.href).origin;
  if (tool.auth) headers.Authorization = tool.auth;
  try {
    const signals = [AbortSignal.timeout(WAIT_MS), ...(signal ? [signal] : [])];
    return await fetch(tool.url, {
      method: "POST",
      body: JSON.stringify(body),
      signal: AbortSignal.any(signals),
      credentials: "omit",
      headers: { "Content-Type": "application/json", ...headers },
    });
  } catch (e) {
    await new Promise(r => setTimeout(r, 50)); // the event follows the failure
    if (forbidden.has(origin))
      throw new Error(`this page may not call ${origin}: start the server with --page-connect ${origin}`);
    if (signal?.aborted) throw new Error("stopped");
    if (e.name === "TimeoutError") throw new Error(`${origin} did not respond within ${WAIT_MS / 1000} s`);
    throw new Error(`${origin} does not respond, or its CORS policy blocks this page`);
  }
}

/* MCP */

const sessions = new Map(); // tool id -> Promise of { url, session, tools }

/* The reply to a JSON-RPC request: JSON, or the event with its id. */
async function reply(response, id) {
  if (!response.ok) throw new Error("the MCP server returned " + response.status + " " + response.statusText);
  const text = await response.text();
  const messages = (response.headers.get("Content-Type") ?? "").startsWith("text/event-stream")
    ? text
        .split(/\r?\n\r?\n/)
        .map(e =>
          e
            .split(/\r?\n/)
            .filter(l => l.startsWith("data:"))
            .map(l => l.slice(5))
            .join("\n"),
        )
        .filter(Boolean)
    : [text];
  for (const m of messages) {
    const d = JSON.parse(m);
    if (d.id !== id) continue;
    if (d.error) throw new Error(d.error.message ?? "the MCP server failed");
    return d.result;
  }
  throw new Error("the MCP server did not reply");
}

let lastId = 0;
async function rpc(tool, session, method, params, signal) {
  const id = ++lastId;
  const r = await request(
    tool,
    { jsonrpc: "2.0", id, method, params },
    {
      Accept: "application/json, text/event-stream",
      ...(session ? { "Mcp-Session-Id": session, "MCP-Protocol-Version": "2025-06-18" } : {}),
    },
    signal,
  );
  return { result: await reply(r, id), session: r.headers.get("Mcp-Session-Id") ?? session };
}

async function connect(tool) {
  const { session } = await rpc(tool, null, "initialize", {
    protocolVersion: "2025-06-18",
    capabilities: {},
    clientInfo: { name: "steel", version: "1" },
  });
  await request(
    tool,
    { jsonrpc: "2.0", method: "notifications/initialized" },
    { Accept: "application/json, text/event-stream", ...(session ? { "Mcp-Session-Id": session } : {}) },
  );
  const { result } = await rpc(tool, session, "tools/list", {});
  return { url: tool.url, session, tools: Array.isArray(result?.tools) ? result.tools : [] };
}

export async function mcpTools(tool) {
  const known = await sessions.get(tool.id)?.catch(() => null);
  if (!known || known.url !== tool.url) sessions.set(tool.id, connect(tool));
  return (await sessions.get(tool.id)).tools;
}

/* The server's tools: [{ server, name, description, parameters, key }]; none if it has none. */
let ofServer = [],
  missing = [];
/* MCP servers that are not running: [{ name, state, error }]. */
export const missingServers = () => missing;
export const serverTools = () => ofServer;

/* While a server is starting, the list is loaded again soon. One that failed starts again by itself, later. */
const STARTING_MS = 1000,
  FAILED_MS = 30000;
let again = null,
  changed = () => {};
/* f is called when the list has changed. */
export const onServerTools = f => (changed = f);
export async function loadServerTools() {
  clearTimeout(again);
  const { tools = [], servers = [] } = await api.call("mcp/tools").then(
    r => r.json(),
    () => ({}), // the request for the models reports what is wrong
  );
  const state = () => JSON.stringify([ofServer, missing]),
    was = state();
  missing = servers.filter(s => s.state !== "running");
  const known = tools.filter(t => typeof t?.name === "string");
  ofServer = known.map(t => {
    const server = String(t.server ?? "");
    return {
      server,
      name: t.name,
      description: String(t.description ?? ""),
      parameters: t.parameters ?? {},
      key: `server:${server}/${t.name}`,
    };
  });
  if (state() !== was) changed();
  clearTimeout(again);
  if (missing.length)
    again = setTimeout(loadServerTools, missing.some(s => s.state === "starting") ? STARTING_MS : FAILED_MS);
}

/* How many tools the model may use. */
export const count = () =>
  settings.tools.length + ofServer.filter(t => settings.serverTools.includes(t.key)).length;

const LONGEST_NAME = 64;
/* A function name that is not in use, as the API allows it. */
function nameFor(t, used) {
  const fit = text => text.replace(/[^\w-]/g, "_").slice(0, LONGEST_NAME - 3) || "tool";
  const first = fit(t.remote),
    second = t.server ? fit(t.server + "_" + t.remote) : first;
  let name = used.has(first) ? second : first;
  for (let i = 2; used.has(name); i++) name = second + "_" + i;
  used.add(name);
  return name;
}

/* The tools a model may use, and the ones that could not be reached. A tool: { name (for the model), remote (its own
 * name), server, description, parameters, ask, key (of a permission), tool (of the settings) }. */
export async function available() {
  const { found, failed } = await ofUser(),
    used = new Set();
  for (const t of ofServer)
    if (settings.serverTools.includes(t.key)) found.push({ ...t, remote: t.name, ask: true, tool: null });
  for (const t of found) t.name = nameFor(t, used);
  return { found, failed };
}
async function ofUser() {
  const found = [],
    failed = [];
  for (const tool of settings.tools) {
    if (tool.kind === "http") {
      found.push({
        remote: tool.name,
        server: "",
        description: tool.description,
        parameters: tool.parameters,
        ask: tool.ask,
        key: "http:" + tool.id,
        tool,
      });
      continue;
    }
    try {
      for (const t of await mcpTools(tool))
        if (typeof t.name === "string")
          found.push({
            remote: t.name,
            server: tool.name,
            description: String(t.description ?? ""),
            parameters: t.inputSchema ?? {},
            ask: tool.ask,
            key: `mcp:${tool.id}/${t.name}`,
            tool,
          });
    } catch (e) {
      sessions.delete(tool.id);
      failed.push(`${tool.name}: ${e.message}`);
    }
  }
  return { found, failed };
}

export const describe = t => ({
  type: "function",
  function: { name: t.name, description: t.description, parameters: t.parameters },
});

/* The text of an MCP result. */
function resultText(result) {
  const text = (result.content ?? []).map(c => (c.type === "text" ? c.text : `[${c.type}]`)).join("\n");
  return result.isError ? "error: " + text : text;
}

/* Runs one tool call and returns text for the model. Errors are results too, so that the model can retry. */
export async function run(known, call, signal) {
  let args;
  try {
    args = JSON.parse(call.arguments || "{}");
  } catch {
    return "error: the arguments are not valid JSON";
  }
  const t = known.find(k => k.name === call.name);
  if (!t) return `error: there is no tool ${call.name}`;
  let text;
  try {
    if (!t.tool) {
      const body = { server: t.server, name: t.remote, arguments: args };
      text = resultText(await (await api.call("mcp/call", body, signal)).json());
    } else if (t.tool.kind === "http") {
      const r = await request(t.tool, args, {}, signal);
      text = await r.text();
      if (!r.ok) text = `error: ${r.status} ${r.statusText}\n${text}`;
    } else {
      const { session } = await sessions.get(t.tool.id);
      const { result } = await rpc(t.tool, session, "tools/call", { name: t.remote, arguments: args }, signal);
      text = resultText(result);
    }
  } catch (e) {
    text = "error: " + e.message;
  }
  return text.length > LONGEST_RESULT
    ? text.slice(0, LONGEST_RESULT) + "\n[cut: " + text.length + " characters]"
    : text;
}
