/* The demo models, which are part of the program. */
#include "file/builtin.h"
#include "base/embed.h"

#include <string.h>
#include <unistd.h>

#ifdef STEEL_BUILTIN
EMBED_FILE(steel_builtin, STEEL_BUILTIN);
#endif
#ifdef STEEL_BUILTIN_SEE
EMBED_FILE(steel_see, STEEL_BUILTIN_SEE);
EMBED_FILE(steel_tower, STEEL_BUILTIN_TOWER);
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
