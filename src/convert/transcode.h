/*
 * The common part of `convert` and `quantize`. Takes a list of output tensors and the source of
 * their rows; reads, dequantises, quantises and writes them with all threads, a few megabytes at a
 * time. Input pages are released after use, so memory does not grow with the model.
 */
#ifndef STEEL_CONVERT_TRANSCODE_H
#define STEEL_CONVERT_TRANSCODE_H

#include "backend/lora.h"
#include "convert/imatrix.h"
#include "file/gguf_write.h"
#include "model/layout.h"

/* One matrix of an input file. */
struct input_matrix {
    const struct tensor *data;   /* values or blocks; of a packed matrix, its codes */
    struct packed_layout layout; /* LAYOUT_PLAIN: only data is set */
    /* Row i is the tensor's row first + step * i. tensor_rows: rows per matrix of a plain tensor; 0
     * = it has exactly these rows. transposed: stored as (n_in, tensor_rows). */
    int first, step, tensor_rows;
    bool transposed;
    int64_t offset; /* first tensor row of the matrix; needs tensor_rows if plain */
};

/* An adapter's change that is added to a tensor's rows before they are written. */
struct merge_part {
    const struct lora *l;
    float scale;
};

/* One output tensor: n_mats matrices of `rows` rows of dims[0] values, one after the other. */
struct out_tensor {
    char name[128];
    enum dtype type;
    int n_dims;
    int64_t dims[TENSOR_MAX_DIMS];
    int64_t rows; /* of each matrix */
    int n_mats;
    struct input_matrix *mats; /* (n_mats), or one that holds all matrices; NULL: `values` */
    float *values; /* (rows, dims[0]) computed here, n_mats = 1; of type I32 their bits */
    float *scales; /* (n_mats) NVFP4: factor on a GGUF's values; owned, or NULL */
    /* > 0: number of heads whose rows are interleaved, first half with second half. GGUF stores q
     * and k of the llama architecture in this order. */
    int heads;
    /* Source rows, and columns, in output order, for parts of a tensor (plain:
     * input_matrix.tensor_rows) that are reordered. (rows), (dims[0]), owned; NULL = in order. */
    int32_t *order, *columns;
    float *row_times;          /* (rows) factors on the rows of each matrix; owned, or NULL */
    bool weighted;             /* the importance matrix has this name */
    struct merge_part *merges; /* (n_merges) owned */
    int n_merges;
    int32_t *merge_rows; /* (rows) row of the changed weight for each row of a matrix; owned */
};

struct transcode {
    const struct tensorfile *in;
    struct out_tensor *tensors; /* (n) */
    size_t n, cap;
    const struct imatrix *importance;                       /* or NULL */
    int threads;                                            /* 0 = all */
    void (*progress)(void *arg, size_t done, size_t total); /* bytes of input; may be NULL */
    void *progress_arg;
};

/* Appends a zeroed tensor with its name and shape. */
struct out_tensor *transcode_add(struct transcode *t, const char *name, int n_dims,
                                 const int64_t *dims);
int transcode_sources(const struct out_tensor *o); /* length of mats */
/* Whether packed matrices can be copied in their own type, without unpacking blocks. */
bool transcode_copies(const struct out_tensor *o);
void transcode_clear(struct transcode *t);

/* Declares the tensors, begins the file and writes all data. The caller finishes the writer. */
bool transcode_run(struct transcode *t, struct gguf_writer *w, struct error *err);

#endif
