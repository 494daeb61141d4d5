/* See agents.h. A user's own configuration is never written: settings go into the environment, into
 * arguments, or into a file that the arguments or the environment name. */
#include "cli/agents.h"
#include "base/error.h"
#include "base/mem.h"
#include "server/http/jsonout.h"

#include <string.h>

/* Tokens that an agent may ask for in one reply. Some agents take this from what is left of the
 * context for prompts, so it is a quarter at most. */
static int output_limit(int context)
{
    return context / 4 < 32768 ? context / 4 : 32768;
}

static void set_var(struct agent_setup *s, const char *name, const char *value)
{
    CHECK(s->n_vars < AGENT_MAX_VARS, "%s", name);
    s->vars[s->n_vars].name = name;
    s->vars[s->n_vars++].value = value ? mem_strdup(value) : NULL;
}

/* Moves the text out of b. */
static void set_var_buf(struct agent_setup *s, const char *name, struct buf *b)
{
    CHECK(s->n_vars < AGENT_MAX_VARS, "%s", name);
    s->vars[s->n_vars].name = name;
    s->vars[s->n_vars++].value = buf_take(b);
}

static void add_arg(struct agent_setup *s, const char *arg)
{
    CHECK(s->n_args < AGENT_MAX_ARGS, "%s", arg);
    s->args[s->n_args++] = mem_strdup(arg);
}

static void add_arg_buf(struct agent_setup *s, struct buf *b)
{
    CHECK(s->n_args < AGENT_MAX_ARGS, "an argument");
    s->args[s->n_args++] = buf_take(b);
}

static void add_base_url(struct buf *b, const struct agent_server *to)
{
    struct buf url = {0};
    buf_addf(&url, "%s/v1", to->url);
    jsonout_text(b, url.p);
    buf_clear(&url);
}

