/*
 * The settings dialog: key, sampling, system prompts, tools, files. Rebuilt each time it opens; every change is saved at
 * once.
 */
import { $, el, button, toast, pickFile, saveFile, plural, number } from "./dom.js";
import * as chats from "./chats.js";
import * as db from "./db.js";
import * as tools from "./tools.js";
import * as transfer from "./transfer.js";
import { settings, set, SAMPLING, ADVANCED } from "./settings.js";

let act = null,
  model = null;
export const setup = actions => {
  act = actions;
};

const field = (label, input, tall) => el("label", { class: tall ? "tall" : null }, label + " ", input);
const input = (value, oninput, props = {}) => {
  const e = el("input", props);
  e.value = value ?? "";
  e.oninput = () => oninput(e.value.trim(), e);
  return e;
};
const area = (value, oninput, props = {}) => {
  const e = el("textarea", props);
  e.value = value ?? "";
  e.oninput = () => oninput(e.value, e);
  return e;
};
const section = (name, ...parts) => el("section", {}, el("h3", {}, name), ...parts);

/* Fields of SAMPLING or ADVANCED. The placeholder shows the model's default. */
const numbers = list =>
  list.map(([name, label, range]) => {
    const own = model?.sampling[name];
    const hint =
      own !== undefined ? "model: " + own : name === "seed" ? "random" : name === "max_tokens" ? "no limit" : "";
    return field(
      label,
      input(settings.sampling[name], v => set("sampling", { ...settings.sampling, [name]: v }), {
        type: "number",
        inputmode: "decimal",
        placeholder: hint,
        id: "set-" + name,
        ...range,
      }),
    );
  });

function sampling() {
  const used = ADVANCED.some(([name]) => ![undefined, ""].includes(settings.sampling[name]));
  return section(
    "Sampling",
    el("p", {}, "Empty fields use the defaults of the server or of the model's author."),
    el("div", { class: "grid" }, ...numbers(SAMPLING)),
    el(
      "details",
      { id: "advanced", open: used },
      el("summary", {}, "Advanced"),
      el("div", { class: "grid" }, ...numbers(ADVANCED)),
    ),
    button("Reset to defaults", () => {
      set("sampling", {});
      redraw();
    }),
  );
}

const check = (text, checked, onchange, props = {}) =>
  el(
    "label",
    { class: "check" },
    el("input", { type: "checkbox", checked, onchange: e => onchange(e.target.checked), ...props }),
    " " + text,
  );

function presets() {
  const save = () => set("presets", settings.presets);
  const rows = settings.presets.map((p, i) =>
    el(
      "fieldset",
      {},
      el("legend", {}, p.name || "Unnamed"),
      field(
        "Name",
        input(p.name, v => {
          p.name = v.slice(0, 100);
          save();
        }),
      ),
      field(
        "Text",
        area(
          p.text,
          v => {
            p.text = v;
            save();
          },
          { rows: 2 },
        ),
        true,
      ),
      el(
        "label",
        { class: "check" },
        el("input", {
          type: "radio",
          name: "preset",
          checked: settings.preset === p.id,
          onchange: () => set("preset", p.id),
        }),
        " new conversations start with it",
      ),
      settings.presets.length > 1
        ? button("Remove", () => {
            settings.presets.splice(i, 1);
            if (settings.preset === p.id) set("preset", settings.presets[0].id);
            save();
            redraw();
          })
        : null,
    ),
  );
  return section(
    "System prompts",
    ...rows,
    button(
      "Add a system prompt",
      () => {
        settings.presets.push({ id: chats.newId(), name: "New prompt", text: "" });
        save();
        redraw();
      },
      { id: "add-preset" },
    ),
  );
}

const EXAMPLE = { type: "object", properties: { town: { type: "string" } }, required: ["town"] };

