/* The log writer. A line is written by one call, so that lines never mix. Owns the ring. */
#include "server/http/log.h"
#include "base/buf.h"
#include "base/os.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { STOP_MS = 300, PIECE = 8 << 10, MAX_TEXT = 1000 };

static enum log_level least = LOG_INFO;
static bool as_json;

/* Under lock. The ring holds whole lines, the oldest at `from`. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static char ring[LOG_RING];
static size_t from, used;
static bool running, stopping;
static uint64_t n_dropped, n_dropped_said;
static pthread_t writer;

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

/* Writes a JSON string of printable ASCII, so that clients can neither forge lines nor send terminal
 * escapes. Other characters are escaped, invalid UTF-8 becomes U+FFFD, long texts are truncated. */
static void add_quoted(struct buf *b, const char *s)
{
    buf_addc(b, '"');
    for (const unsigned char *p = (const unsigned char *)s; *p;) {
        if (p - (const unsigned char *)s >= MAX_TEXT) {
            buf_adds(b, "...");
            break;
        }
        if (*p < 0x80) {
            if (*p == '"' || *p == '\\')
                buf_addf(b, "\\%c", *p);
            else if (*p < 32 || *p == 127)
                buf_addf(b, "\\u%04x", *p);
            else
                buf_addc(b, (char)*p);
            p++;
            continue;
        }
        int n = *p >= 0xf0 ? 3 : *p >= 0xe0 ? 2 : 1;
        uint32_t c = *p & (0x3fu >> n);
        bool ok = *p >= 0xc2 && *p <= 0xf4;
        for (int i = 1; ok && i <= n; i++) {
            ok = (p[i] & 0xc0) == 0x80; /* false at the end of the string too */
            c = c << 6 | (p[i] & 0x3f);
        }
        if (!ok)
            buf_adds(b, "\\ufffd");
        else if (c >= 0x10000)
            buf_addf(b, "\\u%04x\\u%04x", 0xd800 + ((c - 0x10000) >> 10 & 0x3ff),
                     0xdc00 + (c & 0x3ff));
        else
            buf_addf(b, "\\u%04x", c);
        p += ok ? n + 1 : 1;
    }
    buf_addc(b, '"');
}

static void add_text(struct buf *b, const char *s)
{
    bool plain = !as_json && *s && strlen(s) <= MAX_TEXT;
    for (const char *p = s; *p && plain; p++)
        plain = *p > 32 && *p < 127 && *p != '"';
    if (plain)
        buf_adds(b, s);
    else
        add_quoted(b, s);
}

static void build_line(struct buf *b, enum log_level level, const char *msg,
                       const struct log_field *f, int n)
{
    static const char *const names[] = {"debug", "info", "warn", "error"};
    if (as_json)
        buf_adds(b, "{\"time\":\"");
    add_time(b);
    if (as_json) {
        buf_addf(b, "\",\"level\":\"%s\",\"msg\":", names[level]);
        add_quoted(b, msg);
    } else {
        buf_addf(b, " %-5s %s", names[level], msg);
    }
    for (int i = 0; i < n; i++) {
        buf_addf(b, as_json ? ",\"%s\":" : " %s=", f[i].key);
        if (f[i].text)
            add_text(b, f[i].text);
        else
            add_number(b, f[i].number);
    }
    buf_adds(b, as_json ? "}\n" : "\n");
}

static void write_all(const char *p, size_t n)
{
    while (n) {
        ssize_t done = write(STDERR_FILENO, p, n);
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0 && errno == EAGAIN &&
            poll(&(struct pollfd){.fd = STDERR_FILENO, .events = POLLOUT}, 1, -1) >= 0)
            continue;
        if (done <= 0)
            return; /* stderr is gone */
        p += done;
        n -= (size_t)done;
    }
}

/* Under lock. Appends the line, or counts it as dropped. */
static void ring_add(const char *p, size_t n)
{
    if (n > sizeof ring - used) {
        n_dropped++;
        return;
    }
    for (size_t at = (from + used) % sizeof ring, done = 0; done < n; at = 0) {
        size_t piece = n - done < sizeof ring - at ? n - done : sizeof ring - at;
        memcpy(ring + at, p + done, piece);
        done += piece;
    }
    used += n;
}

/* Under lock. Waits until half the ring is free, so that this line is not dropped too. */
static void say_dropped(void)
{
    if (n_dropped == n_dropped_said || used > sizeof ring / 2)
        return;
    struct buf b = {0};
    build_line(&b, LOG_WARN, "log lines were dropped",
               &LOG_NUM("count", n_dropped - n_dropped_said), 1);
    n_dropped_said = n_dropped;
    ring_add(b.p, b.len);
    buf_clear(&b);
}

static void *writer_main(void *arg)
{
    (void)arg;
    static char piece[PIECE];
    os_name_thread("steel-log");
    pthread_mutex_lock(&lock);
    for (;;) {
        say_dropped();
        while (!used && !stopping)
            pthread_cond_wait(&changed, &lock);
        if (!used)
            break;
        size_t n = used < sizeof ring - from ? used : sizeof ring - from;
        n = n < sizeof piece ? n : sizeof piece;
        memcpy(piece, ring + from, n);
        from = (from + n) % sizeof ring;
        used -= n;
        pthread_mutex_unlock(&lock);
        write_all(piece, n);
        pthread_mutex_lock(&lock);
    }
    running = false;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return NULL;
}

void log_start(void)
{
    pthread_mutex_lock(&lock);
    if (!running) {
        stopping = false;
        running = !pthread_create(&writer, NULL, writer_main, NULL);
        if (running)
            pthread_detach(writer); /* its last write may never return */
    }
    pthread_mutex_unlock(&lock);
}

void log_stop(void)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += STOP_MS * 1000000L;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&lock);
    stopping = true;
    pthread_cond_broadcast(&changed);
    while (running && !pthread_cond_timedwait(&changed, &lock, &until))
        ;
    pthread_mutex_unlock(&lock);
}

uint64_t log_dropped(void)
{
    pthread_mutex_lock(&lock);
    uint64_t n = n_dropped;
    pthread_mutex_unlock(&lock);
    return n;
}

void log_fields(enum log_level level, const char *msg, const struct log_field *f, int n)
{
    if (level < least)
        return;
    struct buf b = {0};
    build_line(&b, level, msg, f, n);
    pthread_mutex_lock(&lock);
    bool direct = !running; /* after log_stop the writer takes no lines */
    if (!direct && !stopping) {
        ring_add(b.p, b.len);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    if (direct)
        write_all(b.p, b.len);
    buf_clear(&b);
}
