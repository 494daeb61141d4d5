/*
 * Inside a compiled grammar: terminals, rules as graphs, arrays, objects. Built by the compilers
 * (grammar_gbnf.c, schema_build.c), read by the matcher (grammar_match.c, grammar_mask.c).
 *
 * Invariants of a finished grammar:
 * 1. Every terminal's language is non-empty and every node can produce some text, so no allowed
 *    prefix is a dead end. The compilers prune; the matcher relies on it.
 * 2. Node 0 is the root. Nothing changes after grammar_finish.
 */
#ifndef STEEL_TEXT_GRAMMAR_INT_H
#define STEEL_TEXT_GRAMMAR_INT_H

#include "text/grammar/grammar.h"
#include "text/grammar/grammar_re.h"

#define NO_LIMIT UINT32_MAX

enum term_kind {
    TERM_RAW,  /* the automaton's characters, written in UTF-8 */
    TERM_STR,  /* a JSON string with quotes; the automaton reads the unescaped text */
    TERM_PART, /* a part of a JSON string, without quotes */
    TERM_KEY,  /* an object's property name: declared names first, then the automaton */
    TERM_FREE, /* arbitrary tokens until a stop */
};

/*
 * Free text around constrained text. Its automaton reads bytes as characters and never dies. Bit i
 * of a label means that stop i has just been written. The stop is not part of the free text: the
 * following terminals read it in the form of `again`, which is one fixed form for stops whose white
 * space varies. A free terminal is always the only active thread. Every stop starts with one of
 * VOCAB_MARKS, after optional white space.
 */
struct free_text {
    char **again;     /* (n) */
    uint32_t n, idle; /* idle: the state without a partial stop */
    bool may_end;     /* the reply may end inside it */
};

struct term {
    enum term_kind kind;
    bool plain; /* characters are escaped only where JSON requires it */
    bool bare;  /* TERM_KEY: not a JSON string: `open`, the raw name, `shut` */
    char shut;
    const char *open;
    struct dfa *dfa;
    struct names *names; /* TERM_KEY */
    bool repeats;        /* TERM_KEY: undeclared names are finitely many and may repeat. If used
                          * names were excluded, a name in progress could become a dead end. */
    char *tag; /* TERM_RAW: written as the special token with this spelling if the vocabulary has
                * one, and then only so; or NULL */
    bool token_only;        /* never written as text */
    bool spells;            /* the grammar's spelled tokens may be part of its text */
    struct free_text *free; /* TERM_FREE */
    uint32_t *left;         /* (states) least bytes to its end: see grammar_completion.c */
    uint32_t *total;        /* (states) TERM_KEY with several kinds of names: left + value's cost */
};

/* The declared properties of an object: a trie of code points, in sorted order. */
struct name_node {
    uint32_t cp, child, sibling; /* 0 = none; node 0 is the root */
    uint32_t lo, hi;             /* names below this node: positions lo .. hi - 1 */
    uint32_t name;               /* position + 1 of the name ending here, or 0 */
    uint32_t spelled;            /* bytes from the root to this node */
};

struct names {
    struct name_node *nodes; /* (n_nodes) */
    uint32_t n_nodes;
    uint32_t n;        /* names */
    bool escapes;      /* some name contains characters that JSON escapes */
    uint32_t *spelled; /* (n) bytes of each name */
};

enum node_kind { NODE_GRAPH, NODE_ARRAY, NODE_OBJECT };

struct edge {
    bool call; /* target is a node, else a terminal */
    uint32_t target, to;
};

enum {
    MARK_OPEN,
    MARK_EMPTY,
    MARK_CLOSE,
    MARK_COMMA,
    ARRAY_MARKS,
    MARK_COLON = ARRAY_MARKS,
    OBJECT_MARKS
};
struct array_node {
    uint32_t *prefix; /* (n_prefix) nodes of the first items */
    uint32_t n_prefix;
    uint32_t items; /* node of the remaining items; unused if max == n_prefix */
    uint32_t min, max;
    uint32_t *both; /* (n_prefix + 1) node of an item that satisfies both its position and
                     * `contains`; NO_LIMIT if there is none */
    uint32_t n_contains;
    uint32_t mark
        [ARRAY_MARKS]; /* terminals; NO_LIMIT: nothing is written. Those of the ends always are */
};

