/*
 * steel launch: runs a coding agent with a local model. It finds or starts a server, gives the agent
 * its settings (agents.h), and waits for it. It stops only what it started.
 *
 * Signals: the agent shares the terminal's process group, so Ctrl-C reaches it directly, and this
 * process ignores it meanwhile. The server has a group of its own. SIGTERM and SIGHUP are passed on
 * to the agent.
 */
#include "cli/agents.h"
#include "cli/cli.h"
#include "cli/client.h"
#include "base/json_guard.h"
#include "base/mem.h"
#include "base/os.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { REPLY_S = 30, POLL_MS = 50, NOT_FOUND = 127 };

struct launch {
    const struct agent *agent;
    const char *model_path; /* as the user named it; NULL = not named */
    const char *alias, *host, *key;
    int port;
    bool print, tuned;  /* tuned: server_args has more than keys */
    char **server_args; /* (n) options for `steel serve`, without the address */
    int n_server_args;
    char **agent_args; /* (n) after -- */
    int n_agent_args;
    char url[320];
    char *model; /* owned; the name the server gives it */
    int context;
    bool thinks;
    char dir[PATH_MAX]; /* "" = not made */
    pid_t server;       /* 0 = not started here */
};

static volatile sig_atomic_t interrupted;
static volatile sig_atomic_t agent_pid; /* 0 = not running */

static void on_signal(int sig)
{
    int saved = errno;
    if (agent_pid > 0 && sig != SIGINT && sig != SIGQUIT)
        kill(agent_pid, sig);
    else if (agent_pid <= 0)
        interrupted = sig;
    errno = saved;
}

static void handle_signals(void (*handler)(int))
{
    struct sigaction sa = {.sa_handler = handler};
    const int signals[] = {SIGINT, SIGQUIT, SIGTERM, SIGHUP};
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        sigaction(signals[i], &sa, NULL);
}

static int http_get(const struct launch *l, const char *path, struct buf *body)
{
    const struct client_target t = {l->host, l->port, l->key};
    return client_request(&t, "GET", path, NULL, REPLY_S, body);
}

/* The server */

static const char *text_of(const json_t *v)
{
    return json_is_string(v) ? json_string_value(v) : "";
}

static bool is_model(const char *wanted, const json_t *entry)
{
    char a[PATH_MAX], b[PATH_MAX];
    const char *id = text_of(json_object_get(entry, "id")),
               *root = text_of(json_object_get(entry, "root"));
    if (!strcmp(wanted, id) || !strcmp(wanted, root))
        return true;
    return realpath(wanted, a) && realpath(root, b) && !strcmp(a, b);
}

/* Takes the model's name and context from the reply of /v1/models. */
static bool take_facts(struct launch *l, const struct buf *body, struct error *err)
{
    struct error why = {0};
    json_t *v = body->p && json_guard(body->p, body->len, &json_limits_request, NULL, &why)
                    ? json_loadb(body->p, body->len, 0, NULL)
                    : NULL;
    const json_t *list = json_object_get(v, "data"), *found = NULL;
    for (size_t i = 0; !found && i < json_array_size(list); i++)
        if (!l->model_path || l->server || is_model(l->model_path, json_array_get(list, i)))
            found = json_array_get(list, i);
    const char *id = text_of(json_object_get(found, "id"));
    bool ok = *id;
    if (!json_array_size(list))
        error_set(err, "%s/v1/models lists no models: is that a server for models?", l->url);
    else if (!found)
        error_set(err,
                  "the server at %s has the model %s, not %s: leave MODEL out, choose another "
                  "--port, or stop that server",
                  l->url, text_of(json_object_get(json_array_get(list, 0), "id")), l->model_path);
    else if (!ok)
        error_set(err, "%s/v1/models: data[].id is missing", l->url);
    json_int_t context = json_integer_value(json_object_get(found, "max_model_len"));
    const json_t *caps = json_object_get(found, "capabilities");
    for (size_t i = 0; i < json_array_size(caps); i++)
        l->thinks |= !strcmp(text_of(json_array_get(caps, i)), "thinking");
    l->context = context > 0 && context <= INT_MAX ? (int)context : 0;
    l->model = ok ? mem_strdup(id) : NULL;
    json_decref(v);
    return ok;
}

