/* See client.h. */
#include "cli/client.h"
#include "base/os.h"
#include "route/http_response.h"

#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MAX_REPLY = 4 << 20 };

static int connect_to(const char *host, int port)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *list = NULL;
    char text[16];
    int fd = -1;
    snprintf(text, sizeof text, "%d", port);
    if (getaddrinfo(host, text, &hints, &list) != 0)
        return -1;
    for (struct addrinfo *a = list; a && fd < 0; a = a->ai_next) {
        fd = os_socket(a->ai_family, a->ai_socktype, a->ai_protocol, true);
        if (fd >= 0 && connect(fd, a->ai_addr, a->ai_addrlen) < 0) {
            close(fd);
            fd = -1;
        }
    }
    freeaddrinfo(list);
    return fd;
}

/* Reads a response. Returns its status, or -1 if it is not one. */
static int read_reply(int fd, int wait_s, struct buf *body)
{
    struct http_response r = {0};
    enum http_response_result got = RESPONSE_MORE;
    const char *why;
    char p[4096];
    int status = -1;
    while (got != RESPONSE_END && got != RESPONSE_BAD && body->len < MAX_REPLY) {
        struct pollfd ready = {.fd = fd, .events = POLLIN};
        if (poll(&ready, 1, wait_s < 0 ? -1 : wait_s * 1000) <= 0)
            break;
        ssize_t n = recv(fd, p, sizeof p, 0);
        if (n < 0)
            break;
        if (!n) {
            got = http_response_close(&r, &why);
            break;
        }
        size_t at = 0, used;
        do {
            got = http_response_feed(&r, p + at, (size_t)n - at, body, &used, &why);
            at += used;
            status = got == RESPONSE_HEAD ? r.head.status : status;
        } while (got == RESPONSE_HEAD || got == RESPONSE_DATA);
    }
    http_response_clear(&r);
    return got == RESPONSE_END ? status : -1;
}

int client_request(const struct client_target *t, const char *method, const char *path,
                   const char *body, int wait_s, struct buf *out)
{
    struct buf b = {0};
    int fd = connect_to(t->host, t->port), status = -1;
    if (fd < 0)
        return 0;
    buf_addf(&b, "%s %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n", method, path);
    if (t->key)
        buf_addf(&b, "Authorization: Bearer %s\r\n", t->key);
    if (body)
        buf_addf(&b, "Content-Type: application/json\r\nContent-Length: %zu\r\n", strlen(body));
    buf_adds(&b, "\r\n");
    if (body)
        buf_adds(&b, body);
    if (os_send(fd, b.p, b.len, true) == (ssize_t)b.len)
        status = read_reply(fd, wait_s, out);
    close(fd);
    buf_clear(&b);
    return status;
}
