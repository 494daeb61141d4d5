/* The load panel: a minute of /metrics, two samples a second while it is open. */
import { $ } from "./dom.js";
import * as api from "./api.js";

const KEPT = 120;
const series = { load: [], rate: [], kv: [] };
let lastTokens = null,
  lastTime = 0;

function plot(canvas, values, top, unit) {
  const g = canvas.getContext("2d"),
    w = canvas.width,
    h = canvas.height,
    max = Math.max(top, ...values, 1e-9);
  const css = getComputedStyle(canvas),
    x = i => ((i + KEPT - values.length) / (KEPT - 1)) * w,
    y = v => h - 4 - (v / max) * (h - 12);
  g.clearRect(0, 0, w, h);
  g.strokeStyle = css.color; // the accent
  g.lineWidth = 3;
  g.beginPath();
  values.forEach((v, i) => g.lineTo(x(i), y(v)));
  g.stroke();
  if (values.length) {
    g.lineTo(w, h);
    g.lineTo(x(0), h);
    g.globalAlpha = 0.15;
    g.fillStyle = g.strokeStyle;
    g.fill();
    g.globalAlpha = 1;
  }
  g.fillStyle = css.color;
  g.font = "20px system-ui, sans-serif";
  g.fillText(unit(max), 6, 22);
}

async function sample() {
  if (!$("load").open || document.hidden) return;
  let text;
  try {
    text = await (await api.call("metrics")).text();
  } catch {
    return;
  } // no response; the next sample tries again
  /* In the names of any --metrics-compat style. */
  const get = (...names) => {
    let sum = 0;
    const line = new RegExp(
      "^(?:steel_|vllm:|llamacpp:)(?:" + names.join("|") + ")(?:\\{[^}]*\\})? ([0-9.eE+-]+)$",
      "gm",
    );
    for (const m of text.matchAll(line)) sum += Number(m[1]);
    return sum;
  };
  const now = performance.now(),
    tokens = get("generation_tokens_total", "tokens_predicted_total");
  const running = get("requests_running", "num_requests_running", "requests_processing");
  const waiting = get("requests_waiting", "num_requests_waiting", "requests_deferred");
  const rate = lastTokens === null ? 0 : Math.max(0, (tokens - lastTokens) / ((now - lastTime) / 1000));
  const kv = get("kv_cache_usage_ratio", "kv_cache_usage_perc");
  lastTokens = tokens;
  lastTime = now;
  for (const [k, v] of [
    ["load", running + waiting],
    ["rate", rate],
    ["kv", kv],
  ]) {
    series[k].push(v);
    if (series[k].length > KEPT) series[k].shift();
  }
  $("s-running").textContent = running;
  $("s-waiting").textContent = waiting;
  $("s-rate").textContent = rate.toFixed(1);
  $("s-rate").dataset.most = Math.max(...series.rate).toFixed(1);
  $("s-kv").textContent = (100 * kv).toFixed(1) + " %";
  plot($("c-load"), series.load, 4, v => v.toFixed(0));
  plot($("c-rate"), series.rate, 10, v => v.toFixed(0));
  plot($("c-kv"), series.kv, 1, v => (100 * v).toFixed(0) + " %");
}

export function setup() {
  setInterval(sample, 500);
  $("load").ontoggle = sample;
}
