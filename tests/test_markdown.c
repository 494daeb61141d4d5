/* Markdown in a terminal: what each form becomes; that pieces do not matter, no line is wider than the
 * screen, and no control character of the text gets through, for random texts at every width. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "base/buf.h"
#include "base/mem.h"
#include "cli/term/flow.h"
#include "cli/term/markdown.h"

static void to_buf(void *arg, const char *p, size_t n)
{
    buf_add(arg, p, n);
}

static bool with_links;

static char *render(const char *text, int columns, bool styles, bool plain)
{
    struct buf out = {0};
    struct markdown_options opt = {.columns = columns,
                                   .styles = styles,
                                   .unicode = true,
                                   .plain = plain,
                                   .links = with_links,
                                   .write = to_buf,
                                   .arg = &out};
    struct markdown *m = markdown_new(&opt);
    markdown_feed(m, text, strlen(text));
    markdown_end(m);
    markdown_free(m);
    buf_addc(&out, 0);
    return buf_take(&out);
}

#define SHOWS(columns, text, want)                                                                 \
    do {                                                                                           \
        char *got_ = render(text, columns, true, false);                                           \
        assert_string_equal(got_, want);                                                           \
        mem_free(got_);                                                                            \
    } while (0)
#define B "\033[0;1m"
#define I "\033[0;3m"
#define C "\033[0;36m"
#define D "\033[0;2m"
#define O "\033[0m"

static void inline_forms(void **state)
{
    (void)state;
    SHOWS(80, "a **bold** word", "a " B "bold" O " word");
    SHOWS(80, "*it* and __both__ ***all***", I "it" O " and " B "both" O " \033[0;1;3mall" O);
    SHOWS(80, "~~gone~~", "\033[0;9mgone" O);
    SHOWS(80, "`x * y` ends", C "x * y" O " ends");
    SHOWS(80, "``a ` b``", C "a ` b" O);
    SHOWS(80, "2 * 3 * 4 = 24, 2*3*4, 2**3**4", "2 * 3 * 4 = 24, 2*3*4, 2**3**4");
    SHOWS(80, "snake_case_name and a_b_c", "snake_case_name and a_b_c");
    SHOWS(80, "a ` alone and ``quoted''", "a ` alone and ``quoted''");
    SHOWS(80, "\\*not\\* \\(x\\)", "*not* \\(x\\)");
    SHOWS(80, "**open\nplain", B "open" O "\nplain");
    SHOWS(80, "**粗体**和`码`", B "粗体" O "和" C "码" O);
}

static void block_forms(void **state)
{
    (void)state;
    SHOWS(80, "# Title\n\ntext", B "Title" O "\n\ntext");
    SHOWS(80, "#hashtag", "#hashtag");
    SHOWS(80, "- one\n  - two\n3. three", "• one\n  • two\n3. three");
    SHOWS(14, "- one two three", "• one two\n  three");
    SHOWS(14, "10. one two three", "10. one two\n    three");
    SHOWS(80, "> said", D "│ " O "said");
    SHOWS(15, "> said and done so", D "│ " O "said and\n" D "│ " O "done so");
    SHOWS(20, "---", D "───────────────────" O);
    SHOWS(20, "```w\nint x;\n\n  y\n```\nafter",
          D "╭─ w ──────────────" O "\n" C "int x;" O "\n" C O "\n" C "  y" O "\n" D
            "╰──────────────────" O "\nafter");
    SHOWS(20, "```\n``\n`````",
          D "╭──────────────────" O "\n" C "``" O "\n" D "╰──────────────────" O);
    SHOWS(20, "~~~\nnever closed",
          D "╭──────────────────" O "\n" C "never closed" O "\n" D "╰──────────────────" O);
    SHOWS(80, "```one line```", C "one line" O);
    SHOWS(80, "\n\nfirst\n\n\n", "first"); /* nothing before and behind */
    SHOWS(80, "-5 degrees\n2026 was", "-5 degrees\n2026 was");
}

static void tables(void **state)
{
    (void)state;
    SHOWS(80, "| a | bb |\n|---|---:|\n| **x** | 1 |\n| y \\| z | `a|b` |\n\nend",
          B "a" O "    " D " │ " O " " B "bb" O "\n" D "──────┼────" O "\n" B "x" O "    " D " │ " O
            "  1\ny | z" D " │ " O C "a|b" O "\n\nend");
    /* too narrow for whole cells: they wrap */
    SHOWS(20, "| k | value |\n|---|---|\n| a | one two three four |",
          B "k" O D " │ " O B "value" O "\n" D "──┼────────────────" O "\na" D " │ " O
            "one two three\n " D " │ " O "four");
    /* too narrow for columns: a line for each cell */
    SHOWS(13, "| first | second | third |\n|---|---|---|\n| a | b | c |\n| d | e | f |",
          B "first" O ": a\n" B "second" O ": b\n" B "third" O ": c\n\n" B "first" O ": d\n" B
            "second" O ": e\n" B "third" O ": f");
    SHOWS(80, "| no table |\ntext", "| no table |\ntext");
    SHOWS(80, "|", "|");
}

