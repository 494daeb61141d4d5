/*
 * See highlight.h. A language is a row of the table: its comments, strings and keywords. Code is
 * read as words, marks and the rest. A word is held until it ends, since only a whole word is a
 * keyword. A mark is held while it may become the start of a comment or a longer quote.
 *
 * Invariants:
 * 1. n_held is less than HIGHLIGHT_HELD: a longer word is plain and streams.
 * 2. Held characters are all of a word, or all of a prefix of one of the language's marks.
 */
#include "cli/term/highlight.h"

#include <ctype.h>
#include <string.h>

enum { N_MARKS = 6 };

/* A pair of marks around a comment or a string. */
struct span {
    const char *open, *close; /* close "\n": the end of the line */
    enum highlight_kind kind;
    bool spans_lines;
    bool after_blank; /* opens only at the start of a line or after a blank */
};

struct highlight_language {
    const char *names;          /* separated by blanks */
    struct span marks[N_MARKS]; /* longer ones before their prefixes */
    const char *keywords;       /* separated and enclosed by blanks */
    bool any_case;              /* keywords in any case */
    bool tags;                  /* words after "<" and "</" are keywords */
};

#define LINE(open)                                                                                 \
    {                                                                                              \
        open, "\n", HIGHLIGHT_COMMENT, false, false                                                \
    }
#define BLANK_LINE(open)                                                                           \
    {                                                                                              \
        open, "\n", HIGHLIGHT_COMMENT, false, true                                                 \
    }
#define BLOCK(open, close)                                                                         \
    {                                                                                              \
        open, close, HIGHLIGHT_COMMENT, true, false                                                \
    }
#define QUOTE(q)                                                                                   \
    {                                                                                              \
        q, q, HIGHLIGHT_STRING, false, false                                                       \
    }
#define LONG_QUOTE(q)                                                                              \
    {                                                                                              \
        q, q, HIGHLIGHT_STRING, true, false                                                        \
    }
#define C_MARKS LINE("//"), BLOCK("/*", "*/"), QUOTE("\""), QUOTE("'")

