/*
 * Transfers with libcurl's multi interface: one thread, one transfer per file. An interrupted
 * transfer waits and resumes from the bytes it has. A transfer with a wrong digest starts over
 * once. Without a digest nothing else would notice that two halves are of two files, so such a file
 * is resumed only if PATH.incomplete.from names the same URL, and with If-Range.
 */
#include "cli/hub/fetch.h"
#include "base/clock.h"
#include "base/curl.h"
#include "base/mem.h"
#include "cli/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    MAX_TRIES = 6,    /* consecutive tries without progress */
    MAX_WAIT_S = 120, /* longest Retry-After that is honoured */
    STALL_S = 30,     /* seconds without a byte until a connection is dropped */
    SHOWN_EVERY_MS = 200,
    TEXT_OF_ERROR = 300,
    VALIDATOR_MAX = 256, /* an ETag or a date */
};

const char *fetch_explain(long status)
{
    switch (status) {
    case 200:
    case 206:
        return "";
    case 401:
        return "it needs a token, or does not exist; set HF_TOKEN to one from "
               "https://huggingface.co/settings/tokens";
    case 403:
        return "access denied: request access to a gated model on its page, and set HF_TOKEN to a "
               "token of that account";
    case 404:
        return "not found";
    case 416:
        return "the server's file is smaller than the partial download";
    case 429:
        return "too many requests; try again later";
    default:
        return status >= 500 ? "the server failed" : "the server refused it";
    }
}

/* A handle with the options of every transfer. */
static CURL *new_handle(const char *url, const struct fetch_options *opt,
                        struct curl_slist **headers, char *text_of_error, struct error *err)
{
    CURL *h = curl.easy_init();
    bool https = !strncmp(url, "https://", 8);
    bool ok = h && curl.easy_setopt(h, CURLOPT_URL, url) == CURLE_OK &&
              curl.easy_setopt(h, CURLOPT_PROTOCOLS_STR, "http,https") == CURLE_OK &&
              /* https never redirects to http */
              curl.easy_setopt(h, CURLOPT_REDIR_PROTOCOLS_STR, https ? "https" : "http,https") ==
                  CURLE_OK &&
              curl.easy_setopt(h, CURLOPT_FOLLOWLOCATION, 1L) == CURLE_OK &&
              curl.easy_setopt(h, CURLOPT_MAXREDIRS, 10L) == CURLE_OK &&
              curl.easy_setopt(h, CURLOPT_NOSIGNAL, 1L) == CURLE_OK &&
              curl.easy_setopt(h, CURLOPT_CONNECTTIMEOUT, opt->once ? 10L : 30L) == CURLE_OK &&
              curl.easy_setopt(h, CURLOPT_LOW_SPEED_LIMIT, 1L) == CURLE_OK &&
              curl.easy_setopt(h, CURLOPT_LOW_SPEED_TIME, (long)STALL_S) == CURLE_OK &&
              curl.easy_setopt(h, CURLOPT_USERAGENT, "steel") == CURLE_OK &&
              curl.easy_setopt(h, CURLOPT_ERRORBUFFER, text_of_error) == CURLE_OK;
    if (ok && opt->token) { /* the token is not sent to other hosts after a redirect */
        struct buf line = {0};
        buf_addf(&line, "Authorization: Bearer %s", opt->token);
        *headers = curl.slist_append(NULL, line.p);
        ok = *headers && curl.easy_setopt(h, CURLOPT_HTTPHEADER, *headers) == CURLE_OK;
        buf_clear(&line);
    }
    if (ok)
        return h;
    error_set(err, "the installed libcurl is too old (7.85 is needed)");
    if (h)
        curl.easy_cleanup(h);
    return NULL;
}

/* A small document */

struct text {
    struct buf *out;
    size_t max;
    bool head; /* the rest is not wanted */
};

