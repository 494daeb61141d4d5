/*
 * The menus beside the message box: the model or adapter that answers, and how much it thinks. Both belong to the
 * conversation; new conversations begin with what was chosen last.
 */
import { $, el } from "./dom.js";
import * as api from "./api.js";
import * as chats from "./chats.js";
import { settings, set } from "./settings.js";

const NONE = { id: "", context: 0, sampling: {}, capabilities: [], efforts: [], params: 0 };
/* The words of reasoning_effort. A model whose template knows none gets a bound on its thinking: at most this many tokens,
 * and at most this part of the context. */
const NAMES = {
  none: "Off",
  minimal: "Minimal",
  low: "Low",
  medium: "Medium",
  high: "High",
  xhigh: "Very high",
  max: "Maximum",
};
const BUDGETS = { low: [1024, 1 / 8], medium: [4096, 1 / 4] };

let list = [];
export const load = async () => {
  list = await api.models();
};
export const known = id => list.some(m => m.id === id);
export const loaded = id => list.some(m => m.id === id && m.state === "loaded");
export const several = () => list.length > 1;
export const of = record => list.find(m => m.id === record.model) ?? list[0] ?? NONE;

const thinks = model => model.efforts.length > 0 || model.capabilities.includes("thinking");
const words = model => ["none", ...(model.efforts.length ? model.efforts : ["low", "medium", "high"])];

/* The fields of a request that choose the model and its thinking. */
export function fields(record) {
  const model = of(record),
    out = several() ? { model: model.id } : {};
  if (!thinks(model) || !(record.effort in NAMES)) return out;
  out.reasoning_effort = record.effort;
  const bound = !model.efforts.length && BUDGETS[record.effort];
  if (bound) out.reasoning_budget = Math.max(16, Math.min(bound[0], Math.floor(model.context * bound[1])));
  return out;
}

/* Fields of a new conversation. */
export const defaults = () => ({
  ...(settings.model ? { model: settings.model } : {}),
  ...(settings.effort ? { effort: settings.effort } : {}),
});

const option = ([value, text]) => el("option", { value }, text);

/* Shows the menus of a conversation. */
export function draw(record) {
  const model = of(record),
    state = { unloaded: " (not loaded)", loading: " (loading)", failed: " (cannot be loaded)" },
    name = m => [m.id, m.parent ? `${m.id} (adapter of ${m.parent})` : m.id + (state[m.state] ?? "")];
  $("model").textContent = $("model").title = model.id;
  $("pick").parentElement.hidden = !several();
  $("pick").replaceChildren(...list.map(m => option(name(m))));
  $("pick").value = model.id;
  $("effort").parentElement.hidden = !thinks(model);
  const effort = record.effort in NAMES ? record.effort : "",
    offered = words(model);
  if (effort && !offered.includes(effort)) offered.push(effort); // chosen with another model; the server takes the nearest
  $("effort").replaceChildren(option(["", "Default"]), ...offered.map(w => option([w, NAMES[w] ?? w])));
  $("effort").value = effort;
}

/* act: { current() -> { conv, fresh }, changed() } */
export function setup(act) {
  const choose = (field, value) => {
    const { conv, fresh } = act.current();
    set(field, value);
    if (fresh) conv.record[field] = value;
    else chats.change(conv, { [field]: value });
    act.changed();
  };
  $("pick").onchange = () => choose("model", $("pick").value);
  $("effort").onchange = () => choose("effort", $("effort").value);
}
