/* The sampling options that steel run and steel serve share. */
#ifndef STEEL_CLI_SAMPLING_H
#define STEEL_CLI_SAMPLING_H

#include "cli/args.h"

#include <stdint.h>

/* Rows for the fields of `o`, a struct steel_request_options or sample_params. `samplers` is a
 * const char *, `breakers` a struct opt_list. */
/* clang-format off */
#define SAMPLING_ROWS(o, samplers, breakers) \
    {OPT_INT, 0, "repeat-last-n", 0, &(o).repeat_last_n, -1, 1 << 20, "N", \
     "tokens that penalties look back on (default 64, -1 = all)"}, \
    {OPT_FLOAT, 0, "presence-penalty", 0, &(o).presence_penalty, -100, 100, "X", \
     "subtract X from the logit of tokens that occurred (default 0)"}, \
    {OPT_FLOAT, 0, "frequency-penalty", 0, &(o).frequency_penalty, -100, 100, "X", \
     "subtract X per occurrence of a token (default 0)"}, \
    {OPT_STRING, 0, "samplers", "sampler-seq", &(samplers), 0, 0, "LIST", \
     "sampling stages in this order, as in top_k;top_p;temperature; others are off"}, \
    {OPT_FLOAT, 0, "typical", "typical-p", &(o).typical_p, 0, 1, "P", \
     "typical sampling; 1 = off (default 1)"}, \
    {OPT_FLOAT, 0, "top-nsigma", "top-n-sigma", &(o).top_n_sigma, -1, 100, "N", \
     "keep logits within N standard deviations of the best; 0 = off (default 0)"}, \
    {OPT_FLOAT, 0, "xtc-probability", 0, &(o).xtc_probability, 0, 1, "P", \
     "how often the best tokens are left out; 0 = off (default 0)"}, \
    {OPT_FLOAT, 0, "xtc-threshold", 0, &(o).xtc_threshold, 0, 1, "P", \
     "XTC's tokens: at least this likely, except the least likely of them (default 0.1)"}, \
    {OPT_FLOAT, 0, "dynatemp-range", 0, &(o).dynatemp_range, 0, 100, "X", \
     "the temperature follows the entropy, X up and down; 0 = off (default 0)"}, \
    {OPT_FLOAT, 0, "dynatemp-exp", 0, &(o).dynatemp_exponent, 0, 100, "X", \
     "exponent of the entropy for --dynatemp-range (default 1)"}, \
    {OPT_INT, 0, "mirostat", 0, &(o).mirostat, 0, 2, "N", \
     "mirostat 1 or 2 in place of the stages that drop tokens; 0 = off (default 0)"}, \
    {OPT_FLOAT, 0, "mirostat-ent", 0, &(o).mirostat_tau, 0, 100, "X", \
     "mirostat's target surprise in bits (default 5)"}, \
    {OPT_FLOAT, 0, "mirostat-lr", 0, &(o).mirostat_eta, 0, 1, "X", \
     "mirostat's learning rate (default 0.1)"}, \
    {OPT_FLOAT, 0, "dry-multiplier", 0, &(o).dry_multiplier, 0, 100, "X", \
     "DRY: lower tokens that would continue a repetition; 0 = off (default 0)"}, \
    {OPT_FLOAT, 0, "dry-base", 0, &(o).dry_base, 1, 100, "X", \
     "growth of DRY's penalty with the length of the repetition (default 1.75)"}, \
    {OPT_INT, 0, "dry-allowed-length", 0, &(o).dry_allowed_length, 1, 1 << 20, "N", \
     "repetitions of fewer tokens are free (default 2)"}, \
    {OPT_INT, 0, "dry-penalty-last-n", 0, &(o).dry_last_n, -1, 1 << 20, "N", \
     "tokens that DRY looks back on (default -1 = all)"}, \
    {OPT_LIST, 0, "dry-sequence-breaker", 0, &(breakers), 0, 0, "TEXT", \
     "no repetition goes across this text; none = no breaker (repeatable; default newline : \" " \
     "*)"}
/* clang-format on */

/* Checks --samplers and --dry-sequence-breaker. *order: the stages in the sampler's form, 0 without
 * --samplers. False after a usage message. */
bool sampling_check(const struct usage *u, const char *samplers, uint64_t *order,
                    const struct opt_list *breakers);
/* The number of breakers; "none" stands for an empty list. */
int sampling_n_breakers(const struct opt_list *breakers);

#endif
