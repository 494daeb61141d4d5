/*
 * Inside the Jinja engine: values, the syntax tree, and the state of one compile or render.
 * Included only by jinja_*.c.
 *
 * Errors leave through jinja_fail, a longjmp to the entry point. This is safe because a compile or
 * render allocates only in its arenas and the caller's buf, and holds no other resource. Lists,
 * dicts and strings never change once built (the sandbox forbids it), so values share their parts
 * freely; a substring is a view. Only namespaces, iterators, loops, cyclers and joiners have
 * mutable state.
 */
#ifndef STEEL_TEXT_JINJA_INT_H
#define STEEL_TEXT_JINJA_INT_H

#include "text/jinja/jinja.h"
#include "text/literal.h"

#include <setjmp.h>

/* ------------------------------------------------------------------ arenas */

struct jchunk {
    struct jchunk *next;
    size_t size; /* bytes after this header */
};

struct jarena {
    struct jchunk *chunks; /* newest first */
    char *p, *end;         /* free part of the newest chunk */
    size_t total, limit;   /* bytes allocated, and their limit */
};

/* ------------------------------------------------------------------ values */

enum jtype {
    JT_MISSING, /* internal: no value; never visible to a template */
    JT_UNDEF,
    JT_NONE,
    JT_BOOL,
    JT_INT,
    JT_FLOAT,
    JT_STR,
    JT_LIST,
    JT_TUPLE,
    JT_DICT,
    JT_VIEW, /* dict.keys(), .values(), .items() */
    JT_ITER, /* a generator, as returned by map, select, reverse...; consumed by iterating */
    JT_RANGE,
    JT_NS, /* namespace() */
    JT_MACRO,
    JT_FUNC,   /* a built-in global */
    JT_METHOD, /* a method bound to its object */
    JT_LOOP,
    JT_CYCLER,
    JT_JOINER,
};

enum { STR_MARKUP = 1, STR_ASCII = 2, STR_WIDE = 4 }; /* ASCII/WIDE: known to be (not) all ASCII */

struct jval {
    uint8_t type;  /* enum jtype */
    uint8_t flags; /* STR_* */
    uint32_t len;  /* JT_STR: bytes */
    union {
        bool b;
        int64_t i;
        double f;
        const char *s; /* (len) UTF-8, not terminated */
        struct jlist *list;
        struct jdict *dict;
        struct jview *view;
        struct jiter *iter;
        struct jrange *range;
        struct jmacro *macro;
        struct jmethod *method;
        struct jloop *loop;
        struct jcycler *cycler;
        struct jundef *undef;
        int func; /* enum jfunc */
    } u;
};

struct jlist {
    struct jval *v; /* (n) */
    uint32_t n;
    bool group; /* a groupby pair with attributes .grouper and .list */
};

struct jpair {
    struct jval k, v;
};

struct jdict {
    struct jpair *e; /* (cap), n used, in insertion order */
    uint32_t n, cap;
    uint32_t *index; /* (n_index) entry + 1 by hash, 0 = empty; NULL while the dict is small */
    uint32_t n_index;
};

enum jview_kind { VIEW_KEYS, VIEW_VALUES, VIEW_ITEMS };
struct jview {
    struct jdict *dict;
    enum jview_kind kind;
};

struct jiter {
    struct jlist *list;
    uint32_t pos;
    const char *name; /* Python's type name */
};

struct jrange {
    int64_t start, stop, step, n;
};

struct jmacro {
    const struct jnode *node; /* N_MACRO, N_CALLBLOCK */
    struct jscope *scope;     /* scope of its definition */
};

struct jmethod {
    struct jval self;
    int id; /* enum jmethod_id */
};

struct jcycler { /* JT_CYCLER. JT_JOINER uses items[0] and pos (0 = not used yet) */
    struct jlist *items;
    uint32_t pos;
};

enum jundef_kind { UNDEF_NAME, UNDEF_ATTR, UNDEF_UNSAFE, UNDEF_HINT };
struct jundef {
    enum jundef_kind kind;
    struct jval name, obj;
    const char *hint;
};

