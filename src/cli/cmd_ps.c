/* steel ps, load and stop: the models of a running server. */
#include "base/json_guard.h"
#include "base/mem.h"
#include "cli/cli.h"
#include "cli/client.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { REPLY_S = 30 };

static const char *text_of(const json_t *o, const char *name)
{
    const char *s = json_string_value(json_object_get(o, name));
    return s ? s : "";
}

/* The reply of an endpoint; NULL with the server's error. */
static json_t *ask(const struct client_target *t, const char *method, const char *path,
                   const char *body, int wait_s, struct error *err)
{
    struct buf b = {0};
    struct error why = {0};
    int status = client_request(t, method, path, body, wait_s, &b);
    json_t *v = b.p && json_guard(b.p, b.len, &json_limits_request, NULL, &why)
                    ? json_loadb(b.p, b.len, 0, NULL)
                    : NULL;
    const char *message = text_of(json_object_get(v, "error"), "message");
    buf_clear(&b);
    if (status == 200 && json_is_object(v))
        return v;
    if (!status)
        error_set(err, "no server listens at %s:%d (steel serve starts one)", t->host, t->port);
    else if (status == 401)
        error_set(err, "the server at %s:%d needs a key: name it with --api-key", t->host, t->port);
    else
        error_set(err, "%s:%d%s: %s (status %d)", t->host, t->port, path,
                  *message ? message : "no answer of a Steel server", status);
    json_decref(v);
    return NULL;
}

/* Reads the options. False: *rc is the exit code. */
static bool read_flags(const char *command, const char *synopsis, const char *about, int argc,
                       char **argv, struct client_target *t, const char **name, bool *all, int *rc)
{
    const struct opt opts[] = {
        {OPT_STRING, 0, "host", 0, &t->host, 0, 0, "ADDR", "the server's address (127.0.0.1)"},
        {OPT_INT, 0, "port", 0, &t->port, 1, 65535, "N", "the server's port (default 8080)"},
        {OPT_STRING, 0, "api-key", 0, &t->key, 0, 0, "KEY", "the server's key"},
        {OPT_FLAG, 'a', "all", 0, all, 0, 0, 0, "also the models that are not loaded"},
    };
    int n_args = name != NULL;
    const struct usage u = {
        .command = command,
        .synopsis = synopsis,
        .about = about,
        .opts = opts,
        .n_opts = (int)(sizeof opts / sizeof *opts) - n_args,
        .min_args = n_args,
        .max_args = n_args,
    };
    const char *pos[1] = {NULL};
    int n = args_parse(&u, argc, argv, pos);
    if (n >= 0 && t->key && (!*t->key || strpbrk(t->key, "\r\n")))
        n = args_usage_error(&u, "--api-key: a key is one line and not empty");
    if (n < 0)
        *rc = cli_args_exit(n);
    else if (name)
        *name = pos[0];
    return n >= 0;
}

static void print_one(const json_t *m, int n)
{
    const json_t *status = json_object_get(m, "status"), *meta = json_object_get(m, "meta");
    const json_t *progress = json_object_get(status, "progress");
    char state[32], size[16];
    snprintf(state, sizeof state, "%.16s", text_of(status, "value"));
    if (json_is_number(progress))
        snprintf(state, sizeof state, "loading %.0f %%", 100 * json_number_value(progress));
    if (!n)
        printf("%-40s %-14s %10s  %s\n", "name", "state", "size", "device");
    printf("%-40s %-14s %10s  %s\n", text_of(m, "id"), state,
           cli_bytes(json_number_value(json_object_get(meta, "size")), size),
           text_of(status, "device"));
}

int cmd_ps(int argc, char **argv)
{
    struct client_target t = {.host = "127.0.0.1", .port = 8080};
    struct error err = {0};
    bool all = false;
    int rc = EXIT_FAIL, n = 0;
    size_t i;
    json_t *m;
    if (!read_flags("ps", "", "Lists the models of a running server that are loaded or loading.",
                    argc, argv, &t, NULL, &all, &rc))
        return rc;
    json_t *v = ask(&t, "GET", "/v1/models", NULL, REPLY_S, &err);
    if (!v)
        return cli_fail(&err);
    json_array_foreach(json_object_get(v, "data"), i, m)
    {
        const char *state = text_of(json_object_get(m, "status"), "value");
        if (all ? *state : !strcmp(state, "loaded") || !strcmp(state, "loading"))
            print_one(m, n++);
    }
    if (!n)
        fprintf(stderr, "no model is loaded\n");
    json_decref(v);
    return EXIT_OK;
}

/* Posts the model's name to an endpoint. */
static int post_name(const char *command, const char *about, const char *path, int wait_s, int argc,
                     char **argv)
{
    struct client_target t = {.host = "127.0.0.1", .port = 8080};
    struct error err = {0};
    const char *name;
    int rc = EXIT_FAIL;
    if (!read_flags(command, "NAME", about, argc, argv, &t, &name, NULL, &rc))
        return rc;
    json_t *body = json_pack("{s:s}", "model", name);
    if (!body) {
        error_set(&err, "the name is not UTF-8");
        return cli_fail(&err);
    }
    char *text = json_dumps(body, JSON_COMPACT);
    json_t *v = ask(&t, "POST", path, text, wait_s, &err);
    mem_free(text);
    json_decref(body);
    json_decref(v);
    return v ? EXIT_OK : cli_fail(&err);
}

int cmd_load_model(int argc, char **argv)
{
    return post_name("load", "Loads a model of a running server and waits until it is in memory.",
                     "/models/load", -1, argc, argv);
}

int cmd_stop_model(int argc, char **argv)
{
    return post_name("stop",
                     "Unloads a model of a running server. Requests that use it end as usual.",
                     "/models/unload", REPLY_S, argc, argv);
}
