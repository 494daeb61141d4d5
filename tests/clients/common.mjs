// Starts `steel serve` on a free port with the built-in model (or STEEL_TEST_MODEL) and stops it.
import { spawn } from "node:child_process";
import { createServer } from "node:net";
import { once } from "node:events";
import path from "node:path";

const root = path.resolve(import.meta.dirname, "../..");
const steel = path.resolve(root, process.env.STEEL || "build/steel");

async function freePort() {
  const s = createServer().listen(0, "127.0.0.1");
  await once(s, "listening");
  const { port } = s.address();
  s.close();
  await once(s, "close");
  return port;
}

export async function startServer(...args) {
  const port = await freePort();
  const model = process.env.STEEL_TEST_MODEL ? [process.env.STEEL_TEST_MODEL] : [];
  const child = spawn(steel, ["serve", ...model, "--port", String(port), ...args], { cwd: root, stdio: ["ignore", "ignore", "pipe"] });
  let log = "";
  child.stderr.on("data", d => { log += d; });
  const origin = `http://127.0.0.1:${port}`;
  for (let i = 0; ; i++) {
    if (child.exitCode !== null || i > 3000) throw new Error("the server did not start:\n" + log);
    try { if ((await fetch(origin + "/health")).ok) break; } catch { /* not listening yet */ }
    await new Promise(r => setTimeout(r, 100));
  }
  return {
    origin, port, child,
    baseURL: origin + "/v1",
    log: () => log,
    async metric(name) {
      const text = await (await fetch(origin + "/metrics")).text();
      let sum = 0;
      for (const m of text.matchAll(new RegExp(`^steel_${name}(?:\\{[^}]*\\})? ([0-9.eE+-]+)$`, "gm"))) sum += Number(m[1]);
      return sum;
    },
    async idle() { // every request has left the engine
      for (let i = 0; i < 6000; i++) {
        if (await this.metric("requests_running") + await this.metric("requests_waiting") === 0) return;
        await new Promise(r => setTimeout(r, 50));
      }
      throw new Error("requests are still running");
    },
    async stop() {
      child.kill("SIGTERM");
      const [code] = child.exitCode !== null ? [child.exitCode] : await once(child, "exit");
      if (code !== 0) throw new Error(`the server exited with ${code}:\n${log}`);
    },
  };
}

export const weather = {
  name: "get_weather",
  description: "Get the weather in a town",
  parameters: { type: "object", properties: { town: { type: "string", description: "The town" } }, required: ["town"] },
};
export const weatherQuestion = "What is the weather in Emberton?";