static const struct highlight_language languages[] = {
    {"c h cpp c++ cc cxx hpp cuda cu objc",
     {C_MARKS},
     " alignas alignof auto bool break case catch char class concept const constexpr continue "
     "decltype default delete do double else enum explicit extern false final float for friend "
     "goto "
     "if inline int long mutable namespace new noexcept nullptr operator override private "
     "protected "
     "public register requires restrict return short signed sizeof static static_assert struct "
     "switch template this throw true try typedef typename union unsigned using virtual void "
     "volatile while NULL size_t ssize_t int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t "
     "uint64_t define elif endif ifdef ifndef include pragma undef ",
     false,
     false},
    {"java kotlin kt scala groovy dart",
     {LINE("//"), BLOCK("/*", "*/"), LONG_QUOTE("\"\"\""), QUOTE("\""), QUOTE("'")},
     " abstract as assert boolean break byte case catch char class companion const continue data "
     "def default do double else enum extends false final finally float for fun if implements "
     "import in instanceof int interface internal is lateinit long match native new null object "
     "open override package private protected public return sealed short static String super "
     "suspend switch synchronized this throw throws trait true try type val var void when while "
     "with yield ",
     false,
     false},
    {"js javascript jsx mjs ts typescript tsx",
     {LINE("//"), BLOCK("/*", "*/"), LONG_QUOTE("`"), QUOTE("\""), QUOTE("'")},
     " abstract any as async await boolean break case catch class const continue debugger declare "
     "default delete do else enum export extends false finally for from function get if implements "
     "import in instanceof interface keyof let namespace never new null number of private "
     "protected "
     "public readonly return set static string super switch this throw true try type typeof "
     "undefined unknown var void while with yield ",
     false,
     false},
    {"cs csharp c# fsharp",
     {C_MARKS},
     " abstract as async await base bool break byte case catch char class const continue decimal "
     "default delegate do double else enum event explicit extern false finally fixed float for "
     "foreach get goto if implicit in int interface internal is lock long namespace new null "
     "object "
     "operator out override params private protected public readonly record ref return sbyte "
     "sealed "
     "set short sizeof static string struct switch this throw true try typeof uint ulong using var "
     "virtual void volatile when where while yield ",
     false,
     false},
    {"go golang",
     {LINE("//"), BLOCK("/*", "*/"), LONG_QUOTE("`"), QUOTE("\""), QUOTE("'")},
     " any append bool break byte cap case chan const continue copy default defer delete else "
     "error "
     "fallthrough false float32 float64 for func go goto if import int int8 int16 int32 int64 "
     "interface iota len make map new nil package panic range return rune select string struct "
     "switch true type uint uint8 uint16 uint32 uint64 var ",
     false,
     false},
    {"rust rs",
     {LINE("//"), BLOCK("/*", "*/"), QUOTE("\"")},
     " as async await bool break char const continue crate dyn else enum extern f32 f64 false fn "
     "for i8 i16 i32 i64 i128 if impl in isize let loop match mod move mut pub ref return self "
     "Self "
     "static str String struct super trait true type u8 u16 u32 u64 u128 unsafe use usize Vec "
     "where "
     "while ",
     false,
     false},
    {"swift",
     {LINE("//"), BLOCK("/*", "*/"), LONG_QUOTE("\"\"\""), QUOTE("\"")},
     " actor as async await break case catch class continue default defer do else enum extension "
     "fallthrough false fileprivate for func guard if import in init inout internal is let nil "
     "open "
     "override private protocol public repeat return self Self static struct subscript super "
     "switch "
     "throw throws true try typealias var where while ",
     false,
     false},
    {"php",
     {LINE("//"), BLOCK("/*", "*/"), LINE("#"), LONG_QUOTE("\""), LONG_QUOTE("'")},
     " abstract and array as break callable case catch class clone const continue declare default "
     "do echo else elseif empty enum extends false final finally fn for foreach function global if "
     "implements include instanceof interface isset match namespace new null or print private "
     "protected public readonly require require_once return static switch throw trait true try "
     "unset use var while yield ",
     false,
     false},
    {"py python python3 ipython starlark",
     {LONG_QUOTE("\"\"\""), LONG_QUOTE("'''"), LINE("#"), QUOTE("\""), QUOTE("'")},
     " and as assert async await break case class continue def del elif else except False finally "
     "for from global if import in is lambda match None nonlocal not or pass raise return self "
     "True "
     "try while with yield ",
     false,
     false},
    {"rb ruby elixir ex crystal",
     {LINE("#"), QUOTE("\""), QUOTE("'")},
     " alias and begin break case class def defmodule defp do else elsif end ensure false fn for "
     "if "
     "in module next nil not or redo require rescue retry return self super then true undef unless "
     "until when while with yield ",
     false,
     false},
    {"sh bash zsh shell fish",
     {BLANK_LINE("#"), LONG_QUOTE("\""), LONG_QUOTE("'")},
     " alias case cd declare do done echo elif else esac eval exec exit export fi for function if "
     "in "
     "local printf read readonly return set shift source then trap unset until while ",
     false,
     false},
    {"ps1 powershell pwsh",
     {BLOCK("<#", "#>"), LINE("#"), QUOTE("\""), QUOTE("'")},
     " begin break catch continue do else elseif end exit finally for foreach function if in param "
     "process return switch throw try until while ",
     true,
     false},
    {"make makefile cmake dockerfile docker",
     {BLANK_LINE("#"), QUOTE("\"")},
     " add_executable add_library add cmd copy define else endef endif entrypoint env expose from "
     "function if ifdef ifeq ifndef ifneq include label project run set target_link_libraries user "
     "volume workdir ",
     true,
     false},
    {"json jsonc json5", {C_MARKS}, " true false null ", false, false},
    {"yaml yml toml ini conf properties",
     {BLANK_LINE("#"), QUOTE("\""), QUOTE("'")},
     " true false null yes no on off ",
     true,
     false},
    {"sql mysql postgresql sqlite plsql",
     {LINE("--"), BLOCK("/*", "*/"), QUOTE("\""), LONG_QUOTE("'")},
     " add all alter and as asc begin between by case cascade check column commit constraint count "
     "create cross database default delete desc distinct drop else end exists foreign from full "
     "function group having if in index inner insert int integer into is join key left like limit "
     "not null offset on or order outer primary references returning right rollback select set sum "
     "table text then transaction union unique update using values varchar view when where with ",
     true,
     false},
    {"lua",
     {BLOCK("--[[", "]]"), LINE("--"), QUOTE("\""), QUOTE("'")},
     " and break do else elseif end false for function goto if in local nil not or repeat return "
     "then true until while ",
     false,
     false},
    {"hs haskell elm",
     {BLOCK("{-", "-}"), LINE("--"), QUOTE("\"")},
     " case class data default deriving do else forall foreign if import in infix infixl infixr "
     "instance let module newtype of qualified then type where ",
     false,
     false},
    {"r julia jl perl pl",
     {BLANK_LINE("#"), QUOTE("\""), QUOTE("'")},
     " begin break const do else elseif elsif end false FALSE for foreach function global if "
     "import "
     "in last let library local macro module mutable my next NULL our package repeat return struct "
     "sub true TRUE try unless until use using while ",
     false,
     false},
    {"lisp scheme clojure clj elisp racket",
     {LINE(";"), LONG_QUOTE("\"")},
     " and begin car cdr cond cons def defmacro defn defun define do fn if lambda let loop nil not "
     "ns or quote recur set when ",
     false,
     false},
    {"zig",
     {LINE("//"), QUOTE("\""), QUOTE("'")},
     " and anyerror bool break catch comptime const continue defer else enum errdefer error export "
     "extern false fn for if inline null or orelse pub return struct switch test true try "
     "undefined union unreachable usize var void while ",
     false,
     false},
    {"html xml svg xhtml vue", {BLOCK("<!--", "-->"), QUOTE("\"")}, " ", false, true},
    {"css scss less",
     {BLOCK("/*", "*/"), QUOTE("\""), QUOTE("'")},
     " important media import keyframes root hover before after ",
     false,
     false},
};