struct object_prop {
    uint32_t node;  /* node of the value; NO_LIMIT: not allowed */
    uint32_t order; /* position in the schema */
    bool required;
    uint32_t needs, n_needs; /* dependentRequired: object_node.needs[needs ..] are positions */
};

struct object_node {
    uint32_t key;             /* terminal */
    struct object_prop *prop; /* (n_props) sorted by name, like the name positions */
    uint32_t n_props;
    uint32_t *needs;  /* transitively closed lists of dependentRequired */
    uint32_t *others; /* (n_others) node of the value, by label - 1 of the key's automaton */
    uint32_t n_others;
    uint32_t min, max;
    bool in_order;
    uint32_t mark[OBJECT_MARKS]; /* terminals; NO_LIMIT: nothing is written */
};

struct gnode {
    enum node_kind kind;
    uint32_t start; /* NODE_GRAPH: first state */
    struct array_node *array;
    struct object_node *object;
};

/* Terminals of JSON punctuation: the first terminals of every grammar that contains JSON. */
enum {
    T_LBRACE,  /* {ws */
    T_RBRACE0, /* } right after it */
    T_RBRACE,  /* ws} */
    T_LBRACK,
    T_RBRACK0,
    T_RBRACK,
    T_COMMA, /* ws,ws */
    T_COLON, /* ws:ws */
    T_JSON_COUNT
};

struct grammar {
    int refs;
    struct term *terms; /* (n_terms) */
    uint32_t n_terms;
    struct gnode *nodes; /* (n_nodes) */
    uint32_t n_nodes;
    struct edge *edges; /* (state_at[n_states]) */
    uint32_t *state_at; /* (n_states + 1) */
    bool *state_final;  /* (n_states) */
    uint32_t n_states;
    uint32_t *state_cost,
        *node_cost;  /* (n_states), (n_nodes) bytes to the end: grammar_completion.c */
    uint32_t detour; /* largest cost of an optional part, in bytes */
    bool json, tags; /* has JSON's terminals; has tag terminals */
    /* Special tokens that terminals spell out, NULL-terminated; or NULL. */
    const char *const *spelled;
    uint32_t n_edges, cap_edges, cap_states, cap_terms, cap_nodes;
    size_t bytes, work; /* work: steps spent compiling */
    uint64_t serial;    /* unique within the process */
};

/* For compilers. A terminal takes ownership of its automaton. All edges of a state are added before
 * the next state. */
struct grammar *grammar_new(void);
uint32_t grammar_add_term(struct grammar *g, enum term_kind kind, struct dfa *dfa);
uint32_t grammar_add_node(struct grammar *g, enum node_kind kind);
uint32_t grammar_add_state(struct grammar *g, bool final);
void grammar_add_edge(struct grammar *g, bool call, uint32_t target, uint32_t to);
void grammar_finish(struct grammar *g);
uint32_t grammar_add_tag(struct grammar *g, struct dfa *dfa, const char *text, bool token_only);
/* Moves all of sub into g and frees sub. Returns the new number of sub's root. If sub has JSON's
 * terminals, g must have them too. */
uint32_t grammar_import(struct grammar *g, struct grammar *sub);

struct grammar *gbnf_compile(const char *text, size_t len, struct error *err);
/* As text (TERM_RAW) without the tags (NULL-terminated, or NULL), or inside a JSON string (TERM_PART). */
struct grammar *lark_compile(const char *text, size_t len, enum term_kind kind,
                             const char *const *tags, struct error *err);