/* Asks a server that is ready which model it has. */
static bool read_facts(struct launch *l, struct error *err)
{
    struct buf body = {0};
    int status = http_get(l, "/v1/models", &body);
    bool ok = false;
    if (status == 401 || status == 403)
        error_set(err, "the server at %s refuses the key: name it with --api-key", l->url);
    else if (status != 200)
        error_set(err, "%s/v1/models: status %d instead of 200", l->url, status);
    else
        ok = take_facts(l, &body, err);
    buf_clear(&body);
    return ok;
}

static void print_log(const struct launch *l)
{
    char path[PATH_MAX + 16], line[1024];
    snprintf(path, sizeof path, "%s/server.log", l->dir);
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f))
        fputs(line, stderr);
    if (f)
        fclose(f);
}

/* Waits until /health is 200. A server that does not know /health counts as ready. */
static bool wait_ready(struct launch *l, struct error *err)
{
    for (;;) {
        struct buf body = {0};
        int rc, status = http_get(l, "/health", &body);
        buf_clear(&body);
        if (interrupted)
            return error_set(err, "interrupted");
        if (l->server && waitpid(l->server, &rc, WNOHANG) == l->server) {
            l->server = 0;
            print_log(l);
            return error_set(err, "the server did not start");
        }
        if (status > 0 && status != 503)
            return true;
        if (status <= 0 &&
            !l->server) /* one that ends while it is asked also cuts the connection */
            return error_set(err, "%s does not answer with HTTP", l->url);
        poll(NULL, 0, POLL_MS);
    }
}

/* In the child. */
static _Noreturn void exec_server(const struct launch *l, pid_t parent)
{
    char path[PATH_MAX + 16], port[16];
    int n = 0, in = open("/dev/null", O_RDONLY);
    snprintf(path, sizeof path, "%s/server.log", l->dir);
    snprintf(port, sizeof port, "%d", l->port);
    int log = open(path, O_WRONLY | O_CREAT | O_EXCL, 0600);
    char **argv = mem_zalloc((size_t)l->n_server_args + 10, sizeof *argv);
    const char *const head[] = {"steel", "serve"};
    const char *const tail[] = {"--host", l->host, "--port", port};
    for (int i = 0; i < 2; i++)
        argv[n++] = mem_strdup(head[i]);
    for (int i = 0; i < l->n_server_args; i++)
        argv[n++] = l->server_args[i];
    for (int i = 0; i < 4; i++)
        argv[n++] = mem_strdup(tail[i]);
    setpgid(0, 0);
    os_end_with_parent(SIGTERM);
    if (getppid() != parent || in < 0 || log < 0 || dup2(in, STDIN_FILENO) < 0 ||
        dup2(log, STDOUT_FILENO) < 0 || dup2(log, STDERR_FILENO) < 0)
        _exit(EXIT_FAIL);
    os_run_self(argv);
    _exit(NOT_FOUND);
}

static bool start_server(struct launch *l, struct error *err)
{
    pid_t parent = getpid(), pid = fork();
    if (pid < 0)
        return error_set(err, "the server cannot be started: %s", strerror(errno));
    if (!pid)
        exec_server(l, parent);
    l->server = pid;
    return true;
}

static void stop_server(struct launch *l)
{
    int rc;
    if (!l->server)
        return;
    kill(l->server, SIGTERM);
    while (waitpid(l->server, &rc, 0) < 0 && errno == EINTR)
        ;
    l->server = 0;
}

/* The agent */

static bool make_folder(struct launch *l, struct error *err)
{
    const char *tmp = getenv("TMPDIR");
    int n = snprintf(l->dir, sizeof l->dir, "%s/steel-launch-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    if (n >= (int)sizeof l->dir || !mkdtemp(l->dir)) {
        error_set(err, "a temporary folder (%s): %s", l->dir, strerror(errno));
        l->dir[0] = 0;
        return false;
    }
    return true;
}

static void remove_folder(const struct launch *l)
{
    char path[PATH_MAX + 64];
    if (!l->dir[0])
        return;
    snprintf(path, sizeof path, "%s/server.log", l->dir);
    unlink(path);
    if (l->agent->file_name) {
        snprintf(path, sizeof path, "%s/%s", l->dir, l->agent->file_name);
        unlink(path);
    }
    rmdir(l->dir);
}