/* Whether a list of words, separated by blanks, has this one. */
static bool has_word(const char *list, const char *word, size_t n)
{
    for (const char *p = list; (p = strstr(p, word)); p++)
        if ((p == list || p[-1] == ' ') && (p[n] == ' ' || !p[n]))
            return true;
    return false;
}

bool highlight_begin(struct highlight *h, const char *name, size_t n)
{
    char word[24];
    size_t len = 0;
    h->language = NULL;
    h->closer = NULL;
    h->n_held = 0;
    h->before = 0;
    if (n && *name == '{') { /* "{.python}" */
        name += n > 1 && name[1] == '.' ? 2 : 1;
        n -= n > 1 && name[-1] == '.' ? 2 : 1;
    }
    while (len < n && len + 1 < sizeof word &&
           (isalnum((unsigned char)name[len]) || name[len] == '+' || name[len] == '#')) {
        word[len] = (char)tolower((unsigned char)name[len]);
        len++;
    }
    word[len] = 0;
    for (size_t i = 0; len && i < sizeof languages / sizeof *languages; i++)
        if (has_word(languages[i].names, word, len))
            h->language = &languages[i];
    return h->language != NULL;
}

static void write_char(struct highlight *h, uint32_t c, enum highlight_kind kind)
{
    h->write(h->arg, c, kind);
    h->before = c;
}

static void release(struct highlight *h, enum highlight_kind kind)
{
    for (int i = 0; i < h->n_held; i++)
        write_char(h, h->held[i], kind);
    h->n_held = 0;
}

static bool is_word(uint32_t c)
{
    return c == '_' || c >= 128 || (c && isalnum((int)c));
}

static bool is_digit(uint32_t c)
{
    return c >= '0' && c <= '9';
}

/* The kind of the held word. */
static enum highlight_kind word_kind(const struct highlight *h)
{
    char word[HIGHLIGHT_HELD + 1];
    const struct highlight_language *l = h->language;
    if (is_digit(h->held[0]))
        return HIGHLIGHT_NUMBER;
    for (int i = 0; i < h->n_held; i++) {
        if (h->held[i] >= 128)
            return HIGHLIGHT_PLAIN;
        word[i] = (char)(l->any_case ? tolower((int)h->held[i]) : (int)h->held[i]);
    }
    word[h->n_held] = 0;
    if (l->tags)
        return h->before == '<' || h->before == '/' ? HIGHLIGHT_KEYWORD : HIGHLIGHT_PLAIN;
    /* `x.for` and `$if` name something else; after a word character it is the rest of a long word */
    bool name = h->before == '.' || h->before == '$' || is_word(h->before);
    return !name && has_word(l->keywords, word, (size_t)h->n_held) ? HIGHLIGHT_KEYWORD
                                                                   : HIGHLIGHT_PLAIN;
}

