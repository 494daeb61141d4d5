/*
 * The loops of bench/agents through the scheduler and the KV cache, without a model. At least 98 % of what a prompt has
 * in common with an earlier one comes from the cache, with attention alone and with recurrent states. Prompts have the
 * recorded lengths, a token for four characters. Steps cost made-up times, so every figure is the same in every run.
 * STEEL_AGENTS=1 prints the figures.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "base/mem.h"
#include "backend/backend.h"
#include "engine/scheduler.h"
#include "file/tensorfile.h"

enum {
    PAGE = 16,
    MAX_SEQS = 16,
    CHARS = 4,  /* of a token */
    ANSWER = 5, /* generated tokens of a request */
    CONTEXT = 1 << 18,
    MOST_PROMPTS = 32,
    AIM = 98, /* percent */
};

static const char *const AGENTS[] = {"claude", "codex", "opencode", "qwen", "pi"};
enum { N_AGENTS = 5 };

/* Prompts */

struct prompt {
    int32_t *tokens;
    int n, cap;
    int ends[64], n_ends; /* of messages */
};

static void put(struct prompt *p, int32_t token)
{
    if (p->n == p->cap) {
        p->cap += p->cap / 2 + 1024;
        p->tokens = mem_realloc(p->tokens, (size_t)p->cap, sizeof *p->tokens);
    }
    p->tokens[p->n++] = token;
}

/* Token i of text `seed`. Control tokens are below 100. */
static int32_t word(int64_t seed, int64_t i)
{
    uint64_t h = ((uint64_t)seed * 1000003u + (uint64_t)i + 1) * 0x9e3779b97f4a7c15u;
    return (int32_t)(100 + (h >> 33) % 1000000000u);
}

static void put_text(struct prompt *p, int64_t seed, int64_t start, int64_t n_chars)
{
    for (int64_t i = start / CHARS; i < (start + n_chars + CHARS - 1) / CHARS; i++)
        put(p, word(seed, i));
}

static void put_segments(struct prompt *p, const json_t *segments)
{
    size_t i;
    json_t *s;
    json_array_foreach(segments, i, s) put_text(p, json_integer_value(json_array_get(s, 0)),
                                                json_integer_value(json_array_get(s, 1)),
                                                json_integer_value(json_array_get(s, 2)));
}

static int64_t segments_len(const json_t *segments)
{
    int64_t n = 0;
    size_t i;
    json_t *s;
    json_array_foreach(segments, i, s) n += json_integer_value(json_array_get(s, 2));
    return n;
}

enum { TURN = 1, END, LINE, THINK, END_THINK, TOOLS, CALL, ROLE };

enum variant { RECORDED, NO_THINKING, TOOL_ADDED, TURN_EDITED, TWO_AGENTS, AT_ONCE, N_VARIANTS };
static const char *const VARIANTS[] = {"recorded",    "no thinking", "tool added",
                                       "turn edited", "two agents",  "at once"};

/* What a request differs in from the recorded one. */
struct change {
    bool no_thinking, tool_added, second_agent;
    int edited; /* the message that is other text; -1 = none */
};

static bool has_role(const json_t *m, const char *role)
{
    return !strcmp(json_string_value(json_object_get(m, "role")), role);
}

static void put_end(struct prompt *p)
{
    put(p, END);
    p->ends[p->n_ends++] = p->n;
    put(p, LINE);
}

static void put_message(struct prompt *p, const json_t *m, bool think, bool edited)
{
    const json_t *text = json_object_get(m, "text"), *thinking = json_object_get(m, "thinking");
    put(p, TURN);
    put(p, ROLE + json_string_value(json_object_get(m, "role"))[0]);
    put(p, LINE);
    if (thinking && think) {
        put(p, THINK);
        put_segments(p, thinking);
        put(p, END_THINK);
    }
    if (edited)
        put_text(p, 77, 0, segments_len(text) > 20 ? segments_len(text) : 20);
    else
        put_segments(p, text);
    size_t i;
    json_t *call;
    json_array_foreach(json_object_get(m, "calls"), i, call)
    {
        put(p, CALL);
        put(p, (int32_t)json_integer_value(json_array_get(call, 0)));
        put_segments(p, json_array_get(call, 2));
        put(p, END);
    }
    put_end(p);
}

