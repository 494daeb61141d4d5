/*
 * Files that are part of the program: EMBED_FILE(name, "path") defines the bytes name_begin up to name_end, in read-only
 * memory. The path is relative to where the compiler runs. Nothing is copied; pages load when they are touched.
 */
#ifndef STEEL_BASE_EMBED_H
#define STEEL_BASE_EMBED_H

#include <stdint.h>

#ifdef __APPLE__ /* Mach-O */
#define EMBED_SECTION ".const_data\n"
#define EMBED_END     ".text\n"
#define EMBED_NAME    "_"
#else /* ELF */
#define EMBED_SECTION ".section .rodata\n"
#define EMBED_END     ".previous\n"
#define EMBED_NAME    ""
#endif

#define EMBED_FILE(name, path)                                                                     \
    __asm__(EMBED_SECTION ".balign 64\n"                                                           \
                          ".globl " EMBED_NAME #name "_begin\n" EMBED_NAME #name "_begin:\n"       \
                          ".incbin \"" path "\"\n"                                                 \
                          ".globl " EMBED_NAME #name "_end\n" EMBED_NAME #name "_end:\n"           \
                          ".byte 0\n" EMBED_END);                                                  \
    extern const uint8_t name##_begin[], name##_end[]

#endif