/* True if the first n of the held characters are the start of a mark, or with `whole` the mark. */
static bool starts(const struct highlight *h, const struct span *s, int n, bool whole)
{
    if (!s->open || (s->after_blank && h->before && h->before != ' ' && h->before != '\t'))
        return false;
    for (int i = 0; i < n; i++)
        if (!s->open[i] || h->held[i] != (uint32_t)(unsigned char)s->open[i])
            return false;
    return !whole || !s->open[n];
}

/* The held characters are no start of a mark any more, or `over`: the line ends. Takes the longest
 * mark they begin with, or one plain character, and reads the rest again. */
static void settle_mark(struct highlight *h)
{
    uint32_t rest[HIGHLIGHT_HELD];
    const struct span *found = NULL;
    int n = h->n_held, used = 1;
    for (int len = n; len > 0 && !found; len--)
        for (int i = 0; i < N_MARKS && !found; i++)
            if (starts(h, &h->language->marks[i], len, true)) {
                found = &h->language->marks[i];
                used = len;
            }
    memcpy(rest, h->held, sizeof rest);
    h->n_held = 0;
    for (int i = 0; i < used; i++)
        write_char(h, rest[i], found ? found->kind : HIGHLIGHT_PLAIN);
    if (found) {
        h->closer = found->close;
        h->inside = found->kind;
        h->spans_lines = found->spans_lines;
        h->escaped = false;
        h->matched = 0;
    }
    for (int i = used; i < n; i++)
        highlight_char(h, rest[i]);
}

static bool may_be_mark(const struct highlight *h)
{
    for (int i = 0; i < N_MARKS; i++)
        if (starts(h, &h->language->marks[i], h->n_held, false))
            return true;
    return false;
}

static void code_char(struct highlight *h, uint32_t c)
{
    bool in_word = h->n_held && is_word(h->held[0]);
    bool number = in_word && is_digit(h->held[0]);
    if (in_word && (is_word(c) || (number && c == '.' && h->held[h->n_held - 1] != '.'))) {
        if (h->n_held == HIGHLIGHT_HELD - 1)
            release(h, HIGHLIGHT_PLAIN);
        h->held[h->n_held++] = c;
        return;
    }
    if (in_word)
        release(h, word_kind(h));
    if (!h->n_held && is_word(c)) {
        h->held[h->n_held++] = c;
        return;
    }
    h->held[h->n_held++] = c;
    if (!may_be_mark(h))
        settle_mark(h);
}

/* A character of a comment or a string. */
static void inside_char(struct highlight *h, uint32_t c)
{
    const char *closer = h->closer;
    write_char(h, c, h->inside);
    if (h->escaped || (c == '\\' && h->inside == HIGHLIGHT_STRING)) {
        h->escaped = !h->escaped;
        h->matched = 0;
        return;
    }
    while (h->matched && c != (uint32_t)(unsigned char)closer[h->matched])
        h->matched = h->matched > 1 && closer[h->matched - 1] == closer[0] && closer[1] == closer[0]
                         ? h->matched - 1
                         : 0;
    h->matched += c == (uint32_t)(unsigned char)closer[h->matched];
    if (!closer[h->matched])
        h->closer = NULL;
}

void highlight_char(struct highlight *h, uint32_t c)
{
    if (h->closer)
        inside_char(h, c);
    else
        code_char(h, c);
}

void highlight_newline(struct highlight *h)
{
    while (h->n_held && !h->closer)
        if (is_word(h->held[0]))
            release(h, word_kind(h));
        else
            settle_mark(h);
    if (h->closer && !h->spans_lines)
        h->closer = NULL;
    h->escaped = false;
    h->matched = 0;
    h->before = 0;
}
