/*
 * The HTTP client: requests with the user's key, event streams, and errors that say what to do about them. Knows neither
 * conversations nor the page.
 */
let key = "";
export const setKey = k => {
  key = k;
};

/* kind: gone (no response), key, loading, context, busy, request (any other error reply). */
export class ServerError extends Error {
  constructor(kind, message, more = {}) {
    super(message);
    this.kind = kind;
    Object.assign(this, more);
  }
}

export async function call(path, body, signal) {
  const headers = key ? { Authorization: "Bearer " + key } : {};
  if (body) headers["Content-Type"] = "application/json";
  let r;
  try {
    r = await fetch(path, {
      method: body ? "POST" : "GET",
      headers,
      signal,
      body: body && JSON.stringify(body),
    });
  } catch (e) {
    if (e.name === "AbortError") throw e;
    throw new ServerError("gone", "The server at " + location.host + " does not respond.");
  }
  if (r.ok) return r;
  const reply = await r.json().catch(() => null),
    error = reply?.error ?? {};
  const said = typeof error.message === "string" ? error.message : r.status + " " + r.statusText;
  if (r.status === 401)
    throw new ServerError(
      "key",
      "This server needs an API key" + (key ? ", and the one given is wrong." : "."),
    );
  if (r.status === 503 && reply?.status === "loading")
    throw new ServerError("loading", said, { percent: reply.percent });
  if (error.code === "context_length_exceeded")
    throw new ServerError("context", said, { tokens: error.n_prompt_tokens, context: error.n_ctx });
  if (r.status === 429 || r.status === 503) {
    const wait = Number(r.headers.get("Retry-After"));
    throw new ServerError("busy", said + (wait ? " (try again in " + wait + " s)" : ""));
  }
  throw new ServerError("request", said);
}

/* Yields the parsed events of a stream. A connection that ends before the last event is an error. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (e) {
      if (e.name === "AbortError") throw e;
      part = { done: true };
    }
    if (part.done)
      throw new ServerError("gone", "The connection to the server was lost in the middle of the answer.");
    rest += part.value;
    for (let cut; (cut = rest.indexOf("\n\n")) >= 0; rest = rest.slice(cut + 2)) {
      const line = rest.slice(0, cut);
      if (line === "data: [DONE]") return;
      if (!line.startsWith("data: ")) continue; // a keep-alive comment
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new ServerError("request", event.error.message ?? "the server failed");
      yield event;
    }
  }
}

/* The server's models and adapters: [{ id, parent, state, context, sampling, capabilities, efforts, params }]. An adapter
 * has its parent's defaults. A model that is not in memory has the context that it was trained with. */
export async function models() {
  const all = (await (await call("v1/models")).json()).data;
  const chats = all.filter(m => !Array.isArray(m.capabilities) || m.capabilities.includes("completion"));
  return (chats.length ? chats : all).map(m => {
    const base = all.find(x => x.id === m.parent) ?? m;
    return {
      id: String(m.id),
      parent: m.parent ?? null,
      state: m.status?.value ?? "loaded",
      context: m.max_model_len ?? m.meta?.n_ctx_train ?? 0,
      sampling: base.default_sampling ?? {},
      capabilities: m.capabilities ?? [],
      efforts: base.reasoning_efforts ?? [],
      params: base.meta?.n_params ?? Infinity,
    };
  });
}

export async function countTokens(body, signal) {
  return (await (await call("apply-template", body, signal)).json()).count;
}