static void set_claude(struct agent_setup *s, const struct agent_server *to, const char *path)
{
    static const char *const models[] = {"ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL",
                                         "ANTHROPIC_DEFAULT_SONNET_MODEL",
                                         "ANTHROPIC_DEFAULT_HAIKU_MODEL"};
    struct buf window = {0};
    (void)path;
    set_var(s, "ANTHROPIC_BASE_URL", to->url);
    set_var(s, "ANTHROPIC_AUTH_TOKEN", to->key);
    /* These would take precedence over the two above. */
    set_var(s, "ANTHROPIC_API_KEY", NULL);
    set_var(s, "CLAUDE_CODE_USE_BEDROCK", NULL);
    set_var(s, "CLAUDE_CODE_USE_VERTEX", NULL);
    for (size_t i = 0; i < sizeof models / sizeof *models; i++)
        set_var(s, models[i], to->model);
    if (to->context) {
        buf_addf(&window, "%d", to->context);
        set_var_buf(s, "CLAUDE_CODE_AUTO_COMPACT_WINDOW", &window);
    }
    set_var(s, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1");
    /* A header that changes with every request would make every prompt differ from its start. */
    set_var(s, "CLAUDE_CODE_ATTRIBUTION_HEADER", "0");
}

static void set_codex(struct agent_setup *s, const struct agent_server *to, const char *path)
{
    struct buf b = {0};
    (void)path;
    set_var(s, "OPENAI_API_KEY", to->key);
    add_arg(s, "-c");
    add_arg(s, "model_provider=\"steel\"");
    add_arg(s, "-c");
    buf_adds(&b, "model_providers.steel={name=\"Steel\", base_url=");
    add_base_url(&b, to);
    buf_adds(&b, ", env_key=\"OPENAI_API_KEY\", wire_api=\"responses\"}");
    add_arg_buf(s, &b);
    add_arg(s, "-c");
    buf_adds(&b, "model=");
    jsonout_text(&b, to->model);
    add_arg_buf(s, &b);
    if (to->context) {
        add_arg(s, "-c");
        buf_addf(&b, "model_context_window=%d", to->context);
        add_arg_buf(s, &b);
    }
}

static void set_opencode(struct agent_setup *s, const struct agent_server *to, const char *path)
{
    struct buf b = {0}, full = {0};
    (void)path;
    buf_addf(&full, "steel/%s", to->model);
    buf_adds(&b, "{\"provider\":{\"steel\":{\"npm\":\"@ai-sdk/openai-compatible\","
                 "\"name\":\"Steel\",\"options\":{\"baseURL\":");
    add_base_url(&b, to);
    buf_adds(&b, ",\"apiKey\":\"{env:OPENAI_API_KEY}\"},\"models\":{");
    jsonout_text(&b, to->model);
    buf_adds(&b, ":{\"name\":");
    jsonout_text(&b, to->model);
    buf_addf(&b, ",\"tool_call\":true,\"reasoning\":%s", to->thinks ? "true" : "false");
    if (to->context)
        buf_addf(&b, ",\"limit\":{\"context\":%d,\"output\":%d}", to->context,
                 output_limit(to->context));
    buf_adds(&b, "}}}},\"model\":");
    jsonout_text(&b, full.p);
    buf_adds(&b, ",\"small_model\":");
    jsonout_text(&b, full.p);
    buf_addc(&b, '}');
    set_var_buf(s, "OPENCODE_CONFIG_CONTENT", &b);
    set_var(s, "OPENAI_API_KEY", to->key);
    buf_clear(&full);
}

static void set_qwen(struct agent_setup *s, const struct agent_server *to, const char *path)
{
    struct buf url = {0};
    buf_addf(&url, "%s/v1", to->url);
    add_arg(s, "--auth-type");
    add_arg(s, "openai");
    add_arg(s, "--openai-base-url");
    add_arg(s, url.p);
    add_arg(s, "--model");
    add_arg(s, to->model);
    set_var_buf(s, "OPENAI_BASE_URL", &url);
    set_var(s, "OPENAI_API_KEY", to->key);
    set_var(s, "OPENAI_MODEL", to->model);
    set_var(s, "QWEN_CODE_SYSTEM_DEFAULTS_PATH", path);
    buf_adds(&s->file, "{\"model\":{\"generationConfig\":{");
    if (to->context)
        buf_addf(&s->file, "\"contextWindowSize\":%d", to->context);
    buf_adds(&s->file, "}}}\n");
}

static void set_pi(struct agent_setup *s, const struct agent_server *to, const char *path)
{
    struct buf *b = &s->file;
    buf_adds(b, "export default function (pi) {\n  pi.registerProvider(\"steel\", {\n"
                "    name: \"Steel\",\n    baseUrl: ");
    add_base_url(b, to);
    buf_adds(b, ",\n    apiKey: \"OPENAI_API_KEY\",\n    api: \"openai-completions\",\n"
                "    models: [{\n      id: ");
    jsonout_text(b, to->model);
    buf_adds(b, ",\n      name: ");
    jsonout_text(b, to->model);
    /* All fields of a model are mandatory. Without a known context a small one is safe. */
    int context = to->context ? to->context : 32768;
    buf_addf(b,
             ",\n      reasoning: %s,\n      input: [\"text\"],\n"
             "      cost: { input: 0, output: 0, cacheRead: 0, cacheWrite: 0 },\n"
             "      contextWindow: %d,\n      maxTokens: %d,\n    }],\n  });\n}\n",
             to->thinks ? "true" : "false", context, output_limit(context));
    set_var(s, "OPENAI_API_KEY", to->key);
    add_arg(s, "--extension");
    add_arg(s, path);
    add_arg(s, "--provider");
    add_arg(s, "steel");
    add_arg(s, "--model");
    add_arg(s, to->model);
}

const struct agent agents[] = {
    {"claude", "@anthropic-ai/claude-code", NULL, set_claude},
    {"codex", "@openai/codex", NULL, set_codex},
    {"opencode", "opencode-ai", NULL, set_opencode},
    {"qwen", "@qwen-code/qwen-code", "steel-qwen.json", set_qwen},
    {"pi", "@earendil-works/pi-coding-agent", "steel-pi.js", set_pi},
    {NULL, NULL, NULL, NULL},
};

const struct agent *agent_find(const char *name)
{
    for (const struct agent *a = agents; a->name; a++)
        if (!strcmp(a->name, name))
            return a;
    return NULL;
}

void agent_setup_clear(struct agent_setup *s)
{
    for (int i = 0; i < s->n_vars; i++)
        mem_free(s->vars[i].value);
    for (int i = 0; i < s->n_args; i++)
        mem_free(s->args[i]);
    buf_clear(&s->file);
    *s = (struct agent_setup){0};
}
