/* GET /openapi.json: the served endpoints, from their table. */
#include "server/api/server_int.h"
#include "base/version.h"

#include <ctype.h>
#include <string.h>

static bool is_served(const struct endpoint *e)
{
    return e->respond || e->prepare;
}

/* Whether an earlier row or place has the path already. */
static bool is_repeated(const char *path, int row, int place)
{
    for (int i = 0; i <= row; i++)
        for (int k = 0; is_served(&endpoints[i]) && k < ENDPOINT_MAX_PATHS; k++)
            if (endpoints[i].paths[k] && (i < row || k < place) &&
                !strcmp(endpoints[i].paths[k], path))
                return true;
    return false;
}

enum { N_PARTS = 2 };
static const char *const part_names[N_PARTS] = {"name", "part"}; /* of the stars of a path */

static void add_method(const struct endpoint *e, int n_parts, struct buf *b)
{
    buf_addc(b, '"');
    for (const char *m = e->method; *m; m++)
        buf_addc(b, (char)tolower((unsigned char)*m));
    buf_adds(b, "\":{\"summary\":");
    jsonout_text(b, e->name);
    if (n_parts)
        buf_adds(b, ",\"parameters\":[");
    for (int i = 0; i < n_parts; i++)
        buf_addf(b,
                 "%s{\"name\":\"%s\",\"in\":\"path\",\"required\":true,"
                 "\"schema\":{\"type\":\"string\"}}",
                 i ? "," : "", part_names[i]);
    if (n_parts)
        buf_addc(b, ']');
    if (e->prepare)
        buf_adds(b, ",\"requestBody\":{\"required\":true,\"content\":{\"application/json\":{"
                    "\"schema\":{\"type\":\"object\"}}}}");
    if (e->open)
        buf_adds(b, ",\"security\":[]");
    buf_adds(b, ",\"responses\":{\"200\":{\"description\":\"the reply\"},"
                "\"default\":{\"description\":\"an error\"}}}");
}

/* All methods of a path. */
static void add_path(const char *path, struct buf *b)
{
    int n = 0, n_parts = 0;
    buf_addc(b, '"');
    for (const char *p = path; *p; p++) {
        if (*p == '*' && n_parts < N_PARTS)
            buf_addf(b, "{%s}", part_names[n_parts++]);
        else
            buf_addc(b, *p);
    }
    buf_adds(b, "\":{");
    for (int i = 0; i < n_endpoints; i++)
        for (int k = 0; is_served(&endpoints[i]) && k < ENDPOINT_MAX_PATHS; k++)
            if (endpoints[i].paths[k] && !strcmp(endpoints[i].paths[k], path)) {
                buf_adds(b, n++ ? "," : "");
                add_method(&endpoints[i], n_parts, b);
            }
    buf_addc(b, '}');
}

void get_openapi(struct server *s, struct http_exchange *x)
{
    struct buf b = {0};
    int n = 0;
    buf_addf(
        &b,
        "{\"openapi\":\"3.1.0\",\"info\":{\"title\":\"Steel\",\"version\":\"%s\"},"
        "\"components\":{\"securitySchemes\":{\"key\":{\"type\":\"http\",\"scheme\":\"bearer\"}}},"
        "\"security\":[{\"key\":[]}],\"paths\":{",
        version_number());
    for (int i = 0; i < n_endpoints; i++)
        for (int k = 0; is_served(&endpoints[i]) && k < ENDPOINT_MAX_PATHS; k++)
            if (endpoints[i].paths[k] && !is_repeated(endpoints[i].paths[k], i, k)) {
                buf_adds(&b, n++ ? "," : "");
                add_path(endpoints[i].paths[k], &b);
            }
    buf_adds(&b, "}}");
    reply_json(x, s, 200, &b);
    buf_clear(&b);
}

void get_version(struct server *s, struct http_exchange *x)
{
    struct buf b = {0};
    buf_addf(&b, "{\"version\":\"%s\"}", version_number());
    reply_json(x, s, 200, &b);
    buf_clear(&b);
}
