/*
 * steel logits: reads token ids and writes the logits of every position, both in one small binary
 * format (little-endian i32 T, i32 V, i32 ids[T], f32 logits[T][V]). Used to compare with other
 * software.
 */
#include "cli/cli.h"
#include "cli/hub/hub.h"
#include "cli/logits_images.h"
#include "base/mem.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static bool read_ids(const char *path, struct image_input *out, struct error *err)
{
    FILE *f = fopen(path, "rb");
    if (!f)
        return error_set(err, "%s: %s", path, strerror(errno));
    int32_t head[2];
    bool ok = fread(head, 4, 2, f) == 2 && head[0] > 0 && head[0] <= 1 << 24;
    if (!ok)
        error_set(err, "%s: the header (tokens, vocabulary) is missing or invalid", path);
    if (ok) {
        out->n = head[0];
        out->ids = mem_zalloc((size_t)out->n, sizeof *out->ids);
        ok = fread(out->ids, 4, (size_t)out->n, f) == (size_t)out->n;
        if (!ok)
            error_set(err, "%s: fewer than %d ids", path, out->n);
    }
    fclose(f);
    return ok;
}

/* The largest difference between two rows, relative to the largest logit. */
static float row_difference(const float *a, const float *b, int n)
{
    float diff = 0, scale = 1e-30f;
    for (int i = 0; i < n; i++) {
        diff = fmaxf(diff, fabsf(a[i] - b[i]));
        scale = fmaxf(scale, fabsf(a[i]));
    }
    return diff / scale;
}

/* Feeds the ids, `chunk` at a time, to n_copies sequences in one batch. All copies must agree
 * exactly, because a row's result must not depend on its neighbours. */
static bool compute(struct runtime *rt, const struct image_input *in, int chunk, int n_copies,
                    FILE *out, struct error *err)
{
    struct lora_pick picks[LORA_MAX_USES];
    int n_picks = cli_all_adapters(rt, picks);
    int V = rt->model->config.n_vocab;
    float *row = mem_zalloc((size_t)V, sizeof *row), *other = mem_zalloc((size_t)V, sizeof *other);
    struct kv_seq *seqs = mem_zalloc((size_t)n_copies, sizeof *seqs);
    struct step_item *items = mem_zalloc((size_t)n_copies, sizeof *items);
    bool ok = true;
    for (int at = 0, next; ok && at < in->n; at = next) {
        int n = rows_whole(&in->rows, at, in->n - at < chunk ? in->n - at : chunk);
        for (int i = 0; i < n_copies; i++)
            items[i] = (struct step_item){.seq = &seqs[i],
                                          .tokens = in->ids + at,
                                          .n_tokens = n,
                                          .rows = in->rows.n ? &in->rows : NULL,
                                          .loras = picks,
                                          .n_loras = n_picks,
                                          .want = LOGITS_ALL};
        next = at + n;
        ok = step_run(rt->step, items, n_copies, err);
        for (int t = 0; ok && t < n; t++) {
            step_logits(rt->step, items[0].first_row + t, row);
            for (int i = 1; ok && i < n_copies; i++) {
                step_logits(rt->step, items[i].first_row + t, other);
                float diff = row_difference(row, other, V);
                if (diff > 1e-5f)
                    ok = error_set(err, "position %d: copy %d differs from copy 0 by %g", at + t, i,
                                   (double)diff);
            }
            ok = ok && step_ok(rt->step, err);
            if (ok && fwrite(row, sizeof *row, (size_t)V, out) != (size_t)V)
                ok = error_set(err, "cannot write logits: %s", strerror(errno));
        }
    }
    for (int i = 0; i < n_copies; i++)
        kvcache_release(rt->kv, &seqs[i]);
    mem_free(seqs);
    mem_free(items);
    mem_free(row);
    mem_free(other);
    return ok;
}

/* The longest run of placeholders: of models that read an image at once, a step may have it beyond a chunk. */
static int longest_run(const struct image_input *in)
{
    json_int_t token = json_integer_value(json_object_get(in->json, "image_token_id"));
    int longest = 0;
    for (int i = 0, n = 0; in->json && i < in->n; i++) {
        n = in->ids[i] == token ? n + 1 : 0;
        longest = n > longest ? n : longest;
    }
    return longest;
}

/* Files of the command; pixels and features belong to input. */
struct logits_files {
    const char *ids, *input, *pixels, *features, *out, *mmproj;
};

