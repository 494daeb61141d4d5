/* What the commands share: exit codes, Ctrl-C, messages, the loading bar, flags that open a model. */
#ifndef STEEL_CLI_CLI_H
#define STEEL_CLI_CLI_H

#include "backend/devices.h"
#include "backend/kv_type.h"
#include "cli/args.h"
#include "engine/runtime.h"

enum { EXIT_OK = 0, EXIT_FAIL = 1, EXIT_USAGE = 2, EXIT_INTERRUPTED = 130 };

/* One per file src/cli/cmd_NAME.c; main.c has the table. argv[0] is the command's name. */
struct command {
    const char *name, *args, *about;
    int (*run)(int argc, char **argv);
};
extern const struct command cli_commands[]; /* ends with a name of NULL */
/* Gives every command's table to `take`, those of `steel bench serve` and its like too. */
void cli_walk(void (*take)(const struct usage *u, void *ctx), void *ctx);

int cmd_bench(int argc, char **argv);
int cmd_bench_serve(int argc, char **argv); /* steel bench serve */
int cmd_completion(int argc, char **argv);
int cmd_embed(int argc, char **argv);
int cmd_rerank(int argc, char **argv);
int cmd_doctor(int argc, char **argv);
int cmd_help(int argc, char **argv);
int cmd_detokenize(int argc, char **argv);
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

/* "steel: MESSAGE" on stderr; returns EXIT_FAIL. */
int cli_fail(const struct error *err);
/* Turns ARGS_HELP / ARGS_BAD into an exit code. */
static inline int cli_args_exit(int n)
{
    return n == ARGS_HELP ? EXIT_OK : EXIT_USAGE;
}

/* From here on Ctrl-C sets a flag; a second one ends the program at once. */
void cli_catch_interrupt(void);
bool cli_interrupted(void);
void cli_clear_interrupt(void);

/* -m, a row of every command that takes a model; `path` is a const char *. */
#define MODEL_ROW(path)                                                                            \
    {                                                                                              \
        OPT_STRING, 'm', "model", 0, &(path), 0, 0, "MODEL", "the model, if not given first"       \
    }
/* The model of a command line: what -m says, else the first of the n positionals, which is then taken
 * off them, else what the config says. `others`: positionals that must be left. False after a usage
 * message: there are too many. NULL: none is named. */
bool cli_take_model(const struct usage *u, const char **flag, const char **pos, int *n, int others);

/* The flags of every command that opens a model, as rows of its option table. */
struct model_flags {
    int threads, context, page_len;
    const char *device, *kv_type, *k_type, *v_type;
    float gpu_memory;
    bool deterministic, no_repack, profile;
    int draft; /* runtime.h; DRAFT_AUTO to begin with where an engine answers */
    int tp, pp, rank_timeout;
    bool ep;
    const char *expert_stats;
    struct opt_list loras;
};
/* --draft, of commands that answer. */
#define DRAFT_ROW(f)                                                                               \
    {                                                                                              \
        OPT_INT, 0, "draft", "spec-draft-n-max", &(f).draft, 0, DRAFT_MOST, "N",                   \
            "tokens the model's MTP block guesses ahead (default 1 where it has one; 0 = none)"    \
    }
/* --lora, of commands that compute text; its row stands before the others. */
#define LORA_ROW(f)                                                                                \
    {                                                                                              \
        OPT_LIST, 0, "lora", "lora-scaled", &(f).loras, 0, 0, "[NAME=]PATH[:SCALE]",               \
            "a LoRA adapter: PEFT folder or GGUF (repeatable)"                                     \
    }
