/* steel convert: a Hugging Face folder to GGUF, optionally with adapters merged; or a PEFT
 * adapter to a GGUF adapter. */
#include "cli/cli.h"
#include "cli/convert_ui.h"
#include "convert/lora.h"
#include "base/buf.h"
#include "base/mem.h"
#include "vision/tower.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

/* True if options choose types for single tensors. */
static bool asks_types(const struct convert_options *opt)
{
    return opt->n_overrides || opt->head_type != DT_NONE || opt->embedding_type != DT_NONE;
}

static bool convert(const char *in, const char *base, const char *out,
                    const struct convert_options *opt, struct convert_result *result,
                    struct error *err)
{
    if (base && opt->n_merge)
        return error_set(err,
                         "use --base to convert an adapter or --merge-lora to merge one, not both");
    if (base && asks_types(opt))
        return error_set(err, "an adapter has one type: --tensor and the like do not apply");
    if (base)
        return convert_adapter(in, base, out, opt, result, err);
    if (convert_is_adapter(in))
        return error_set(err,
                         "%s is an adapter: name its model with --base, or merge it: steel "
                         "convert MODEL OUT.gguf --merge-lora %s",
                         in, in);
    struct stat st;
    bool file = stat(in, &st) == 0 && S_ISREG(st.st_mode) && !strstr(in, "config.json");
    if (file && opt->n_merge && (opt->mix || asks_types(opt)))
        return error_set(err,
                         "%s: merging into a GGUF keeps its types: --type, --tensor "
                         "and the like do not apply",
                         in);
    return file && opt->n_merge ? merge_file(in, out, opt, result, err)
                                : convert_folder(in, out, opt, result, err);
}

static bool has_tower(const char *in)
{
    struct tensorfile *f = tensorfile_open(in, NULL);
    bool has = f && !f->is_gguf && tower_present(f);
    if (f)
        tensorfile_close(f);
    return has;
}

/* Writes the image tower beside the model. */
static int convert_images(const char *in, const char *model, const struct convert_options *options,
                          const struct mix *mix, bool force)
{
    struct convert_options opt = {.mix = mix,
                                  .threads = options->threads,
                                  .dry_run = options->dry_run,
                                  .progress = options->progress,
                                  .note = options->note,
                                  .planned = options->planned};
    struct convert_ui ui;
    struct convert_result result;
    struct error err = {0};
    struct buf out = {0};
    const char *slash = strrchr(model, '/'), *name = slash ? slash + 1 : model;
    buf_add(&out, model, (size_t)(name - model));
    buf_addf(&out, "mmproj-%s", name);
    convert_ui_init(&ui, "converting");
    opt.arg = &ui;
    bool ok = convert_ui_target(in, out.p, &opt, force, &err) &&
              convert_tower(in, out.p, &opt, &result, &err);
    if (ok)
        convert_ui_done(&ui, out.p, &opt, &result);
    buf_clear(&out);
    return ok ? EXIT_OK : cli_fail(&err);
}

