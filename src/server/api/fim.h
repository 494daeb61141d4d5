/* Fill-in-the-middle prompts, for /infill and `suffix`. */
#ifndef STEEL_SERVER_FIM_H
#define STEEL_SERVER_FIM_H

#include "server/api/server_int.h"

struct fim_source {
    const json_t *prefix, *suffix; /* strings */
    const json_t *prompt;          /* string that continues the prefix; NULL = none */
    const json_t *extra;           /* array of {filename, text}, other files; NULL = none */
    int room; /* tokens of the prompt: the text farthest from the cursor is cut; 0 = never */
    bool cut; /* set: text was cut */
};

/* On a worker: adds the prompt. False with an error; `param` is the field to blame where the model has
 * no fill-in-the-middle tokens, and `status` is the error's. */
bool fim_add_prompt(struct api_request *req, struct fim_source *src, int status, const char *param);

#endif
