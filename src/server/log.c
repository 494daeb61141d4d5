/* The log writer: a line is built whole and written by one call, so lines never mix. */
#include "server/log.h"
#include "server/jsonout.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

static enum log_level least = LOG_INFO;
static bool as_json;

void log_setup(enum log_level level, bool json)
{
    least = level;
    as_json = json;
}

static void add_time(struct buf *b)
{
    struct timespec t;
    struct tm tm;
    char s[40];
    clock_gettime(CLOCK_REALTIME, &t);
    if (as_json)
        strftime(s, sizeof s, "%Y-%m-%dT%H:%M:%S", gmtime_r(&t.tv_sec, &tm));
    else
        strftime(s, sizeof s, "%H:%M:%S", localtime_r(&t.tv_sec, &tm));
    buf_addf(b, "%s.%03d%s", s, (int)(t.tv_nsec / 1000000), as_json ? "Z" : "");
}

static void add_number(struct buf *b, double v)
{
    if (v == (double)(int64_t)v)
        buf_addf(b, "%lld", (long long)v);
    else
        buf_addf(b, "%.3f", v);
}

void log_fields(enum log_level level, const char *msg, const struct log_field *f, int n)
{
    static const char *const names[] = {"debug", "info", "warn", "error"};
    if (level < least)
        return;
    struct buf b = {0};
    if (as_json)
        buf_adds(&b, "{\"time\":\"");
    add_time(&b);
    if (as_json) {
        buf_addf(&b, "\",\"level\":\"%s\",\"msg\":", names[level]);
        jsonout_text(&b, msg);
    } else {
        buf_addf(&b, " %-5s %s", names[level], msg);
    }
    for (int i = 0; i < n; i++) {
        if (as_json)
            buf_addf(&b, ",\"%s\":", f[i].key);
        else
            buf_addf(&b, " %s=", f[i].key);
        if (!f[i].text)
            add_number(&b, f[i].number);
        else if (as_json || strpbrk(f[i].text, " \"\n\r\t\x1b"))
            jsonout_text(&b, f[i].text); /* quoted: a client cannot forge lines */
        else
            buf_adds(&b, f[i].text);
    }
    if (as_json)
        buf_addc(&b, '}');
    buf_addc(&b, '\n');
    fwrite(b.p, 1, b.len, stderr);
    buf_clear(&b);
}