static bool write_file(const char *path, const struct buf *text, struct error *err)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0600);
    bool ok = fd >= 0 && write(fd, text->p, text->len) == (ssize_t)text->len;
    if (fd >= 0)
        close(fd);
    return ok || error_set(err, "%s: %s", path, strerror(errno));
}

/* Whether a program is on PATH. */
static bool is_on_path(const char *program)
{
    const char *dirs = getenv("PATH");
    while (dirs && *dirs) {
        size_t n = strcspn(dirs, ":");
        char file[PATH_MAX];
        struct stat st;
        if (snprintf(file, sizeof file, "%.*s/%s", n ? (int)n : 1, n ? dirs : ".", program) <
                (int)sizeof file &&
            stat(file, &st) == 0 && S_ISREG(st.st_mode) && access(file, X_OK) == 0)
            return true;
        dirs += n + (dirs[n] == ':');
    }
    return false;
}

/* In the child. */
static _Noreturn void exec_agent(const struct launch *l, const struct agent_setup *s)
{
    int n = 0;
    char **argv = mem_zalloc((size_t)(1 + s->n_args + l->n_agent_args + 1), sizeof *argv);
    for (int i = 0; i < s->n_vars; i++)
        if (s->vars[i].value)
            setenv(s->vars[i].name, s->vars[i].value, 1);
        else
            unsetenv(s->vars[i].name);
    argv[n++] = mem_strdup(l->agent->name);
    for (int i = 0; i < s->n_args; i++)
        argv[n++] = s->args[i];
    for (int i = 0; i < l->n_agent_args; i++)
        argv[n++] = l->agent_args[i];
    execvp(argv[0], argv);
    fprintf(stderr, "steel: %s: %s\n", argv[0], strerror(errno));
    _exit(NOT_FOUND);
}

/* Runs the agent to its end. Returns its exit code, 128 + N if signal N ended it. */
static int run_agent(const struct launch *l, const struct agent_setup *s, struct error *err)
{
    int status;
    sigset_t all, old;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, &old); /* until agent_pid is known */
    pid_t pid = interrupted ? -1 : fork();
    if (!pid) {
        handle_signals(SIG_DFL);
        sigprocmask(SIG_SETMASK, &old, NULL);
        exec_agent(l, s);
    }
    agent_pid = pid > 0 ? pid : 0;
    sigprocmask(SIG_SETMASK, &old, NULL);
    if (pid < 0) {
        error_set(err, "%s cannot be started: %s", l->agent->name,
                  interrupted ? "interrupted" : strerror(errno));
        return EXIT_FAIL;
    }
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR) {
            error_set(err, "%s: %s", l->agent->name, strerror(errno));
            return EXIT_FAIL;
        }
    agent_pid = 0;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

/* --print */

static void print_quoted(const char *text)
{
    putchar('\'');
    for (; *text; text++)
        if (*text == '\'')
            fputs("'\\''", stdout);
        else
            putchar(*text);
    putchar('\'');
}

/* Prints the settings as lines for a shell. */
static void print_setup(const struct launch *l, const struct agent_setup *s, const char *path)
{
    if (s->file.len)
        printf("cat >%s <<'END'\n%sEND\n", path, s->file.p);
    for (int i = 0; i < s->n_vars; i++) {
        printf(s->vars[i].value ? "export %s=" : "unset %s", s->vars[i].name);
        if (s->vars[i].value)
            print_quoted(s->vars[i].value);
        putchar('\n');
    }
    fputs(l->agent->name, stdout);
    for (int i = 0; i < s->n_args + l->n_agent_args; i++) {
        putchar(' ');
        print_quoted(i < s->n_args ? s->args[i] : l->agent_args[i - s->n_args]);
    }
    putchar('\n');
}

static void make_setup(const struct launch *l, const char *path, struct agent_setup *s)
{
    struct agent_server to = {.url = l->url,
                              .model = l->model,
                              .key = l->key ? l->key : "steel",
                              .context = l->context,
                              .thinks = l->thinks};
    l->agent->set(s, &to, path);
}