function toolRow(t, i) {
  const save = () => set("tools", settings.tools),
    said = el("p", { class: "said", role: "note" });
  const url = input(
    t.url,
    v => {
      t.url = v;
      save();
    },
    { type: "url", placeholder: "http://localhost:3000/" + (t.kind === "mcp" ? "mcp" : "weather") },
  );
  const schema = area(
    JSON.stringify(t.parameters, null, 1),
    (v, e) => {
      try {
        t.parameters = JSON.parse(v);
        e.setCustomValidity("");
        said.textContent = "";
        save();
      } catch (x) {
        e.setCustomValidity("no JSON");
        said.textContent = "The schema is not valid JSON: " + x.message;
      }
    },
    { rows: 4, spellcheck: "false" },
  );
  const test = async () => {
    said.textContent = "Asking…";
    try {
      said.textContent = "Has: " + ((await tools.mcpTools(t)).map(x => x.name).join(", ") || "no tools");
    } catch (e) {
      said.textContent = e.message;
    }
  };
  return el(
    "fieldset",
    { class: "tool-row" },
    el("legend", {}, t.kind === "mcp" ? "MCP server" : "HTTP tool"),
    field(
      "Name",
      input(t.name, v => {
        t.name = v.replace(/[^\w-]/g, "_").slice(0, 64);
        save();
      }),
    ),
    field("URL", url),
    field(
      "Authorization",
      input(
        t.auth,
        v => {
          t.auth = v;
          save();
        },
        { type: "password", placeholder: "none", autocomplete: "off" },
      ),
    ),
    ...(t.kind === "mcp"
      ? [button("Connect", test)]
      : [
          field(
            "Description",
            input(t.description, v => {
              t.description = v;
              save();
            }),
          ),
          field("Parameters (JSON schema)", schema, true),
        ]),
    said,
    check("ask before each call", t.ask, yes => {
      t.ask = yes;
      save();
    }),
    button("Remove", () => {
      settings.tools.splice(i, 1);
      save();
      redraw();
    }),
  );
}

/* A switch for each of the server's tools, and the state of MCP servers that do not run. */
function serverTools() {
  const list = tools.serverTools(),
    servers = [...new Set(list.map(t => t.server))];
  const missing = tools.missingServers().map(s => {
    const why = s.state === "starting" ? "starting" : (s.error ?? s.state);
    return el("p", { class: "said" }, `On this server: ${s.name}: ${why}`);
  });
  const toggle = (key, yes) =>
    set("serverTools", [...settings.serverTools.filter(k => k !== key), ...(yes ? [key] : [])]);
  const parts = servers.map(server =>
    el(
      "fieldset",
      { class: "server-tools" },
      el("legend", {}, "On this server: " + server),
      ...list
        .filter(t => t.server === server)
        .map(t =>
          el(
            "div",
            { class: "server-tool" },
            check(t.name, settings.serverTools.includes(t.key), yes => toggle(t.key, yes), {
              "data-key": t.key,
            }),
            el("small", {}, t.description),
          ),
        ),
    ),
  );
  return [...parts, ...missing];
}

function toolList() {
  const add = kind => () => {
    settings.tools.push({
      id: chats.newId(),
      kind,
      name: kind === "mcp" ? "server" : "get_weather",
      url: "",
      auth: "",
      ask: true,
      ...(kind === "http" ? { description: "", parameters: EXAMPLE } : {}),
    });
    set("tools", settings.tools);
    redraw();
  };
  const part = section(
    "Tools",
    el("p", {}, "The page asks you before each call. A tool's result goes to the model."),
    model && !model.capabilities.includes("tools")
      ? el("p", { class: "said" }, "This model's chat template does not support tools; they are not sent.")
      : null,
    el("div", { id: "server-tools" }, ...serverTools()),
    el(
      "p",
      {},
      "Your browser calls the tools below with a POST of the arguments as JSON. It can call this server and the origins given by --page-connect.",
    ),
    ...settings.tools.map(toolRow),
    button("Add an HTTP tool", add("http"), { id: "add-http" }),
    button("Add an MCP server", add("mcp"), { id: "add-mcp" }),
  );
  part.dataset.part = "tools";
  return part;
}

