/*
 * What a compiled grammar is inside: terminals, rules as graphs, arrays, objects. Filled by the
 * compilers (grammar_gbnf.c, schema_build.c), read by the matcher (grammar_match.c, grammar_mask.c).
 *
 * Invariants of a finished grammar:
 * 1. Every terminal's language is non-empty, every node can produce some text: no prefix that the
 *    matcher allows is a dead end. The compilers prune; the matcher relies on it.
 * 2. Node 0 is the root. Nothing changes after grammar_finish.
 */
#ifndef STEEL_TEXT_GRAMMAR_INT_H
#define STEEL_TEXT_GRAMMAR_INT_H

#include "text/grammar/grammar.h"
#include "text/grammar/grammar_re.h"

#define NO_LIMIT UINT32_MAX

enum term_kind {
    TERM_RAW,  /* the automaton's characters as they are, in UTF-8 */
    TERM_STR,  /* a JSON string, with its quotes: the automaton reads what it means */
    TERM_KEY,  /* the same for an object's property: names first, then the automaton */
    TERM_FREE, /* any tokens, up to a text that stops it */
};

/*
 * Free text around what is constrained. The automaton of its terminal reads bytes as if they were
 * characters and never dies; bit i of a label says that stop i has just been written. The stop's text
 * is not a part of the free text: what follows reads it, as `again` spells it (which is the same for
 * stops that may be written with more or less white space). A free terminal is the only one that is
 * under way where it is. Every stop begins with one of VOCAB_MARKS, white space aside.
 */
struct free_text {
    char **again;     /* (n) */
    uint32_t n, idle; /* idle: the automaton's state where nothing of a stop has been written */
    bool may_end;     /* the answer may end inside it */
};

struct term {
    enum term_kind kind;
    bool plain; /* characters are escaped only where JSON asks for it */
    bool bare;  /* TERM_KEY: not a JSON string: `open`, the name as it is, `shut` */
    char shut;
    const char *open;
    struct dfa *dfa;
    struct names *names; /* TERM_KEY */
    bool repeats;        /* TERM_KEY: others have finitely many names, which may come twice: with
                            those taken out, a name that was begun could be a dead end */
    char *tag; /* TERM_RAW: a special token of this spelling, where the vocabulary has one, and
                  nothing else then; or NULL */
    bool token_only;        /* ... and nothing at all where it has none */
    bool spells;            /* the grammar's spelled tokens may be a part of its text */
    struct free_text *free; /* TERM_FREE */
    uint32_t *left;         /* (states) bytes that end it at least: see grammar_end.c */
    uint32_t
        *total; /* (states) TERM_KEY of an object with several kinds of names: ... and the value
                        that follows */
};

/* The declared properties of an object by name: a trie of code points, in sorted order. */
struct name_node {
    uint32_t cp, child, sibling; /* 0 = none; node 0 is the root */
    uint32_t lo, hi;             /* names below: positions lo .. hi - 1 */
    uint32_t name;               /* position + 1 of the name that ends here, or 0 */
    uint32_t spelled;            /* bytes that lead here */
};

struct names {
    struct name_node *nodes; /* (n_nodes) */
    uint32_t n_nodes;
    uint32_t n;        /* names */
    bool escapes;      /* some name has characters that JSON escapes */
    uint32_t *spelled; /* (n) bytes of each name */
};

enum node_kind { NODE_GRAPH, NODE_ARRAY, NODE_OBJECT };

struct edge {
    bool call; /* of a node, else a terminal */
    uint32_t target, to;
};

struct array_node {
    uint32_t *prefix; /* (n_prefix) nodes of the first items */
    uint32_t n_prefix;
    uint32_t items; /* node of the rest; unused where max == n_prefix */
    uint32_t min, max;
    uint32_t *both; /* (n_prefix + 1) node of an item that fits its place and `contains`;
                          NO_LIMIT where there is none */
    uint32_t n_contains;
};

struct object_prop {
    uint32_t node;  /* of its value; NO_LIMIT: may not occur */
    uint32_t order; /* place in the schema */
    bool required;
    uint32_t needs, n_needs; /* dependentRequired: object_node.needs[needs ..] are positions */
};

enum { MARK_OPEN, MARK_EMPTY, MARK_CLOSE, MARK_COMMA, MARK_COLON, OBJECT_MARKS };
struct object_node {
    uint32_t key;             /* terminal */
    struct object_prop *prop; /* (n_props) sorted by name, as the names' positions are */
    uint32_t n_props;
    uint32_t *needs;  /* the lists of dependentRequired, closed: whatever they ask for in turn */
    uint32_t *others; /* (n_others) node of a value by the label - 1 of the key's automaton */
    uint32_t n_others;
    uint32_t min, max;
    bool in_order;
    uint32_t mark[OBJECT_MARKS]; /* terminals; NO_LIMIT: nothing is written there */
};

