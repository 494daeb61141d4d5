/* /model: switches to another model and continues the conversation with it. */
#include "cli/hub/hub.h"
#include "cli/term/terminal_int.h"
#include "base/mem.h"
#include "file/builtin.h"
#include "file/tensorfile.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void list_one(void *arg, const struct hub_found *f)
{
    if (f->whole)
        terminal_say(arg, "  %s%s%s", f->repo, f->quant[0] ? ":" : "", f->quant);
}

/* Opens a model and moves the conversation to it. template: NULL = the model's own. False: no model
 * is open. */
static bool take_over(struct terminal *t, const char *path, const char *template,
                      const char *messages, struct steel_error *err)
{
    t->engine = generate_open(path, &t->opt.engine, err);
    t->chat = t->engine ? steel_chat_new(t->engine, template, err) : NULL;
    if (t->chat && steel_chat_set_format(t->chat, t->opt.format, err) &&
        steel_chat_set_system(t->chat, t->system, err) &&
        steel_chat_add_json(t->chat, messages, err))
        return true;
    steel_chat_free(t->chat);
    t->chat = NULL;
    steel_engine_close(t->engine);
    t->engine = NULL;
    return false;
}

void terminal_model(struct terminal *t, const char *name)
{
    struct steel_info info;
    struct error e = {0};
    steel_engine_info(t->engine, &info);
    if (!*name) {
        terminal_say(t,
                     "the model is %s. /model NAME or /model FILE switches; available:", info.path);
        terminal_say(t, "  " BUILTIN_NAME);
        terminal_say(t, "  " BUILTIN_SEE);
        if (!hub_each(list_one, t, &e))
            terminal_say(t, "%s", e.msg);
        return;
    }
    struct buf path = {0};
    bool ok = hub_open(name, &path, &e);
    const char *file = path.len ? path.p : name;
    struct tensorfile *f = ok ? tensorfile_open(file, &e) : NULL;
    if (!f) {
        terminal_say(t, "%s", e.msg);
        buf_clear(&path);
        return;
    }
    tensorfile_close(f); /* invalid files are rejected before the current model is closed */
    struct steel_error err = {0};
    char *last = mem_strdup(info.path), *messages = terminal_messages(t, 0);
    steel_chat_free(t->chat);
    steel_engine_close(t->engine);
    t->last = (struct steel_event){0};
    if (take_over(t, file, NULL, messages, &err)) {
        t->opt.chat_template = NULL;
        steel_engine_info(t->engine, &info);
        terminal_say(t, "switched to %s", info.path);
    } else {
        terminal_say(t, "%s", err.message);
        if (!take_over(t, last, t->opt.chat_template, messages, &err)) {
            terminal_say(t, "steel: %s", err.message);
            t->quit = true;
        }
    }
    mem_free(last);
    mem_free(messages);
    buf_clear(&path);
}