/* The model's name and context, if a server runs; otherwise what the command line says. */
static int print_settings(struct launch *l, struct error *err)
{
    struct agent_setup setup = {0};
    struct buf body = {0};
    char path[PATH_MAX];
    int status = http_get(l, "/health", &body);
    buf_clear(&body);
    if (status == 200 && !read_facts(l, err))
        return EXIT_FAIL;
    if (!l->model)
        l->model = mem_strdup(l->alias ? l->alias : l->model_path ? l->model_path : "steel");
    snprintf(path, sizeof path, "%s", l->agent->file_name ? l->agent->file_name : "");
    make_setup(l, path, &setup);
    print_setup(l, &setup, path);
    agent_setup_clear(&setup);
    return EXIT_OK;
}

static int launch(struct launch *l, struct error *err)
{
    struct agent_setup setup = {0};
    struct buf body = {0};
    char path[PATH_MAX + 64] = "";
    int rc = EXIT_FAIL;
    if (!is_on_path(l->agent->name)) {
        error_set(err, "%s is not on PATH. Install it with: npm install -g %s", l->agent->name,
                  l->agent->package);
        return EXIT_FAIL;
    }
    bool runs = http_get(l, "/health", &body) != 0;
    buf_clear(&body);
    handle_signals(on_signal);
    if (!make_folder(l, err) || (!runs && !start_server(l, err)))
        return EXIT_FAIL;
    if (!runs)
        fprintf(stderr, "steel: starting a server at %s (log: %s/server.log)\n", l->url, l->dir);
    if (!wait_ready(l, err) || !read_facts(l, err))
        return interrupted ? 128 + interrupted : EXIT_FAIL;
    if (runs)
        fprintf(stderr, "steel: using the server that runs at %s, model %s%s\n", l->url, l->model,
                l->tuned ? "; options of the server have no effect" : "");
    if (l->agent->file_name)
        snprintf(path, sizeof path, "%s/%s", l->dir, l->agent->file_name);
    make_setup(l, path, &setup);
    if (!setup.file.len || write_file(path, &setup.file, err))
        rc = run_agent(l, &setup, err);
    agent_setup_clear(&setup);
    return rc;
}

/* Options */

/* Splits the command line: options for the server, without the positionals and launch's own. */
static void take_server_args(struct launch *l, int argc, char **argv, const char *const *pos, int n)
{
    l->server_args = mem_zalloc((size_t)argc + 2, sizeof *l->server_args);
    for (int i = 1; i < argc; i++) {
        bool own = !strcmp(argv[i], "--print") || !strncmp(argv[i], "--host=", 7) ||
                   !strncmp(argv[i], "--port=", 7);
        for (int k = 0; k < n; k++)
            own |= argv[i] == pos[k];
        if (!strcmp(argv[i], "--host") || !strcmp(argv[i], "--port")) {
            i++; /* with its value */
            continue;
        }
        if (!own)
            l->server_args[l->n_server_args++] = argv[i];
        bool key = !strncmp(argv[i], "--api-key", 9);
        l->tuned |= !own && !key && (i < 2 || strcmp(argv[i - 1], "--api-key") != 0);
    }
    if (n > 1) {
        static char flag[] = "-m";
        l->server_args[l->n_server_args++] = flag;
        l->server_args[l->n_server_args++] = (char *)(uintptr_t)pos[1];
    }
}

static bool finish_options(const struct usage *u, struct launch *l, const char *const *pos, int n,
                           const struct opt_list *keys)
{
    l->agent = agent_find(pos[0]);
    l->key = keys->n ? keys->items[0] : NULL;
    bool any = !strcmp(l->host, "0.0.0.0") || !strcmp(l->host, "::");
    const char *to = !any ? l->host : *l->host == ':' ? "::1" : "127.0.0.1";
    const char *names[16];
    int n_names = 0;
    for (const struct agent *a = agents; a->name; a++)
        names[n_names++] = a->name;
    const char *near = args_nearest(pos[0], names, n_names);
    if (!l->agent)
        args_usage_error(u, "unknown agent '%s'%s%s: use " AGENT_NAMES, pos[0],
                         near ? "; did you mean " : "", near ? near : "");
    else if (n > 1 && args_given(&l->model_path))
        args_usage_error(u, "unexpected argument '%s': -m names the model", pos[1]);
    else if (snprintf(l->url, sizeof l->url, strchr(to, ':') ? "http://[%s]:%d" : "http://%s:%d",
                      to, l->port) >= (int)sizeof l->url)
        args_usage_error(u, "--host %s: too long", l->host);
    else if (l->key && (!*l->key || strpbrk(l->key, "\r\n")))
        args_usage_error(u, "--api-key: a key is one line and not empty");
    else {
        l->model_path = n > 1 ? pos[1] : args_given(&l->model_path) ? l->model_path : NULL;
        return true;
    }
    return false;
}

