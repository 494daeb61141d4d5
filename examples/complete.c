/*
 * Several prompts at once through the library:
 *
 *   complete MODEL.gguf 'Once upon a time' 'The capital of France is'
 *
 * All prompts are submitted together and batched in every step of the model. Each line of output is
 * printed as soon as its answer is complete. Build: make examples
 */
#include <steel.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct answer {
    const char *prompt;
    struct steel_request *request;
    char text[4096];
    size_t n;
};

int main(int argc, char **argv)
{
    if (argc < 3) {
        fprintf(stderr, "usage: %s MODEL PROMPT...\n", argv[0]);
        return 2;
    }
    struct steel_error error = {0};
    struct steel_engine *engine = steel_engine_open(argv[1], NULL, &error);
    if (!engine) {
        fprintf(stderr, "%s\n", error.message);
        return 1;
    }
    int n = argc - 2, left = 0;
    struct answer *answers = calloc((size_t)n, sizeof *answers);
    struct steel_queue *queue = steel_queue_new();
    for (int i = 0; i < n; i++) {
        struct steel_request_options o = steel_request_options();
        o.text = answers[i].prompt = argv[i + 2];
        o.max_tokens = 40;
        o.temperature = 0;
        o.queue = queue;
        o.user = &answers[i];
        answers[i].request = steel_request_submit(engine, &o, &error);
        if (answers[i].request)
            left++;
        else
            fprintf(stderr, "%s: %s\n", o.text, error.message);
    }
    int rc = left == n ? 0 : 1;
    struct steel_event ev;
    while (left > 0 && steel_queue_next(queue, &ev, -1)) {
        struct answer *a = ev.user;
        size_t room = sizeof a->text - 1 - a->n, take = ev.n_text < room ? ev.n_text : room;
        memcpy(a->text + a->n, ev.text, take);
        a->n += take;
        if (ev.kind != STEEL_DONE)
            continue;
        left--;
        printf("%s%s\n", a->prompt, a->text);
        fprintf(stderr, "  %d prompt tokens (%d cached), %d generated, first after %.0f ms\n",
                ev.n_prompt, ev.n_cached, ev.n_generated, ev.first_token_s * 1e3);
        if (ev.finish == STEEL_FAILED) {
            fprintf(stderr, "  failed: %s\n", ev.error);
            rc = 1;
        }
    }
    for (int i = 0; i < n; i++)
        steel_request_free(answers[i].request);
    steel_queue_free(queue);
    steel_engine_close(engine);
    free(answers);
    return rc;
}
