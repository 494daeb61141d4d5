/* steel show: prints what a model file contains, without loading it. */
#include "cli/cli.h"
#include "cli/hub/hub.h"
#include "cli/plain.h"
#include "model/eagle.h"
#include "vision/tower.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static void print_array(const struct meta_array *a)
{
    printf("[%zu]", a->n);
    size_t cursor = 0;
    for (size_t i = 0; i < a->n && i < 4; i++) {
        const char *p;
        size_t len;
        double v;
        if (a->type == META_STRING && meta_array_string(a, &cursor, &p, &len)) {
            fputs(" \"", stdout);
            plain_print(stdout, p, len < 24 ? len : 24);
            putchar('"');
        } else if (a->type != META_STRING && meta_array_number(a, i, &v))
            printf(" %g", v);
    }
    printf("%s\n", a->n > 4 ? " ..." : "");
}

/* Prints a string on one line, truncated, without control characters. */
static void print_string(const char *p, size_t len)
{
    putchar('"');
    char line[70];
    size_t n = len < sizeof line ? len : sizeof line;
    for (size_t i = 0; i < n; i++)
        line[i] = (unsigned char)p[i] < 0x20 ? ' ' : p[i];
    plain_print(stdout, line, n);
    printf("%s\"\n", len > 70 ? "..." : "");
}

static void print_metadata(const struct tensorfile *f)
{
    for (size_t i = 0; i < f->n_meta; i++) {
        const struct meta *m = &f->meta[i];
        printf("  %-46s ", m->key);
        switch (m->type) {
        case META_STRING:
            print_string(m->v.s.p, m->v.s.len);
            break;
        case META_ARRAY:
            print_array(&m->v.a);
            break;
        case META_F32:
        case META_F64:
            printf("%g\n", m->v.f);
            break;
        case META_BOOL:
            printf("%s\n", m->v.u ? "true" : "false");
            break;
        case META_I8:
        case META_I16:
        case META_I32:
        case META_I64:
            printf("%" PRId64 "\n", m->v.i);
            break;
        default:
            printf("%" PRIu64 "\n", m->v.u);
        }
    }
    const char *key;
    json_t *v;
    if (f->config)
        json_object_foreach(f->config, key, v)
        {
            char *text = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT);
            printf("  %-46s %.70s\n", key, text ? text : "?");
            free(text);
        }
}

static void print_tensors(const struct tensorfile *f)
{
    char size[16];
    for (size_t i = 0; i < f->n_tensors; i++) {
        const struct tensor *t = &f->tensors[i];
        char shape[96];
        int n = 0;
        for (int d = 0; d < t->n_dims && n < 80; d++)
            n += snprintf(shape + n, sizeof shape - (size_t)n, "%s%" PRId64, d ? " x " : "",
                          t->dims[d]);
        printf("  %-50s %-22s %-8s %12s\n", t->name, n ? shape : "scalar", t->type_name,
               cli_bytes((double)t->bytes, size));
    }
}

/* Prints an entry of a list "a, b". The first entry starts the line. */
static void part(int *n, const char *format, ...)
{
    va_list ap;
    va_start(ap, format);
    printf("%s", (*n)++ ? ", " : "parts           ");
    vprintf(format, ap);
    va_end(ap);
}

