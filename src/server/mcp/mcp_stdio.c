/*
 * An MCP server that is a child process: messages are lines on its stdin and stdout, its stderr goes to
 * the log. It has a process group of its own, none of Steel's descriptors, and of Steel's environment
 * only what programs need to run. Its end: stdin is closed, then SIGTERM, then SIGKILL, all to the
 * group.
 */
#include "server/mcp/mcp_link.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/os.h"
#include "server/http/log.h"
#include "server/mcp/mcp_message.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    TERM_MS = 100,       /* between the end of stdin and SIGTERM */
    KILL_MS = 500,       /* and SIGKILL */
    GONE_MS = 500,       /* between the end of stdout and that of the process */
    TURN = 512 << 10,    /* bytes read in one turn */
    MAX_LINE = 1000,     /* of the log */
    LINES_A_SECOND = 20, /* of stderr that are logged; more are dropped */
};

struct stdio_link {
    struct mcp_link link;
    pid_t pid;
    int in, out, err; /* the child's; -1 = closed */
    struct buf line, unsent, log;
    size_t sent; /* of unsent */
    bool exited, closed;
    int status;
    int64_t end_ns, stop_ns; /* stdout was closed, or the process ended; stop was called */
    bool termed, killed;
    int64_t second; /* the second that n_logged counts */
    int n_logged, n_dropped;
};

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

/* The log */

static void log_text(struct stdio_link *l)
{
    int64_t second = clock_ns() / 1000000000;
    if (second != l->second) {
        if (l->n_dropped)
            log_line(LOG_WARN, "mcp: lines of stderr were dropped",
                     LOG_TEXT("server", l->link.config->name), LOG_NUM("lines", l->n_dropped));
        l->second = second;
        l->n_logged = l->n_dropped = 0;
    }
    if (l->log.len && l->n_logged++ < LINES_A_SECOND)
        log_line(LOG_INFO, "mcp: stderr", LOG_TEXT("server", l->link.config->name),
                 LOG_TEXT("text", l->log.p));
    else
        l->n_dropped += l->log.len > 0;
    buf_reset(&l->log);
}

static void read_stderr(struct stdio_link *l)
{
    char piece[8192];
    for (size_t total = 0; l->err >= 0 && total < TURN;) {
        ssize_t n = read(l->err, piece, sizeof piece);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (n <= 0) {
            log_text(l);
            close_fd(&l->err);
            return;
        }
        total += (size_t)n;
        for (ssize_t i = 0; i < n; i++)
            if (piece[i] == '\n' || l->log.len == MAX_LINE)
                log_text(l);
            else if (piece[i])
                buf_addc(&l->log, piece[i]);
    }
}

/* Starting */

static const char *const inherited[] = {"HOME",  "LANG", "LC_ALL", "LC_CTYPE", "LOGNAME", "PATH",
                                        "SHELL", "TERM", "TMPDIR", "TZ",       "USER"};
enum { N_INHERITED = sizeof inherited / sizeof *inherited };

static bool is_set(const struct mcp_server_config *c, const char *name)
{
    for (int i = 0; i < c->n_pairs; i++)
        if (!strcmp(c->pairs[i].name, name))
            return true;
    return false;
}

static char *joined(const char *name, const char *value)
{
    struct buf b = {0};
    buf_addf(&b, "%s=%s", name, value);
    return buf_take(&b);
}

static char **make_env(const struct mcp_server_config *c)
{
    char **env = mem_zalloc((size_t)c->n_pairs + N_INHERITED + 1, sizeof *env);
    int n = 0;
    for (int i = 0; i < N_INHERITED; i++) {
        const char *value = getenv(inherited[i]);
        if (value && !is_set(c, inherited[i]))
            env[n++] = joined(inherited[i], value);
    }
    for (int i = 0; i < c->n_pairs; i++)
        env[n++] = joined(c->pairs[i].name, c->pairs[i].value);
    return env;
}

static void free_list(char **list)
{
    for (char **p = list; *p; p++)
        mem_free(*p);
    mem_free(list);
}

/* Where the child finds the program: on the PATH that it gets. */
static const char *path_of(char *const *env)
{
    for (; *env; env++)
        if (!strncmp(*env, "PATH=", 5))
            return *env + 5;
    return "/usr/local/bin:/usr/bin:/bin";
}

/* The program's file, for posix_spawn, which would search Steel's own PATH. */
static bool find_program(const struct mcp_server_config *c, const char *path, struct buf *out)
{
    if (strchr(c->command, '/')) {
        buf_adds(out, c->command);
        return true;
    }
    while (*path) {
        size_t n = strcspn(path, ":");
        buf_reset(out);
        buf_addf(out, "%.*s/%s", (int)n, path, c->command);
        if (n && !access(out->p, X_OK))
            return true;
        path += n + (path[n] == ':');
    }
    return false;
}

