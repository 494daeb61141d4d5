/* Embeds the demo model in .rodata. Nothing is copied; pages load when they are touched. */
#include "file/builtin.h"

#include <stdint.h>
#include <string.h>
#include <unistd.h>

#ifdef STEEL_BUILTIN
__asm__(".section .rodata\n"
        ".balign 64\n"
        ".global steel_builtin_begin\n"
        "steel_builtin_begin:\n"
        ".incbin \"" STEEL_BUILTIN "\"\n"
        ".global steel_builtin_end\n"
        "steel_builtin_end:\n"
        ".byte 0\n"
        ".previous\n");
extern const uint8_t steel_builtin_begin[], steel_builtin_end[];
#endif

bool builtin_named(const char *path)
{
    return !path || (!strcmp(path, BUILTIN_NAME) && access(path, F_OK) != 0);
}

const void *builtin_bytes(size_t *n)
{
#ifdef STEEL_BUILTIN
    *n = (size_t)(steel_builtin_end - steel_builtin_begin);
    return steel_builtin_begin;
#else
    *n = 0;
    return NULL;
#endif
}
