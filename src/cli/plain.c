/* See plain.h. */
#include "cli/plain.h"

#include <stdint.h>
#include <unistd.h>
#include <utf8proc.h>

void plain_print(FILE *out, const char *p, size_t n)
{
    if (!isatty(fileno(out))) {
        fwrite(p, 1, n, out);
        return;
    }
    while (n) {
        utf8proc_int32_t c;
        utf8proc_ssize_t used =
            utf8proc_iterate((const utf8proc_uint8_t *)p, (utf8proc_ssize_t)n, &c);
        size_t len = used > 0 ? (size_t)used : 1;
        if (used <= 0)
            fputs("\xef\xbf\xbd", out);
        else if (c == '\n' || c == '\t' || (c >= 32 && c < 127) || c >= 160)
            fwrite(p, 1, len, out);
        else
            fprintf(out, "^%c", c < 32 ? (char)(c + 64) : '?');
        p += len;
        n -= len;
    }
}