struct jloop {
    struct jlist *src;        /* the items */
    uint32_t pos;             /* index of the next item in src */
    const struct jnode *node; /* N_FOR */
    struct jscope *outer;     /* scope that contains the loop */
    int64_t index0, length;   /* length: -1 until known */
    int depth0;
    struct jval after, current, before; /* neighbouring items; MISSING if none */
    struct jlist *changed;              /* last arguments of loop.changed; initially NULL */
};

/* ------------------------------------------------------------------ syntax tree */

enum jkind {
    /* expressions */
    N_CONST,  /* val */
    N_NAME,   /* sym */
    N_TUPLE,  /* list */
    N_LIST,   /* list */
    N_DICT,   /* list: key, value, key, value... */
    N_ATTR,   /* a . val; mid */
    N_ITEM,   /* a [ b ] */
    N_SLICE,  /* a:b:c, each may be NULL; only as b of N_ITEM */
    N_CALL,   /* a ( args ) */
    N_FILTER, /* a | val ( args ); a NULL = captured text; mid = filter number */
    N_TEST,   /* a is val ( args ); mid = test number */
    N_NEG,
    N_POS,
    N_NOT,
    N_AND,
    N_OR,
    N_BIN,     /* a op b */
    N_CONCAT,  /* list */
    N_COMPARE, /* a, then list of N_OPERAND */
    N_OPERAND, /* op a */
    N_COND,    /* b if a else c (c may be NULL) */
    N_NSREF,   /* sym . val; only as a target */
    /* statements */
    N_DATA,        /* val */
    N_PRINT,       /* a */
    N_BLOCK,       /* list: a sequence of statements */
    N_IF,          /* a: test, b: body, c: else body, an N_IF for elif, or NULL */
    N_FOR,         /* a: target, b: iterable, c: filter or NULL, body, orelse, flag: recursive */
    N_SET,         /* a = b */
    N_SETBLOCK,    /* a = body, through the filter chain b or NULL */
    N_MACRO,       /* val: name, sym, params, body */
    N_CALLBLOCK,   /* a: the call, params, body */
    N_FILTERBLOCK, /* b: filter chain, body */
    N_WITH,        /* list: target, value, target, value..., body */
    N_SCOPE,       /* body in its own scope (generation, block) */
    N_DO,          /* a */
    N_BREAK,
    N_CONTINUE,
};

enum jop {
    OP_ADD,
    OP_SUB,
    OP_MUL,
    OP_DIV,
    OP_FLOORDIV,
    OP_MOD,
    OP_POW,
    OP_EQ,
    OP_NE,
    OP_LT,
    OP_LE,
    OP_GT,
    OP_GE,
    OP_IN,
    OP_NOTIN
};

struct jkwarg_node {
    struct jval name; /* string */
    struct jnode *value;
};

struct jcall_node {             /* arguments of a call, filter or test */
    struct jnode **pos;         /* (n_pos) */
    struct jkwarg_node *kw;     /* (n_kw) */
    struct jnode *dyn, *dyn_kw; /* *args and **kwargs, or NULL */
    int n_pos, n_kw;
};

struct jparam {
    struct jval name; /* string */
    int sym;
    struct jnode *def; /* default, or NULL */
};

struct jparams {      /* of a macro or call block */
    struct jparam *p; /* (n) */
    int n;
    bool uses_caller, uses_varargs, uses_kwargs, explicit_caller;
};

struct jnode {
    uint8_t kind; /* enum jkind */
    uint8_t op;   /* enum jop */
    bool flag;
    uint16_t height; /* levels of expressions below, limited by the parser */
    int line, sym, mid, n;
    struct jnode *a, *b, *c;
    struct jnode **list; /* (n) */
    struct jnode *body, *orelse;
    struct jcall_node *args;
    struct jparams *params;
    struct jval val;
};

struct jinja {
    struct jarena arena, text; /* nodes; literals and the source */
    struct jnode *root;
    struct jval *names; /* (n_names) symbol -> name */
    int n_names, cap_names;
    int *name_index; /* (n_name_index) hash -> symbol + 1, 0 = empty */
    int n_name_index;
    int sym_loop, sym_caller, sym_varargs, sym_kwargs;
};

/* ------------------------------------------------------------------ lexer */