/* As a template of Qwen's renders it: tools, messages, thinking after the last message of the user only. */
static struct prompt render(const json_t *loop, const json_t *request, struct change c)
{
    struct prompt p = {0};
    const json_t *messages = json_object_get(request, "messages"),
                 *tools = json_object_get(request, "tools");
    size_t i, n = json_array_size(messages), last_user = 0;
    json_t *index;
    if (json_array_size(tools)) {
        put(&p, TOOLS);
        json_array_foreach(tools, i, index)
        {
            const json_t *t =
                json_array_get(json_object_get(loop, "tools"), (size_t)json_integer_value(index));
            int64_t name = json_integer_value(json_array_get(t, 0));
            put_segments(&p, json_array_get(t, 1));
            put_text(&p, 1000 + name, 0, json_integer_value(json_array_get(t, 2)));
        }
        if (c.tool_added)
            put_text(&p, 99, 0, 700);
        put(&p, END);
    }
    const json_t *all = json_object_get(loop, "messages");
    json_array_foreach(messages, i,
                       index) if (has_role(json_array_get(all, (size_t)json_integer_value(index)),
                                           "user")) last_user = i;
    for (i = 0; i < n; i++) {
        const json_t *m =
            json_array_get(all, (size_t)json_integer_value(json_array_get(messages, i)));
        put_message(&p, m, i > last_user && !c.no_thinking, (int)i == c.edited);
        if (i == last_user && c.second_agent) {
            p.n -= 2;
            p.n_ends -= p.n_ends > 0;
            put_text(&p, 78, 0, 42);
            put_end(&p);
        }
    }
    put(&p, TURN);
    put(&p, ROLE + 'a');
    put(&p, LINE);
    put(&p, THINK);
    put(&p, LINE);
    return p;
}

static int make_prompts(const json_t *loop, enum variant v, struct prompt *out)
{
    const json_t *requests = json_object_get(loop, "requests");
    size_t n = json_array_size(requests);
    int made = 0;
    for (size_t i = 0; i < n; i++) {
        const json_t *r = json_array_get(requests, i);
        struct change c = {.edited = -1, .no_thinking = v == NO_THINKING};
        c.tool_added = v == TOOL_ADDED && i >= n / 2;
        out[made++] = render(loop, r, c);
        c.second_agent = v == TWO_AGENTS || v == AT_ONCE;
        if (c.second_agent)
            out[made++] = render(loop, r, c);
        if (v == TURN_EDITED && i == n - 1) {
            c.edited = (int)json_array_size(json_object_get(r, "messages")) / 2;
            out[made++] = render(loop, r, c);
        }
    }
    return made;
}

/* The engine's part */

struct world {
    struct backend *be;
    struct kvcache *kv;
    struct scheduler s;
    struct step_item items[MAX_SEQS];
    int max_rows;
};

static struct layer attention = {.mixer.attention = {.n_kv_heads = 1, .k_dim = 1, .v_dim = 1}};
static struct layer recurrent[] = {
    {.mixer.attention = {.n_kv_heads = 1, .k_dim = 1, .v_dim = 1}},
    {.mixer =
         {.kind = MIXER_DELTA_NET,
          .delta_net = {.n_k_heads = 1, .n_v_heads = 1, .k_dim = 1, .v_dim = 1, .conv_len = 2}}},
};