static size_t take_text(char *p, size_t size, size_t n, void *arg)
{
    struct text *t = arg;
    size_t left = t->max - t->out->len;
    if (t->head)
        buf_add(t->out, p, size * n < left ? size * n : left);
    if (size * n > left)
        return 0;
    if (!t->head)
        buf_add(t->out, p, size * n);
    return size * n;
}

bool fetch_stopped(const struct fetch_options *opt)
{
    return cli_interrupted() || (opt->watch && atomic_load(&opt->watch->stop));
}

static int on_tick(void *arg, curl_off_t a, curl_off_t b, curl_off_t c, curl_off_t d)
{
    (void)a, (void)b, (void)c, (void)d;
    return fetch_stopped(arg);
}

/* Seconds to wait before retry number `tries`: Retry-After, or exponential back-off. */
static double retry_wait(CURL *h, int tries)
{
    curl_off_t asked = 0;
    curl.easy_getinfo(h, CURLINFO_RETRY_AFTER, &asked);
    if (asked > 0)
        return asked < MAX_WAIT_S ? (double)asked : MAX_WAIT_S;
    return 0.25 * (1 << (tries < 6 ? tries : 6));
}

static bool is_temporary(long status)
{
    return status == 408 || status == 425 || status == 429 || status >= 500;
}

bool fetch_prepare(struct error *err)
{
    return curl_load("downloads need", err);
}

static bool get(const char *url, const struct fetch_options *opt, struct text text, long *status,
                struct error *err)
{
    char why[CURL_ERROR_SIZE] = "", range[40];
    struct curl_slist *headers = NULL;
    struct buf *out = text.out;
    *status = 0;
    CURL *h = curl_load("downloads need", err) ? new_handle(url, opt, &headers, why, err) : NULL;
    if (!h)
        return false;
    curl.easy_setopt(h, CURLOPT_WRITEFUNCTION, take_text);
    curl.easy_setopt(h, CURLOPT_WRITEDATA, &text);
    if (text.head) {
        snprintf(range, sizeof range, "0-%zu", text.max - 1);
        curl.easy_setopt(h, CURLOPT_RANGE, range);
    }
    curl.easy_setopt(h, CURLOPT_NOPROGRESS, 0L);
    curl.easy_setopt(h, CURLOPT_XFERINFOFUNCTION, on_tick);
    curl.easy_setopt(h, CURLOPT_XFERINFODATA, opt);
    CURLcode rc = CURLE_OK;
    for (int tries = 0; tries < MAX_TRIES && !fetch_stopped(opt); tries++) {
        buf_reset(out);
        rc = curl.easy_perform(h);
        curl.easy_getinfo(h, CURLINFO_RESPONSE_CODE, status);
        bool again = rc == CURLE_OK ? is_temporary(*status)
                                    : rc == CURLE_PARTIAL_FILE || rc == CURLE_RECV_ERROR ||
                                          rc == CURLE_GOT_NOTHING || rc == CURLE_OPERATION_TIMEDOUT;
        if (!again || opt->once)
            break;
        if (tries + 1 < MAX_TRIES)
            usleep((useconds_t)(1e6 * retry_wait(h, tries)));
    }
    curl.easy_cleanup(h);
    curl.slist_free_all(headers);
    if (fetch_stopped(opt))
        return error_set(err, "interrupted");
    if (rc == CURLE_WRITE_ERROR && text.head)
        return true; /* a server that knows no ranges */
    if (rc == CURLE_WRITE_ERROR)
        return error_set(err, "%s: the response is larger than %zu MB", url, text.max >> 20);
    if (rc != CURLE_OK)
        return error_set(err, "%s: %s", url, why[0] ? why : curl.easy_strerror(rc));
    return true;
}

bool fetch_text(const char *url, const struct fetch_options *opt, size_t max, struct buf *out,
                long *status, struct error *err)
{
    return get(url, opt, (struct text){out, max, false}, status, err);
}

bool fetch_head(const char *url, const struct fetch_options *opt, size_t bytes, struct buf *out,
                long *status, struct error *err)
{
    return get(url, opt, (struct text){out, bytes, true}, status, err);
}

