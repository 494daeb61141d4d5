/* Carries the demo model's bytes in .rodata: nothing is copied, pages load as they are touched. */
#include "model/builtin.h"

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

struct tensorfile *builtin_or_open(const char *path, struct error *err)
{
    if (path && (strcmp(path, BUILTIN_NAME) || access(path, F_OK) == 0))
        return tensorfile_open(path, err);
#ifdef STEEL_BUILTIN
    size_t bytes = (size_t)(steel_builtin_end - steel_builtin_begin);
    return tensorfile_open_memory(steel_builtin_begin, bytes, BUILTIN_NAME, err);
#else
    error_set(err, "this build carries no model; name a GGUF file or a Hugging Face folder");
    return NULL;
#endif
}
