/* The thread that keeps the connections to MCP servers, and what others see of it. See mcp.h. */
#include "server/mcp/mcp.h"
#include "base/clock.h"
#include "base/curl.h"
#include "base/mem.h"
#include "base/os.h"
#include "server/mcp/mcp_client.h"

#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

struct mcp {
    struct mcp_options opt;
    struct mcp_client **clients; /* (n), the thread's */
    int n;
    CURLM *multi; /* the thread's; NULL: no server has a URL */
    int wake_fd;
    pthread_t thread;
    atomic_bool stopping;
    pthread_mutex_t lock;
    struct mcp_list *list;          /* under lock */
    struct mcp_call *asked, **last; /* under lock: not yet taken by the thread */
    struct mcp_call *done;          /* under lock: came back */
    struct mcp_call *ended;         /* the thread's: come back at the end of its turn */
};

/* Lists */

static void list_free(struct mcp_list *l)
{
    for (int i = 0; i < l->n; i++) {
        mcp_tools_clear(&l->servers[i].tools);
        mem_free(l->servers[i].name);
        mem_free(l->servers[i].error);
    }
    mem_free(l->servers);
    mem_free(l);
}

void mcp_list_release(struct mcp_list *l)
{
    if (l && atomic_fetch_sub(&l->refs, 1) == 1)
        list_free(l);
}

struct mcp_list *mcp_list_get(struct mcp *m)
{
    pthread_mutex_lock(&m->lock);
    struct mcp_list *l = m->list;
    atomic_fetch_add(&l->refs, 1);
    pthread_mutex_unlock(&m->lock);
    return l;
}

const struct mcp_server *mcp_find_server(const struct mcp_list *l, const char *name)
{
    for (int i = 0; l && i < l->n; i++)
        if (!strcmp(l->servers[i].name, name))
            return &l->servers[i];
    return NULL;
}

const struct mcp_tool *mcp_find_tool(const struct mcp_server *s, const char *name)
{
    for (int i = 0; i < s->tools.n; i++)
        if (!strcmp(s->tools.v[i].name, name))
            return &s->tools.v[i];
    return NULL;
}

const char *mcp_state_name(enum mcp_state state)
{
    static const char *const names[] = {"starting", "running", "failed"};
    return names[state];
}

static void publish(struct mcp *m)
{
    struct mcp_list *l = mem_zalloc(1, sizeof *l), *old;
    atomic_init(&l->refs, 1);
    l->servers = mem_zalloc((size_t)m->n + 1, sizeof *l->servers);
    for (int i = 0; i < m->n; i++)
        mcp_client_describe(m->clients[i], &l->servers[l->n++]);
    pthread_mutex_lock(&m->lock);
    old = m->list;
    m->list = l;
    pthread_mutex_unlock(&m->lock);
    mcp_list_release(old);
}

/* Calls */

struct mcp_call *mcp_call_new(const char *server, const char *tool, const char *arguments)
{
    struct mcp_call *c = mem_zalloc(1, sizeof *c);
    c->server = mem_strdup(server);
    c->tool = mem_strdup(tool);
    c->arguments = mem_strdup(arguments);
    return c;
}

void mcp_call_free(struct mcp_call *c)
{
    if (!c)
        return;
    mem_free(c->server);
    mem_free(c->tool);
    mem_free(c->arguments);
    buf_clear(&c->text);
    mem_free(c);
}

static void append(struct mcp_call **at, struct mcp_call *c)
{
    while (*at)
        at = &(*at)->next;
    *at = c;
}

static void on_done(void *arg, struct mcp_call *c)
{
    struct mcp *m = arg;
    c->next = NULL;
    append(&m->ended, c);
}

static void give_back(struct mcp *m)
{
    if (!m->ended)
        return;
    pthread_mutex_lock(&m->lock);
    append(&m->done, m->ended);
    pthread_mutex_unlock(&m->lock);
    m->ended = NULL;
    os_wake(m->opt.done_fd);
}

void mcp_call_start(struct mcp *m, struct mcp_call *c)
{
    pthread_mutex_lock(&m->lock);
    c->next = NULL;
    *m->last = c;
    m->last = &c->next;
    pthread_mutex_unlock(&m->lock);
    os_wake(m->wake_fd);
}

void mcp_call_cancel(struct mcp *m, struct mcp_call *c)
{
    atomic_store(&c->cancelled, true);
    os_wake(m->wake_fd);
}

struct mcp_call *mcp_next_done(struct mcp *m)
{
    pthread_mutex_lock(&m->lock);
    struct mcp_call *c = m->done;
    if (c)
        m->done = c->next;
    pthread_mutex_unlock(&m->lock);
    return c;
}

static void take_calls(struct mcp *m)
{
    pthread_mutex_lock(&m->lock);
    struct mcp_call *c = m->asked;
    m->asked = NULL;
    m->last = &m->asked;
    pthread_mutex_unlock(&m->lock);
    for (struct mcp_call *next; c; c = next) {
        next = c->next;
        int i = 0;
        while (i < m->n && strcmp(m->opt.config->servers[i].name, c->server) != 0)
            i++;
        bool late = atomic_load(&m->stopping), unwanted = atomic_load(&c->cancelled);
        if (i < m->n && !late && !unwanted) {
            mcp_client_call(m->clients[i], c);
            continue;
        }
        buf_adds(&c->text, late ? "the server is shutting down" : "there is no such MCP server");
        c->failed = true;
        on_done(m, c);
    }
}

