/* The parts of the keeper (keeper.h): keeper.c writes, keeper_read.c reads, keeper_segment.c has what both know of segments:
 * their names, their files' shapes, and the copies between a record and the cache. */
#ifndef STEEL_ENGINE_KEEPER_INT_H
#define STEEL_ENGINE_KEEPER_INT_H

#include "backend/backend.h"
#include "engine/engine_int.h"
#include "engine/keeper.h"
#include "engine/prefix_file.h"

enum {
    SEGMENT_TOKENS = 256,
    LEAST_SEGMENTS = 2, /* computing a shorter prefix is fast enough */
};

/* The name of the prefix that ends with a segment. */
struct chain {
    uint64_t h[2];
};

struct save_job {
    struct save_job *next;
    uint64_t *content; /* (n) owned */
    int n;
    uint64_t root;      /* in the memory's index */
    struct chain chain; /* on disk */
};

struct read_job {
    struct read_job *next;
    struct choice *choice; /* the scheduler does not have it */
    int first, end;        /* segments to read */
    int restored;          /* tokens */
};

struct keeper {
    struct engine *e;
    char *dir, *folder;
    uint64_t key[4];
    uint64_t most;
    struct prefix_shape shape; /* of pages; owner is set for each file */
    int seg_len, seg_pages;
    size_t seg_bytes;
    pthread_t writer, reader;
    bool has_writer, has_reader;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* under lock */
    bool quit, writing;
    struct save_job *saves, **saves_end;
    int n_saves;
    struct read_job *reads, **reads_end, *done;
    double read_rate; /* measured, bytes a second */
    uint64_t n_written, n_read, n_damaged, restored;
    struct engine_disk_times times;
    /* the writer's */
    uint64_t folder_bytes;
    int64_t pause_until;
    /* on the engine's thread, in the reader's calls */
    struct kv_seq seq; /* holds what is being restored */
};

/* keeper_segment.c */
struct copy_list {
    struct host_copy *v; /* (n of cap) */
    int n, cap;
};

/* The empty prefix of a request's model, adapters and client. */
struct chain keep_root(const struct keeper *k, const struct request_spec *spec);
/* The content ids of positions [at, at + n) of q. */
void keep_content(const struct seq *q, int at, int n, uint64_t *out);
/* The chain after the next segment, whose content ids are `content` (seg_len) after room for the chain. */
struct chain keep_next(const struct keeper *k, struct chain c, uint64_t *room);
void keep_name(struct chain c, char kind, char name[PREFIX_NAME_MOST]);
bool keep_has(const struct keeper *k, struct chain c, char kind);
void keep_drop(const struct keeper *k, struct chain c, char kind);
/* Marks it as used now. */
void keep_touch(const struct keeper *k, struct chain c);
/* The file of a segment's pages ('k') or of the state at its end ('s'), after `parent`: one record. */
struct prefix_shape keep_shape(const struct keeper *k, struct chain parent, char kind);
/* The parts of a segment's record that are pages [at, at + n) of the segment: plane by plane, adjacent pages together. */
void keep_list_pages(const struct keeper *k, const int32_t *pages, int at, int n, char *record,
                     struct copy_list *l);
void keep_copy_in(const struct keeper *k, const struct copy_list *l);
void keep_copy_out(const struct keeper *k, const struct copy_list *l);
void keep_list_state(const struct keeper *k, int32_t slot, char *host, struct copy_list *l);
struct copy_list keep_list_new(const struct keeper *k);

/* keeper_read.c */
void *keeper_reader(void *arg);

#endif