static void print_attention_parts(const struct network *net, int *n)
{
    const struct attention *first = NULL;
    int depth = network_depth(net);
    int slide = 0, window = 0, share = 0, same = 0, dims[2] = {0, 0}, attend = 0;
    for (int i = 0; i < depth; i++) {
        const struct attention *a = &net->layers[i].mixer.attention;
        if (net->layers[i].mixer.kind != MIXER_ATTENTION)
            continue;
        first = first ? first : a;
        attend++;
        slide += a->window != 0;
        window = a->window > window ? a->window : window;
        share += a->shares_kv;
        same += a->k_is_v;
        dims[0] = !dims[0] || a->k_dim < dims[0] ? a->k_dim : dims[0];
        dims[1] = a->k_dim > dims[1] ? a->k_dim : dims[1];
    }
    if (!first)
        return;
    if (slide)
        part(n, "window of %d in %d of %d layers", window, slide, depth);
    if (dims[0] != dims[1])
        part(n, "heads of %d and %d", dims[0], dims[1]);
    if (first->sinks)
        part(n, "sinks");
    if (first->softcap != 0)
        part(n, "softcap of scores %g", (double)first->softcap);
    if (first->q_norm.kind)
        part(n, "QK-norm%s", first->norm_whole ? " over the projection" : "");
    if (first->wqkv->bias)
        part(n, "biases");
    if (first->rope && first->rope->n_rot < first->k_dim)
        part(n, "RoPE of %d dims", first->rope->n_rot);
    if (first->gated)
        part(n, "gated attention");
    if (first->wrel)
        part(n, "relative positions up to %d", first->rel_len);
    if (first->k_conv.len)
        part(n, "convolutions of keys, values and results");
    if (first->temp_beta != 0)
        part(n, "temperature by position");
    if (share)
        part(n, "keys shared in %d layers", share);
    if (same)
        part(n, "values from keys in %d layers", same);
}

/* RoPE scaling, and where layers differ in RoPE. */
static void print_rope_parts(const struct config *c, int *n)
{
    const struct rope_config *r = &c->rope, *w = &c->rope_window;
    static const char *const kinds[] = {[ROPE_LINEAR] = "linear RoPE scaling",
                                        [ROPE_LLAMA3] = "llama3 RoPE scaling",
                                        [ROPE_YARN] = "YaRN"};
    if (r->kind == ROPE_LONG)
        part(n, "long RoPE beyond %d tokens", r->original_context);
    else if (r->kind == ROPE_PROPORTIONAL)
        part(n, "proportional RoPE");
    else if (r->kind == ROPE_LINEAR)
        part(n, "%s x%g", kinds[r->kind], r->factor);
    else if (r->kind != ROPE_PLAIN)
        part(n, "%s x%g beyond %d tokens", kinds[r->kind], r->factor, r->original_context);
    else if (r->factors)
        part(n, "RoPE factors by dimension");
    if (c->attn_mscale != 0 && c->attn_mscale != 1)
        part(n, "mscale of scores %g", (double)c->attn_mscale);
    if (w->theta != 0 && w->theta != r->theta)
        part(n, "RoPE base %g (%g in windows)", r->theta, w->theta);
}

/* NULL: SiLU, which is not printed. There is no default case, so the compiler reports a new activation without a name. */
static const char *act_name(enum activation act)
{
    switch (act) {
    case ACT_SILU:
        return NULL;
    case ACT_GELU_TANH:
    case ACT_GELU:
        return "GeGLU";
    case ACT_SWIGLU_CLAMP:
    case ACT_SILU_CLAMP:
        return "clamped SwiGLU";
    case ACT_SILU_LIMIT:
        return "limited SwiGLU";
    case ACT_RELU2:
        return "squared ReGLU";
    case ACT_PLAIN_RELU2:
        return "squared ReLU";
    case ACT_PLAIN_XIELU:
        return "xIELU";
    case ACT_PLAIN_GELU:
    case ACT_PLAIN_GELU_TANH:
        return "GELU";
    case ACT_PLAIN_QUICK_GELU:
        return "quick GELU";
    case ACT_NONE:
        return "no activation";
    }
    return NULL;
}

static const char *router_name(enum router_kind kind)
{
    switch (kind) {
    case ROUTER_SOFTMAX:
        return NULL;
    case ROUTER_SIGMOID:
        return "sigmoid routing";
    case ROUTER_SOFTMAX_TOP:
        return "softmax after the choice";
    case ROUTER_SPARSE_MIXER:
        return "sparse mixer";
    case ROUTER_SOFTPLUS:
        return "routing by the root of softplus";
    }
    return NULL;
}