/* The thread */

enum { MAX_FDS = MCP_MAX_SERVERS * MCP_LINK_FDS + 1 };

static void wait_for_events(struct mcp *m, int ms)
{
    struct pollfd fds[MAX_FDS] = {{.fd = m->wake_fd, .events = POLLIN}};
    struct curl_waitfd same[MAX_FDS];
    int n = 1;
    for (int i = 0; i < m->n; i++)
        n += mcp_client_fds(m->clients[i], fds + n);
    if (!m->multi) {
        poll(fds, (nfds_t)n, ms);
    } else {
        for (int i = 0; i < n; i++)
            same[i] = (struct curl_waitfd){
                .fd = fds[i].fd,
                .events = (short)(fds[i].events & POLLIN ? CURL_WAIT_POLLIN : CURL_WAIT_POLLOUT)};
        curl.multi_poll(m->multi, same, (unsigned)n, ms, NULL);
    }
    os_woken(m->wake_fd);
}

static void run_transfers(struct mcp *m)
{
    int n_running, n_left;
    CURLMsg *msg;
    if (!m->multi)
        return;
    curl.multi_perform(m->multi, &n_running);
    while ((msg = curl.multi_info_read(m->multi, &n_left)))
        if (msg->msg == CURLMSG_DONE)
            mcp_http_done(msg->easy_handle, msg->data.result);
}

/* One turn; false: all servers have ended. */
static bool turn(struct mcp *m, bool ending, int *wait_ms)
{
    bool alive = !ending, changed = false;
    run_transfers(m);
    *wait_ms = 1000;
    for (int i = 0; i < m->n; i++) {
        int ms = 10;
        if (ending)
            alive |= !mcp_client_stopped(m->clients[i], clock_ns());
        else
            ms = mcp_client_turn(m->clients[i], clock_ns());
        *wait_ms = ms < *wait_ms ? ms : *wait_ms;
        changed |= mcp_client_changed(m->clients[i]);
    }
    if (changed)
        publish(m);
    give_back(m); /* after the list that says why a server and its calls failed */
    return alive;
}

static void *run(void *arg)
{
    struct mcp *m = arg;
    int ms = 0;
    bool ending = false;
    while (turn(m, ending, &ms)) {
        wait_for_events(m, ms);
        if (!ending && atomic_load(&m->stopping)) {
            ending = true;
            for (int i = 0; i < m->n; i++)
                mcp_client_stop(m->clients[i], clock_ns());
        }
        take_calls(m);
    }
    return NULL;
}

/* Life */

void mcp_free(struct mcp *m)
{
    if (!m)
        return;
    for (int i = 0; i < m->n; i++)
        mcp_client_free(m->clients[i]);
    if (m->multi)
        curl.multi_cleanup(m->multi);
    if (m->wake_fd >= 0)
        close(m->wake_fd);
    mcp_list_release(m->list);
    pthread_mutex_destroy(&m->lock);
    mem_free(m->clients);
    mem_free(m);
}

static bool has_url(const struct mcp_config *c)
{
    for (int i = 0; i < c->n; i++)
        if (c->servers[i].url)
            return true;
    return false;
}

static bool open_multi(struct mcp *m, struct error *err)
{
    if (!has_url(m->opt.config))
        return true;
    if (!curl_load("MCP servers with a url need", err))
        return false;
    m->multi = curl.multi_init();
    return m->multi || error_set(err, "libcurl cannot be initialised");
}

struct mcp *mcp_open(const struct mcp_options *opt, struct error *err)
{
    struct mcp *m = mem_zalloc(1, sizeof *m);
    m->opt = *opt;
    m->last = &m->asked;
    pthread_mutex_init(&m->lock, NULL);
    m->wake_fd = os_wake_fd();
    bool ok = m->wake_fd >= 0 || error_set(err, "no file descriptor is left");
    ok = ok && open_multi(m, err);
    m->clients = mem_zalloc((size_t)opt->config->n + 1, sizeof(struct mcp_client *));
    for (int i = 0; i < opt->config->n; i++)
        m->clients[m->n++] =
            mcp_client_new(&(struct mcp_client_options){.config = &opt->config->servers[i],
                                                        .multi = m->multi,
                                                        .call_s = opt->call_s,
                                                        .done = on_done,
                                                        .arg = m});
    publish(m);
    if (ok && !pthread_create(&m->thread, NULL, run, m))
        return m;
    if (ok)
        error_set(err, "cannot start a thread for MCP servers");
    mcp_free(m);
    return NULL;
}

void mcp_stop(struct mcp *m)
{
    if (!m)
        return;
    atomic_store(&m->stopping, true);
    os_wake(m->wake_fd);
}

void mcp_close(struct mcp *m)
{
    if (!m)
        return;
    mcp_stop(m);
    pthread_join(m->thread, NULL);
    take_calls(m);
    give_back(m);
}
