/*
 * Who runs in the next step, and how much of each prompt. Knows sequences, pages and measured times;
 * knows nothing of requests, text, threads or the model, so that tests can drive it with made-up
 * costs.
 *
 * A sequence wants all of its tokens in the KV cache; the last one's logits give the next token. With
 * one token outstanding it decodes, with more it reads (a prompt, or itself again after preemption).
 * Every decode goes into every step. An answer has several outstanding where a constraint left no choice
 * about them; see forced_singly() for when they are read. Reading fills the rest of the step's time budget: the time a
 * step takes is learned as it runs, so the budget is milliseconds, not tokens.
 *
 * Invariants:
 *  1. a sequence is in the waiting list or in the running list or in none; both are in order of age
 *  2. a waiting sequence holds no pages
 *  3. a sequence enters only when its unread tokens fit the pages left over by those running, one
 *     more page for each of them: nothing enters to be thrown out at once
 *  4. the oldest running sequence is never preempted: some sequence always advances, so every one
 *     ends
 *  5. clients take turns: of those with sequences waiting the one with the fewest running is next, of
 *     equals the one that was let in longest ago; a client's own sequences enter strictly by age.
 *     Where nothing is free, a client takes a place from one that runs at least two more than it
 *     does, down to one less: nobody is overtaken for ever, and nobody's company is kept waiting
 *     for the whole of somebody else's answers. A client whose next sequence lacks pages does not
 *     hold up the others: up to max_seqs of theirs go past it, then none before it is in
 *  6. every full page of a running sequence is indexed (scheduler_commit), and a sequence that would
 *     compute a page another one is computing in the same step waits and takes that page instead
 *  7. where layers have states (states.h): a sequence starts behind cached pages only where a state was
 *     kept, so states are saved where others will want to start: at the last whole page of a prompt,
 *     where it stops being like another one that is cached, at the ends of steps while slots are
 *     free; and what ends or is preempted leaves its own
 */
#ifndef STEEL_ENGINE_SCHEDULER_H
#define STEEL_ENGINE_SCHEDULER_H

#include "engine/kvcache.h"
#include "engine/step.h"

struct seq {
    /* for the caller to fill */
    int32_t *tokens;               /* (cap) the prompt, then what was generated; owned */
    int n_tokens, cap;             /* n_tokens >= 1 */
    int n_prompt;                  /* of them the prompt */
    uint64_t root;                 /* prefix_root: where its chain of pages starts */
    const struct lora_pick *loras; /* (n_loras) adapters it uses */
    int n_loras;
    bool no_cache;   /* takes no page from the index (it still shares its own) */
    uint64_t client; /* whose it is: clients share the machine evenly; 0 is one like the others */
    /* Drafted tokens that stand behind the last one, for the next step to find right or wrong; gone once a
     * token is appended. */
    int n_draft;
    bool all_rows; /* logits after every token of the prompt are wanted; no_cache is set too */
    bool
        unfollowed; /* the MTP block has not seen all its rows: nothing is drafted for it (draft.h) */
    int n_open; /* the last so many of kv's tokens are drafts that no token has confirmed (draft.h) */
    /* kept by the scheduler */
    struct seq *prev, *next;
    struct seq *ahead, *behind; /* the client's neighbours in the waiting list */
    struct seq_client *of;
    uint64_t age; /* order of arrival */
    struct kv_seq kv;
    uint64_t chain; /* serial of the last indexed page */
    int n_indexed;  /* pages indexed */
    int branch;     /* tokens up to which cached pages are like its own, where no state was kept */
    bool running;
    bool entered; /* was admitted before */
    int n_cached; /* prompt tokens not computed when it first ran */
    int n_preempted;
};

struct seq_list {
    struct seq *first, *last;
    int n;
};

/* One who has sequences here. */
struct seq_client {
    struct seq_client *prev, *next;
    uint64_t id;
    int n_seqs, n_waiting, n_running;
    struct seq *first, *last; /* waiting, by age */
    uint64_t let_in;          /* turn in which one entered last; at first: in which it came */
    uint64_t read;            /* turn in which a prompt of its was read last */
    int turn;                 /* rotates among its prompts */
    int n_readers, at, share; /* of the current step: prompts, place in readers, tokens */
    int64_t need;             /* tokens its prompts still want */
    const struct seq
        *blocked;        /* its first, if it lacked pages; looked at again when freed changes */
    uint64_t blocked_at; /* freed, then */
    uint64_t round;      /* in which it lacked them */
};