enum jtok {
    T_EOF,
    T_DATA,
    T_VAR_BEGIN,
    T_VAR_END,
    T_BLOCK_BEGIN,
    T_BLOCK_END,
    T_NAME,
    T_STRING,
    T_INT,
    T_FLOAT,
    T_ADD,
    T_SUB,
    T_DIV,
    T_FLOORDIV,
    T_MUL,
    T_MOD,
    T_POW,
    T_TILDE,
    T_LBRACKET,
    T_RBRACKET,
    T_LPAREN,
    T_RPAREN,
    T_LBRACE,
    T_RBRACE,
    T_EQ,
    T_NE,
    T_GT,
    T_GE,
    T_LT,
    T_LE,
    T_ASSIGN,
    T_DOT,
    T_COLON,
    T_PIPE,
    T_COMMA,
    T_SEMICOLON,
};

struct jtoken {
    uint8_t type; /* enum jtok */
    int line;
    struct jval val; /* DATA, NAME, STRING: string; INT, FLOAT */
};

/* ------------------------------------------------------------------ scopes and state */

struct jbind {
    int sym;
    struct jval val;
};

struct jscope {
    struct jscope *parent; /* NULL: directly inside the template's top level */
    struct jbind *b;       /* (cap), n used */
    int n, cap;
};

struct jstate { /* of one compile or one render */
    jmp_buf jmp;
    struct error *err;
    int line;                    /* line of the current node, for messages */
    struct jarena obj, str, tmp; /* objects; string bytes; the compiler's tokens */
    struct jinja *building;      /* compile: the template; NULL in a render */
    const struct jinja *t;       /* render: the template */
    const json_t *context;       /* render: object or NULL */
    const json_t *own;           /* render: object or NULL */
    bool literal;                /* strings of the context get literal bytes */
    const struct tm *now;        /* or NULL */
    struct jval *globals;        /* (n_names) context and built-ins, MISSING until first read */
    struct jval *top;            /* (n_names) assigned at the top level, MISSING = not */
    struct jscope *scope;        /* innermost; NULL = top level */
    struct buf *out;
    size_t out_limit;
    int64_t steps;         /* steps left until the next budget check */
    int64_t steps_bank;    /* steps left in addition */
    struct budget *budget; /* or NULL */
    int depth;
    char *stack_base; /* stack address at the entry point */
    uint64_t seed;    /* for the random filter */
};

struct jkwarg {
    struct jval name, val;
};
struct jargs {         /* evaluated arguments */
    struct jval *pos;  /* (n) */
    struct jkwarg *kw; /* (n_kw) */
    int n, n_kw;
};

#define JINJA_MAX_SOURCE (512 * 1024)
#define JINJA_MAX_HEIGHT 220  /* nesting of expressions and of statements in the source */
#define JINJA_MAX_DEPTH  2400 /* nested evaluations in a render */
#define JINJA_MAX_STACK  (768 * 1024)
#define JINJA_MAX_DATA   500    /* nesting of lists and dicts */
#define JINJA_MAX_RANGE  100000 /* as in jinja2's sandbox */
/* Maxima for any context: steps, bytes of objects and of strings (each), bytes of output. */
#define JINJA_MAX_STEPS       INT64_C(2000000000)
#define JINJA_MAX_MEMORY      ((size_t)1 << 30)
#define JINJA_MAX_OUTPUT      ((size_t)256 << 20)
#define JINJA_STEPS_PER_CHECK 4096 /* steps between two budget checks */