static void wrapping(void **state)
{
    (void)state;
    SHOWS(17, "the quick brown fox jumps", "the quick brown\nfox jumps");
    SHOWS(17, "abcdefghijklmnopqrstuvwxyz", "abcdefghijklmnop\nqrstuvwxyz");
    SHOWS(17, "一二三四五六七八九十。", "一二三四五六七八\n九十。");
    SHOWS(17, "一二三四五六七八。", "一二三四五六七\n八。"); /* no line begins with a stop */
    /* combining marks stay with their letters and take no room */
    SHOWS(17,
          "e\xcc\x81"
          "e\xcc\x81"
          "e\xcc\x81"
          "e\xcc\x81"
          "e\xcc\x81"
          "e\xcc\x81"
          "e\xcc\x81"
          "e\xcc\x81"
          " abcdefg x",
          "e\xcc\x81"
          "e\xcc\x81"
          "e\xcc\x81"
          "e\xcc\x81"
          "e\xcc\x81"
          "e\xcc\x81"
          "e\xcc\x81"
          "e\xcc\x81"
          " abcdefg\nx");
    SHOWS(17, "**bold words that wrap**", B "bold words that" O "\n" B "wrap" O);
    char *p = render("**raw** and\nlines that wrap here", 17, false, true);
    assert_string_equal(p, "**raw** and\nlines that wrap\nhere");
    mem_free(p);
    p = render("**no** styles\n- `x`", 40, false, false);
    assert_string_equal(p, "**no** styles\n- `x`");
    mem_free(p);
}

static void controls(void **state)
{
    (void)state;
    SHOWS(80,
          "a\033[2Jb\x07"
          "c\x7f",
          "a^[[2Jb^Gc^?");
    SHOWS(80,
          "\xc2\x9b"
          "2J",
          "^?2J");                                           /* a C1 control */
    SHOWS(80, "x\xff\xc3(y", "x\xef\xbf\xbd\xef\xbf\xbd(y"); /* not UTF-8 */
    SHOWS(20, "```\n\033]0;t\007\n```",
          D "╭──────────────────" O "\n" C "^[]0;t^G" O "\n" D "╰──────────────────" O);
}

#define U       "\033[0;4m"
#define TO(url) "\033]8;;" url "\033\\"
#define END     "\033]8;;\033\\"

static void links(void **state)
{
    (void)state;
    SHOWS(80, "a [b c](http://y/z) d", "a " U "b c" O " (http://y/z) d");
    SHOWS(80, "[http://y](http://y)", U "http://y" O);
    SHOWS(80, "[ ] [1] [a](b) x[i](j", "[ ] [1] " U "a" O " (b) x[i](j");
    SHOWS(80, "[a **b** `c`](u) **z**", U "a \033[0;1;4mb" U " \033[0;36;4mc" O " (u) " B "z" O);
    SHOWS(80, "[a *b](u) c", U "a \033[0;3;4mb" O " (u) c");
    with_links = true;
    SHOWS(80, "a [b c](http://y/z) d", "a " TO("http://y/z") U "b c" END O " d");
    SHOWS(80, "[a](https://u)[b](mailto:v)",
          TO("https://u") U "a" END O TO("mailto:v") U "b" END O);
    SHOWS(80, "[a](http://e/W_(x)_y \"title\")!", TO("http://e/W_(x)_y") U "a" END O "!");
    SHOWS(80, "[a](<http://e/b>)", TO("http://e/b") U "a" END O);
    /* a line that wraps ends and reopens the link */
    SHOWS(17, "the [quick brown fox](http://y) jumps",
          "the " TO("http://y") U "quick brown" END O "\n" TO("http://y") U "fox" END O " jumps");
    SHOWS(80, "| a |\n|---|\n| [x](http://y) |\n| long |",
          B "a" O "\n" D "────" O "\n" TO("http://y") U "x" END O "\nlong");
    /* what the terminal should not open, or what says another address, is told in full */
    SHOWS(80, "[a](file:///etc/passwd)", U "a" O " (file:///etc/passwd)");
    SHOWS(80, "[a](javascript:x)", U "a" O " (javascript:x)");
    SHOWS(80, "[http://good.org](http://bad.org)", U "http://good.org" O " (http://bad.org)");
    SHOWS(80, "[http://good.org/](http://good.org)", U "http://good.org/" O " (http://good.org)");
    SHOWS(80, "[http://good.org](http://good.org/)",
          TO("http://good.org/") U "http://good.org" END O);
    /* nothing of the text ends the sequence, or begins another */
    SHOWS(80, "[a](http://y\033\\z)", "[a](http://y^[\\z)");
    SHOWS(80, "[a](http://y\007z)", "[a](http://y^Gz)");
    SHOWS(80, "[a\033[8]b](http://y)", TO("http://y") U "a^[[8]b" END O);
    SHOWS(80, "[a\033]8;;b](http://y)", "[a^[]8;;b](http://y)");
    SHOWS(80, "[a](http://y\\z\xc2\x9c\xc3\xa9)", TO("http://y%5Cz%C2%9C%C3%A9") U "a" END O);
    with_links = false;
}