static void print_mlp_parts(const struct config *c, const struct network *net, int *n)
{
    int dense = 0, depth = network_depth(net);
    const struct mlp *last = &net->layers[depth - 1].mlp;
    for (int i = 0; i < depth; i++)
        dense += !net->layers[i].mlp.router.w;
    enum activation act = last->router.w ? last->experts.act : last->dense.act;
    const char *name = act_name(act);
    if (name)
        part(n, "%s", name);
    if (last->block.out.kind)
        part(n, "norms after blocks");
    if (net->embed.layers.width)
        part(n, "%d values of embedding per layer", net->embed.layers.width);
    if (net->head.softcap != 0)
        part(n, "softcap of logits %g", (double)net->head.softcap);
    if (!last->router.w)
        return;
    if ((name = router_name(last->router.kind)))
        part(n, "%s", name);
    if (last->router.n_groups > 1)
        part(n, "%d of %d expert groups", last->router.n_groups_used, last->router.n_groups);
    if (last->router.choice_bias)
        part(n, "biases of the choice");
    if (last->dense.gate_up && c->n_ff_shared)
        part(n, "shared expert %d wide%s", c->n_ff_shared, last->dense_gate ? " with a gate" : "");
    else if (last->dense.gate_up)
        part(n, "dense beside experts");
    if (dense)
        part(n, "%d dense layer%s", dense, dense == 1 ? "" : "s");
}

/* What the layers have beyond a plain decoder's. */
static void print_parts(const struct config *c, const struct network *net)
{
    static const char *const kinds[] = {[MIXER_ATTENTION] = "attention",
                                        [MIXER_LATENT] = "latent attention",
                                        [MIXER_DELTA_NET] = "gated delta net",
                                        [MIXER_SHORT_CONV] = "short convolution",
                                        [MIXER_SSM] = "state-space model",
                                        [MIXER_SCAN] = "selective scan",
                                        [MIXER_COMPRESSED] = "compressed attention",
                                        [MIXER_NONE] = "no mixer"};
    enum { KINDS = sizeof kinds / sizeof *kinds };
    int n = 0, count[KINDS] = {0}, depth = network_depth(net);
    for (int i = 0; i < depth; i++)
        count[net->layers[i].mixer.kind]++;
    for (int k = 0; k < KINDS; k++)
        if (count[k] && (k || count[k] < depth))
            part(&n, "%s in %d of %d layers", kinds[k], count[k], depth);
    print_attention_parts(net, &n);
    print_rope_parts(c, &n);
    print_mlp_parts(c, net, &n);
    if (net->mtp.fc)
        part(&n, "multi-token prediction");
    if (n)
        putchar('\n');
}

static void print_summary(const struct tensorfile *f, const struct config *c,
                          const struct network *net, enum dtype k_type, enum dtype v_type)
{
    struct model_size s, tower;
    int layers;
    model_measure(f, c, &s);
    char a[16], b[16], d[16];
    printf("architecture    %s, %d layers, embedding %d, %d heads (%d KV) of %d\n", c->arch_name,
           c->n_layers, c->n_embd, c->n_heads, c->n_kv_heads, c->head_dim);
    if (c->n_expert)
        printf("experts         %d, %d used per token, %d wide\n", c->n_expert, c->n_expert_used,
               c->n_ff_exp);
    print_parts(c, net);
    printf("vocabulary      %d%s\n", c->n_vocab, c->tied ? ", tied to the output head" : "");
    printf("context         %d tokens\n", c->context);
    printf("parameters      %.3f B total, %.3f B active per token\n", (double)s.n_params * 1e-9,
           (double)s.n_active * 1e-9);
    printf("weights         %s, %.2f bits per weight, %s read per token\n",
           cli_bytes((double)s.bytes, a), 8.0 * (double)s.bytes / (double)s.n_params,
           cli_bytes((double)s.active_bytes, b));
    if (tower_measure(f, &layers, &tower))
        printf("image tower     %d layers, %s, on CPUs\n", layers,
               cli_bytes((double)tower.bytes, a));
    size_t token = kvcache_token_bytes(net, k_type, v_type), state = kvcache_state_bytes(net);
    printf("KV cache        %zu bytes per token (%s%s%s), %s for the whole context\n", token,
           kv_type_name(k_type), k_type == v_type ? "" : ", values ",
           k_type == v_type ? "" : kv_type_name(v_type), cli_bytes((double)token * c->context, d));
    if (state)
        printf("states          %s for each sequence, whatever its length\n",
               cli_bytes((double)state, d));
}