/* jinja_value.c */
_Noreturn void jinja_fail(struct jstate *st, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
void *jarena_alloc(struct jstate *st, struct jarena *a, size_t bytes); /* 16-aligned, zeroed */
void jarena_clear(struct jarena *a);
void *jalloc(struct jstate *st, size_t count, size_t size); /* from st->obj, zeroed */
char *jstr_alloc(struct jstate *st, size_t bytes);          /* from st->str, not zeroed */
void jrefill(struct jstate *st, uint64_t steps);            /* at least this many, or fails */
static inline void jcharge(struct jstate *st, uint64_t steps)
{
    if ((uint64_t)st->steps < steps)
        jrefill(st, steps);
    st->steps -= (int64_t)steps;
}
static inline void jcharge_bytes(struct jstate *st, uint64_t bytes)
{
    jcharge(st, bytes / 32);
}

struct jval jval_str(const char *s, size_t len); /* a view of s */
struct jval jval_cstr(const char *s);
struct jval jval_copy(struct jstate *st, const char *s, size_t len);
struct jval jval_take(struct jstate *st, struct buf *b, size_t mark); /* moves b[mark..] out of b */
struct jval jval_int(int64_t i);
struct jval jval_bool(bool b);
struct jval jval_float(double f);
struct jval jval_list(struct jstate *st, enum jtype type, size_t n); /* n MISSING elements */
struct jval jval_iter(struct jstate *st, struct jlist *list, const char *name);
struct jval jval_undef(struct jstate *st, enum jundef_kind kind, struct jval name, struct jval obj,
                       const char *hint);
#define JV_NONE    ((struct jval){.type = JT_NONE})
#define JV_MISSING ((struct jval){.type = JT_MISSING})

bool jval_is(struct jval v, const char *s); /* a string equal to s */
bool jval_isnum(struct jval v);             /* bool, int, float */
double jval_todouble(struct jval v);
bool jval_true(struct jval v);
const char *jval_typename(struct jval v);
_Noreturn void jundef_fail(struct jstate *st, struct jval v);
bool jval_eq(struct jstate *st, struct jval a, struct jval b);
bool jval_same(struct jval a, struct jval b);                                  /* Python's `is` */
int jval_cmp(struct jstate *st, struct jval a, struct jval b, const char *op); /* -1 0 1; 2 = NaN */
bool jval_contains(struct jstate *st, struct jval item, struct jval in);
int64_t jval_len(struct jstate *st, struct jval v); /* fails where Python's len() fails */
bool jval_iterable(struct jval v);
struct jlist *jval_tolist(struct jstate *st, struct jval v); /* fails if not iterable */
struct jval jval_fromjson(struct jstate *st, const json_t *j, int depth);

struct jdict *jdict_new(struct jstate *st, uint32_t cap);
bool jdict_get(struct jstate *st, struct jdict *d, struct jval key, struct jval *out);
void jdict_put(struct jstate *st, struct jdict *d, struct jval key, struct jval val);
struct jval jval_dict(struct jdict *d);
struct jpair *jdict_sorted(struct jstate *st, struct jdict *d); /* (n) copy sorted by key */
/* Stable. order[i] = index of the i-th smallest of keys[0..n). */
uint32_t *jval_sort(struct jstate *st, const struct jval *keys, uint32_t n, bool reverse);

/* jinja_print.c: values as text. Appends to st->out; the caller takes the text with jval_take. */
void jprint_raw(struct jstate *st, const char *s, size_t n); /* all output passes through here */
void jprint_str(struct jstate *st, struct jval v);           /* str(v) */
void jprint_float(struct jstate *st, double f);              /* repr of a float */
void jprint_pretty(struct jstate *st, struct jval v);        /* pprint.pformat */
void jprint_json(struct jstate *st, struct jval v, const struct jargs *a);
struct jval jval_tostr(struct jstate *st, struct jval v); /* str(v) as a value; strings unchanged */
struct jval jval_repr(struct jstate *st, struct jval v);
struct jval jval_escape(struct jstate *st, struct jval v); /* markupsafe.escape */

/* jinja_format.c */
struct jval jformat_percent(struct jstate *st, struct jval fmt, struct jval arg);
struct jval jformat_braces(struct jstate *st, struct jval fmt, const struct jargs *a,
                           struct jdict *map);
bool jparse_int(struct jval s, int base, int64_t *out); /* Python's int(str, base) */
bool jparse_float(struct jval s, double *out);

/* jinja_str.c */
/* Code point at *i, which is advanced; -1 for an invalid byte. A literal byte is what it stands for. */
int jutf8_next(const char *s, size_t n, size_t *i);
size_t jutf8_put(int cp, char *out);                /* bytes written, at most 4 */
int64_t jstr_len(struct jstate *st, struct jval s); /* code points */
struct jval jstr_sub(struct jstate *st, struct jval s, int64_t from, int64_t to); /* code points */
struct jval jstr_slice(struct jstate *st, struct jval s, int64_t start, int64_t step, int64_t n);
bool jcp_isspace(int cp);
bool jcp_isword(int cp); /* \w */
bool jcp_isident_start(int cp);
bool jcp_isprintable(int cp);
struct jval jstr_case(struct jstate *st, struct jval s, char how); /* u l c(apitalize) t s f */
bool jstr_class(struct jval s, char what);
bool jstr_islower(struct jval s);
bool jstr_isupper(struct jval s);
enum { STRIP_LEFT = 1, STRIP_RIGHT = 2 };
struct jval jstr_strip(struct jstate *st, struct jval s, struct jval chars, int sides);
struct jval jstr_replace(struct jstate *st, struct jval s, struct jval old, struct jval with,
                         int64_t count);
struct jlist *jstr_splitlines(struct jstate *st, struct jval s, bool keep);
struct jval jstr_pad(struct jstate *st, struct jval s, int64_t width, struct jval fill, char how);
struct jval jstr_concat(struct jstate *st, struct jval a, struct jval b);
const char *jstr_find(const char *hay, size_t n, const char *needle, size_t m);
bool jstr_same(const char *a, const char *b, size_t n); /* literal bytes are what they stand for */

/* jinja_method.c */
enum jmethod_id { M_NONE = -1 };
int jmethod_lookup(const char *name, size_t len); /* -1: no type has such a method */
/* Looks up an attribute of a value (not an item). False if there is none. */
bool jattr_get(struct jstate *st, struct jval obj, struct jval name, int mid, struct jval *out);
struct jval jmethod_call(struct jstate *st, struct jmethod *m, const struct jargs *a);
enum jfunc { F_RANGE, F_DICT, F_NAMESPACE, F_CYCLER, F_JOINER, F_RAISE, F_STRFTIME, F_COUNT };
int jfunc_lookup(struct jval name); /* -1: none */
const char *jfunc_name(int func);
struct jval jfunc_call(struct jstate *st, int func, const struct jargs *a);
/*
 * Binds arguments to the n names (JV_MISSING if absent) in out. Fails, naming `what`, for too many,
 * unknown or repeated arguments, or if one of the first n_min is absent.
 */
void jargs_bind(struct jstate *st, const char *what, const struct jargs *a,
                const char *const *names, int n, int n_min, struct jval *out);
int64_t jarg_int(struct jstate *st, struct jval v, const char *what);
struct jval jarg_str(struct jstate *st, struct jval v, const char *what);

/* jinja_filters.c, jinja_seq.c, jinja_tests.c */
/* clang-format off */
#define JINJA_SEQ_FILTERS(X)                                                                       \
    X(batch) X(dictsort) X(first) X(groupby) X(items) X(join) X(last) X(length) X(list) X(map)     \
    X(max) X(min) X(random) X(reject) X(rejectattr) X(reverse) X(select) X(selectattr) X(slice)    \
    X(sort) X(sum) X(unique)
enum jseq {
#define X(name) JSEQ_##name,
    JINJA_SEQ_FILTERS(X)
#undef X
};
/* clang-format on */
int jfilter_lookup(const char *name, size_t len); /* -1: none */
struct jval jfilter_call(struct jstate *st, int filter, struct jval v, const struct jargs *a);
struct jval jfilter_seq(struct jstate *st, enum jseq which, struct jval v, const struct jargs *a);
int jtest_lookup(const char *name, size_t len);
bool jtest_call(struct jstate *st, int test, struct jval v, const struct jargs *a);

/* jinja_ops.c */
struct jval jop_binary(struct jstate *st, enum jop op, struct jval a, struct jval b);
bool jop_compare(struct jstate *st, enum jop op, struct jval a, struct jval b);
struct jval jget_attr(struct jstate *st, struct jval obj, struct jval name, int mid);
struct jval jget_item(struct jstate *st, struct jval obj, struct jval key);
struct jval jget_slice(struct jstate *st, struct jval obj, struct jval a, struct jval b,
                       struct jval c);

/* jinja_eval.c */
struct jval jloop_attr(struct jstate *st, struct jloop *l, struct jval name);

/* jinja_lex.c, jinja_parse.c */
struct jtoken *jinja_lex(struct jstate *st, const char *src, size_t len, int *n_tokens);
void jinja_parse(struct jstate *st, struct jtoken *tokens, int n);
int jinja_symbol(struct jstate *st, struct jval name);

#endif