/* pipes: stdin, stdout and stderr of the child, each read end first. */
static int spawn(const struct mcp_server_config *c, const char *program, char **env,
                 int pipes[3][2], pid_t *pid)
{
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attr;
    sigset_t none, all;
    char **argv = mem_zalloc((size_t)c->n_args + 2, sizeof *argv);
    argv[0] = c->command;
    for (int i = 0; i < c->n_args; i++)
        argv[i + 1] = c->args[i];
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawn_file_actions_init(&actions);
    posix_spawnattr_init(&attr);
    posix_spawnattr_setsigmask(&attr, &none);
    posix_spawnattr_setsigdefault(&attr, &all);
    posix_spawnattr_setpgroup(&attr, 0);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF |
                                        POSIX_SPAWN_SETPGROUP);
    posix_spawn_file_actions_adddup2(&actions, pipes[0][0], 0);
    posix_spawn_file_actions_adddup2(&actions, pipes[1][1], 1);
    posix_spawn_file_actions_adddup2(&actions, pipes[2][1], 2);
    posix_spawn_file_actions_addclosefrom_np(&actions, 3);
    if (c->cwd)
        posix_spawn_file_actions_addchdir_np(&actions, c->cwd);
    int rc = posix_spawn(pid, program, &actions, &attr, argv, env);
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attr);
    mem_free(argv);
    return rc;
}

static bool make_pipes(int pipes[3][2])
{
    bool ok = true;
    for (int i = 0; i < 3; i++)
        pipes[i][0] = pipes[i][1] = -1;
    for (int i = 0; ok && i < 3; i++)
        ok = os_pipe(pipes[i]);
    /* dup2 onto itself would keep the close-on-exec flag */
    for (int i = 0; ok && i < 3; i++)
        for (int k = 0; ok && k < 2; k++)
            if (pipes[i][k] < 3) {
                int high = fcntl(pipes[i][k], F_DUPFD_CLOEXEC, 3);
                ok = high >= 0;
                close_fd(&pipes[i][k]);
                pipes[i][k] = high;
            }
    return ok;
}

static bool start(struct stdio_link *l, struct error *err)
{
    const struct mcp_server_config *c = l->link.config;
    struct buf program = {0};
    int pipes[3][2], rc = EMFILE;
    char **env = make_env(c);
    bool found = find_program(c, path_of(env), &program);
    if (found && make_pipes(pipes))
        rc = spawn(c, program.p, env, pipes, &l->pid);
    if (found) {
        close_fd(&pipes[0][0]);
        close_fd(&pipes[1][1]);
        close_fd(&pipes[2][1]);
        l->in = pipes[0][1];
        l->out = pipes[1][0];
        l->err = pipes[2][0];
    }
    int fds[] = {l->in, l->out, l->err};
    for (int i = 0; found && !rc && i < 3; i++)
        fcntl(fds[i], F_SETFL, O_NONBLOCK);
    free_list(env);
    buf_clear(&program);
    if (!found)
        return error_set(err, "%.200s is not on the PATH", c->command);
    return !rc || error_set(err, "cannot start %.200s%s%.200s: %s", c->command,
                            c->cwd ? " in " : "", c->cwd ? c->cwd : "", strerror(rc));
}

/* Running */

static void say_closed(struct stdio_link *l, const char *why)
{
    if (!l->closed && !l->stop_ns) {
        l->closed = true;
        l->link.h.closed(l->link.h.user, why);
    }
}

/* Notes the end of the process. The rest of its group is killed first: until the process is reaped,
 * nobody else can have its number. */
static void look_for_exit(struct stdio_link *l)
{
    siginfo_t info = {0};
    if (l->exited || waitid(P_PID, (id_t)l->pid, &info, WEXITED | WNOHANG | WNOWAIT) ||
        info.si_pid != l->pid)
        return;
    kill(-l->pid, SIGKILL);
    while (waitpid(l->pid, &l->status, 0) < 0 && errno == EINTR)
        ;
    l->exited = true;
}

static void read_stdout(struct stdio_link *l)
{
    char piece[16384];
    for (size_t total = 0; l->out >= 0 && !l->closed && total < TURN;) {
        ssize_t n = read(l->out, piece, sizeof piece);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (n <= 0) {
            close_fd(&l->out);
            return;
        }
        total += (size_t)n;
        const char *p = piece, *end = piece + n;
        while (p < end && !l->closed) {
            const char *stop = memchr(p, '\n', (size_t)(end - p));
            buf_add(&l->line, p, (size_t)((stop ? stop : end) - p));
            p = stop ? stop + 1 : end;
            if (l->line.len > MCP_MAX_MESSAGE) {
                say_closed(l, "it wrote a line that is too long");
            } else if (stop) {
                if (l->line.len)
                    l->link.h.message(l->link.h.user, l->line.p, l->line.len);
                if (l->line.cap > 1 << 20)
                    buf_clear(&l->line);
                else
                    buf_reset(&l->line);
            }
        }
    }
}