/* An EAGLE-3 head. Takes f. */
static bool print_head(struct tensorfile *f, bool brief, struct error *err)
{
    struct eagle *e = eagle_open(f, err);
    if (!e)
        return false;
    const struct config *c = &e->config;
    size_t bytes = 0;
    char b[16];
    for (size_t i = 0; i < f->n_tensors; i++)
        bytes += f->tensors[i].bytes;
    printf("%s: %s, %zu tensors\n", f->path, f->is_gguf ? "GGUF" : "safetensors", f->n_tensors);
    printf(
        "EAGLE-3 head    drafts for models with an embedding of %d and %d tokens (--draft-model)\n",
        c->n_embd, c->n_vocab);
    printf("layer           %d heads (%d KV) of %d, %d hidden units\n", c->n_heads, c->n_kv_heads,
           c->head_dim, c->n_ff);
    printf("outputs         %d tokens\n", e->n_out);
    printf("reads           the stream before %s", e->n_taps ? "layers" : "the usual three layers");
    for (int k = 0; k < e->n_taps; k++)
        printf("%s %d", k ? "," : "", e->taps[k]);
    printf("\nweights         %s\n", cli_bytes((double)bytes, b));
    if (!brief) {
        printf("\nmetadata\n");
        print_metadata(f);
        printf("\ntensors\n");
        print_tensors(f);
    }
    eagle_close(e);
    return true;
}

int cmd_show(int argc, char **argv)
{
    bool brief = false;
    const char *kv = NULL, *k = NULL, *v = NULL, *model = NULL;
    const struct opt opts[] = {
        MODEL_ROW(model),
        {OPT_FLAG, 0, "brief", 0, &brief, 0, 0, 0, "print only the summary"},
        {OPT_STRING, 0, "kv-type", 0, &kv, 0, 0, "TYPE",
         "KV cache type to compute sizes for: " KV_TYPE_NAMES},
        {OPT_STRING, 0, "cache-type-k", "-ctk", &k, 0, 0, "TYPE", "type of keys only"},
        {OPT_STRING, 0, "cache-type-v", "-ctv", &v, 0, 0, "TYPE", "type of values only"},
    };
    const struct usage u = {
        .command = "show",
        .synopsis = "[MODEL] [options]",
        .about = "Prints a model's size, metadata and tensors. Reads only the file's headers.",
        .opts = opts,
        .n_opts = sizeof opts / sizeof *opts,
        .min_args = 0,
        .max_args = 1,
    };
    const char *pos[1];
    int n = args_parse(&u, argc, argv, pos);
    if (n < 0)
        return cli_args_exit(n);
    if (!cli_take_model(&u, &model, pos, &n, 0))
        return EXIT_USAGE;
    enum dtype k_type = DT_F16, v_type = DT_F16;
    if (!cli_kv_type(&u, "kv-type", kv, &k_type) || !cli_kv_type(&u, "kv-type", kv, &v_type) ||
        !cli_kv_type(&u, "cache-type-k", k, &k_type) ||
        !cli_kv_type(&u, "cache-type-v", v, &v_type))
        return EXIT_USAGE;
    struct error err = {0};
    struct tensorfile *f = hub_resolve(&model, &err) ? tensorfile_open(model, &err) : NULL;
    if (!f)
        return cli_fail(&err);
    if (eagle_is(f))
        return print_head(f, brief, &err) ? EXIT_OK : cli_fail(&err);
    struct config *c = &(struct config){0};
    struct outline o = {0};
    bool known = config_load(f, c, &err) && outline_load(f, c, &o, &err);
    printf("%s: %s, %zu tensors in %d file%s\n", f->path, f->is_gguf ? "GGUF" : "safetensors",
           f->n_tensors, f->n_shards, f->n_shards == 1 ? "" : "s");
    if (known)
        print_summary(f, c, &o.net, k_type, v_type);
    if (!brief) {
        printf("\nmetadata\n");
        print_metadata(f);
        printf("\ntensors\n");
        print_tensors(f);
    }
    outline_free(&o);
    tensorfile_close(f);
    return known ? EXIT_OK : cli_fail(&err);
}
