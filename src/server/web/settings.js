/*
 * User settings: key, sampling, system prompts, tools. One database record each, shared by all tabs. Knows their effect
 * on a request, not how they are shown (dialog.js).
 */
import * as db from "./db.js";
import * as api from "./api.js";

/* Numeric fields of a request; empty = the default of the server or the model's author. */
export const SAMPLING = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.05 }],
  ["top_k", "Top k", { min: 0, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }],
  ["repetition_penalty", "Repetition penalty", { min: 0.1, max: 10, step: 0.05 }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1 }],
  ["max_tokens", "Max tokens", { min: 1, step: 1 }],
  ["seed", "Seed", { min: 0, step: 1 }],
];
export const ADVANCED = [
  ["typical_p", "Typical p", { min: 0, max: 1, step: 0.05 }],
  ["top_n_sigma", "Top n sigma", { min: -1, max: 100, step: 0.1 }],
  ["dynatemp_range", "Dynamic temperature: range", { min: 0, max: 100, step: 0.1 }],
  ["dynatemp_exponent", "Dynamic temperature: exponent", { min: 0, max: 100, step: 0.1 }],
  ["xtc_probability", "XTC: probability", { min: 0, max: 1, step: 0.05 }],
  ["xtc_threshold", "XTC: threshold", { min: 0, max: 1, step: 0.05 }],
  ["dry_multiplier", "DRY: multiplier", { min: 0, max: 100, step: 0.1 }],
  ["dry_base", "DRY: base", { min: 1, max: 100, step: 0.05 }],
  ["dry_allowed_length", "DRY: allowed length", { min: 1, step: 1 }],
  ["dry_penalty_last_n", "DRY: last tokens", { min: -1, step: 1 }],
  ["repeat_last_n", "Penalties: last tokens", { min: -1, step: 1 }],
  ["mirostat", "Mirostat (0, 1 or 2)", { min: 0, max: 2, step: 1 }],
  ["mirostat_tau", "Mirostat: tau", { min: 0, max: 100, step: 0.1 }],
  ["mirostat_eta", "Mirostat: eta", { min: 0, max: 1, step: 0.01 }],
];

const DEFAULTS = {
  key: "",
  model: "", // of new conversations; "" = the server's first
  effort: "", // of new conversations; see models.js
  titles: true, // the model writes titles
  sampling: {},
  presets: [
    { id: "none", name: "No system prompt", text: "" },
    { id: "short", name: "Short answers", text: "Answer in one or two sentences." },
    {
      id: "code",
      name: "Programming",
      text: "You help with programming. Show code first, then explain what is not obvious.",
    },
  ],
  preset: "none", // preset of new conversations
  tools: [], // see tools.js
  serverTools: [], // keys of the server's tools that are on
};
export const settings = structuredClone(DEFAULTS);

export async function load() {
  for (const { key, value } of await db.all("kv"))
    if (key in DEFAULTS && typeof value === typeof DEFAULTS[key]) settings[key] = value;
  api.setKey(settings.key);
}

export function set(name, value) {
  settings[name] = value;
  if (name === "key") api.setKey(value);
  return db.write([db.put("kv", { key: name, value })]);
}

export const presetText = () => settings.presets.find(p => p.id === settings.preset)?.text ?? "";

/* The request fields other than messages. */
export function requestFields() {
  const out = {};
  for (const [name] of [...SAMPLING, ...ADVANCED]) {
    const v = settings.sampling[name];
    if (v !== undefined && v !== "" && Number.isFinite(Number(v))) out[name] = Number(v);
  }
  return out;
}