/* Files */

async function exportAll() {
  const all = await Promise.all((await chats.list()).map(c => chats.load(c.id)));
  saveFile("steel-chats.json", "application/json", transfer.toJson(all.filter(Boolean)));
}

async function importFiles(files) {
  let done = 0,
    last = null;
  for (const f of files) {
    try {
      for (const { record, nodes } of transfer.parse(await f.text(), f.name.replace(/\.\w+$/, ""))) {
        await db.write([db.put("chats", record), ...nodes.map(n => db.put("nodes", n))], { keep: false });
        done++;
        last = record.id;
      }
    } catch (e) {
      toast(
        `${f.name} was not imported: ${e.name === "QuotaExceededError" ? "this browser's storage is full" : e.message}`,
      );
    }
  }
  if (!last) return;
  toast(`Imported ${plural(done, "conversation")}.`);
  $("settings").close();
  act.imported(last);
}

function data() {
  const space = el("p");
  navigator.storage?.estimate?.().then(
    ({ usage, quota }) => {
      space.textContent = `Stored in this browser only: ${number(Math.round(usage / 1e3))} kB of ${number(Math.round(quota / 1e6))} MB.`;
    },
    () => {},
  );
  return section(
    "Conversations",
    space,
    check("The model writes their titles", settings.titles, yes => set("titles", yes), { id: "set-titles" }),
    button("Export all conversations (JSON)", exportAll, { id: "export-all" }),
    button(
      "Import conversations…",
      async () => importFiles(await pickFile(".json,.md,.markdown,application/json,text/markdown", true)),
      { id: "import" },
    ),
  );
}

const KEYS = [
  ["Enter", "send"],
  ["Shift Enter", "new line"],
  ["Esc", "stop the answer, cancel an edit"],
  ["/", "to the message"],
  ["↑", "edit the last message"],
  ["↓", "leave the edit"],
  ["Ctrl K", "search"],
  ["F2, Delete", "rename, delete the conversation in the list"],
];
function about() {
  return section(
    "Keys",
    el(
      "dl",
      { class: "keys" },
      ...KEYS.flatMap(([k, v]) => [el("dt", {}, el("kbd", {}, k)), el("dd", {}, v)]),
    ),
    el(
      "p",
      {},
      el("a", { href: "web/licences.txt", target: "_blank" }, "Licences of this page and its libraries"),
    ),
  );
}

function key(why) {
  const e = input(settings.key, v => set("key", v), { type: "password", id: "key", autocomplete: "off" });
  e.onchange = () => act.keyChanged();
  return section("Server", why ? el("p", { class: "error", id: "key-why" }, why) : null, field("API key", e));
}

function redraw(why) {
  const box = $("settings"),
    top = box.scrollTop;
  box.replaceChildren(
    el(
      "div",
      { class: "dialog-head" },
      el("h2", { id: "settings-title" }, "Settings"),
      button("Close", () => box.close(), { id: "close-settings" }),
    ),
    key(why),
    sampling(),
    presets(),
    toolList(),
    data(),
    about(),
  );
  box.scrollTop = top;
}

/* The server's tools have changed. The focus stays where it is. */
export function drawServerTools() {
  const box = $("server-tools");
  if (!$("settings").open || !box) return;
  const at = [...box.querySelectorAll("input")].find(e => e === document.activeElement)?.dataset.key;
  box.replaceChildren(...serverTools());
  if (at) [...box.querySelectorAll("input")].find(e => e.dataset.key === at)?.focus();
}

/* why: the reason, if it opens by itself; the key field gets the focus. part: "tools" shows that section. */
export function open(currentModel, why, part) {
  model = currentModel;
  redraw(why);
  if (!$("settings").open) $("settings").showModal();
  if (why) $("key").focus();
  else tools.loadServerTools(); // it may have changed since the page was opened
  if (part) {
    const box = $("settings").querySelector(`section[data-part="${part}"]`);
    box.scrollIntoView();
    box.querySelector("input, button").focus();
  }
}