static bool logits(const char *model, struct runtime_options *opt, const struct logits_files *files,
                   int chunk, int n_copies, struct error *err)
{
    struct image_input in = {.pixels = files->pixels};
    const char *ids_path = files->input ? files->input : files->ids, *out_path = files->out;
    if (!(files->input ? image_input_read(&in, ids_path, err) : read_ids(ids_path, &in, err))) {
        image_input_clear(&in);
        return false;
    }
    opt->images = files->input;
    opt->mmproj = files->mmproj;
    if (chunk <= 0 || chunk > in.n)
        chunk = in.n < 512 ? in.n : 512;
    opt->max_seqs = n_copies;
    opt->max_tokens = opt->max_out = (chunk + longest_run(&in)) * n_copies;
    if (!opt->context)
        opt->context = in.n;
    bool ok = true;
    struct runtime *rt = cli_open(model, opt, err);
    FILE *out = NULL;
    if (!rt)
        ok = false;
    for (int i = 0; ok && i < in.n; i++)
        if (in.ids[i] < 0 || in.ids[i] >= rt->model->config.n_vocab)
            ok = error_set(err, "%s: id %d at position %d is outside the vocabulary of %d",
                           ids_path, in.ids[i], i, rt->model->config.n_vocab);
    ok = ok && (!files->input || image_input_encode(&in, rt, files->features, err));
    if (ok) {
        out = fopen(out_path, "wb");
        ok = out ? true : error_set(err, "%s: %s", out_path, strerror(errno));
    }
    if (ok) {
        int32_t head[2] = {in.n, rt->model->config.n_vocab};
        ok = fwrite(head, 4, 2, out) == 2 && fwrite(in.ids, 4, (size_t)in.n, out) == (size_t)in.n;
        if (!ok)
            error_set(err, "%s: %s", out_path, strerror(errno));
    }
    ok = ok && compute(rt, &in, chunk, n_copies, out, err);
    if (out && fclose(out) != 0 && ok)
        ok = error_set(err, "%s: %s", out_path, strerror(errno));
    if (!ok && out)
        remove(out_path);
    if (ok && opt->profile)
        profile_print(&rt->profile, stderr);
    runtime_close(rt);
    image_input_clear(&in);
    return ok;
}

int cmd_logits(int argc, char **argv)
{
    struct model_flags f = {0};
    struct logits_files files = {0};
    const char *model = NULL;
    int chunk = 0, copies = 1;
    const struct opt opts[] = {
        MODEL_ROW(model),
        {OPT_STRING, 0, "ids", 0, &files.ids, 0, 0, "IN.bin",
         "token ids (logits in the file are ignored)"},
        {OPT_STRING, 0, "input", 0, &files.input, 0, 0, "INPUT.json",
         "instead: ids and the images at their placeholders"},
        {OPT_STRING, 0, "pixels", 0, &files.pixels, 0, 0, "IN.bin",
         "with --input: the images' patches, instead of the pictures"},
        {OPT_STRING, 0, "features", 0, &files.features, 0, 0, "OUT.bin",
         "with --input: file for the images' features"},
        {OPT_STRING, 0, "mmproj", 0, &files.mmproj, 0, 0, "FILE",
         "with --input: the image tower of a GGUF (default: mmproj*.gguf beside it)"},
        {OPT_STRING, 'o', "out", 0, &files.out, 0, 0, "OUT.bin", "file for ids and logits"},
        {OPT_INT, 0, "chunk", 0, &chunk, 1, 1 << 20, "N", "feed N tokens at a time (default 512)"},
        {OPT_INT, 0, "batch", 0, &copies, 1, 1024, "N",
         "run N copies in one batch; fail if they differ"},
        LORA_ROW(f),
        MODEL_FLAG_ROWS(f),
    };
    const struct usage u = {
        .command = "logits",
        .synopsis = "[MODEL] --ids IN.bin|--input INPUT.json --out OUT.bin [options]",
        .about =
            "Computes the logits after every token. Both files are little-endian:\n"
            "i32 T, i32 V, i32 ids[T], f32 logits[T][V]. INPUT.json has ids, with a placeholder\n"
            "for each feature of an image, image_token_id, and images: files beside it.",
        .examples = "  steel logits model.gguf --ids golden.bin --out mine.bin --chunk 7\n",
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
    if (!files.ids == !files.input || !files.out)
        return cli_args_exit(args_usage_error(&u, "--ids or --input, and --out, are needed"));
    if ((files.pixels || files.features) && !files.input)
        return cli_args_exit(args_usage_error(&u, "--pixels and --features need --input"));
    struct runtime_options opt;
    if (!cli_runtime_options(&u, &f, &opt))
        return EXIT_USAGE;
    struct error err = {0};
    cli_catch_interrupt();
    bool ok = cli_few_adapters(&opt, &err) && hub_resolve(&model, &err) &&
              logits(model, &opt, &files, chunk, copies, &err);
    cli_runtime_options_clear(&opt);
    if (ok)
        return EXIT_OK;
    return cli_interrupted() ? EXIT_INTERRUPTED : cli_fail(&err);
}
