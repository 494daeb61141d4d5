/* See http_parse.h. */
#include "server/http/http_parse.h"
#include "base/mem.h"

#include <string.h>
#include <strings.h>

size_t http_head_end(const char *p, size_t n)
{
    for (const char *at = p; (at = memchr(at, '\n', n - (size_t)(at - p))); at++) {
        size_t i = (size_t)(at - p) + 1;
        if (i < n && p[i] == '\n')
            return i + 1;
        if (i + 1 < n && p[i] == '\r' && p[i + 1] == '\n')
            return i + 2;
        if (i >= n)
            break;
    }
    return 0;
}

static bool is_token(char c)
{
    return (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'z') ||
           (c && strchr("!#$%&'*+-.^_`|~", c));
}

static int hex(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 32;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Decodes in place. Refuses a NUL or a bad escape. */
static bool percent_decode(char *s)
{
    char *out = s;
    for (; *s; s++) {
        int c = (unsigned char)*s;
        if (c == '%') {
            int hi = hex(s[1]), lo = hi < 0 ? -1 : hex(s[2]);
            if (lo < 0 || hi * 16 + lo == 0)
                return false;
            c = hi * 16 + lo;
            s += 2;
        }
        *out++ = (char)c;
    }
    *out = 0;
    return true;
}

static const char *parse_request_line(char *line, struct http_head *h)
{
    char *target = strchr(line, ' ');
    if (!target || target == line)
        return "malformed request line";
    *target++ = 0;
    for (const char *c = line; *c; c++)
        if (!is_token(*c))
            return "malformed method";
    char *version = strchr(target, ' ');
    if (!version)
        return "malformed request line";
    *version++ = 0;
    if (strcmp(version, "HTTP/1.1") && strcmp(version, "HTTP/1.0"))
        return "not HTTP/1.0 or HTTP/1.1";
    h->minor = version[7] - '0';
    h->method = line;
    for (const char *c = target; *c; c++)
        if ((unsigned char)*c <= 32 || *c == 127)
            return "malformed request target";
    if (!strncasecmp(target, "http://", 7) || !strncasecmp(target, "https://", 8)) {
        target = strchr(strchr(target, ':') + 3, '/'); /* absolute form, as proxies send it */
        if (!target)
            return "malformed request target";
    }
    if (*target != '/' && strcmp(target, "*"))
        return "malformed request target";
    memcpy((char *)h->target, target, strlen(target) + 1);
    char *query = strchr(target, '?');
    if (query)
        *query++ = 0;
    h->query = query ? query : "";
    h->path = target;
    return percent_decode(target) ? NULL : "malformed escape in the path";
}

static bool has_word(const char *list, const char *word)
{
    size_t n = strlen(word);
    while (*list) {
        list += strspn(list, " \t,");
        size_t len = strcspn(list, ",");
        size_t end = len;
        while (end && (list[end - 1] == ' ' || list[end - 1] == '\t'))
            end--;
        if (end == n && !strncasecmp(list, word, n))
            return true;
        list += len;
    }
    return false;
}

static const char *parse_header(char *line, struct http_head *h)
{
    char *colon = strchr(line, ':');
    if (!colon || colon == line)
        return "malformed header";
    for (const char *c = line; c < colon; c++)
        if (!is_token(*c))
            return "malformed header name";
    *colon = 0;
    char *value = colon + 1 + strspn(colon + 1, " \t");
    for (const unsigned char *c = (unsigned char *)value; *c; c++)
        if ((*c < 32 && *c != '\t') || *c == 127)
            return "control character in a header";
    size_t n = strlen(value);
    while (n && (value[n - 1] == ' ' || value[n - 1] == '\t'))
        value[--n] = 0;
    h->headers[h->n_headers++] = (struct http_header){line, value};
    return NULL;
}

static bool parse_length(const char *value, int64_t *out)
{
    int64_t v = 0;
    if (!*value || strlen(value) > 15)
        return false;
    for (const char *c = value; *c; c++) {
        if (*c < '0' || *c > '9')
            return false;
        v = v * 10 + (*c - '0');
    }
    *out = v;
    return true;
}

/* Reads length (-1 = none), transfer coding and persistence. Returns 0 or a status. */
static int parse_framing(struct http_head *h, const char **why)
{
    h->keep_alive = h->minor >= 1;
    h->length = -1;
    for (int i = 0; i < h->n_headers; i++) {
        const char *name = h->headers[i].name, *value = h->headers[i].value;
        if (!strcasecmp(name, "Content-Length")) {
            int64_t v;
            *why = "malformed Content-Length";
            if (!parse_length(value, &v) || (h->length >= 0 && v != h->length))
                return 400;
            h->length = v;
        } else if (!strcasecmp(name, "Transfer-Encoding")) {
            *why = "Transfer-Encoding in HTTP/1.0"; /* proxies disagree where such a body ends */
            if (h->minor == 0)
                return 400;
            *why = "only the transfer coding chunked is supported";
            if (strcasecmp(value, "chunked") || h->chunked)
                return 501;
            h->chunked = true;
        } else if (!strcasecmp(name, "Connection")) {
            if (has_word(value, "close"))
                h->keep_alive = false;
            else if (has_word(value, "keep-alive"))
                h->keep_alive = true;
        }
    }
    *why = "Content-Length beside Transfer-Encoding";
    if (h->length >= 0 && h->chunked)
        return 400;
    *why = NULL;
    return 0;
}

/* Checks of requests only. */
static int parse_request_headers(struct http_head *h, const char **why)
{
    bool have_host = false;
    for (int i = 0; i < h->n_headers; i++) {
        const char *name = h->headers[i].name, *value = h->headers[i].value;
        if (!strcasecmp(name, "Expect")) {
            *why = "unknown expectation";
            if (strcasecmp(value, "100-continue"))
                return 417;
            h->expect_continue = h->minor >= 1;
        } else if (!strcasecmp(name, "Host")) {
            *why = "two Host headers";
            if (have_host)
                return 400;
            have_host = true;
        }
    }
    *why = "the Host header is missing";
    if (h->minor >= 1 && !have_host)
        return 400;
    *why = NULL;
    return 0;
}

static const char *parse_status_line(char *line, struct http_head *h)
{
    if (strncmp(line, "HTTP/1.", 7) || (line[7] != '0' && line[7] != '1') || line[8] != ' ')
        return "not HTTP/1.0 or HTTP/1.1";
    for (int i = 9; i < 12; i++) {
        if (line[i] < '0' || line[i] > '9')
            return "malformed status";
        h->status = h->status * 10 + (line[i] - '0');
    }
    if ((line[12] && line[12] != ' ') || h->status < 100 || h->status > 599)
        return "malformed status";
    h->minor = line[7] - '0';
    return NULL;
}

/* A complete head, line by line; `first` reads the first. */
static int parse_lines(const char *p, size_t n, struct http_head *h,
                       const char *(*first)(char *line, struct http_head *h), const char **why)
{
    memset(h, 0, sizeof *h);
    *why = "NUL in the head";
    if (memchr(p, 0, n))
        return 400;
    const char *eol = memchr(p, '\n', n);
    size_t n_first = eol ? (size_t)(eol - p) : n;
    *why = "out of memory for the request; try again later";
    h->block = mem_ask(n + 1 + n_first + 1);
    if (!h->block)
        return 503;
    memcpy(h->block, p, n);
    h->block[n] = 0;
    h->block[n + 1] = 0;
    h->target = h->block + n + 1;
    bool any = false;
    for (char *line = h->block, *end; (end = strchr(line, '\n')); line = end + 1) {
        *end = 0;
        if (end > line && end[-1] == '\r')
            end[-1] = 0;
        if (!*line)
            break;
        *why = "too many headers";
        if (h->n_headers == HTTP_MAX_HEADERS)
            return 431;
        *why = strchr(line, '\r') ? "bare carriage return"
               : any              ? parse_header(line, h)
                                  : first(line, h);
        if (*why)
            return 400;
        any = true;
    }
    *why = any ? NULL : "empty head";
    return any ? 0 : 400;
}

bool http_response_parse(const char *p, size_t n, struct http_head *h, const char **why)
{
    bool ok = parse_lines(p, n, h, parse_status_line, why) == 0 && parse_framing(h, why) == 0;
    h->target = NULL;
    return ok;
}

int http_head_parse(const char *p, size_t n, struct http_head *h, const char **why)
{
    int status = parse_lines(p, n, h, parse_request_line, why);
    status = status ? status : parse_framing(h, why);
    status = status ? status : parse_request_headers(h, why);
    h->length = h->length < 0 ? 0 : h->length;
    return status;
}

void http_head_clear(struct http_head *h)
{
    mem_free(h->block);
    memset(h, 0, sizeof *h);
}

const char *http_header(const struct http_head *h, const char *name)
{
    for (int i = 0; i < h->n_headers; i++)
        if (!strcasecmp(h->headers[i].name, name))
            return h->headers[i].value;
    return NULL;
}

enum {
    SIZE,
    SIZE_SPACE, /* after the digits: an extension may follow, nothing else */
    EXTENSION,
    SIZE_LF,
    DATA,
    DATA_CR,
    DATA_LF,
    TRAILER_START,
    TRAILER,
    TRAILER_LF,
    LAST_LF
};

enum http_chunks_result http_chunks_feed(struct http_chunks *c, const char *p, size_t n, size_t max,
                                         struct buf *out, size_t *used)
{
    size_t i = 0;
    while (i < n) {
        char ch = p[i];
        if (c->state == DATA) {
            size_t take = n - i < (size_t)c->left ? n - i : (size_t)c->left;
            buf_add(out, p + i, take);
            i += take;
            c->left -= (int64_t)take;
            if (c->left == 0)
                c->state = DATA_CR;
            continue;
        }
        i++;
        /* Extensions and trailers are skipped, up to a limit. */
        if (ch != '\n' && ++c->n_line > 4096)
            return CHUNKS_BAD;
        switch (c->state) {
        case SIZE: {
            int d = hex(ch);
            if (d >= 0 && c->n_digits < 12) {
                c->left = c->left * 16 + d;
                c->n_digits++;
                break;
            }
            if (!c->n_digits || (ch != '\r' && ch != ';' && ch != ' ' && ch != '\t'))
                return CHUNKS_BAD;
            if ((uint64_t)c->left > max - (out->len < max ? out->len : max))
                return CHUNKS_TOO_LARGE;
            c->state = ch == '\r' ? SIZE_LF : ch == ';' ? EXTENSION : SIZE_SPACE;
            break;
        }
        case SIZE_SPACE:
            if (ch != '\r' && ch != ';' && ch != ' ' && ch != '\t')
                return CHUNKS_BAD;
            if (ch == '\r' || ch == ';')
                c->state = ch == '\r' ? SIZE_LF : EXTENSION;
            break;
        case EXTENSION:
            if (ch != '\r' && ch != '\t' && ((unsigned char)ch < 32 || ch == 127))
                return CHUNKS_BAD;
            if (ch == '\r')
                c->state = SIZE_LF;
            break;
        case SIZE_LF:
            if (ch != '\n')
                return CHUNKS_BAD;
            c->state = c->left ? DATA : TRAILER_START;
            c->n_digits = c->n_line = 0;
            break;
        case DATA_CR:
            if (ch != '\r')
                return CHUNKS_BAD;
            c->state = DATA_LF;
            break;
        case DATA_LF:
            if (ch != '\n')
                return CHUNKS_BAD;
            c->state = SIZE;
            c->n_line = 0;
            break;
        case TRAILER_START:
            c->state = ch == '\r' ? LAST_LF : TRAILER;
            if (ch == '\n')
                return CHUNKS_BAD;
            break;
        case TRAILER:
            if (ch == '\n')
                return CHUNKS_BAD;
            if (ch == '\r')
                c->state = TRAILER_LF;
            break;
        case TRAILER_LF:
            if (ch != '\n')
                return CHUNKS_BAD;
            c->state = TRAILER_START; /* n_line is not reset: all trailers together are bounded */
            break;
        default:
            *used = i;
            return ch == '\n' ? CHUNKS_DONE : CHUNKS_BAD;
        }
    }
    *used = i;
    return CHUNKS_MORE;
}

const char *http_status_text(int status)
{
    switch (status) {
    case 200:
        return "OK";
    case 201:
        return "Created";
    case 202:
        return "Accepted";
    case 204:
        return "No Content";
    case 304:
        return "Not Modified";
    case 400:
        return "Bad Request";
    case 401:
        return "Unauthorized";
    case 403:
        return "Forbidden";
    case 404:
        return "Not Found";
    case 405:
        return "Method Not Allowed";
    case 406:
        return "Not Acceptable";
    case 408:
        return "Request Timeout";
    case 409:
        return "Conflict";
    case 413:
        return "Content Too Large";
    case 415:
        return "Unsupported Media Type";
    case 417:
        return "Expectation Failed";
    case 422:
        return "Unprocessable Content";
    case 429:
        return "Too Many Requests";
    case 431:
        return "Request Header Fields Too Large";
    case 500:
        return "Internal Server Error";
    case 501:
        return "Not Implemented";
    case 502:
        return "Bad Gateway";
    case 503:
        return "Service Unavailable";
    case 504:
        return "Gateway Timeout";
    default:
        return "Status";
    }
}
