/* Embeds the demo models in .rodata. Nothing is copied; pages load when they are touched. */
#include "file/builtin.h"

#include <stdint.h>
#include <string.h>
#include <unistd.h>

#define EMBED(symbol, file)                                                                        \
    __asm__(".section .rodata\n"                                                                   \
            ".balign 64\n"                                                                         \
            ".global steel_" #symbol "_begin\n"                                                    \
            "steel_" #symbol "_begin:\n"                                                           \
            ".incbin \"" file "\"\n"                                                               \
            ".global steel_" #symbol "_end\n"                                                      \
            "steel_" #symbol "_end:\n"                                                             \
            ".byte 0\n"                                                                            \
            ".previous\n");                                                                        \
    extern const uint8_t steel_##symbol##_begin[], steel_##symbol##_end[]

#ifdef STEEL_BUILTIN
EMBED(builtin, STEEL_BUILTIN);
#endif
#ifdef STEEL_BUILTIN_SEE
EMBED(see, STEEL_BUILTIN_SEE);
EMBED(tower, STEEL_BUILTIN_TOWER);
#endif

static const struct {
    const char *name;
    const uint8_t *begin, *end;
} models[] = {
#ifdef STEEL_BUILTIN
    {BUILTIN_NAME, steel_builtin_begin, steel_builtin_end},
#else
    {BUILTIN_NAME, NULL, NULL},
#endif
#ifdef STEEL_BUILTIN_SEE
    {BUILTIN_SEE, steel_see_begin, steel_see_end},
    {BUILTIN_TOWER, steel_tower_begin, steel_tower_end},
#else
    {BUILTIN_SEE, NULL, NULL},
    {BUILTIN_TOWER, NULL, NULL},
#endif
};

const char *builtin_name(const char *path)
{
    if (!path)
        return BUILTIN_NAME;
    for (size_t i = 0; i < sizeof models / sizeof *models; i++)
        if (!strcmp(path, models[i].name) && access(path, F_OK) != 0)
            return models[i].name;
    return NULL;
}

const void *builtin_bytes(const char *name, size_t *n)
{
    *n = 0;
    for (size_t i = 0; i < sizeof models / sizeof *models; i++)
        if (!strcmp(name, models[i].name)) {
            *n = (size_t)(models[i].end - models[i].begin);
            return models[i].begin;
        }
    return NULL;
}

const char *builtin_tower(const char *path)
{
    const char *name = builtin_name(path);
    return name && !strcmp(name, BUILTIN_SEE) ? BUILTIN_TOWER : NULL;
}
