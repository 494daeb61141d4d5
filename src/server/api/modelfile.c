/* See modelfile.h. */
#include "server/api/modelfile.h"
#include "base/mem.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static const char QUOTES[] = "\"\"\"";

struct modelfile_cursor {
    const char *at, *end;
    int line;
};

void modelfile_clear(struct modelfile *m)
{
    mem_free(m->from);
    mem_free(m->system);
    mem_free(m->template);
    mem_free(m->adapter);
    json_decref(m->options);
    *m = (struct modelfile){0};
}

static bool is_blank(char c)
{
    return c == ' ' || c == '\t' || c == '\r';
}

/* Whether it can be the rest of a line. */
static bool is_line(const char *text, size_t n)
{
    return n && !memchr(text, '\n', n) && *text != '"' && !is_blank(*text) &&
           !is_blank(text[n - 1]);
}

bool modelfile_holds(const char *text, size_t n)
{
    bool quotes = memmem(text, n, QUOTES, 3) || (n && text[n - 1] == '"');
    return !memchr(text, 0, n) && (is_line(text, n) || !quotes);
}

static void skip_blanks(struct modelfile_cursor *c)
{
    while (c->at < c->end && is_blank(*c->at))
        c->at++;
}

/* To the first character of an instruction; false at the end. */
static bool next_instruction(struct modelfile_cursor *c)
{
    for (;;) {
        skip_blanks(c);
        if (c->at < c->end && *c->at == '#')
            while (c->at < c->end && *c->at != '\n')
                c->at++;
        if (c->at == c->end)
            return false;
        if (*c->at != '\n')
            return true;
        c->at++;
        c->line++;
    }
}

static void take_word(struct modelfile_cursor *c, char *word, size_t size)
{
    size_t n = 0;
    while (c->at < c->end && !isspace((unsigned char)*c->at)) {
        if (n + 1 < size)
            word[n++] = *c->at;
        c->at++;
    }
    word[n] = 0;
    skip_blanks(c);
}

/* A text in quotes or three quotes, or the rest of the line. After it comes the end of the line. */
static bool take_value(struct modelfile_cursor *c, struct buf *out, struct error *err)
{
    size_t left = (size_t)(c->end - c->at);
    size_t n_quotes = left >= 3 && !memcmp(c->at, QUOTES, 3) ? 3 : left && *c->at == '"' ? 1 : 0;
    const char *begin = c->at + n_quotes, *end;
    int line = c->line;
    if (!n_quotes) {
        end = memchr(begin, '\n', left);
        end = c->at = end ? end : c->end;
        while (end > begin && is_blank(end[-1]))
            end--;
    } else {
        end = memmem(begin, (size_t)(c->end - begin), QUOTES, n_quotes);
        if (!end)
            return error_set(err, "line %d: the text has no closing quotes", line);
        for (const char *p = begin; p < end; p++)
            c->line += *p == '\n';
        c->at = end + n_quotes;
        skip_blanks(c);
        if (c->at < c->end && *c->at != '\n')
            return error_set(err, "line %d: text after the closing quotes", c->line);
    }
    buf_add(out, begin, (size_t)(end - begin));
    return true;
}

/* The JSON value of a PARAMETER. */
static json_t *parameter_value(const char *text)
{
    char *end;
    double number = strtod(text, &end);
    if (!strcasecmp(text, "true") || !strcasecmp(text, "false"))
        return json_boolean(tolower((unsigned char)*text) == 't');
    if (end == text || *end || !isfinite(number) || strpbrk(text, "xXpP"))
        return json_string(text);
    bool whole = number == floor(number) && fabs(number) < 9e15 && !strpbrk(text, ".eE");
    return whole ? json_integer((json_int_t)number) : json_real(number);
}

static bool add_parameter(struct modelfile *m, const char *name, const struct buf *text, int line,
                          struct error *err)
{
    bool stop = !strcmp(name, "stop");
    json_t *v = stop ? json_string(text->p) : parameter_value(text->p);
    if (!v) /* not UTF-8 */
        return error_set(err, "line %d: PARAMETER %.40s: not UTF-8", line, name);
    m->options = m->options ? m->options : json_object();
    json_t *list = json_object_get(m->options, name);
    if (stop && list)
        json_array_append_new(list, v);
    else if (json_object_set_new(m->options, name, stop ? json_pack("[o]", v) : v))
        return error_set(err, "line %d: PARAMETER: the name is not UTF-8", line);
    return true;
}