/* Files */

struct transfer {
    const struct fetch_file *file;
    char *partial; /* owned: path of the partial file */
    CURL *handle;  /* NULL = not created yet */
    struct curl_slist *headers;
    char why[CURL_ERROR_SIZE];
    int fd; /* -1 = closed */
    int64_t at;
    EVP_MD_CTX *sum;
    bool begun; /* the current response has delivered bytes */
    bool running, done;
    int tries, wrong;
    int64_t at_then; /* size when the current try started */
    int64_t wait_until_ns;
    int write_errno;
    char refusal[TEXT_OF_ERROR];
    /* Which file on the server the bytes are of: a strong ETag, or a date. "" = unknown. */
    char validator[VALIDATOR_MAX];
    struct {
        char etag[VALIDATOR_MAX], date[VALIDATOR_MAX];
        long long from; /* of Content-Range; -1 = none */
    } response;
    bool other_file; /* the response does not continue the bytes at hand */
};

static bool is_checked(const struct transfer *s)
{
    return s->file->digest != FETCH_UNCHECKED;
}

/* Copies the value of a header line "NAME: value". False if the line is another header. */
static bool header_value(const char *line, size_t n, const char *name, char out[VALIDATOR_MAX])
{
    size_t len = strlen(name);
    if (n <= len || strncasecmp(line, name, len) != 0 || line[len] != ':')
        return false;
    const char *from = line + len + 1, *end = line + n;
    while (from < end && (*from == ' ' || *from == '\t'))
        from++;
    while (end > from && strchr(" \t\r\n", end[-1]))
        end--;
    size_t size = (size_t)(end - from);
    for (const char *c = from; c < end; c++)
        size = (unsigned char)*c < 32 ? VALIDATOR_MAX : size;
    if (size >= VALIDATOR_MAX)
        size = 0;
    memcpy(out, from, size);
    out[size] = 0;
    return true;
}

static size_t take_header(char *line, size_t size, size_t count, void *arg)
{
    struct transfer *s = arg;
    size_t n = size * count;
    char text[VALIDATOR_MAX];
    if (n > 5 && !strncasecmp(line, "HTTP/", 5)) { /* of the next response, after a redirect */
        s->response.etag[0] = s->response.date[0] = 0;
        s->response.from = -1;
    } else if (header_value(line, n, "ETag", text)) {
        snprintf(s->response.etag, sizeof s->response.etag, "%s",
                 strncmp(text, "W/", 2) ? text : ""); /* a weak one does not tell bytes apart */
    } else if (header_value(line, n, "Last-Modified", text)) {
        memcpy(s->response.date, text, sizeof text);
    } else if (header_value(line, n, "Content-Range", text)) {
        if (sscanf(text, "bytes %18lld-", &s->response.from) != 1)
            s->response.from = -1;
    }
    return n;
}

/* The text of PATH.incomplete.from: the URL's hash, as URLs may hold secrets, and the validator. */
static bool origin_text(const struct transfer *s, struct buf *out)
{
    unsigned char md[EVP_MAX_MD_SIZE];
    unsigned n = 0;
    const char *url = s->file->url;
    if (EVP_Digest(url, strlen(url), md, &n, EVP_sha256(), NULL) != 1)
        return false;
    for (unsigned i = 0; i < n; i++)
        buf_addf(out, "%02x", md[i]);
    buf_addf(out, " %s\n", s->validator);
    return true;
}

static void origin_path(const struct transfer *s, struct buf *out)
{
    buf_addf(out, "%s.from", s->partial);
}

