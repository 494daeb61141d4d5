/*
 * The engine behind `convert` and `quantize`: a list of output tensors, each with where its rows come
 * from, is read, turned into floats, quantised and written by all threads, a few megabytes each. Input
 * pages are given back as they are used, so memory does not grow with the model.
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
    struct packed_layout layout; /* LAYOUT_PLAIN: data is all there is */
    /* These are rows first, first + step, ... of the tensor's, a plain one's of `of` in each matrix;
     * of 0: all of them. across: it is stored transposed. */
    int first, step, tensor_rows;
    bool transposed;
    int64_t offset; /* rows of the tensor before the matrix; a plain one's of is set */
};

/* A change that is added to the rows of a tensor before they are written. */
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
    struct input_matrix *mats; /* (n_mats), or (1) holding all of them; NULL: `values` */
    float *values;             /* (rows, dims[0]) computed here, n_mats = 1 */
    float *scales; /* (n_mats) what multiplies the values of a GGUF's NVFP4; owned, or NULL */
    /* > 0: number of heads whose rows are interleaved, first half with second half. GGUF stores q
     * and k of the llama architecture in this order. */
    int heads;
    /* Where the parts of a tensor (a plain one's source.of) lie in another order: source rows, and
     * columns, of those of the output. (rows), (dims[0]), owned; NULL = as they are */
    int32_t *order, *columns;
    bool weighted;             /* importance is known under this name */
    struct merge_part *merges; /* (n_merges) owned */
    int n_merges;
    int32_t *merge_rows; /* (rows) of a matrix: which row of the change's weight each is; owned */
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
int transcode_sources(const struct out_tensor *o); /* how many mats has */
/* Whether packed matrices can be written in their own type: no block is taken apart. */
bool transcode_copies(const struct out_tensor *o);
void transcode_clear(struct transcode *t);

/* Declares the tensors to the writer, begins the file and writes all data. The caller finishes it. */
bool transcode_run(struct transcode *t, struct gguf_writer *w, struct error *err);

#endif
