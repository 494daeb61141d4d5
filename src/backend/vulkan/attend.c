/* Attention on the Vulkan backend: which kernel runs, and how the keys of few rows are split. */
#include "backend/vulkan/vulkan.h"

/* One call: arguments without splits, parts and bytes, and the cache's formats. */
struct call {
    struct attn_args *args;
    uint32_t format_k, format_v, rows, seqs;
};

struct attn_pick {
    const char *name, *formats, *device;
    int from; /* rows of a sequence, if they were divided evenly */
    bool (*fits)(const struct vulkan *v, const struct call *c);
    void (*run)(struct vulkan *v, const struct call *c);
};

/* Workgroups that fill a large GPU, and keys that a workgroup reads at once. */
enum { FULL = 1024, CHUNK = 128, FEW = 256 };

uint32_t vulkan_splits(int rows, int heads)
{
    int n = rows > 0 && heads > 0 ? FULL / (rows * heads) : 1;
    return n < 2 ? 1 : n > VULKAN_SPLITS ? VULKAN_SPLITS : (uint32_t)n;
}

/* Heads that a workgroup of attn_group.comp has: fewer where workgroups are few. 0: the kernel does not fit. */
static uint32_t group_of(const struct vulkan *v, const struct call *c)
{
    enum { MAX_GROUP = 8, MAX_QUERIES = 2048, SHARED = 24 << 10 };
    const struct attn_args *a = c->args;
    uint32_t n = a->n_heads / a->n_kv_heads;
    if (c->format_k != c->format_v || (a->flags & ATTN_LATENT) || a->k_dim % 8 || a->v_dim % 8 ||
        (a->flags & ATTN_CHOSEN) || v->shared < SHARED)
        return 0;
    uint32_t group = n < MAX_GROUP ? n : MAX_GROUP;
    uint32_t chunks = (uint32_t)v->reach / CHUNK, all = c->rows * a->n_heads * chunks;
    while (group &&
           (n % group || group * a->k_dim > MAX_QUERIES || (group > 1 && all / group < FEW)))
        group--;
    return group;
}

static bool group_fits(const struct vulkan *v, const struct call *c)
{
    return group_of(v, c) > 0;
}

/* Workgroups of `heads` heads each; the parts of the keys are joined. */
static void run_split(struct vulkan *v, const struct call *c, enum vulkan_kernel k, uint32_t second,
                      uint32_t heads)
{
    struct attn_args *a = c->args;
    uint32_t across = a->n_heads / heads;
    a->parts = v->s.parts;
    uint32_t splits = vulkan_splits((int)c->rows, (int)across);
    uint32_t chunks = (uint32_t)v->reach / CHUNK;
    a->splits = splits < chunks ? splits : chunks;
    bool chosen = a->flags & ATTN_CHOSEN;
    uint64_t bytes =
        a->v_dim % 16 || chosen ? 0 : vulkan_bytes(v, (int)c->rows, (int)(a->n_heads * a->v_dim));
    a->bytes = chosen ? v->s.chosen_keys : bytes;
    vulkan_run(v, k, c->format_k, second, a, sizeof *a, across, c->rows, a->splits);
    if (a->splits > 1)
        vulkan_run(v, KERNEL_ATTN_JOIN, 0, 0, a, sizeof *a, a->n_heads, c->rows, 1);
    vulkan_has_bytes(v, a->a, bytes);
}

static void run_group(struct vulkan *v, const struct call *c)
{
    uint32_t group = group_of(v, c);
    CHECK(group > 0, "heads that do not divide into groups");
    run_split(v, c, KERNEL_ATTN_GROUP, group, group);
}

static void run_head(struct vulkan *v, const struct call *c)
{
    run_split(v, c, KERNEL_ATTN, c->format_v, 1);
}

/* Heads of up to 128 values take 28 KB of shared memory, those of up to 256 44 KB. Positions are floats in between. */
static bool coop_fits(const struct vulkan *v, const struct call *c)
{
    enum { MAX_DIM = 256, SHARED = 32 << 10, SHARED_WIDE = 48 << 10, MAX_POS = 1 << 24 };
    const struct attn_args *a = c->args;
    uint32_t dim = a->k_dim > a->v_dim ? a->k_dim : a->v_dim;
    return v->coop && v->shuffle && c->format_k == FORMAT_F16 && c->format_v == FORMAT_F16 &&
           !(a->flags & (ATTN_LATENT | ATTN_TURN | ATTN_CHOSEN)) && a->k_dim % 16 == 0 &&
           a->v_dim % 16 == 0 && dim <= MAX_DIM &&
           v->shared >= (dim > MAX_DIM / 2 ? SHARED_WIDE : SHARED) &&
           v->bounds.max_pages * v->bounds.page_len < MAX_POS;
}

static void run_coop(struct vulkan *v, const struct call *c)
{
    enum { TILE = 64 };
    struct attn_args *a = c->args;
    a->splits = c->seqs;
    vulkan_run(v, KERNEL_ATTN_COOP, a->k_dim / 16, a->v_dim / 16, a, sizeof *a, a->n_heads,
               c->rows / TILE + c->seqs, 1);
}

/* The first row that fits and whose sequences have rows enough. A row after `attn` runs only if it is forced: it has not been
 * measured on a GPU yet. */
static const struct attn_pick table[] = {
    {"attn_group", "any, for k and v", "", 1, group_fits, run_group},
    {"attn", "any", "", 1, NULL, run_head},
    {"attn_coop", "F16", "coop", 16, coop_fits, run_coop},
};
enum { N_PICKS = (int)(sizeof table / sizeof *table) };
_Static_assert((int)N_PICKS == (int)VULKAN_ATTN_PICKS, "counters of the table");

void vulkan_attend(struct vulkan *v, struct attn_args *args, uint32_t format_k, uint32_t format_v)
{
    const struct call c = {args, format_k, format_v, (uint32_t)v->batch.n_tokens,
                           (uint32_t)v->batch.n_seqs};
    int found = N_PICKS - 1;
    for (int i = N_PICKS - 1; i >= 0; i--) {
        bool suits = c.rows / (c.seqs ? c.seqs : 1) >= (uint32_t)table[i].from &&
                     !vulkan_is_forced(v, table[i].name, true);
        if (table[i].fits && !table[i].fits(v, &c))
            continue;
        if (vulkan_is_forced(v, table[i].name, false)) {
            found = i;
            break;
        }
        if (suits)
            found = i;
    }
    v->attn_runs[found]++;
    table[found].run(v, &c);
}

bool vulkan_attn_pick_info(const struct vulkan *v, int i, struct pick_info *out)
{
    if (i < 0 || i >= N_PICKS)
        return false;
    *out = (struct pick_info){.name = table[i].name,
                              .op = "attention",
                              .formats = table[i].formats,
                              .device = table[i].device,
                              .rows_from = table[i].from,
                              .available = !*table[i].device || v->coop,
                              .runs = v->attn_runs[i]};
    return true;
}
