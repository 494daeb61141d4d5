/* libFuzzer entry: the user's config file. Every line has a name without blanks, and the lines printed again are the same lines in the same
 * sections. */
#include "base/buf.h"
#include "base/error.h"
#include "base/mem.h"
#include "cli/config_file.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static bool same(const char *a, const char *b)
{
    return a && b ? !strcmp(a, b) : a == b;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct config_file first = {0}, again = {0};
    struct buf text = {0};
    char *copy = mem_strndup((const char *)data, size);
    int wrong = config_file_parse(copy, &first);
    for (int i = 0; i < first.n; i++) {
        const struct config_line *l = &first.lines[i];
        CHECK(*l->name && !strpbrk(l->name, " \t=\n") && !strchr(l->value, '\n'), "line %d: '%s'",
              l->line, l->name);
        CHECK(!wrong || l->line < wrong, "line %d after the wrong one, %d", l->line, wrong);
        if (l->section && (!i || !same(l->section, first.lines[i - 1].section)))
            buf_addf(&text, "[%s]\n", l->section);
        buf_addf(&text, "--%s = %s\n", l->name, l->value);
    }
    buf_add(&text, "", 1);
    CHECK(!config_file_parse(text.p, &again) && again.n == first.n, "%d lines became %d", first.n,
          again.n);
    for (int i = 0; i < first.n; i++)
        CHECK(same(first.lines[i].name, again.lines[i].name) &&
                  same(first.lines[i].value, again.lines[i].value) &&
                  same(first.lines[i].section, again.lines[i].section),
              "line %d became '%s' '%s'", i, again.lines[i].name, again.lines[i].value);
    mem_free(first.lines);
    mem_free(again.lines);
    mem_free(copy);
    buf_clear(&text);
    return 0;
}
