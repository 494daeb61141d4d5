/*
 * The interface between ranks.c and the file that knows MPI (ranks_mpi.c), a shared object of its own, so that the
 * program starts where MPI is not installed. It only starts operations. ranks.c waits for them, so that every wait
 * can end.
 */
#ifndef STEEL_DIST_RANKS_LINK_H
#define STEEL_DIST_RANKS_LINK_H

#include <stddef.h>

enum { RANKS_LINK_VERSION = 7 };
/* The members of an operation: all ranks, or those of this rank's stage (made by `split`). */
enum { RANKS_ALL_GROUP, RANKS_STAGE_GROUP, RANKS_GROUPS };

/* Operations return a request, or NULL where MPI refused; test frees it when it is done. Operations of one
 * group are begun in the same order by all its members, operations of different groups in any order. */
struct ranks_link {
    int version;
    int rank, size;
    int local, n_local; /* among those of this machine */
    void *(*bcast)(void *buf, size_t bytes, int root, int group);
    void *(*allgather)(const void *mine, void *all, size_t bytes_each, int group);
    /* All-to-all: sends n[t] floats at mine + at[t] to member t, receives got[t] floats from it at all + got_at[t]. */
    void *(*exchange)(const float *mine, const int *n, const int *at, float *all, const int *got,
                      const int *got_at, int group);
    /* Allgather in place: member t has the n[t] floats at all + at[t]; afterwards all members have them. */
    void *(*complete)(float *all, const int *n, const int *at, int group);
    void *(*send)(const void *buf, size_t bytes, int to, int tag);
    void *(*recv)(void *buf, size_t bytes, int from, int tag);
    int (*test)(void *request);       /* 1 done, 0 not yet, -1 failed */
    void (*poke)(void);               /* lets operations in flight make progress */
    int (*split)(int color, int key); /* makes RANKS_STAGE_GROUP; 0 = done */
    void (*finalize)(void);
};

/* The shared object's only symbol. NULL: why (size) has the reason. */
typedef const struct ranks_link *ranks_link_open(int version, char *why, size_t size);

#endif
