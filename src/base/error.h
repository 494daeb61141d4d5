/*
 * Errors, three kinds (see CONTRIBUTING.md):
 *   bad input      bool f(..., struct error *err); true is success, the message names file/field
 *   our own bug    CHECK(cond, "..."): always on, aborts with file:line
 *   device failure ops return void; the backend keeps the first error and end() reports it
 */
#ifndef STEEL_BASE_ERROR_H
#define STEEL_BASE_ERROR_H

#include <stdbool.h>

struct error {
    char msg[1024]; /* one line, no trailing newline; empty = no error */
};

/* Formats the message (err may be NULL) and returns false, so callers write `return error_set(...)`. */
bool error_set(struct error *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Prepends "prefix: " to an existing message; returns false. */
bool error_prefix(struct error *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

_Noreturn void check_failed(const char *file, int line, const char *cond, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

#define CHECK(cond, ...)                                                                           \
    do {                                                                                           \
        if (__builtin_expect(!(cond), 0))                                                          \
            check_failed(__FILE__, __LINE__, #cond, __VA_ARGS__);                                  \
    } while (0)

#endif
