/* What the commands share: exit codes, Ctrl-C, messages, the progress bar, and the options that
 * open a model. */
#ifndef STEEL_CLI_CLI_H
#define STEEL_CLI_CLI_H

#include "backend/devices.h"
#include "backend/kv_type.h"
#include "cli/args.h"
#include "engine/runtime.h"

enum { EXIT_OK = 0, EXIT_FAIL = 1, EXIT_USAGE = 2, EXIT_INTERRUPTED = 130 };

/* Each command is a file cmd_NAME.c; main.c has the table. argv[0] is the command's name. */
struct command {
    const char *name, *args, *about;
    int (*run)(int argc, char **argv);
};
extern const struct command cli_commands[]; /* terminated by a NULL name */
/* Calls `take` with every command's option table, including subcommands such as `steel bench
 * serve`. */
void cli_walk(void (*take)(const struct usage *u, void *ctx), void *ctx);

int cmd_bench(int argc, char **argv);
int cmd_cache(int argc, char **argv);
int cmd_bench_serve(int argc, char **argv); /* steel bench serve */
int cmd_completion(int argc, char **argv);
int cmd_embed(int argc, char **argv);
int cmd_rerank(int argc, char **argv);
int cmd_doctor(int argc, char **argv);
int cmd_help(int argc, char **argv);
int cmd_detokenize(int argc, char **argv);
int cmd_launch(int argc, char **argv);
int cmd_load_model(int argc, char **argv);
int cmd_ps(int argc, char **argv);
int cmd_stop_model(int argc, char **argv);
int cmd_list(int argc, char **argv);
int cmd_logits(int argc, char **argv);
int cmd_plan(int argc, char **argv);
int cmd_pull(int argc, char **argv);
int cmd_rm(int argc, char **argv);
int cmd_route(int argc, char **argv);
int cmd_run(int argc, char **argv);
int cmd_serve(int argc, char **argv);
int cmd_show(int argc, char **argv);
int cmd_template(int argc, char **argv);
int cmd_tokenize(int argc, char **argv);
int cmd_constrain(int argc, char **argv);
int cmd_convert(int argc, char **argv);
int cmd_quantize(int argc, char **argv);
int cmd_perplexity(int argc, char **argv);

/* Prints "steel: MESSAGE" to stderr. Returns EXIT_FAIL. */
int cli_fail(const struct error *err);
/* Turns ARGS_HELP / ARGS_BAD into an exit code. */
static inline int cli_args_exit(int n)
{
    return n == ARGS_HELP ? EXIT_OK : EXIT_USAGE;
}

/* After this call, Ctrl-C sets a flag, and a second Ctrl-C ends the program at once. */
void cli_catch_interrupt(void);
bool cli_interrupted(void);
void cli_clear_interrupt(void);

/* The -m option of every command that takes a model. `path` is a const char *. */
#define MODEL_ROW(path)                                                                            \
    {                                                                                              \
        OPT_STRING, 'm', "model", 0, &(path), 0, 0, "MODEL",                                       \
            "the model, if not the first argument"                                                 \
    }
/* Finds the model of a command line: the value of -m, or the first of the n positionals, which
 * is removed from them, or the config file's model. `others`: how many positionals must be left.
 * *flag stays NULL if no model is named. Returns false after a usage message: too many
 * positionals. */
bool cli_take_model(const struct usage *u, const char **flag, const char **pos, int *n, int others);

/* The options of every command that opens a model. */
struct model_flags {
    int threads, context, page_len;
    const char *device, *kv_type, *k_type, *v_type;
    float gpu_memory;
    const char *gpu_limit, *gpu_layers, *override_tensor; /* OFFLOAD_ROWS */
    bool cpu_moe;
    int n_cpu_moe;
    bool deterministic, no_repack, profile, kv_canary;
    int draft;             /* see runtime.h; initialised to DRAFT_AUTO by commands that generate */
    const char *draft_how; /* --draft of those commands; NULL = auto */
    const char *draft_model, *draft_device;
    int tp, pp, rank_timeout;
    bool ep;
    const char *expert_stats, *expert_memory;
    struct opt_list loras;
};
/* --draft and --draft-model, for commands that generate. */
#define DRAFT_ROW(f)                                                                               \
    {                                                                                              \
        OPT_STRING, 0, "draft", "spec-draft-n-max", &(f).draft_how, 0, 0,                          \
            "auto|text|head|model|off|N",                                                          \
            "draft tokens: as many as pay (auto), from earlier text, the MTP block or the draft "  \
            "model alone, none, or always N from the draft model or the block (default: auto)"     \
    }
#define DRAFT_MODEL_ROWS(f)                                                                        \
    {OPT_STRING,                                                                                   \
     0,                                                                                            \
     "draft-model",                                                                                \
     "model-draft",                                                                                \
     &(f).draft_model,                                                                             \
     0,                                                                                            \
     0,                                                                                            \
     "MODEL",                                                                                      \
     "a small model with the same vocabulary, or an EAGLE-3 head, which drafts tokens"},           \
    {                                                                                              \
        OPT_STRING, 0, "draft-device", "device-draft", &(f).draft_device, 0, 0, "NAME",            \
            "the draft model's device (default: the model's)"                                      \
    }