#define MODEL_FLAG_ROWS(f)                                                                         \
    {OPT_HEADING, 0, "engine", 0, 0, 0, 0, 0, 0},                                                  \
        {OPT_INT, 't', "threads", 0, &(f).threads, -1, 1024, "N", "CPU threads (default: all)"},   \
        {OPT_INT,         'c',          "ctx-size",                                                \
         "max-model-len", &(f).context, 0,                                                         \
         1 << 28,         "N",          "context in tokens (default: the model's, or what fits)"}, \
        {OPT_STRING, 0,           "device",                                                        \
         0,          &(f).device, 0,                                                               \
         0,          "NAME",      "auto (default: a GPU that fits), " DEVICE_NAMES},               \
        {OPT_FLOAT,                                                                                \
         0,                                                                                        \
         "gpu-memory-utilization",                                                                 \
         0,                                                                                        \
         &(f).gpu_memory,                                                                          \
         0.05,                                                                                     \
         1,                                                                                        \
         "X",                                                                                      \
         "share of the GPU's memory to use (default 0.9)"},                                        \
        {OPT_STRING,                                                                               \
         0,                                                                                        \
         "kv-type",                                                                                \
         "kv-cache-dtype",                                                                         \
         &(f).kv_type,                                                                             \
         0,                                                                                        \
         0,                                                                                        \
         "TYPE",                                                                                   \
         "KV cache: " KV_TYPE_NAMES " (default f16)"},                                             \
        {OPT_STRING, 0, "cache-type-k", "-ctk", &(f).k_type, 0, 0, "TYPE", "keys alone"},          \
        {OPT_STRING, 0, "cache-type-v", "-ctv", &(f).v_type, 0, 0, "TYPE", "values alone"},        \
        {OPT_INT, 0, "page-len", 0, &(f).page_len, 1, 1024, "N", "tokens a KV page (default 16)"}, \
        {OPT_FLAG,                                                                                 \
         0,                                                                                        \
         "deterministic",                                                                          \
         0,                                                                                        \
         &(f).deterministic,                                                                       \
         0,                                                                                        \
         0,                                                                                        \
         0,                                                                                        \
         "same bytes whatever the batch and the threads"},                                         \
        {OPT_INT,                                                                                  \
         0,                                                                                        \
         "tp",                                                                                     \
         "tensor-parallel-size",                                                                   \
         &(f).tp,                                                                                  \
         1,                                                                                        \
         64,                                                                                       \
         "N",                                                                                      \
         "ranks that share each layer, under mpirun (default: all)"},                              \
        {OPT_INT,                                                                                  \
         0,                                                                                        \
         "pp",                                                                                     \
         "pipeline-parallel-size",                                                                 \
         &(f).pp,                                                                                  \
         1,                                                                                        \
         64,                                                                                       \
         "N",                                                                                      \
         "pieces the layers are cut into, under mpirun"},                                          \
        {OPT_FLAG,                                                                                 \
         0,                                                                                        \
         "ep",                                                                                     \
         "enable-expert-parallel",                                                                 \
         &(f).ep,                                                                                  \
         0,                                                                                        \
         0,                                                                                        \
         0,                                                                                        \
         "whole experts to each of --tp ranks"},                                                   \
        {OPT_STRING,                                                                               \
         0,                                                                                        \
         "expert-stats",                                                                           \
         0,                                                                                        \
         &(f).expert_stats,                                                                        \
         0,                                                                                        \
         0,                                                                                        \
         "FILE",                                                                                   \
         "an importance matrix (GGUF): ranks get whole experts of equal load"},                    \
        {OPT_INT,                                                                                  \
         0,                                                                                        \
         "rank-timeout",                                                                           \
         0,                                                                                        \
         &(f).rank_timeout,                                                                        \
         1,                                                                                        \
         3600,                                                                                     \
         "SECONDS",                                                                                \
         "a rank that is silent for so long is lost (default 10)"},                                \
        {OPT_FLAG, 0, "no-repack", 0, &(f).no_repack, 0, 0, 0, "compute from the mapped file"},    \
    {                                                                                              \
        OPT_FLAG, 0, "profile", 0, &(f).profile, 0, 0, 0, "print where the time went, per stage"   \
    }

/* Columns of the terminal (COLUMNS where there is none to ask), 80 where nobody says. */
int cli_columns(void);
/* Draws "WHAT [====    ]  50 % TAIL" on stderr over the last one, as wide as the terminal allows. */
void cli_bar(const char *what, int percent, const char *tail);
/* The loading bar. */
void cli_progress_bar(int percent);
/* A cache's type by its name, where there is one; false after a usage message. */
bool cli_kv_type(const struct usage *u, const char *flag, const char *name, enum dtype *out);
/* Adapters of a list of "[NAME=]PATH[:SCALE]"; false after a usage message. */
bool cli_adapters(const struct usage *u, const char *flag, const struct opt_list *texts,
                  const struct adapter_ref **out, int *n);
void cli_adapters_free(const struct adapter_ref **refs, int *n);
/* Options of the runtime from the flags; false after a usage message. */
bool cli_runtime_options(const struct usage *u, const struct model_flags *f,
                         struct runtime_options *opt);
/* What the options hold of the heap. */
void cli_runtime_options_clear(struct runtime_options *opt);
/* All adapters of the command line at once, for commands that compute one thing: picks
 * (LORA_MAX_USES); how many. They are no more than that. */
int cli_all_adapters(const struct runtime *rt, struct lora_pick *picks);
bool cli_few_adapters(const struct runtime_options *opt, struct error *err);
/* Opens the model with a progress bar where stderr is a terminal. */
struct runtime *cli_open(const char *path, struct runtime_options *opt, struct error *err);

/* Whole file (or "-": stdin) into out, at most `max` bytes. */
bool cli_read_file(const char *path, size_t max, struct buf *out, struct error *err);
/* "1.23 GB", "512.0 MB" into buf (>= 16). */
const char *cli_bytes(double bytes, char *buf);

#endif