struct gnode {
    enum node_kind kind;
    uint32_t start; /* NODE_GRAPH: first state */
    struct array_node *array;
    struct object_node *object;
};

/* The terminals that JSON is made of, by their places in every grammar that has JSON in it. */
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
    uint32_t *state_cost, *node_cost; /* (n_states), (n_nodes) bytes to the end: grammar_end.c */
    uint32_t detour;                  /* bytes that what need not be begun takes at most */
    bool json, tags;                  /* its first terminals are JSON's; some terminal is a tag */
    const char *const
        *spelled; /* special tokens that terminals spell out, NULL at the end; or NULL */
    uint32_t n_edges, cap_edges, cap_states, cap_terms, cap_nodes;
    size_t bytes, work; /* work: steps that compiling took */
    uint64_t serial;    /* no two grammars of a process have the same */
};

/* For compilers. Terminals take over the automaton. Edges of a state are added before the next one. */
struct grammar *grammar_new(void);
uint32_t grammar_add_term(struct grammar *g, enum term_kind kind, struct dfa *dfa);
uint32_t grammar_add_node(struct grammar *g, enum node_kind kind);
uint32_t grammar_add_state(struct grammar *g, bool final);
void grammar_add_edge(struct grammar *g, bool call, uint32_t target, uint32_t to);
void grammar_finish(struct grammar *g);
uint32_t grammar_add_tag(struct grammar *g, struct dfa *dfa, const char *text, bool token_only);
/* Moves all of sub, which is freed, into g; the node that was its root. Where sub has JSON's terminals,
 * g has them too. */
uint32_t grammar_import(struct grammar *g, struct grammar *sub);

struct grammar *gbnf_compile(const char *text, size_t len, struct error *err);
/* What tool calls ask for, beside the flags of grammar.h. */
enum {
    SCHEMA_OBJECT = 1 << 8,   /* an object, whatever else the schema allows */
    SCHEMA_PYTHON = 1 << 9,   /* the object is "(a=1, b=True)", True, False and None everywhere */
    SCHEMA_XML = 1 << 10,     /* the object is ">", its "<parameter=a>..." and "</function>" */
    SCHEMA_MINIMAX = 1 << 11, /* '">', its '<parameter name="a">...</parameter>' and "</invoke>" */
    SCHEMA_GLM = 1 << 12,     /* its "<arg_key>a</arg_key><arg_value>..." and "</tool_call>" */
    SCHEMA_GEMMA = 1 << 13,   /* objects are {a:1}, texts are between two of <|"|>, everywhere */
};
struct grammar *schema_compile(const char *text, size_t len, int flags, struct error *err);
struct grammar *choice_compile(const char *text, size_t len, struct error *err);
/* The terminals that JSON is made of, into an empty grammar. */
void schema_add_json(struct grammar *g, int flags);
/* chat_grammar.c: see chat_grammar.h. */
struct grammar *chat_reply_compile(const char *text, size_t len, int flags, struct error *err);

/* ---- the vocabulary (grammar_vocab.c) ---- */

/* A trie in depth-first order: a node's subtree is i .. skip - 1. */
struct trie_node {
    uint32_t skip;
    int32_t token; /* -1: none ends here */
    uint8_t byte;
    uint8_t depth;  /* 1 for the first byte */
    uint8_t height; /* bytes of the longest way down from here */
};

struct vocab_trie {
    struct trie_node *nodes; /* (n) */
    uint32_t n;
};

struct grammar_vocab {
    const struct tokenizer *tok;
    int n_vocab;
    size_t n_words;
    /* (n_words) tokens of a group with up to k characters; all have at most DFA_SAFE_MAX */
    uint32_t *mask[DFA_GROUPS][DFA_SAFE_MAX + 1];
    struct vocab_trie trie[DFA_GROUPS + 1]; /* the groups, then the rest */
    int32_t *twin;                          /* (n_vocab) next token with the same bytes, or -1 */
    uint32_t *ends;                         /* (n_words) tokens that end an answer */
    /* Inside a string that may be anything: the rest's tokens that stay in it, and the texts that
     * come after a closing quote in some token. */
    uint32_t *inside;        /* (n_words) */
    struct vocab_trie after; /* .token: index into exits */
    uint32_t *exit_at;       /* (n_exits + 1) */
    int32_t *exit_token;
    uint32_t n_exits;
    struct mask_memo *memo; /* masks made before */
    int32_t *marked;        /* (n_marked) tokens of any kind that hold one of VOCAB_MARKS */
    uint32_t n_marked;
};
#define VOCAB_MARKS "<[{"
enum { VOCAB_TOKEN_MAX = 255 }; /* longer tokens are never allowed */
/* May the token be a part of constrained text? Special ones may not. */
bool vocab_usable(const struct tokenizer *t, int32_t id);