#define K "\033[0;35m"
#define S "\033[0;32m"
#define N "\033[0;33m"

/* The code of a fence, without its frame. */
static void check_code(const char *language, const char *code, const char *want)
{
    struct buf text = {0};
    buf_addf(&text, "```%s\n%s\n```", language, code);
    char *got = render(text.p, 20, true, false), *from = strchr(got, '\n') + 1;
    char *to = strstr(from, "\n\033[0;2m╰");
    assert_non_null(to);
    *to = 0;
    assert_string_equal(from, want);
    mem_free(got);
    buf_clear(&text);
}

static void colours(void **state)
{
    (void)state;
    check_code("c", "if (x1 == 0x1f) // no \"s\"",
               K "if" O " (x1 == " N "0x1f" O ") " D "// no \"s\"" O);
    check_code("cpp", "/* if\n 2 */ ifx x.if 1.5",
               D "/* if" O "\n" D " 2 */" O " ifx x.if " N "1.5" O);
    check_code("C", "char *s = \"a\\\"b\"; '\\''",
               K "char" O " *s = " S "\"a\\\"b\"" O "; " S "'\\''" O);
    check_code("c", "\"open\nint", S "\"open" O "\n" K "int" O);
    check_code("c", "a / b /", "a / b /");
    check_code("python", "def f(): # x\n  return '' + \"\"",
               K "def" O " f(): " D "# x" O "\n  " K "return" O " " S "''" O " + " S "\"\"" O);
    check_code("{.py}", "\"\"\"a\n\"b\"\n\"\"\" or",
               S "\"\"\"a" O "\n" S "\"b\"" O "\n" S "\"\"\"" O " " K "or" O);
    check_code("sh", "echo $# ${#x} # y", K "echo" O " $# ${#x} " D "# y" O);
    check_code("lua", "--[[ a\nb ]] end -- c",
               D "--[[ a" O "\n" D "b ]]" O " " K "end" O " " D "-- c" O);
    check_code("SQL", "SELECT 'it' -- x", K "SELECT" O " " S "'it'" O " " D "-- x" O);
    check_code("html", "<p>if</p><!-- a -->", "<" K "p" O ">if</" K "p" O ">" D "<!-- a -->" O);
    check_code("html", "<!-- --- -- --> <!x", D "<!-- --- -- -->" O " <!x");
    check_code("rust,ignore", "fn f<'a>(x: &'a str)", K "fn" O " f<'a>(x: &'a " K "str" O ")");
    check_code("none", "int", C "int" O);
    check_code("c", "\033]8;;x\007 \xc2\x9bm \"\033[2J\"",
               "^[]" N "8" O ";;x^G ^?m " S "\"^[[2J\"" O);
    check_code("c", "averylongwordthatislongerthanthebufferofheldcharactersif",
               "averylongwordthatislongerthanthebufferofheldcharactersif");
}

static uint32_t draw_state = 1;
static uint32_t draw(uint32_t n)
{
    draw_state = draw_state * 1664525u + 1013904223u;
    return (draw_state >> 8) % n;
}

