/* Golden models with an MTP block, made by mtp_toy.py in a folder of their own. */
#ifndef STEEL_TESTS_MTP_TOY_H
#define STEEL_TESTS_MTP_TOY_H

#include "base/error.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static const char *const mtp_models[] = {"qwen3_5",  "qwen3_5_moe", "qwen3_next",
                                         "glm4_moe", "deepseek_v3", "glm4_moe_lite"};
enum { MTP_MODELS = sizeof mtp_models / sizeof *mtp_models };

/* The folder of one, below `dir`. */
static inline void mtp_toy_make(const char *dir, const char *model, char *out, size_t size)
{
    char command[512];
    snprintf(out, size, "%s/%s", dir, model);
    snprintf(command, sizeof command, "python3 tests/mtp_toy.py tests/golden/%s %s", model, out);
    CHECK(system(command) == 0, "%s", command); /* NOLINT(cert-env33-c): our own words */
}

/* A golden model without a block, with a vocabulary: a byte a token. */
static inline void mtp_toy_plain(const char *dir, const char *model, char *out, size_t size)
{
    char command[512];
    snprintf(out, size, "%s/plain-%s", dir, model);
    snprintf(command, sizeof command, "python3 tests/mtp_toy.py tests/golden/%s %s plain", model,
             out);
    CHECK(system(command) == 0, "%s", command); /* NOLINT(cert-env33-c): our own words */
}

static inline void mtp_toy_remove(const char *dir)
{
    char command[256];
    snprintf(command, sizeof command, "rm -rf %s", dir);
    CHECK(system(command) == 0, "%s", command); /* NOLINT(cert-env33-c): our own words */
}

#endif