int cmd_convert(int argc, char **argv)
{
    struct convert_options opt = {0};
    struct opt_list tensors = {0}, merge = {0};
    const char *base = NULL;
    bool force = false, no_images = false;
    const char *image_type = NULL;
    const char *type = NULL, *head = NULL, *embedding = NULL;
    const struct opt opts[] = {
        {OPT_STRING, 0, "type", "outtype", &type, 0, 0, "TYPE",
         "f32, f16, bf16, q8_0 or any type of `steel quantize` (default: the folder's)"},
        {OPT_STRING, 0, "imatrix", 0, &opt.imatrix, 0, 0, "FILE",
         "importance matrix (GGUF or .dat) for quantised types"},
        {OPT_INT, 't', "threads", 0, &opt.threads, 1, 1024, "N", "CPU threads (default: all)"},
        {OPT_STRING, 0, "pre", 0, &opt.pre, 0, 0, "NAME",
         "GGUF name of the pre-tokenizer, if it cannot be detected"},
        {OPT_STRING, 0, "output-tensor-type", 0, &head, 0, 0, "TYPE", "type of the output head"},
        {OPT_STRING, 0, "token-embedding-type", 0, &embedding, 0, 0, "TYPE",
         "type of the token embedding"},
        {OPT_LIST, 0, "tensor", "tensor-type", &tensors, 0, 0, "PATTERN=TYPE",
         "type of tensors whose names match the pattern (repeatable)"},
        {OPT_LIST, 0, "merge-lora", 0, &merge, 0, 0, "PATH[:SCALE]",
         "merge a LoRA adapter into the weights; DIR may be a GGUF (repeatable)"},
        {OPT_STRING, 0, "base", 0, &base, 0, 0, "MODEL",
         "the adapter's model: DIR is a PEFT folder to convert to a GGUF adapter"},
        {OPT_STRING, 0, "image-type", 0, &image_type, 0, 0, "TYPE",
         "type of the image tower's matrices (default: the folder's)"},
        {OPT_FLAG, 0, "no-images", 0, &no_images, 0, 0, 0, "leave the image tower out"},
        {OPT_FLAG, 0, "force", 0, &force, 0, 0, 0, "replace OUT.gguf if it exists"},
        {OPT_FLAG, 0, "dry-run", 0, &opt.dry_run, 0, 0, 0,
         "print each tensor's type and size, write nothing"},
    };
    const struct usage u = {
        .command = "convert",
        .synopsis = "DIR OUT.gguf [options]",
        .about =
            "Converts a Hugging Face folder (config.json, safetensors, tokenizer) to GGUF:\n"
            "every family that steel runs, also quantised (GPTQ, AWQ, FP8, NVFP4, ...). The "
            "output\n"
            "file appears only when it is complete. The image tower of a folder becomes a file\n"
            "beside it, mmproj-OUT.gguf.",
        .examples = "  steel convert ~/models/Qwen3-0.6B qwen3-0.6b.gguf\n"
                    "  steel convert ~/models/Qwen3-30B-A3B qwen3-30b-q4.gguf --type q4_k_m\n"
                    "  steel convert model.gguf tuned.gguf --merge-lora ./adapter\n"
                    "  steel convert ./adapter adapter.gguf --base model.gguf --type f16\n",
        .opts = opts,
        .n_opts = sizeof opts / sizeof *opts,
        .min_args = 2,
        .max_args = 2,
    };
    const char *pos[2];
    int n = args_parse(&u, argc, argv, pos);
    if (n < 0)
        return cli_args_exit(n);
    opt.mix = type ? mix_find(type) : NULL;
    if (type && !opt.mix)
        return cli_args_exit(
            args_usage_error(&u, "unknown type '%s'; there are %s", type, mix_names()));
    const struct mix *image_mix = image_type ? mix_find(image_type) : NULL;
    if (image_type && !image_mix)
        return cli_args_exit(
            args_usage_error(&u, "unknown type '%s'; there are %s", image_type, mix_names()));
    if (!convert_ui_type(&u, "output-tensor-type", head, &opt.head_type) ||
        !convert_ui_type(&u, "token-embedding-type", embedding, &opt.embedding_type) ||
        !convert_ui_overrides(&u, &tensors, &opt)) {
        convert_ui_free(&opt);
        return EXIT_USAGE;
    }
    if (!cli_adapters(&u, "merge-lora", &merge, &opt.merge, &opt.n_merge)) {
        convert_ui_free(&opt);
        return EXIT_USAGE;
    }
    struct convert_ui ui;
    convert_ui_init(&ui, "converting");
    opt.progress = convert_ui_progress;
    opt.note = convert_ui_note;
    opt.planned = opt.dry_run ? convert_ui_plan : NULL;
    opt.arg = &ui;
    struct error err = {0};
    struct convert_result result;
    bool ok = convert_ui_target(pos[0], pos[1], &opt, force, &err) &&
              convert(pos[0], base, pos[1], &opt, &result, &err);
    bool tower = ok && !base && !no_images && has_tower(pos[0]);
    cli_adapters_free(&opt.merge, &opt.n_merge);
    convert_ui_free(&opt);
    opt.overrides = NULL;
    opt.n_overrides = 0;
    if (!ok)
        return cli_fail(&err);
    convert_ui_done(&ui, pos[1], &opt, &result);
    return tower ? convert_images(pos[0], pos[1], &opt, image_mix, force) : EXIT_OK;
}