static void write_stdin(struct stdio_link *l)
{
    while (l->in >= 0 && l->sent < l->unsent.len) {
        ssize_t n = write(l->in, l->unsent.p + l->sent, l->unsent.len - l->sent);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (n < 0) { /* SIGPIPE is ignored */
            close_fd(&l->in);
            return;
        }
        l->sent += (size_t)n;
    }
    buf_clear(&l->unsent);
    l->sent = 0;
}

static void say_end(struct stdio_link *l)
{
    char why[100];
    if (l->exited && WIFSIGNALED(l->status))
        snprintf(why, sizeof why, "the process was ended by signal %d", WTERMSIG(l->status));
    else if (l->exited)
        snprintf(why, sizeof why, "the process ended with exit code %d", WEXITSTATUS(l->status));
    else
        snprintf(why, sizeof why, "the process closed its stdout");
    say_closed(l, why);
}

static void service(struct mcp_link *link, int64_t now_ns)
{
    struct stdio_link *l = (struct stdio_link *)link;
    read_stderr(l);
    if (l->stop_ns)
        return;
    read_stdout(l);
    write_stdin(l);
    look_for_exit(l);
    if (l->out >= 0 && !l->exited)
        return;
    if (!l->end_ns)
        l->end_ns = now_ns;
    l->link.soon = true;
    if ((l->out < 0 && l->exited) || now_ns - l->end_ns > (int64_t)GONE_MS * 1000000)
        say_end(l);
}

static bool send_text(struct mcp_link *link, const char *text, size_t n, int64_t id)
{
    (void)id;
    struct stdio_link *l = (struct stdio_link *)link;
    if (l->unsent.len - l->sent + n > MCP_MAX_UNSENT)
        return false;
    buf_add(&l->unsent, text, n);
    buf_addc(&l->unsent, '\n');
    write_stdin(l);
    return true;
}

static void drop(struct mcp_link *link, int64_t id)
{
    (void)link, (void)id;
}

static void ready(struct mcp_link *link, const char *version)
{
    (void)link, (void)version;
}

static int fds(struct mcp_link *link, struct pollfd *out)
{
    struct stdio_link *l = (struct stdio_link *)link;
    int n = 0;
    if (l->out >= 0 && !l->stop_ns)
        out[n++] = (struct pollfd){.fd = l->out, .events = POLLIN};
    if (l->err >= 0)
        out[n++] = (struct pollfd){.fd = l->err, .events = POLLIN};
    if (l->in >= 0 && l->sent < l->unsent.len)
        out[n++] = (struct pollfd){.fd = l->in, .events = POLLOUT};
    return n;
}

/* Ending */

static void stop(struct mcp_link *link, int64_t now_ns)
{
    struct stdio_link *l = (struct stdio_link *)link;
    l->stop_ns = now_ns;
    link->soon = true;
    close_fd(&l->in);
}

static bool stopped(struct mcp_link *link, int64_t now_ns)
{
    struct stdio_link *l = (struct stdio_link *)link;
    int64_t ms = (now_ns - l->stop_ns) / 1000000;
    look_for_exit(l);
    if (l->exited)
        return true;
    if (ms >= TERM_MS && !l->termed) {
        l->termed = true;
        kill(-l->pid, SIGTERM);
    }
    if (ms >= KILL_MS && !l->killed) {
        l->killed = true;
        kill(-l->pid, SIGKILL);
    }
    return false;
}

static void free_link(struct mcp_link *link)
{
    struct stdio_link *l = (struct stdio_link *)link;
    if (l->pid > 0 && !l->exited) {
        kill(-l->pid, SIGKILL);
        while (waitpid(l->pid, &l->status, 0) < 0 && errno == EINTR)
            ;
    }
    read_stderr(l);
    close_fd(&l->in);
    close_fd(&l->out);
    close_fd(&l->err);
    buf_clear(&l->line);
    buf_clear(&l->unsent);
    buf_clear(&l->log);
    mem_free(l);
}

static const struct mcp_link_functions functions = {
    .send = send_text,
    .drop = drop,
    .ready = ready,
    .fds = fds,
    .service = service,
    .stop = stop,
    .stopped = stopped,
    .free = free_link,
};

struct mcp_link *mcp_stdio_open(const struct mcp_server_config *c, const struct mcp_link_handler *h,
                                struct error *err)
{
    struct stdio_link *l = mem_zalloc(1, sizeof *l);
    l->link = (struct mcp_link){.f = &functions, .config = c, .h = *h};
    l->in = l->out = l->err = -1;
    if (start(l, err))
        return &l->link;
    l->pid = 0;
    free_link(&l->link);
    return NULL;
}