/* No line of code is wrapped (terminals do it, and copy it whole), so these texts have none that is long. */
static void random_text(struct buf *b)
{
    static const char *const parts[] = {"**",
                                        "*",
                                        "_",
                                        "`",
                                        "``",
                                        "~~",
                                        "word ",
                                        "longerword ",
                                        "\n",
                                        "\n\n",
                                        "- ",
                                        "1. ",
                                        "> ",
                                        "# ",
                                        "| a | b |\n",
                                        "|---|---|\n",
                                        "| c | dd ee |\n",
                                        "```\n",
                                        "~~~\n",
                                        "  ",
                                        "一二三",
                                        "e\xcc\x81",
                                        "\xf0\x9f\x98\x80",
                                        "\xf0\x9f\x91\xa8\xe2\x80\x8d\xf0\x9f\x91\xa9",
                                        "\t",
                                        "\\",
                                        "---\n",
                                        "x",
                                        "\033[2J",
                                        "\033]8;;http://x\033\\",
                                        "\xff",
                                        "[",
                                        "](",
                                        "](http://x/\033y)",
                                        "[z](https://x/y)",
                                        ")",
                                        "```c\n",
                                        "```py\n",
                                        "if /* ",
                                        "*/",
                                        "\"\"\"",
                                        "\"",
                                        "# x",
                                        "abcdefghijklmnopqrstuvwxyzabcdefgh "};
    buf_reset(b);
    for (uint32_t i = 2 + draw(60); i; i--)
        buf_adds(b, parts[draw(sizeof parts / sizeof *parts)]);
}

/* Whether a sequence is a hyperlink to a web address, or the end of one. */
static bool is_link(const char *p, size_t n)
{
    for (size_t i = 5; i + 2 < n; i++)
        if (p[i] <= 32 || p[i] == '\\' || p[i] >= 127)
            return false;
    return n > 6 && !memcmp(p, "\033]8;;", 5) && !memcmp(p + n - 2, "\033\\", 2) &&
           (n == 7 || !strncmp(p + 5, "http", 4));
}

/* Escape sequences that are ours end in m, or are links, and take no columns. */
static int widest(const char *p, size_t n, bool *clean)
{
    int most = 0, at = 0;
    for (size_t used; n; p += used, n -= used) {
        uint32_t c = 0;
        used = flow_decode(p, n, &c);
        assert_true(used > 0);
        if (c == 27 && n > 1 && p[1] == ']') {
            while (used < n && p[used - 1] != '\\')
                used++;
            *clean = *clean && is_link(p, used);
        } else if (c == 27) {
            while (used < n && p[used - 1] != 'm')
                used++;
            *clean = *clean && p[1] == '[' && strspn(p + 2, "0123456789;") == used - 3;
        } else if (c == '\n') {
            at = 0;
        } else {
            *clean = *clean && c >= 32 && !(c >= 127 && c < 160);
            at += flow_char_width(c);
        }
        most = at > most ? at : most;
    }
    return most;
}

static void any_text(void **state)
{
    (void)state;
    struct buf text = {0};
    for (int round = 0; round < 4000; round++) {
        random_text(&text);
        bool fenced = strstr(text.p, "```") || strstr(text.p, "~~~");
        int columns = 13 + (int)draw(60);
        bool styles = draw(2), plain = draw(8) == 0, clean = true;
        with_links = draw(2);
        char *whole = render(text.p, columns, styles, plain);
        int w = widest(whole, strlen(whole), &clean);
        assert_true(clean);
        if (!fenced)
            assert_in_range(w, 0, columns - 1);
        struct buf out = {0};
        struct markdown_options opt = {.columns = columns,
                                       .styles = styles,
                                       .unicode = true,
                                       .plain = plain,
                                       .links = with_links,
                                       .write = to_buf,
                                       .arg = &out};
        struct markdown *m = markdown_new(&opt);
        for (size_t at = 0, n; at < text.len; at += n) {
            n = 1 + draw(7);
            n = n < text.len - at ? n : text.len - at;
            markdown_feed(m, text.p + at, n);
        }
        markdown_end(m);
        markdown_free(m);
        buf_addc(&out, 0);
        assert_string_equal(out.p, whole);
        buf_clear(&out);
        mem_free(whole);
    }
    with_links = false;
    buf_clear(&text);
}

/* What a hostile text costs is bounded: bytes out for bytes in. */
static void long_texts(void **state)
{
    (void)state;
    static const char *const parts[] = {
        "`",    "` `` ",         "*",  "|",  "| a |\n|---|\n", "> ", "#", "    ", "~", "1", "[",
        "[x](", "[x](http://y)", "[]", "](", "```c\n",         "\"", "/", "if "};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        struct buf text = {0};
        while (text.len < 200000)
            buf_adds(&text, parts[i]);
        char *got = render(text.p, 40, true, false);
        assert_in_range(strlen(got), 0, 20 * text.len);
        mem_free(got);
        buf_clear(&text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(links),       cmocka_unit_test(colours),  cmocka_unit_test(inline_forms),
        cmocka_unit_test(block_forms), cmocka_unit_test(tables),   cmocka_unit_test(wrapping),
        cmocka_unit_test(controls),    cmocka_unit_test(any_text), cmocka_unit_test(long_texts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