int cmd_launch(int argc, char **argv)
{
    struct launch l = {.host = "127.0.0.1", .port = 8080};
    struct model_flags model = {.draft = DRAFT_AUTO};
    struct opt_list keys = {0};
    const char *kv_memory, *state_memory, *chat_template;
    int max_seqs;
    bool share;
    /* Options without `l` are checked here and passed to `steel serve` as they are. */
    const struct opt opts[] = {
        {OPT_FLAG, 0, "print", 0, &l.print, 0, 0, 0,
         "print the settings as lines for a shell; start nothing"},
        {OPT_STRING, 0, "host", 0, &l.host, 0, 0, "ADDR", "the server's address (127.0.0.1)"},
        {OPT_INT, 0, "port", 0, &l.port, 1, 65535, "N", "the server's port (default 8080)"},
        {OPT_LIST, 0, "api-key", 0, &keys, 0, 0, "KEY", "the server's key"},
        {OPT_HEADING, 0, "a server that is started", 0, 0, 0, 0, 0, 0},
        MODEL_ROW(l.model_path),
        {OPT_STRING, 'a', "alias", "served-model-name", &l.alias, 0, 0, "NAME",
         "the model's name (default: from the file)"},
        LORA_ROW(model),
        {OPT_INT, 0, "max-num-seqs", "-np", &max_seqs, 1, 4096, "N", "maximum batch size"},
        {OPT_STRING, 0, "kv-memory", 0, &kv_memory, 0, 0, "SIZE", "memory for the KV cache"},
        {OPT_STRING, 0, "state-memory", 0, &state_memory, 0, 0, "SIZE",
         "memory for recurrent-state checkpoints"},
        {OPT_FLAG, 0, "share-prefix-cache", 0, &share, 0, 0, 0,
         "share the prefix cache among all API keys"},
        {OPT_STRING, 0, "chat-template", "chat-template-file", &chat_template, 0, 0, "FILE",
         "use this Jinja file instead of the model's template"},
        DRAFT_ROW(model),
        DRAFT_MODEL_ROWS(model),
        MODEL_FLAG_ROWS(model),
    };
    const struct usage u = {
        .command = "launch",
        .synopsis = AGENT_NAMES " [MODEL] [options] [-- ARGS]",
        .about = "Runs a coding agent with a local model: starts a server if none runs at the "
                 "address, waits\n"
                 "until it is ready, starts the agent with settings for it, and stops the server "
                 "afterwards.\n"
                 "Your own configuration of the agent is not changed. ARGS go to the agent, and "
                 "the exit code\n"
                 "is the agent's.",
        .examples = "  steel launch claude model.gguf -c 65536\n"
                    "  steel launch codex model.gguf -- exec 'fix the test'\n"
                    "  steel launch opencode --print\n",
        .opts = opts,
        .n_opts = sizeof opts / sizeof *opts,
        .min_args = 1,
        .max_args = 2,
    };
    int n_own = 1;
    while (n_own < argc && strcmp(argv[n_own], "--") != 0)
        n_own++;
    const char *pos[2];
    int n = args_parse(&u, n_own, argv, pos);
    if (n < 0)
        return cli_args_exit(n);
    if (!finish_options(&u, &l, pos, n, &keys))
        return EXIT_USAGE;
    take_server_args(&l, n_own, argv, pos, n);
    l.agent_args = argv + n_own + 1;
    l.n_agent_args = n_own < argc ? argc - n_own - 1 : 0;
    struct error err = {0};
    int rc = l.print ? print_settings(&l, &err) : launch(&l, &err);
    stop_server(&l);
    remove_folder(&l);
    mem_free(l.model);
    mem_free(l.server_args);
    if (err.msg[0])
        cli_fail(&err);
    return rc;
}