/* Reads the validator of the partial file. "" if it has another URL, or none that is known. */
static void read_origin(struct transfer *s)
{
    struct buf path = {0}, want = {0};
    char text[128 + VALIDATOR_MAX] = "";
    origin_path(s, &path);
    int fd = open(path.p, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, text, sizeof text - 1) : 0;
    text[n > 0 ? n : 0] = 0;
    s->validator[0] = 0;
    if (origin_text(s, &want) && !strncmp(text, want.p, want.len - 1) && strchr(text, '\n'))
        snprintf(s->validator, sizeof s->validator, "%.*s", (int)strcspn(text + want.len - 1, "\n"),
                 text + want.len - 1);
    if (fd >= 0)
        close(fd);
    buf_clear(&path);
    buf_clear(&want);
}

static void forget_origin(const struct transfer *s)
{
    struct buf path = {0};
    origin_path(s, &path);
    unlink(path.p);
    buf_clear(&path);
}

/* Takes the response's validator, before its first byte is written. */
static bool write_origin(struct transfer *s)
{
    struct buf path = {0}, text = {0};
    memcpy(s->validator, s->response.etag[0] ? s->response.etag : s->response.date,
           sizeof s->validator);
    forget_origin(s);
    origin_path(s, &path);
    bool ok = true;
    if (s->validator[0] && origin_text(s, &text)) {
        int fd = open(path.p, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
        ok = fd >= 0 && write(fd, text.p, text.len) == (ssize_t)text.len;
        ok = fd >= 0 && close(fd) == 0 && ok;
    }
    buf_clear(&path);
    buf_clear(&text);
    return ok;
}

static bool start_sum(struct transfer *s)
{
    if (s->file->digest == FETCH_UNCHECKED)
        return true;
    EVP_MD_CTX_free(s->sum);
    s->sum = EVP_MD_CTX_new();
    bool git = s->file->digest == FETCH_GIT_BLOB;
    bool ok = s->sum && EVP_DigestInit_ex(s->sum, git ? EVP_sha1() : EVP_sha256(), NULL) == 1;
    if (ok && git) { /* git hashes "blob SIZE\0" and the bytes */
        char head[40];
        int n = snprintf(head, sizeof head, "blob %lld", (long long)s->file->size);
        ok = EVP_DigestUpdate(s->sum, head, (size_t)n + 1) == 1;
    }
    return ok;
}

/* Starts over from the first byte. */
static bool start_over(struct transfer *s)
{
    s->at = 0;
    return ftruncate(s->fd, 0) == 0 && lseek(s->fd, 0, SEEK_SET) == 0 && start_sum(s);
}

/* Opens the partial file and hashes the bytes it has. */
static bool open_partial(struct transfer *s, struct error *err)
{
    static char chunk[1 << 20];
    struct stat st;
    s->fd = open(s->partial, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (s->fd < 0 || fstat(s->fd, &st) || !start_sum(s))
        return error_set(err, "%s: %s", s->partial, strerror(errno));
    if (!S_ISREG(st.st_mode))
        return error_set(err, "%s is not a file", s->partial);
    if (!is_checked(s))
        read_origin(s);
    if ((s->file->size >= 0 && st.st_size > s->file->size) || (!is_checked(s) && !s->validator[0]))
        return start_over(s) || error_set(err, "%s: %s", s->partial, strerror(errno));
    for (ssize_t n; s->at < st.st_size; s->at += n) {
        n = read(s->fd, chunk, sizeof chunk);
        if (n <= 0)
            return error_set(err, "%s: %s", s->partial, n < 0 ? strerror(errno) : "truncated");
        if (s->sum && EVP_DigestUpdate(s->sum, chunk, (size_t)n) != 1)
            return error_set(err, "%s: out of memory for the checksum", s->partial);
        if (cli_interrupted())
            return error_set(err, "interrupted");
    }
    return true;
}

/* Before the first byte of a file: checks that the response continues the bytes at hand, or drops
 * them if the response is the whole file. */
static bool begin_body(struct transfer *s, long status)
{
    const char *now = s->response.etag[0] ? s->response.etag : s->response.date;
    bool changed = !is_checked(s) && *now && strcmp(now, s->validator) != 0;
    if (status == 206 && (s->response.from != s->at || (s->at && changed))) {
        s->other_file = true;
        return false;
    }
    if (status == 200 && s->at && !start_over(s)) { /* the server ignored the range */
        s->write_errno = errno;
        return false;
    }
    if (status == 200 && !is_checked(s) && !write_origin(s)) {
        s->write_errno = errno;
        return false;
    }
    return true;
}

static size_t take_bytes(char *p, size_t size, size_t count, void *arg)
{
    struct transfer *s = arg;
    size_t n = size * count;
    long status = 0;
    curl.easy_getinfo(s->handle, CURLINFO_RESPONSE_CODE, &status);
    if (status != 200 && status != 206) { /* keep the error body for the message */
        size_t have = strlen(s->refusal);
        snprintf(s->refusal + have, sizeof s->refusal - have, "%.*s", (int)n, p);
        return n;
    }
    if (!s->begun && !begin_body(s, status))
        return 0;
    s->begun = true;
    if (s->file->size >= 0 && s->at + (int64_t)n > s->file->size)
        return 0; /* larger than announced */
    for (size_t done = 0; done < n;) {
        ssize_t k = write(s->fd, p + done, n - done);
        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0) {
            s->write_errno = k < 0 ? errno : ENOSPC;
            return 0;
        }
        done += (size_t)k;
    }
    if (s->sum && EVP_DigestUpdate(s->sum, p, n) != 1)
        return 0;
    s->at += (int64_t)n;
    return n;
}

/* A file without a digest is resumed only if it is still the same. No token is sent for it, so the
 * handle has no other headers. */
static bool set_if_range(struct transfer *s)
{
    struct buf line = {0};
    curl.easy_setopt(s->handle, CURLOPT_HTTPHEADER, NULL);
    curl.slist_free_all(s->headers);
    s->headers = NULL;
    if (!s->at)
        return true;
    buf_addf(&line, "If-Range: %s", s->validator);
    s->headers = curl.slist_append(NULL, line.p);
    buf_clear(&line);
    return s->headers && curl.easy_setopt(s->handle, CURLOPT_HTTPHEADER, s->headers) == CURLE_OK;
}

static bool start_transfer(struct transfer *s, CURLM *multi, const struct fetch_options *opt,
                           struct error *err)
{
    char range[32];
    if (s->fd >= 0 && !is_checked(s) && !s->validator[0] && s->at && !start_over(s))
        return error_set(err, "%s: %s", s->partial, strerror(errno));
    if (!s->handle && !(s->handle = new_handle(s->file->url, opt, &s->headers, s->why, err)))
        return false;
    if (s->fd < 0 && !open_partial(s, err))
        return false;
    if (!is_checked(s) && !set_if_range(s))
        return error_set(err, "%s: out of memory for the transfer", s->file->name);
    s->begun = s->other_file = false;
    s->response.from = -1;
    s->at_then = s->at;
    s->why[0] = s->refusal[0] = 0;
    s->write_errno = 0;
    snprintf(range, sizeof range, "%lld-", (long long)s->at);
    curl.easy_setopt(s->handle, CURLOPT_RANGE, s->at ? range : NULL);
    curl.easy_setopt(s->handle, CURLOPT_WRITEFUNCTION, take_bytes);
    curl.easy_setopt(s->handle, CURLOPT_WRITEDATA, s);
    curl.easy_setopt(s->handle, CURLOPT_HEADERFUNCTION, take_header);
    curl.easy_setopt(s->handle, CURLOPT_HEADERDATA, s);
    if (s->at == s->file->size) { /* complete already */
        s->done = true;
        return true;
    }
    s->running = curl.multi_add_handle(multi, s->handle) == CURLM_OK;
    return s->running || error_set(err, "%s: out of memory for the transfer", s->file->name);
}

static bool sum_is_right(struct transfer *s, char hex[80])
{
    unsigned char md[EVP_MAX_MD_SIZE];
    unsigned n = 0;
    hex[0] = 0;
    if (!s->sum)
        return true;
    if (EVP_DigestFinal_ex(s->sum, md, &n) != 1)
        return false;
    for (unsigned i = 0; i < n && i < 32; i++)
        snprintf(hex + 2 * i, 3, "%02x", md[i]);
    return !strcmp(hex, s->file->hex);
}

/* All bytes have arrived. If the digest is wrong, the file is discarded and downloaded once
 * more. */
static bool finish_transfer(struct transfer *s, struct error *err)
{
    char hex[80];
    s->done = true;
    if (sum_is_right(s, hex)) {
        bool ok = fsync(s->fd) == 0;
        ok = close(s->fd) == 0 && ok;
        s->fd = -1;
        ok = ok && rename(s->partial, s->file->path) == 0;
        if (ok && !is_checked(s))
            forget_origin(s);
        return ok || error_set(err, "%s: %s", s->file->path, strerror(errno));
    }
    if (s->wrong++ == 0 && start_over(s)) {
        s->done = false;
        s->tries = 0;
        return true;
    }
    unlink(s->partial);
    return error_set(err,
                     "%s: the checksum is wrong, twice: it is %s and should be %s; the file was "
                     "deleted",
                     s->file->name, hex, s->file->hex);
}

/* A transfer ended: successfully, to be retried later, or with an error. */
static bool end_transfer(struct transfer *s, CURLM *multi, CURLcode rc, struct error *err)
{
    long status = 0;
    curl.easy_getinfo(s->handle, CURLINFO_RESPONSE_CODE, &status);
    curl.multi_remove_handle(multi, s->handle);
    s->running = false;
    bool good = status == 200 || status == 206;
    if (s->write_errno)
        return error_set(err, "%s: %s; the partial download is kept, and the next pull resumes it",
                         s->partial, strerror(s->write_errno));
    if (rc == CURLE_OK && good && (s->file->size < 0 || s->at == s->file->size))
        return finish_transfer(s, err);
    if (s->other_file && !start_over(s))
        return error_set(err, "%s: %s", s->partial, strerror(errno));
    if (rc == CURLE_WRITE_ERROR && good &&
        !s->other_file) /* larger than announced: the digest check reports it */
        return finish_transfer(s, err);
    if (status == 416 && start_over(s)) {
        status = 0;
    } else if (rc == CURLE_OK && !good && !is_temporary(status)) {
        s->refusal[strcspn(s->refusal, "\r\n")] = 0;
        return error_set(err, "%s: HTTP %ld: %s%s%.200s%s", s->file->name, status,
                         fetch_explain(status), s->refusal[0] ? " (" : "", s->refusal,
                         s->refusal[0] ? ")" : "");
    }
    /* Bytes that cannot be resumed are no progress. */
    if (s->at > s->at_then && (is_checked(s) || s->validator[0]))
        s->tries = 0;
    if (++s->tries >= MAX_TRIES)
        return error_set(err,
                         "%s: %s, %d times; the partial download is kept, and the next pull "
                         "resumes it",
                         s->file->name,
                         s->other_file    ? "the server sent another range than asked for"
                         : rc != CURLE_OK ? (s->why[0] ? s->why : curl.easy_strerror(rc))
                         : good           ? "the connection was closed"
                                          : fetch_explain(status),
                         s->tries);
    s->wait_until_ns = clock_ns() + (int64_t)(1e9 * retry_wait(s->handle, s->tries - 1));
    return true;
}

/* Progress display on a terminal, and for a thread that watches. */
struct meter {
    bool on;
    struct pull_watch *watch;
    int64_t start_ns, shown_ns, from;
};

static void show(struct meter *m, const struct transfer *transfers, int n, bool last)
{
    int64_t now = clock_ns(), have = 0, total = 0;
    if ((!m->on && !m->watch) || (!last && now - m->shown_ns < (int64_t)SHOWN_EVERY_MS * 1000000))
        return;
    for (int i = 0; i < n; i++) {
        have += transfers[i].done && transfers[i].file->size >= 0 ? transfers[i].file->size
                                                                  : transfers[i].at;
        total += transfers[i].file->size > 0 ? transfers[i].file->size : 0;
    }
    if (!m->start_ns) {
        m->start_ns = now;
        m->from = have;
    }
    m->shown_ns = now;
    if (m->watch) {
        atomic_store(&m->watch->have, have);
        atomic_store(&m->watch->total, total);
    }
    if (!m->on)
        return;
    double s = (double)(now - m->start_ns) * 1e-9, rate = s > 0 ? (double)(have - m->from) / s : 0;
    char a[16], b[16], c[16], line[128];
    int n_line = snprintf(line, sizeof line, "%s of %s, %s/s", cli_bytes((double)have, a),
                          cli_bytes((double)total, b), cli_bytes(rate, c));
    if (rate > 0 && total > have) {
        long left = (long)((double)(total - have) / rate);
        snprintf(line + n_line, sizeof line - (size_t)n_line, ", %ld:%02ld left", left / 60,
                 left % 60);
    }
    fprintf(stderr, "\r\033[K%.*s", cli_columns() - 1, line);
    if (last)
        fputc('\n', stderr);
}

static void close_transfer(struct transfer *s, CURLM *multi)
{
    if (s->running)
        curl.multi_remove_handle(multi, s->handle);
    if (s->handle)
        curl.easy_cleanup(s->handle);
    curl.slist_free_all(s->headers);
    EVP_MD_CTX_free(s->sum);
    if (s->fd >= 0)
        close(s->fd);
    mem_free(s->partial);
}

/* Starts transfers that may start. *n_open: transfers that are not done. False on an error. */
static bool start_transfers(struct transfer *transfers, int n, CURLM *multi,
                            const struct fetch_options *opt, int *n_open, struct error *err)
{
    int running = 0;
    *n_open = 0;
    for (int i = 0; i < n; i++)
        running += transfers[i].running;
    for (int i = 0; i < n; i++) {
        struct transfer *s = &transfers[i];
        if (!s->done && !s->running && running < opt->at_once && clock_ns() >= s->wait_until_ns) {
            if (!start_transfer(s, multi, opt, err) || (s->done && !finish_transfer(s, err)))
                return false;
            running += s->running;
        }
        *n_open += !s->done;
    }
    return true;
}

bool fetch_files(const struct fetch_file *files, int n, const struct fetch_options *opt,
                 struct error *err)
{
    if (!curl_load("downloads need", err))
        return false;
    CURLM *multi = curl.multi_init();
    struct transfer *transfers = mem_zalloc((size_t)n, sizeof *transfers);
    struct meter meter = {.on = !opt->quiet && isatty(STDERR_FILENO), .watch = opt->watch};
    bool ok = multi || error_set(err, "libcurl cannot be initialised");
    int open = n;
    for (int i = 0; i < n; i++) {
        struct buf path = {0};
        buf_addf(&path, "%s.incomplete", files[i].path);
        transfers[i] = (struct transfer){.file = &files[i], .partial = buf_take(&path), .fd = -1};
    }
    while (ok && open) {
        int left;
        ok = start_transfers(transfers, n, multi, opt, &open, err);
        if (ok && open) {
            curl.multi_perform(multi, &left);
            curl.multi_poll(multi, NULL, 0, 50, NULL);
        }
        for (CURLMsg *m; ok && multi && (m = curl.multi_info_read(multi, &left));)
            for (int i = 0; i < n; i++)
                if (m->msg == CURLMSG_DONE && transfers[i].handle == m->easy_handle) {
                    ok = end_transfer(&transfers[i], multi, m->data.result, err);
                    break;
                }
        show(&meter, transfers, n, !ok || !open);
        if (ok && fetch_stopped(opt))
            ok = error_set(err, "interrupted; the next pull resumes the download");
    }
    for (int i = 0; i < n; i++)
        close_transfer(&transfers[i], multi);
    mem_free(transfers);
    if (multi)
        curl.multi_cleanup(multi);
    return ok;
}