static bool take_instruction(struct modelfile_cursor *c, struct modelfile *m, struct error *err)
{
    char word[32], name[64] = "";
    int line = c->line;
    struct buf text = {0};
    take_word(c, word, sizeof word);
    bool parameter = !strcasecmp(word, "PARAMETER");
    const struct {
        const char *word;
        char **to;
    } texts[] = {{"FROM", &m->from},
                 {"SYSTEM", &m->system},
                 {"TEMPLATE", &m->template},
                 {"ADAPTER", &m->adapter}};
    char **to = NULL;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        to = !strcasecmp(word, texts[i].word) ? texts[i].to : to;
    if (!strcasecmp(word, "MESSAGE"))
        return error_set(err, "line %d: MESSAGE is not supported: send the messages", line);
    if (!to && !parameter && strcasecmp(word, "LICENSE") != 0)
        return error_set(err, "line %d: '%.31s' is not an instruction of a Modelfile", line, word);
    if (parameter)
        take_word(c, name, sizeof name);
    buf_adds(&text, "");
    bool ok = take_value(c, &text, err);
    if (ok && !text.len && (parameter || to == &m->from || to == &m->adapter))
        ok = error_set(err, "line %d: %s has no value", line, word);
    if (ok && to == &m->adapter && *to)
        ok = error_set(err, "line %d: more than one ADAPTER", line);
    if (ok && parameter)
        ok = add_parameter(m, name, &text, line, err);
    if (ok && to) {
        mem_free(*to);
        *to = buf_take(&text);
    }
    buf_clear(&text);
    return ok;
}

bool modelfile_parse(const char *text, size_t n, struct modelfile *m, struct error *err)
{
    struct modelfile_cursor c = {.at = text, .end = text + n, .line = 1};
    *m = (struct modelfile){0};
    bool ok = n <= MODELFILE_MOST || error_set(err, "a Modelfile has at most 1 MB");
    if (ok && memchr(text, 0, n))
        ok = error_set(err, "the character NUL");
    while (ok && next_instruction(&c))
        ok = take_instruction(&c, m, err);
    if (ok && !m->from)
        ok = error_set(err, "FROM is missing");
    if (!ok)
        modelfile_clear(m);
    return ok;
}

bool modelfile_read(const char *path, struct modelfile *m, struct error *err)
{
    struct buf b = {0};
    char chunk[4096];
    size_t n;
    *m = (struct modelfile){0};
    FILE *f = fopen(path, "re");
    if (!f)
        return error_set(err, "%s: %s", path, strerror(errno));
    while (b.len <= MODELFILE_MOST && (n = fread(chunk, 1, sizeof chunk, f)) > 0)
        buf_add(&b, chunk, n);
    bool ok = !ferror(f) || error_set(err, "%s: cannot be read", path);
    fclose(f);
    ok = ok && (modelfile_parse(b.p ? b.p : "", b.len, m, err) || error_prefix(err, "%s", path));
    buf_clear(&b);
    return ok;
}

static void print_value(const char *text, struct buf *out)
{
    const char *quotes = is_line(text, strlen(text)) ? "" : QUOTES;
    buf_adds(out, quotes);
    buf_adds(out, text);
    buf_adds(out, quotes);
    buf_addc(out, '\n');
}

static void print_text(const char *word, const char *text, struct buf *out)
{
    if (!text)
        return;
    buf_addf(out, "%s ", word);
    print_value(text, out);
}

/* The shortest digits that are the same number. */
static void print_real(double v, struct buf *out)
{
    char text[40];
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, v);
        if (strtod(text, NULL) == v)
            break;
    }
    buf_addf(out, "%s\n", text);
}

static void print_parameter(const char *name, const json_t *v, struct buf *out)
{
    size_t i;
    json_t *item;
    if (json_is_array(v)) {
        json_array_foreach((json_t *)v, i, item) print_parameter(name, item, out);
        return;
    }
    buf_addf(out, "PARAMETER %s ", name);
    if (json_is_string(v))
        print_value(json_string_value(v), out);
    else if (json_is_integer(v))
        buf_addf(out, "%lld\n", (long long)json_integer_value(v));
    else if (json_is_real(v))
        print_real(json_real_value(v), out);
    else
        buf_adds(out, json_is_true(v) ? "true\n" : "false\n");
}

void modelfile_print(const struct modelfile *m, struct buf *out)
{
    const char *name;
    json_t *v;
    print_text("FROM", m->from, out);
    print_text("ADAPTER", m->adapter, out);
    print_text("TEMPLATE", m->template, out);
    print_text("SYSTEM", m->system, out);
    json_object_foreach(m->options, name, v) print_parameter(name, v, out);
}

static void inherit_text(char **to, const char *from)
{
    if (!*to && from)
        *to = mem_strdup(from);
}

void modelfile_inherit(struct modelfile *m, const struct modelfile *base)
{
    inherit_text(&m->system, base->system);
    inherit_text(&m->template, base->template);
    inherit_text(&m->adapter, base->adapter);
    if (!base->options)
        return;
    m->options = m->options ? m->options : json_object();
    json_object_update_missing(m->options, base->options);
}
