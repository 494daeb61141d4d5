/*
 * The communicator of a backend: collective operations with the processes that compute the same layers
 * (tensor or expert parallel). A table of functions, filled in by dist/; NULL in struct backend: this
 * process computes alone. A backend that adds up on its devices (NCCL) uses share() and agree() to set
 * that up.
 *
 * Members call the same operations in the same order. The first failure is kept; after it operations do
 * nothing, and the step that is being computed ends with that error.
 */
#ifndef STEEL_BACKEND_COMM_H
#define STEEL_BACKEND_COMM_H

#include "base/error.h"

#include <stddef.h>
#include <stdint.h>

enum { COMM_MOST = 64 }; /* processes */

struct comm {
    int size, index; /* of the members, who share each layer; 1, 0: the layers are whole */
    /* Of all processes of the job: */
    int n_all, first;    /* how many they are; the first of this one's members among them */
    int n_on_device;     /* how many use this one's GPU, itself included; 0 = it has none */
    bool own_devices;    /* each of them has a GPU of its own */
    struct error notice; /* for the user, from opening on; empty = nothing */

    /* rows (n) of all members, added up in the order of members. */
    void (*sum)(struct comm *c, float *rows, size_t n);
    /* The same of rows (n_rows, width). Bit t of from[i]: member t has something of row i; without it its
     * row is zeros. */
    void (*sum_rows)(struct comm *c, float *rows, int n_rows, int width, const uint64_t *from);
    /* Each member has columns of (n_rows, width), (n_rows, its columns) in rows: member 0 gets all of them. */
    void (*gather)(struct comm *c, float *rows, int n_rows, int width);
    /* While this process computes: messages under way make progress. */
    void (*progress)(struct comm *c);

    /* Of all processes, not just members. share: all (n_all, bytes) = everyone's `mine`. agree: the first
     * error that any of them has; true where none has. */
    bool (*share)(struct comm *c, const void *mine, void *all, size_t bytes, struct error *err);
    bool (*agree)(struct comm *c, bool ok, struct error *err);
    /* Whether a sum that this process has waited for since start (clock_ns) will not come, and why. */
    bool (*is_lost)(struct comm *c, int64_t start, struct error *err);
    /* An operation of the backend's own has failed, or its device. */
    void (*fail)(struct comm *c, const struct error *why);
};

#endif