/* checkpoints 0: no layer has states. */
static void world_open(struct world *w, int checkpoints, int max_rows)
{
    struct network net = {.n_layers = checkpoints ? 2 : 1,
                          .layers = checkpoints ? recurrent : &attention};
    struct error err = {0};
    *w = (struct world){.be = backend_open_ref(), .max_rows = max_rows};
    w->kv = kvcache_new(w->be, &net, DT_F32, DT_F32, PAGE, CONTEXT / PAGE, MAX_SEQS + checkpoints,
                        &err);
    assert_non_null(w->kv);
    w->kv->prefix = prefix_new(CONTEXT / PAGE, PAGE, true);
    struct step_limits lim = {.max_tokens = max_rows,
                              .read_chunk = max_rows > 512 ? 256 : 16,
                              .max_seqs = MAX_SEQS,
                              .max_out = MAX_SEQS};
    scheduler_init(&w->s, w->kv, &lim, CONTEXT, 0);
}

static void world_close(struct world *w)
{
    scheduler_clear(&w->s);
    kvcache_verify(w->kv);
    kvcache_free(w->kv);
    w->be->ops->close(w->be);
}

static struct seq *submit(struct world *w, const struct prompt *p, uint64_t root)
{
    struct seq *q = mem_zalloc(1, sizeof *q);
    for (int i = 0; i < p->n; i++)
        seq_append(q, p->tokens[i]);
    q->n_prompt = p->n;
    q->root = root;
    for (int i = 0; i < p->n_ends; i++)
        seq_turn(q, p->ends[i]);
    scheduler_add(&w->s, q);
    return q;
}

static void end(struct world *w, struct seq *q)
{
    scheduler_remove(&w->s, q);
    seq_clear(q);
    mem_free(q);
}

static void step(struct world *w)
{
    struct states *states = w->kv->states;
    int n = scheduler_plan(&w->s, w->items);
    assert_true(n > 0);
    for (int i = 0; i < n; i++) {
        struct step_item *it = &w->items[i];
        assert_true(kvcache_grow(w->kv, it->seq, it->seq->n_tokens + it->n_tokens));
        if (states && it->save_at && states_available(states) > MAX_SEQS)
            kvcache_save(w->kv, it->seq, it->seq->n_tokens + it->save_at);
        kvcache_advance(w->kv, it->seq, it->n_tokens);
    }
    scheduler_commit(&w->s, (int64_t)(1e6 + 1e4 * w->s.n_read));
    for (int i = 0; i < n; i++)
        if (w->items[i].want == LOGITS_LAST)
            seq_append(w->s.planned[i], word(5, w->s.planned[i]->n_tokens));
}

/* Figures */

static int common(const struct prompt *a, const struct prompt *b)
{
    int n = a->n < b->n ? a->n : b->n, i = 0;
    while (i < n && a->tokens[i] == b->tokens[i])
        i++;
    return i;
}

struct figures {
    int64_t tokens, shared, able, cached;
};

static struct figures add(struct figures a, struct figures b)
{
    return (struct figures){a.tokens + b.tokens, a.shared + b.shared, a.able + b.able,
                            a.cached + b.cached};
}

static int share_of(const struct figures *f)
{
    return (int)(10000 * f->cached / f->able);
}

static void print_share(const char *how, const char *agent, const char *variant,
                        const struct figures *f)
{
    if (getenv("STEEL_AGENTS") || share_of(f) < 100 * AIM)
        printf("%-22s %-9s %-12s %6.2f %% of prompts, %6.2f %% of common prefixes%s\n", how, agent,
               variant, 100.0 * (double)f->cached / (double)f->tokens,
               100.0 * (double)f->cached / (double)f->shared,
               share_of(f) < 100 * AIM ? "  MISSED" : "");
}

/* Sends prompts i to i + n - 1 of a loop at once, and waits for their answers. */
static struct figures ask(struct world *w, const struct prompt *p, int i, int n, uint64_t root)
{
    struct figures f = {0};
    struct seq *q[2];
    int left = n;
    for (int k = 0; k < n; k++)
        q[k] = submit(w, &p[i + k], root);
    while (left) {
        step(w);
        for (int k = 0; k < n; k++) {
            if (!q[k] || q[k]->n_tokens < q[k]->n_prompt + ANSWER)
                continue;
            int shared = 0;
            for (int j = 0; j < i + k; j++) {
                int c = common(&p[j], &p[i + k]);
                shared = c > shared ? c : shared;
            }
            f = add(f, (struct figures){p[i + k].n, shared, shared > PAGE ? shared - PAGE : 0,
                                        q[k]->n_cached});
            end(w, q[k]);
            q[k] = NULL;
            left--;
        }
    }
    return f;
}

