/* See flow.h. */
#include "cli/term/flow.h"

#include <string.h>
#include <utf8proc.h>

void flow_clear(struct flow *f)
{
    buf_clear(&f->prefix);
    buf_clear(&f->word);
    buf_clear(&f->link);
}

int flow_char_width(uint32_t c)
{
    int w = utf8proc_charwidth((utf8proc_int32_t)c);
    return w < 0 ? 0 : w;
}

size_t flow_decode(const char *p, size_t n, uint32_t *c)
{
    utf8proc_int32_t cp = -1;
    utf8proc_ssize_t used =
        utf8proc_iterate((const utf8proc_uint8_t *)p, (utf8proc_ssize_t)(n < 4 ? n : 4), &cp);
    if (used > 0) {
        *c = (uint32_t)cp;
        return (size_t)used;
    }
    unsigned char first = (unsigned char)*p;
    size_t need = first >= 0xf0 && first < 0xf5 ? 4 : first >= 0xe0 ? 3 : first >= 0xc2 ? 2 : 1;
    size_t have = 1;
    while (have < need && have < n && ((unsigned char)p[have] & 0xc0) == 0x80)
        have++;
    if (first < 0xf5 && have < need && have == n)
        return 0; /* incomplete */
    *c = 0xfffd;
    return 1;
}

void flow_encode(struct buf *out, uint32_t c)
{
    utf8proc_uint8_t bytes[4];
    buf_add(out, (char *)bytes, (size_t)utf8proc_encode_char((utf8proc_int32_t)c, bytes));
}

/* `was`: the style before. */
static void add_style(const struct flow *f, struct buf *out, unsigned was, unsigned style)
{
    static const struct {
        unsigned bit;
        const char *code;
    } codes[] = {{FLOW_BOLD, ";1"},     {FLOW_DIM, ";2"},     {FLOW_ITALIC, ";3"},
                 {FLOW_STRIKE, ";9"},   {FLOW_CODE, ";36"},   {FLOW_LINK, ";4"},
                 {FLOW_KEYWORD, ";35"}, {FLOW_STRING, ";32"}, {FLOW_NUMBER, ";33"}};
    if (!f->styles)
        return;
    if (f->links && f->link.len && ((was | style) & FLOW_LINK))
        buf_addf(out, "\033]8;;%s\033\\", style & FLOW_LINK ? f->link.p : "");
    buf_adds(out, "\033[0");
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        if (style & codes[i].bit)
            buf_adds(out, codes[i].code);
    buf_addc(out, 'm');
}

void flow_link(struct flow *f, const char *url)
{
    if ((f->word_style | f->shown) & FLOW_LINK) { /* the word before belongs to another link */
        flow_word(f);
        flow_style(f, f->word_style & ~(unsigned)FLOW_LINK);
    }
    buf_reset(&f->link);
    buf_adds(&f->link, url);
}

void flow_style(struct flow *f, unsigned style)
{
    if (f->shown != style)
        add_style(f, f->out, f->shown, style);
    f->shown = f->word_style = style;
}

/* Starts a continuation line in the same style. */
static void wrap_line(struct flow *f)
{
    unsigned style = f->shown;
    if (style)
        add_style(f, f->out, style, 0);
    buf_addc(f->out, '\n');
    buf_add(f->out, f->prefix.p ? f->prefix.p : "", f->prefix.len);
    f->column = f->prefix_width;
    if (style)
        add_style(f, f->out, 0, style);
}

void flow_word(struct flow *f)
{
    if (!f->word.len)
        return;
    if (f->word_width && f->column + f->spaces + f->word_width > f->width &&
        f->column > f->prefix_width)
        wrap_line(f);
    else
        for (int i = 0; i < f->spaces && f->column + f->word_width < f->width; i++, f->column++)
            buf_addc(f->out, ' ');
    buf_add(f->out, f->word.p, f->word.len);
    f->column += f->word_width;
    f->shown = f->word_style;
    f->spaces = 0;
    f->word_width = 0;
    f->word_ends = false;
    buf_reset(&f->word);
}

/* Closing punctuation (CJK): no line starts with it. */
static bool is_closing(uint32_t c)
{
    return (c >= 0x3001 && c <= 0x3002) || c == 0xff0c || c == 0xff0e || c == 0xff01 ||
           c == 0xff1f || c == 0xff1a || c == 0xff1b || c == 0xff09 || c == 0x300d || c == 0x300f ||
           c == 0x3011 || c == 0x300b || c == 0x3009;
}

static void add_one(struct flow *f, uint32_t c, int width, unsigned style)
{
    if (f->word_width + width > f->width - f->prefix_width) /* longer than a line: break it */
        flow_word(f);
    if (style != f->word_style) {
        add_style(f, &f->word, f->word_style, style);
        f->word_style = style;
    }
    flow_encode(&f->word, c);
    f->word_width += width;
}

void flow_char(struct flow *f, uint32_t c, unsigned style)
{
    if (c == ' ' || c == '\t') {
        flow_word(f);
        flow_style(f, style);
        f->spaces += c == ' ' ? 1 : 4;
        f->joined = false;
        return;
    }
    if (c < 32 || (c >= 127 && c < 160)) { /* shown as ^[ for an escape */
        add_one(f, '^', 1, style);
        add_one(f, c < 32 ? c + 64 : '?', 1, style);
        return;
    }
    int width = flow_char_width(c);
    bool wide = width > 1, belongs = !width || f->joined;
    f->joined = c == 0x200d; /* zero width joiner */
    if (!belongs && !is_closing(c) && f->word.len && (f->word_ends || wide))
        flow_word(f);
    add_one(f, c, width, style);
    if (!belongs)
        f->word_ends = wide;
}

void flow_text(struct flow *f, const char *text, unsigned style)
{
    for (size_t n = strlen(text), used; n; text += used, n -= used) {
        uint32_t c = 0xfffd;
        used = flow_decode(text, n, &c);
        used = used ? used : n;
        flow_char(f, c, style);
    }
}

void flow_newline(struct flow *f)
{
    flow_word(f);
    flow_style(f, 0);
    buf_addc(f->out, '\n');
    f->column = f->spaces = 0;
}
