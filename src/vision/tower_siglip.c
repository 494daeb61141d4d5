/*
 * Towers with the layers of SigLIP or CLIP, which differ in what comes before and after:
 *   Gemma 3: square images, patches are averaged
 *   SmolVLM and Idefics 3: tiles and the whole image, patches are joined
 *   LFM2-VL: images of any ratio, large ones in tiles
 *   LLaVA: CLIP with a class token, the last layer left out, square images cut from the middle
 */
#include "vision/family.h"

#include <math.h>
#include <string.h>

static const struct norm_name last_norm = TOWER_NORM("v.post_ln", "model.post_layernorm");

/* One size for all images. */
static bool fixed(struct tower_config *t, int n)
{
    (void)t;
    (void)n;
    return false;
}

static int most_square(const struct tower_config *t)
{
    int unit = t->patch * t->merge, side = (t->side + unit - 1) / unit * t->merge;
    return side * side;
}

/* Gemma 3 */

static const struct norm_name soft_norm =
    TOWER_NORM("mm.soft_emb_norm", "lm_head.mm_soft_emb_norm");
static const struct tensor_name soft_project = {"mm.input_projection",
                                                "=lm_head.mm_input_projection_weight"};

static void defaults_gemma3(struct config *c, struct tower_config *t)
{
    (void)c;
    t->filter = IMAGE_BILINEAR;
    t->table = TABLE_CUBIC;
    t->merge = 4;
    t->side = 896;
    t->patch = 14;
}

static bool read_gemma3(const struct meta_reader *in, struct tower_config *t)
{
    int tokens = 256;
    struct meta_reader whole = *in;
    whole.hf = in->f->config;
    t->grid = t->side / t->patch;
    if (in->f->is_gguf)
        return true;
    if (!reader_int(&whole, "mm_tokens_per_image", NULL, 1, 1 << 16, false, &tokens))
        return false;
    int side = (int)lround(sqrt(tokens));
    t->merge = side > 0 ? t->grid / side : 0;
    return (side * side == tokens && t->merge > 0 && t->merge * side == t->grid) ||
           error_set(in->err, "%s: config.json: mm_tokens_per_image: %d of a grid of %d x %d",
                     in->f->path, tokens, t->grid, t->grid);
}

static bool read_side(const struct meta_reader *in, const json_t *o, struct tower_config *t)
{
    const json_t *size = reader_get(o, "size", NULL);
    int width = t->side, height = t->side;
    if (!tower_int(in, size, "width", NULL, 1, 1 << 16, &width) ||
        !tower_int(in, size, "height", NULL, 1, 1 << 16, &height))
        return false;
    return (width == height && width == t->side) ||
           error_set(in->err,
                     "%s: preprocessor_config.json: size: %d x %d, expected the tower's %d",
                     in->f->path, width, height, t->side);
}

static bool plan_square(const struct tower_config *t, int width, int height, struct image_plan *out,
                        struct error *err)
{
    (void)width, (void)height, (void)err;
    plan_whole(t, out, t->side, t->side);
    return true;
}

static void merge_gemma3(struct net_builder *b)
{
    const struct tower_config *t = b->c->tower;
    int E = b->c->n_embd;
    /* stored as (E, n_out) in both kinds of file */
    const struct weight_rows rows = {.name = &soft_project,
                                     .n = t->n_out,
                                     .tensor_rows = t->n_out,
                                     .transposed = true,
                                     .also_gguf = true};
    struct merge_step *s = tower_step(b);
    s->rows = t->merge * t->merge;
    s->mean = true;
    s->norm = tower_norm(b, 0, &last_norm, E);
    s->joined = build_rms_adjusted(b, 0, &soft_norm.gain, E, (struct adjust){.add = 1});
    s->w = build_weight(b, WEIGHT_LINEAR, 0, E, 1, 1, &rows);
}

#define SIGLIP_ROOTS                                                                               \
    {"vision_tower.vision_model.", "multi_modal_projector"},                                       \
    {                                                                                              \
        "model.vision_tower.vision_model.", "model.multi_modal_projector"                          \
    }

const struct tower_family tower_gemma3 = {.name = "gemma3",
                                          .types = {"gemma3"},
                                          .roots = {SIGLIP_ROOTS},
                                          .names = {TOWER_SIGLIP},
                                          .norm = NORM_LAYER,
                                          .gelu = ACT_PLAIN_GELU_TANH,
                                          .begin = "\n\n<start_of_image>",
                                          .feature = "<image_soft_token>",
                                          .end = "<end_of_image>\n\n",
                                          .defaults = defaults_gemma3,
                                          .read = read_gemma3,
                                          .read_pixels = read_side,
                                          .plan = plan_square,
                                          .limit = fixed,
                                          .most = most_square,
                                          .merge = merge_gemma3};