static json_t *load(const char *agent)
{
    char path[64];
    struct error err = {0};
    snprintf(path, sizeof path, "bench/agents/%s.json", agent);
    json_t *loop = json_load_path(path, 1 << 20, &err);
    assert_non_null(loop);
    return loop;
}

static void free_prompts(struct prompt *p, int n)
{
    for (int i = 0; i < n; i++)
        mem_free(p[i].tokens);
    memset(p, 0, (size_t)n * sizeof *p);
}

/* Every loop after the other on one server. Returns the least share in hundredths of a percent. */
static int run_loops(const char *how, int checkpoints, int max_rows)
{
    static struct prompt prompts[MOST_PROMPTS];
    struct world w;
    int least = 10000;
    uint64_t root = (uint64_t)1 << 63;
    world_open(&w, checkpoints, max_rows);
    for (int a = 0; a < N_AGENTS; a++) {
        json_t *loop = load(AGENTS[a]);
        for (enum variant v = 0; v < N_VARIANTS; v++) {
            int n = make_prompts(loop, v, prompts), together = v == AT_ONCE ? 2 : 1;
            struct figures f = {0};
            root++;
            for (int i = 0; i < n; i += together)
                f = add(f, ask(&w, prompts, i, together, root));
            least = share_of(&f) < least ? share_of(&f) : least;
            print_share(how, AGENTS[a], VARIANTS[v], &f);
            free_prompts(prompts, n);
        }
        json_decref(loop);
    }
    world_close(&w);
    return least;
}

/* Conversations of all agents take turns, each agent in `each` of them. Returns the share of all. */
static int run_in_turns(const char *how, int checkpoints, int each)
{
    static struct prompt prompts[N_AGENTS][MOST_PROMPTS];
    struct world w;
    struct figures f = {0};
    int n[N_AGENTS], most = 0;
    world_open(&w, checkpoints, 512);
    for (int a = 0; a < N_AGENTS; a++) {
        json_t *loop = load(AGENTS[a]);
        n[a] = make_prompts(loop, RECORDED, prompts[a]);
        most = n[a] > most ? n[a] : most;
        json_decref(loop);
    }
    for (int i = 0; i < most; i++)
        for (int c = 0; c < N_AGENTS * each; c++)
            if (i < n[c % N_AGENTS])
                f = add(f, ask(&w, prompts[c % N_AGENTS], i, 1, (uint64_t)1 << 63 | (uint64_t)c));
    print_share(how, "all", "in turns", &f);
    for (int a = 0; a < N_AGENTS; a++)
        free_prompts(prompts[a], n[a]);
    world_close(&w);
    return share_of(&f);
}

static void test_attention(void **state)
{
    (void)state;
    assert_true(run_loops("attention", 0, 512) >= 100 * AIM);
    assert_true(run_in_turns("attention", 0, 2) >= 100 * AIM);
}

/* By default there are 64 checkpoints beside the slots of 16 running sequences. */
static void test_states(void **state)
{
    (void)state;
    static const int checkpoints[] = {16, 32, 64, 128};
    for (int i = 0; i < 4; i++) {
        char how[32];
        snprintf(how, sizeof how, "%d checkpoints", checkpoints[i]);
        assert_true(run_loops(how, checkpoints[i], 512) >= 100 * AIM);
        assert_true(run_in_turns(how, checkpoints[i], 2) >= 100 * AIM);
    }
}

/* The large steps of a GPU: only the first message is read in parts to save states. */
static void test_large_steps(void **state)
{
    (void)state;
    assert_true(run_loops("steps of 2,048 tokens", 32, 2048) >= 100 * AIM);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_states),
        cmocka_unit_test(test_large_steps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
