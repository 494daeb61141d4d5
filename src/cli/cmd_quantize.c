/* steel quantize: quantises a GGUF. */
#include "cli/convert_ui.h"
#include "base/mem.h"

#include <stdio.h>

int cmd_quantize(int argc, char **argv)
{
    struct convert_options opt = {0};
    struct opt_list tensors = {0};
    bool force = false;
    const char *head = NULL, *embedding = NULL;
    const struct opt opts[] = {
        {OPT_STRING, 0, "imatrix", 0, &opt.imatrix, 0, 0, "FILE",
         "importance matrix (GGUF or .dat)"},
        {OPT_INT, 't', "threads", 0, &opt.threads, 1, 1024, "N", "CPU threads (default: all)"},
        {OPT_FLAG, 0, "pure", 0, &opt.pure, 0, 0, 0, "all matrices in TYPE, no mix of types"},
        {OPT_FLAG, 0, "allow-requantize", 0, &opt.requantize, 0, 0, 0,
         "accept tensors that are already quantised"},
        {OPT_STRING, 0, "output-tensor-type", 0, &head, 0, 0, "TYPE", "type of the output head"},
        {OPT_STRING, 0, "token-embedding-type", 0, &embedding, 0, 0, "TYPE",
         "type of the token embedding"},
        {OPT_LIST, 0, "tensor", "tensor-type", &tensors, 0, 0, "PATTERN=TYPE",
         "type of tensors whose names match the pattern (repeatable)"},
        {OPT_FLAG, 0, "force", 0, &force, 0, 0, 0, "replace OUT.gguf if it exists"},
        {OPT_FLAG, 0, "dry-run", 0, &opt.dry_run, 0, 0, 0,
         "print each tensor's type and size, write nothing"},
    };
    const struct usage u = {
        .command = "quantize",
        .synopsis = "IN.gguf OUT.gguf TYPE [options]",
        .about =
            "Quantises a GGUF. TYPE is one of Q8_0, Q6_K, Q5_K_M, Q5_K_S, Q5_1, Q5_0,\n"
            "Q4_K_M, Q4_K_S, Q4_1, Q4_0, IQ4_NL, IQ4_XS, MXFP4, Q3_K_L, Q3_K_M, IQ3_S, Q3_K_S,\n"
            "Q2_K, or F32, F16, BF16. The output file appears only when it is complete.",
        .examples = "  steel quantize model-f16.gguf model-q4.gguf Q4_K_M\n"
                    "  steel quantize model-f16.gguf model-q3.gguf Q3_K_M --imatrix imatrix.gguf\n"
                    "  steel quantize model-f16.gguf model-q4.gguf Q4_K_M --tensor "
                    "'ffn_down_exps=Q6_K'\n",
        .opts = opts,
        .n_opts = sizeof opts / sizeof *opts,
        .min_args = 3,
        .max_args = 3,
    };
    const char *pos[3];
    int n = args_parse(&u, argc, argv, pos);
    if (n < 0)
        return cli_args_exit(n);
    opt.mix = mix_find(pos[2]);
    if (!opt.mix)
        return cli_args_exit(
            args_usage_error(&u, "unknown type '%s'; there are %s", pos[2], mix_names()));
    if (!convert_ui_type(&u, "output-tensor-type", head, &opt.head_type) ||
        !convert_ui_type(&u, "token-embedding-type", embedding, &opt.embedding_type) ||
        !convert_ui_overrides(&u, &tensors, &opt)) {
        convert_ui_free(&opt);
        return EXIT_USAGE;
    }
    struct convert_ui ui;
    convert_ui_init(&ui, "quantising");
    opt.progress = convert_ui_progress;
    opt.note = convert_ui_note;
    opt.planned = opt.dry_run ? convert_ui_plan : NULL;
    opt.arg = &ui;
    struct error err = {0};
    struct convert_result result;
    bool ok = convert_ui_target(pos[0], pos[1], &opt, force, &err) &&
              quantize_file(pos[0], pos[1], &opt, &result, &err);
    convert_ui_free(&opt);
    if (!ok)
        return cli_fail(&err);
    convert_ui_done(&ui, pos[1], &opt, &result);
    return EXIT_OK;
}