/* ---- the matcher (grammar_match.c) ---- */

struct item {
    uint32_t node, pos, data, origin;
};

struct thread {
    uint32_t term, q, sub, name;
    uint32_t hash;    /* TERM_KEY: of the name so far */
    struct item then; /* where the parser stands once the terminal ends */
};

struct waiter {
    uint32_t callee;
    uint32_t cost; /* to the end of the answer once it is complete: see grammar_end.c */
    struct item then;
};

/* One point of the text. */
struct point {
    uint32_t threads, n_threads; /* in matcher.threads */
    uint32_t n_rows, n_waiters, n_data;
    bool accepts;
};

struct record { /* one accepted token: how things stood before it */
    struct point point;
    uint32_t n_threads_all;
};

struct grammar_matcher {
    struct grammar *g;
    const struct grammar_vocab *v;
    struct thread *threads; /* stack: the points of history, then of a walk */
    uint32_t n_threads, cap_threads;
    uint32_t *rows; /* (n_rows) first waiter */
    uint32_t n_rows, cap_rows;
    struct waiter *waiters;
    uint32_t n_waiters, cap_waiters;
    uint32_t *data; /* sets of objects */
    uint32_t n_data, cap_data;
    struct point now;
    struct record *history;
    size_t n_history, cap_history;
    /* scratch of a closure */
    struct item *todo;
    uint32_t n_todo, cap_todo;
    uint32_t *todo_next;
    uint16_t todo_head[64];
    uint32_t *nulls; /* nodes complete at the row where they began */
    uint32_t n_nulls, cap_nulls;
    uint32_t *chain; /* scratch of threads_unique */
    uint32_t cap_chain;
    size_t work, work_max;
    const char *error;  /* a limit that was met */
    int32_t *tag_token; /* (n_terms) of terminals that are tags: their token or -1; NULL: no tags */
    int32_t spelled[8]; /* (n_spelled) special tokens that terminals spell out */
    uint32_t n_spelled;
    /* Free text with nothing of a stop written: the tokens that hold a whole one. */
    int32_t *hits;              /* (n_hits) */
    uint32_t n_hits, hits_term; /* of this terminal + 1; 0 = not made */
    /* the way to the end: grammar_end.c */
    uint32_t n_costed;      /* rows whose waiters have their cost */
    uint32_t budget, slack; /* tokens of the whole answer, 0 = any; kept in hand */
    bool frugal;            /* nothing is begun that need not be */
    size_t next_look;       /* before so many tokens there is no hurry */
    uint32_t *scratch;      /* (n_words) a mask in the making, or NULL */
    struct point *levels;   /* (VOCAB_TOKEN_MAX + 2) of a walk */
    bool fresh;             /* masks are made anew always: for tests of the kept ones */
};

/* Steps the threads of `from` over one byte; the new point's threads are put on the stack.
 * False: nothing is left. */
bool match_step(struct grammar_matcher *m, const struct point *from, uint8_t byte,
                struct point *to);
/* Takes back everything that was made after `p` (its own threads stay). */
void match_pop(struct grammar_matcher *m, const struct point *p, uint32_t n_threads);
/* The point after the terminal of thread t has ended here, without the thread itself. */
bool match_end_term(struct grammar_matcher *m, const struct thread *t, struct point *to);
/* Puts one more thread to point p, whose threads are the last ones. */
bool match_add_thread(struct grammar_matcher *m, const struct thread *t, struct point *p);
void match_begin(struct grammar_matcher *m); /* at the root, once */
bool match_bytes(struct grammar_matcher *m, const char *p, size_t n);
bool match_tag(struct grammar_matcher *m, int32_t token); /* a special token */
/* The thread of the free text at p, or NULL. */
const struct thread *match_free(const struct grammar_matcher *m, const struct point *p);
bool match_over(struct grammar_matcher *m, const char *what);

/* grammar_memo.c: masks that were made before. memo_key: false where the state is too long to keep. */
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

/* grammar_end.c: costs of a finished grammar; is it time to end, and with which token (-1: an ending
 * one)? */
void grammar_costs(struct grammar *g);
uint32_t grammar_edge_cost(const struct grammar *g, const struct edge *e);
bool match_hurry(struct grammar_matcher *m, int32_t *token);

#endif