enum { COST_BUCKETS = 12 };

/* What steps take, learned from those seen. */
struct step_cost {
    double decode_ns[COST_BUCKETS]; /* a step of 2^b decodes; 0 = not seen */
    double read_ns;                 /* one token of a prompt on top; 0 = not seen */
    int most_read;                  /* tokens read by the step that read most */
};

struct scheduler {
    struct kvcache *kv;
    struct step_limits limits;
    int context;
    double budget_ns; /* 0 = three times what the decodes take, at least 250 ms */
    struct seq_list waiting, running;
    uint64_t next_age;
    struct seq_client *clients;  /* all that have sequences */
    int max_per_client;          /* of one client's running at once; 0 = no bound */
    bool records;                /* steps of decodes alone are recorded: cheaper than others */
    uint64_t entries, reads;     /* turns of entering and of reading so far */
    struct seq_client **reading; /* (max_seqs) scratch: clients with prompts to read */
    struct step_cost cost;
    struct seq **planned; /* (max_seqs) of the current step */
    struct seq **readers; /* (max_seqs) scratch */
    struct seq **sorted;  /* (max_seqs) scratch: readers by client */
    int *shares;          /* (max_seqs) scratch */
    int n_planned, n_decode, n_read;
    int n_forced;   /* tokens of answers that are read together; steps with some teach no costs */
    bool singly;    /* forced tokens are read one a step: see forced_singly() */
    int n_spare;    /* logits rows of the step beyond one for each that runs */
    int n_drafted;  /* drafts of the step */
    uint64_t freed; /* counts what gives pages back */
    uint64_t round; /* counts plans */
    struct seq *passed; /* the first that lacked pages, and waits while others go in; NULL = none */
    int n_passes;       /* how many did */
    /* totals */
    int64_t n_preempted;
    int64_t cache_queries, cache_hits; /* prompt tokens looked up, found */
};

void scheduler_init(struct scheduler *s, struct kvcache *kv, const struct step_limits *limits,
                    int context, double budget_ms);
void scheduler_clear(struct scheduler *s); /* no sequences may be left */

/* Behind all others of its client. */
void scheduler_add(struct scheduler *s, struct seq *q);
/* Takes a sequence out, wherever it is, and gives its pages back (indexed: others may use them). */
void scheduler_remove(struct scheduler *s, struct seq *q);
/* A token was chosen. */
void seq_append(struct seq *q, int32_t token);
/* What may come behind its tokens; replaces what was drafted before. */
void seq_draft(struct seq *q, const int32_t *tokens, int n);
void seq_clear(struct seq *q); /* frees its memory; not in the scheduler any more */
static inline int seq_unread(const struct seq *q)
{
    return q->n_tokens - q->kv.n_tokens;
}

/* Admits, preempts, and fills items (max_seqs) for step_run: all but the samplers. Sequence i of the
 * step is s->planned[i]. Returns how many; 0 = nothing to do. */
int scheduler_plan(struct scheduler *s, struct step_item *items);
/* The planned step ran, in so many ns: indexes new pages, learns. To be called before tokens are
 * appended. Not called when the step failed. */
void scheduler_commit(struct scheduler *s, int64_t ns);
/* The same for a step planned before the current one: seqs (n), NULL where a sequence left since. With
 * n_decode and n_read 0 nothing is learned. */
void scheduler_commit_step(struct scheduler *s, struct seq *const *seqs, int n, int n_decode,
                           int n_read, int64_t ns);

/* Indexes the pages of one that has none open and leaves before its step is committed. */
void scheduler_index(struct scheduler *s, struct seq *q);

/* The learned costs, for tests and metrics. */
double scheduler_decode_ns(const struct scheduler *s, int n_decode);
double scheduler_budget_ns(const struct scheduler *s, int n_decode); /* longer where n is 0 */
int scheduler_read_tokens(const struct scheduler *s, int n_decode);  /* to read beside n decodes */

#endif
