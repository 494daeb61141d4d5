/*
 * The images of a prompt. While a conversation is translated and rendered, an image is a mark: a text that nobody can
 * guess. In the rendered prompt the mark becomes the model's own marks. After tokenising, its placeholder becomes one
 * token for each feature. The features are computed last, when the prompt is known to be valid.
 *
 *  1. Images are given as bytes, as base64 or as data: URLs. Other URLs go to the caller's fetch, if it has one.
 *  2. An image's content id is a keyed hash of its bytes, of its details and of a salt. Prompts with different salts share neither features
 *     nor cached pages.
 *  3. Features run beside the engine's steps, on a backend of their own (vision/encoder.h).
 *
 * One thread uses a struct prompt_images at a time. It may be made and used in a job (base/mem.h).
 */
#ifndef STEEL_ENGINE_IMAGES_H
#define STEEL_ENGINE_IMAGES_H

#include "base/budget.h"
#include "base/buf.h"
#include "engine/engine.h"
#include "text/tokenizer/tokenizer.h"
#include "vision/encoder.h"

#include <jansson.h>

enum { IMAGES_WHERE = 64 };

/* Features of recent images, by content; one per engine. */
struct image_cache;
enum { IMAGE_KEYS = 8 };
struct image_cache *image_cache_new(void);
/* Before the first image: the secrets of content ids, in place of this process's own. */
void image_cache_keys(struct image_cache *c, const uint64_t keys[IMAGE_KEYS]);
void image_cache_free(struct image_cache *c);
/* Seconds so far, of all callers. */
struct image_times {
    double decode;  /* files become pixels */
    double patches; /* resizing, normalising, cutting */
};
void image_cache_times(struct image_cache *c, struct image_times *out);

struct image_rules {
    int64_t max_pixels;      /* of an image; 0 = IMAGE_DEFAULT_PIXELS */
    const atomic_bool *stop; /* true: the work ends early with an error; NULL = never */
    struct budget *budget;   /* of decoding; NULL = no limit */
    const char *salt;        /* NULL = none */
    /* Gets the bytes at an http or https URL, in memory that belongs to no job. NULL = such URLs are refused. */
    bool (*fetch)(void *arg, const char *url, const atomic_bool *stop, struct buf *out,
                  struct error *err);
    void *fetch_arg;
};

struct prompt_images;
/* NULL: the model reads text only. The functions below then do nothing. */
struct prompt_images *prompt_images_new(struct engine *e, const struct image_rules *rules);
void prompt_images_free(struct prompt_images *m);
/* The same, after the job that used it was abandoned (mem.h). */
void prompt_images_abandon(struct prompt_images *m);
/* The same of prompt_images_encode: the images are as before it. */
void prompt_images_encode_abandon(struct prompt_images *m);
int prompt_images_count(const struct prompt_images *m);

/* Images added from now on: whether few details are enough (encoder_low_config). */
void prompt_images_set_low(struct prompt_images *m, bool low);
/* Appends the mark of an image. Errors begin with `where`. */
bool prompt_images_add(struct prompt_images *m, const void *bytes, size_t n, const char *where,
                       struct buf *out, struct error *err);

/* The same; takes the memory of `bytes`, which is the current job's. */
bool prompt_images_give(struct prompt_images *m, struct buf *bytes, const char *where,
                        struct buf *out, struct error *err);

/* The same of a string of base64. */
bool prompt_images_add_base64(struct prompt_images *m, const json_t *v, const char *where,
                              struct buf *out, struct error *err);
/* Whether a text has the model's own mark of a feature. */
bool prompt_images_has_mark(const struct prompt_images *m, const char *text, size_t n);

/* The same of an image at an http or https URL. */
bool prompt_images_add_url(struct prompt_images *m, const char *url, const char *where,
                           struct buf *out, struct error *err);

/* image_parts.c */
/* Whether a part of a message is an image: image_url, input_image or image. */
bool image_is_part(const json_t *part);
bool prompt_images_add_part(struct prompt_images *m, const json_t *part, const char *where,
                            struct buf *out, struct error *err);
/* Takes the images out of messages: each becomes its mark, in one text part with the texts beside it. Also in tool
 * results. A new reference; NULL with err. */
json_t *prompt_images_take(struct prompt_images *m, const json_t *messages, struct error *err);
/* The same of a body of Ollama, whose images are lists of base64 beside a text. */
json_t *prompt_images_take_lists(struct prompt_images *m, const json_t *body, struct error *err);

/* Replaces the marks in a rendered prompt by the model's own, which depend on the images' sizes. */
bool prompt_images_show(struct prompt_images *m, struct buf *prompt, struct error *err);
/* Repeats the placeholders among the prompt's tokens, one for each feature. */
bool prompt_images_expand(struct prompt_images *m, struct token_list *ids, struct error *err);
/* Computes the features. Not for a prompt longer than the context, which the engine refuses. */
bool prompt_images_encode(struct prompt_images *m, struct error *err);
/* Sets spec's embeddings and positions. m keeps ownership. */
void prompt_images_submit(const struct prompt_images *m, struct request_spec *spec);
/* Releases the features. prompt_images_encode finds them again. */
void prompt_images_rest(struct prompt_images *m);

#endif
