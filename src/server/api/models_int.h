/* Shared by the files of the registry of models: models.c (choosing, deciding), models_load.c (the loader),
 * models_list.c (what is told). */
#ifndef STEEL_SERVER_MODELS_INT_H
#define STEEL_SERVER_MODELS_INT_H

#include "server/api/models.h"
#include "server/http/api_error.h"

enum {
    FAILED_AGAIN_S = 5, /* a model that could not be loaded is not tried again before */
    RETIRE_AFTER_S = 2, /* a request waits this long before a busy model retires for it */
};

void model_entry_free(struct model_entry *e);
bool model_has_name(const struct model_entry *e, const char *asked); /* or an alias */
const char *model_task_word(enum model_task task);
/* The error of a model that could not be loaded. The reason may name a path, so it is for the log only. */
void model_refuse_failed(struct api_error *err, const struct model_entry *e);
void loaded_log(const struct loaded *l); /* a line about a model that was loaded */

#endif