/* --lora, for commands that run a model on text. Its row comes before the engine's. */
#define LORA_ROW(f)                                                                                \
    {                                                                                              \
        OPT_LIST, 0, "lora", "lora-scaled", &(f).loras, 0, 0, "[NAME=]PATH[:SCALE]",               \
            "LoRA adapter: a PEFT folder or a GGUF (repeatable)"                                   \
    }
/* Experts beside a GPU, by llama.cpp's names. */
#define OFFLOAD_ROWS(f)                                                                            \
    {OPT_STRING,                                                                                   \
     0,                                                                                            \
     "gpu-memory",                                                                                 \
     0,                                                                                            \
     &(f).gpu_limit,                                                                               \
     0,                                                                                            \
     0,                                                                                            \
     "SIZE",                                                                                       \
     "of the GPU, at most, as 8G; experts that do not fit stay in host memory"},                   \
        {OPT_INT,                                                                                  \
         0,                                                                                        \
         "n-cpu-moe",                                                                              \
         "-ncmoe",                                                                                 \
         &(f).n_cpu_moe,                                                                           \
         0,                                                                                        \
         1 << 20,                                                                                  \
         "N",                                                                                      \
         "the experts of the first N layers stay in host memory, and the CPU computes them "       \
         "(default: as many as the GPU has no room for)"},                                         \
        {OPT_FLAG, 0, "cpu-moe", "-cmoe", &(f).cpu_moe, 0, 0, 0, "the experts of all layers do"},  \
        {OPT_STRING,                                                                               \
         0,                                                                                        \
         "override-tensor",                                                                        \
         "-ot",                                                                                    \
         &(f).override_tensor,                                                                     \
         0,                                                                                        \
         0,                                                                                        \
         "REGEX=CPU",                                                                              \
         "the experts of layers whose tensors match do, as in 'blk\\.1[0-9]\\..*_exps=CPU'"},      \
        {OPT_STRING,                                                                               \
         0,                                                                                        \
         "n-gpu-layers",                                                                           \
         "-ngl",                                                                                   \
         &(f).gpu_layers,                                                                          \
         0,                                                                                        \
         0,                                                                                        \
         "N",                                                                                      \
         "0: the CPU alone; all, auto or at least the model's number of layers: the default"},     \
    {                                                                                              \
        OPT_STRING, 0, "gpu-layers", 0, &(f).gpu_layers, 0, 0, "N", 0                              \
    }
