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

const DEFAULTS = {
  key: "",
  think: "", // "" = model default, "on", "off"
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
  for (const [name] of SAMPLING) {
    const v = settings.sampling[name];
    if (v !== undefined && v !== "" && Number.isFinite(Number(v))) out[name] = Number(v);
  }
  if (settings.think) out.chat_template_kwargs = { enable_thinking: settings.think === "on" };
  return out;
}
