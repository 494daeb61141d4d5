/*
 * MPI, as a shared object of its own (steel-mpi.so): see ranks_link.h. Nothing else includes mpi.h.
 * Operations are started here and never waited for.
 */
#include "dist/ranks_link.h"

#include <limits.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static MPI_Comm groups[RANKS_GROUPS];

/* Requests in flight, in a fixed array so that a step allocates nothing. */
enum { MOST = 64 };
static MPI_Request requests[MOST];
static char taken[MOST];

static MPI_Request *fresh(size_t bytes)
{
    for (int i = 0; bytes <= INT_MAX && i < MOST; i++)
        if (!taken[i]) {
            taken[i] = 1;
            return &requests[i];
        }
    return NULL;
}

static void done(const MPI_Request *r)
{
    taken[r - requests] = 0;
}

/* The started request, or NULL if MPI refused to start it. */
static MPI_Request *begun(MPI_Request *r, int rc)
{
    if (rc == MPI_SUCCESS)
        return r;
    done(r);
    return NULL;
}

static void *link_bcast(void *buf, size_t bytes, int root, int group)
{
    MPI_Request *r = fresh(bytes);
    return r ? begun(r, MPI_Ibcast(buf, (int)bytes, MPI_BYTE, root, groups[group], r)) : NULL;
}

static void *link_allgather(const void *mine, void *all, size_t each, int group)
{
    MPI_Request *r = fresh(each);
    int n = (int)each;
    return r ? begun(r, MPI_Iallgather(mine, n, MPI_BYTE, all, n, MPI_BYTE, groups[group], r))
             : NULL;
}

static void *link_exchange(const float *mine, const int *n, const int *at, float *all,
                           const int *got, const int *got_at, int group)
{
    MPI_Request *r = fresh(0);
    return r ? begun(r, MPI_Ialltoallv(mine, n, at, MPI_FLOAT, all, got, got_at, MPI_FLOAT,
                                       groups[group], r))
             : NULL;
}

static void *link_complete(float *all, const int *n, const int *at, int group)
{
    MPI_Request *r = fresh(0);
    return r ? begun(r, MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_FLOAT, all, n, at, MPI_FLOAT,
                                        groups[group], r))
             : NULL;
}

static void *link_send(const void *buf, size_t bytes, int to, int tag)
{
    MPI_Request *r = fresh(bytes);
    return r ? begun(r, MPI_Isend(buf, (int)bytes, MPI_BYTE, to, tag, groups[0], r)) : NULL;
}

static void *link_recv(void *buf, size_t bytes, int from, int tag)
{
    MPI_Request *r = fresh(bytes);
    return r ? begun(r, MPI_Irecv(buf, (int)bytes, MPI_BYTE, from, tag, groups[0], r)) : NULL;
}

static int link_test(void *request)
{
    int ended = 0;
    int rc = MPI_Test(request, &ended, MPI_STATUS_IGNORE);
    if (rc == MPI_SUCCESS && !ended)
        return 0;
    done(request);
    return rc == MPI_SUCCESS ? 1 : -1;
}

static void link_poke(void)
{
    int any = 0;
    MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, groups[0], &any, MPI_STATUS_IGNORE);
}

static int link_split(int color, int key)
{
    for (int i = 1; i < RANKS_GROUPS; i++)
        if (MPI_Comm_split(groups[0], color, key, &groups[i]) != MPI_SUCCESS ||
            MPI_Comm_set_errhandler(groups[i], MPI_ERRORS_RETURN) != MPI_SUCCESS)
            return -1;
    return 0;
}

static void link_finalize(void)
{
    MPI_Finalize();
}

static struct ranks_link table = {
    .version = RANKS_LINK_VERSION,
    .bcast = link_bcast,
    .allgather = link_allgather,
    .exchange = link_exchange,
    .complete = link_complete,
    .send = link_send,
    .recv = link_recv,
    .test = link_test,
    .poke = link_poke,
    .split = link_split,
    .finalize = link_finalize,
};

__attribute__((visibility("default"))) ranks_link_open steel_ranks_link;

/* Open MPI's network transports listen on all addresses, even if all ranks are on one machine and use
 * shared memory. Then only shared memory is used, unless the user has chosen transports. */
static void stay_inside(void)
{
    const char *here = getenv("OMPI_COMM_WORLD_LOCAL_SIZE"), *all = getenv("OMPI_COMM_WORLD_SIZE");
    if (!here || !all || strcmp(here, all) != 0 || getenv("OMPI_MCA_btl") || getenv("OMPI_MCA_pml"))
        return;
    setenv("OMPI_MCA_btl", "self,vader", 1);
    setenv("OMPI_MCA_pml", "ob1", 1);
}

const struct ranks_link *steel_ranks_link(int version, char *why, size_t size)
{
    int level = 0;
    if (version != RANKS_LINK_VERSION) {
        snprintf(why, size, "it is for version %d of the interface, not %d", RANKS_LINK_VERSION,
                 version);
        return NULL;
    }
    stay_inside();
    /* The engine's thread makes the calls, but another thread may end the program. */
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level) != MPI_SUCCESS ||
        level < MPI_THREAD_SERIALIZED) {
        snprintf(why, size, "MPI does not start, or knows no threads");
        return NULL;
    }
    MPI_Comm_dup(MPI_COMM_WORLD, &groups[0]);
    MPI_Comm_set_errhandler(groups[0], MPI_ERRORS_RETURN);
    MPI_Comm_rank(groups[0], &table.rank);
    MPI_Comm_size(groups[0], &table.size);
    MPI_Comm here;
    MPI_Comm_split_type(groups[0], MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &here);
    MPI_Comm_rank(here, &table.local);
    MPI_Comm_size(here, &table.n_local);
    MPI_Comm_free(&here);
    return &table;
}