#define MODEL_FLAG_ROWS(f)                                                                         \
    {OPT_HEADING, 0, "engine", 0, 0, 0, 0, 0, 0},                                                  \
        {OPT_INT, 't', "threads", 0, &(f).threads, -1, 1024, "N", "CPU threads (default: all)"},   \
        {OPT_INT,         'c',          "ctx-size",                                                \
         "max-model-len", &(f).context, 0,                                                         \
         1 << 28,         "N",          "context in tokens (default: the model's, or what fits)"}, \
        {OPT_STRING, 0,           "device",                                                        \
         0,          &(f).device, 0,                                                               \
         0,          "NAME",      "auto (default: a GPU if it fits), " DEVICE_NAMES},              \
        {OPT_FLOAT,                                                                                \
         0,                                                                                        \
         "gpu-memory-utilization",                                                                 \
         0,                                                                                        \
         &(f).gpu_memory,                                                                          \
         0.05,                                                                                     \
         1,                                                                                        \
         "X",                                                                                      \
         "share of the GPU's memory to use (default 0.9)"},                                        \
        OFFLOAD_ROWS(f),                                                                           \
        {OPT_STRING,                                                                               \
         0,                                                                                        \
         "kv-type",                                                                                \
         "kv-cache-dtype",                                                                         \
         &(f).kv_type,                                                                             \
         0,                                                                                        \
         0,                                                                                        \
         "TYPE",                                                                                   \
         "KV cache: " KV_TYPE_NAMES " (default f16)"},                                             \
        {OPT_STRING, 0, "cache-type-k", "-ctk", &(f).k_type, 0, 0, "TYPE", "type of keys only"},   \
        {OPT_STRING, 0, "cache-type-v", "-ctv", &(f).v_type, 0, 0, "TYPE", "type of values only"}, \
        {OPT_INT,                                                                                  \
         0,                                                                                        \
         "page-len",                                                                               \
         0,                                                                                        \
         &(f).page_len,                                                                            \
         1,                                                                                        \
         1024,                                                                                     \
         "N",                                                                                      \
         "tokens per KV cache page (default 16)"},                                                 \
        {OPT_FLAG,                                                                                 \
         0,                                                                                        \
         "deterministic",                                                                          \
         0,                                                                                        \
         &(f).deterministic,                                                                       \
         0,                                                                                        \
         0,                                                                                        \
         0,                                                                                        \
         "same output for any batch and any number of threads"},                                   \
        {OPT_FLAG,                                                                                 \
         0,                                                                                        \
         "kv-canary",                                                                              \
         0,                                                                                        \
         &(f).kv_canary,                                                                           \
         0,                                                                                        \
         0,                                                                                        \
         0,                                                                                        \
         "mark the pages of the KV cache and check them in every step"},                           \
        {OPT_INT,                                                                                  \
         0,                                                                                        \
         "tp",                                                                                     \
         "tensor-parallel-size",                                                                   \
         &(f).tp,                                                                                  \
         1,                                                                                        \
         64,                                                                                       \
         "N",                                                                                      \
         "tensor parallel ranks, under mpirun (default: all)"},                                    \
        {OPT_INT,                                                                                  \
         0,                                                                                        \
         "pp",                                                                                     \
         "pipeline-parallel-size",                                                                 \
         &(f).pp,                                                                                  \
         1,                                                                                        \
         64,                                                                                       \
         "N",                                                                                      \
         "pipeline parallel stages, under mpirun"},                                                \
        {OPT_FLAG,                                                                                 \
         0,                                                                                        \
         "ep",                                                                                     \
         "enable-expert-parallel",                                                                 \
         &(f).ep,                                                                                  \
         0,                                                                                        \
         0,                                                                                        \
         0,                                                                                        \
         "expert parallel: whole experts on each of the --tp ranks"},                              \
        {OPT_STRING,                                                                               \
         0,                                                                                        \
         "expert-stats",                                                                           \
         0,                                                                                        \
         &(f).expert_stats,                                                                        \
         0,                                                                                        \
         0,                                                                                        \
         "FILE",                                                                                   \
         "importance matrix (GGUF): balances whole experts over ranks by load"},                   \
        {OPT_INT,                                                                                  \
         0,                                                                                        \
         "rank-timeout",                                                                           \
         0,                                                                                        \
         &(f).rank_timeout,                                                                        \
         1,                                                                                        \
         3600,                                                                                     \
         "SECONDS",                                                                                \
         "a rank silent for this long counts as lost (default 10)"},                               \
        {OPT_STRING,                                                                               \
         0,                                                                                        \
         "expert-memory",                                                                          \
         0,                                                                                        \
         &(f).expert_memory,                                                                       \
         0,                                                                                        \
         0,                                                                                        \
         "SIZE",                                                                                   \
         "memory for experts, as 8G; the others are read from the file (default: all fit, or "     \
         "what is free)"},                                                                         \
        {OPT_FLAG,                                                                                 \
         0,                                                                                        \
         "no-repack",                                                                              \
         0,                                                                                        \
         &(f).no_repack,                                                                           \
         0,                                                                                        \
         0,                                                                                        \
         0,                                                                                        \
         "compute from the mapped file: starts faster, runs slower"},                              \
    {                                                                                              \
        OPT_FLAG, 0, "profile", 0, &(f).profile, 0, 0, 0, "print the time of each stage"           \
    }

/* Columns of the terminal; without a terminal, COLUMNS, or 80. */
int cli_columns(void);
/* Draws "WHAT [====    ]  50 % TAIL" on stderr over the previous one, fitted to the terminal. */
void cli_bar(const char *what, int percent, const char *tail);
/* The progress bar while a model loads. */
void cli_progress_bar(int percent);
/* Sets *out to the KV cache type `name`, if not NULL. False after a usage message. */
bool cli_kv_type(const struct usage *u, const char *flag, const char *name, enum dtype *out);
/* Parses a list of "[NAME=]PATH[:SCALE]". False after a usage message. */
bool cli_adapters(const struct usage *u, const char *flag, const struct opt_list *texts,
                  const struct adapter_ref **out, int *n);
void cli_adapters_free(const struct adapter_ref **refs, int *n);
/* Runtime options from the command line's. False after a usage message. */
/* --draft: the sources and the number of draft tokens (runtime.h). */
bool cli_draft(const struct usage *u, const char *how, int *draft, unsigned *from);
bool cli_runtime_options(const struct usage *u, const struct model_flags *f,
                         struct runtime_options *opt);
/* Frees what the options own. */
void cli_runtime_options_clear(struct runtime_options *opt);
/* For commands that apply all adapters at once: cli_all_adapters fills picks (LORA_MAX_USES) and
 * returns their number. cli_few_adapters checks that there are no more than that. */
int cli_all_adapters(const struct runtime *rt, struct lora_pick *picks);
bool cli_few_adapters(const struct runtime_options *opt, struct error *err);
/* Opens the model, with a progress bar if stderr is a terminal. */
struct runtime *cli_open(const char *path, struct runtime_options *opt, struct error *err);

/* Checks --chat-template, a Jinja file or a model, before the model is loaded. A model's name
 * becomes its path, which stays valid. NULL is the model's own template. */
bool cli_chat_template(const char **path, struct error *err);
/* Reads a whole file (or "-": stdin) into out, at most `max` bytes. */
bool cli_read_file(const char *path, size_t max, struct buf *out, struct error *err);
/* "1.23 GB", "512.0 MB" into buf (>= 16). */
const char *cli_bytes(double bytes, char *buf);
/* Creates the parent folders of a file. */
bool cli_make_parents(const char *path, struct error *err);

#endif