/* Flags for tool-call arguments, in addition to those of grammar.h. */
enum {
    SCHEMA_OBJECT = 1 << 8,   /* the value must be an object */
    SCHEMA_PYTHON = 1 << 9,   /* the object is "(a=1, b=True)" */
    SCHEMA_XML = 1 << 10,     /* ">", per property "<parameter=a>...", then "</function>" */
    SCHEMA_MINIMAX = 1 << 11, /* '">', per property '<parameter name="a">...', "</invoke>" */
    SCHEMA_GLM = 1 << 12,     /* per property "<arg_key>a</arg_key>...", "</tool_call>" */
    SCHEMA_GEMMA = 1 << 13,   /* objects are {a:1}, strings are quoted with <|"|> */
    SCHEMA_SEED = 1 << 14,    /* SCHEMA_XML without lines around values */
    SCHEMA_HUNYUAN = 1 << 15, /* SCHEMA_GLM with ":opensource" in every tag */
    SCHEMA_MUSE = 1 << 16,    /* SCHEMA_MINIMAX with "atem:" in every tag */
    SCHEMA_M3 =
        1 << 17, /* NS<a>value NS</a>, lists and objects too, then NS</invoke>; NS: ]<]minimax[>[ */
    SCHEMA_DSML =
        1
        << 18, /* SCHEMA_MINIMAX with DeepSeek's mark in every tag, and whether a value is a string */
};
struct grammar *schema_compile(const char *text, size_t len, int flags, struct error *err);
struct grammar *choice_compile(const char *text, size_t len, struct error *err);
/* Adds the terminals of JSON punctuation to an empty grammar. */
void schema_add_json(struct grammar *g, int flags);
/* chat_grammar.c: see chat_grammar.h. */
struct grammar *chat_reply_compile(const char *text, size_t len, int flags, struct error *err);

/* ---- the vocabulary (grammar_vocab.c) ---- */

/* A trie in depth-first order: the subtree of node i is i .. skip - 1. */
struct trie_node {
    uint32_t skip;
    int32_t token; /* -1: no token ends here */
    uint8_t byte;
    uint8_t depth;  /* 1 for the first byte */
    uint8_t height; /* length of the longest path below this node */
};

struct vocab_trie {
    struct trie_node *nodes; /* (n) */
    uint32_t n;
};

struct grammar_vocab {
    const struct tokenizer *tok;
    int n_vocab;
    size_t n_words;
    /* (n_words) tokens of a group with at most k characters; none has more than DFA_SAFE_MAX */
    uint32_t *mask[DFA_GROUPS][DFA_SAFE_MAX + 1];
    struct vocab_trie trie[DFA_GROUPS + 1]; /* one per group, then one for the other tokens */
    int32_t *twin;                          /* (n_vocab) next token with the same bytes, or -1 */
    uint32_t *ends;                         /* (n_words) tokens that end a reply */
    /* For unrestricted strings: other tokens that stay inside, and the texts that follow a closing
     * quote in some token. */
    uint32_t *inside;        /* (n_words) */
    struct vocab_trie after; /* .token: index into exits */
    uint32_t *exit_at;       /* (n_exits + 1) */
    int32_t *exit_token;
    uint32_t n_exits;
    struct mask_memo *memo; /* cache of masks */
    int32_t *marked;        /* (n_marked) tokens of any kind that contain one of VOCAB_MARKS */
    uint32_t n_marked;
};
#define VOCAB_MARKS "<[{"
enum { VOCAB_TOKEN_MAX = 255 }; /* longer tokens are never allowed */
/* Whether the token may be part of constrained text. Special tokens may not. */
bool vocab_usable(const struct tokenizer *t, int32_t id);

/* ---- the matcher (grammar_match.c) ---- */

struct item {
    uint32_t node, pos, data, origin;
};

struct thread {
    uint32_t term, q, sub, name;
    uint32_t hash;    /* TERM_KEY: hash of the name so far */
    struct item then; /* the parser's item after the terminal ends */
};

struct rule_waiter {
    uint32_t callee;
    uint32_t cost; /* cost to the end of the reply after its completion: see grammar_completion.c */
    struct item then;
};

/* One position in the text. */
struct point {
    uint32_t threads, n_threads; /* range in matcher.threads */
    uint32_t n_rows, n_waiters, n_data;
    bool accepts;
};

struct accept_record { /* an accepted token: the state before it */
    struct point point;
    uint32_t n_threads_all;
};

enum { TODO_HEADS = 64, TODO_HEADS_MOST = 2048 };

