/* steel convert: a Hugging Face folder into a GGUF. */
#include "cli/convert_ui.h"
#include "base/mem.h"

#include <stdio.h>

int cmd_convert(int argc, char **argv)
{
    struct convert_options opt = {0};
    struct opt_list tensors = {0};
    bool force = false;
    const char *type = NULL, *head = NULL, *embedding = NULL;
    const struct opt opts[] = {
        {OPT_STRING, 0, "type", "outtype", &type, 0, 0, "TYPE",
         "f32, f16, bf16, q8_0 or any type of `steel quantize` (default: the folder's)"},
        {OPT_STRING, 0, "imatrix", 0, &opt.imatrix, 0, 0, "FILE",
         "importance matrix (GGUF or .dat) for quantised types"},
        {OPT_INT, 't', "threads", 0, &opt.threads, 1, 1024, "N", "CPU threads (default: all)"},
        {OPT_STRING, 0, "pre", 0, &opt.pre, 0, 0, "NAME",
         "pre-tokenizer, where GGUF's name for it cannot be told"},
        {OPT_STRING, 0, "output-tensor-type", 0, &head, 0, 0, "TYPE", "type of the output head"},
        {OPT_STRING, 0, "token-embedding-type", 0, &embedding, 0, 0, "TYPE",
         "type of the token embedding"},
        {OPT_LIST, 0, "tensor", "tensor-type", &tensors, 0, 0, "PATTERN=TYPE",
         "type of the tensors whose names have the pattern; may be given again"},
        {OPT_FLAG, 0, "force", 0, &force, 0, 0, 0, "replace OUT.gguf if it is there"},
        {OPT_FLAG, 0, "dry-run", 0, &opt.dry_run, 0, 0, 0,
         "print each tensor's type and size, write nothing"},
    };
    const struct usage u = {
        .command = "convert",
        .synopsis = "DIR OUT.gguf [options]",
        .about = "Makes a GGUF of a Hugging Face folder (config.json, safetensors, tokenizer):\n"
                 "Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE, also packed (GPTQ, AWQ, FP8, NVFP4, "
                 "...). The\n"
                 "output appears under its name only when complete.",
        .examples = "  steel convert ~/models/Qwen3-0.6B qwen3-0.6b.gguf\n"
                    "  steel convert ~/models/Qwen3-30B-A3B qwen3-30b-q4.gguf --type q4_k_m\n",
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
    if (!convert_ui_type(&u, "output-tensor-type", head, &opt.head_type) ||
        !convert_ui_type(&u, "token-embedding-type", embedding, &opt.embedding_type) ||
        !convert_ui_overrides(&u, &tensors, &opt)) {
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
              convert_folder(pos[0], pos[1], &opt, &result, &err);
    convert_ui_free(&opt);
    if (!ok)
        return cli_fail(&err);
    convert_ui_done(&ui, pos[1], &opt, &result);
    return EXIT_OK;
}