struct grammar_matcher {
    struct grammar *g;
    const struct grammar_vocab *v;
    struct thread *threads; /* stack: the points of the history, then those of a walk */
    uint32_t n_threads, cap_threads;
    uint32_t *rows; /* (n_rows) index of the row's first waiter */
    uint32_t n_rows, cap_rows;
    struct rule_waiter *waiters;
    uint32_t n_waiters, cap_waiters;
    uint32_t *data; /* property sets of objects */
    uint32_t n_data, cap_data;
    struct point now;
    struct accept_record *history;
    size_t n_history, cap_history;
    /* scratch of the closure */
    struct item *todo;
    uint32_t n_todo, cap_todo;
    uint32_t *todo_next;
    uint16_t todo_head[TODO_HEADS_MOST];
    uint32_t todo_mask; /* heads in use - 1 */
    uint32_t *nulls;    /* nodes completed in the row where they started */
    uint32_t n_nulls, cap_nulls;
    uint32_t *chain; /* scratch of threads_dedup */
    uint32_t cap_chain;
    size_t work, work_max;
    size_t pause_at; /* go_on is called at this work */
    bool (*go_on)(void *arg);
    void *go_on_arg;
    const char *error;  /* the limit that was exceeded */
    int32_t *tag_token; /* (n_terms) token of each tag terminal or -1; NULL: no tags */
    int32_t spelled[8]; /* (n_spelled) special tokens that terminals spell out */
    uint32_t n_spelled;
    /* Free text without a partial stop: the tokens that contain a whole stop. */
    int32_t *stop_tokens; /* (n_stop_tokens) */
    uint32_t n_stop_tokens,
        stop_tokens_term; /* of terminal stop_tokens_term - 1; 0 = not computed */
    /* completions: grammar_completion.c */
    uint32_t n_costed;      /* rows whose waiters have costs */
    uint32_t budget, slack; /* tokens of the whole reply (0 = no limit); safety margin */
    bool frugal;            /* optional parts are not started */
    size_t next_check;      /* the budget needs no check before this token */
    uint32_t *scratch;      /* (n_words) mask under construction, or NULL */
    struct point *levels;   /* (VOCAB_TOKEN_MAX + 2) points of a walk */
    bool no_cache;          /* bypass the mask cache (for tests of it) */
};

/* Steps the threads of `from` over one byte and pushes the new point's threads. False if none is
 * left. */
bool match_step(struct grammar_matcher *m, const struct point *from, uint8_t byte,
                struct point *to);
/* Undoes everything after `p`, keeping its threads. */
void match_pop(struct grammar_matcher *m, const struct point *p, uint32_t n_threads);
/* The point after the terminal of thread t ends here. Does not include t. */
bool match_end_term(struct grammar_matcher *m, const struct thread *t, struct point *to);
/* Adds a thread to point p, whose threads must be on top of the stack. */
bool match_add_thread(struct grammar_matcher *m, const struct thread *t, struct point *p);
void match_begin(struct grammar_matcher *m); /* enters the root, once */
bool match_bytes(struct grammar_matcher *m, const char *p, size_t n);
bool match_tag(struct grammar_matcher *m, int32_t token); /* accepts a special token */
/* The free-text thread at p, or NULL. */
const struct thread *match_free(const struct grammar_matcher *m, const struct point *p);
bool match_over_limit(struct grammar_matcher *m, const char *what);
/* Starts counting the work of a mask or a token. */
void match_begin_work(struct grammar_matcher *m);
/* Whether go_on ended the work: m->error is set until then, so that all loops end. */
bool match_given_up(const struct grammar_matcher *m);
bool match_pause(struct grammar_matcher *m);
/* Calls go_on now and then; false sets m->error. */
static inline bool match_goes_on(struct grammar_matcher *m)
{
    return m->work < m->pause_at || match_pause(m);
}

/* grammar_memo.c: the mask cache. memo_key returns false if the state is too long to cache. */
enum { MEMO_KEY_MAX = 1024 };
struct memo_key {
    uint64_t hash;
    uint32_t n, v[MEMO_KEY_MAX];
};
struct mask_memo *memo_new(size_t n_words);
void memo_free(struct mask_memo *t);
bool memo_key(const struct grammar_matcher *m, struct memo_key *key);
bool memo_find(struct mask_memo *t, const struct memo_key *key, uint32_t *bits);
void memo_add(struct mask_memo *t, const struct memo_key *key, const uint32_t *bits);
uint64_t memo_hits(struct mask_memo *t);

/* grammar_completion.c: costs of a finished grammar. match_must_end: whether it is time to end, and
 * with which token (-1: an ending token). */
void grammar_costs(struct grammar *g);
uint32_t grammar_edge_cost(const struct grammar *g, const struct edge *e);
bool match_must_end(struct grammar_matcher *m, int32_t *token);

#endif
