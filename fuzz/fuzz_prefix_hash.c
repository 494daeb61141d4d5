/* libFuzzer entry: a request's body through the gateway's prefix hashing. Fields are within the body,
 * hashes are in order, and text after a list's last member does not change the hashes before it. */
#include "route/prefix_hash.h"
#include "base/error.h"

#include <stdlib.h>
#include <string.h>

static struct prefix_hashes one, two;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *body = malloc(size ? size : 1); /* exact size, so that reads past its end are detected */
    struct body_fields f;
    char text[64];
    if (!body)
        return 0;
    memcpy(body, data, size);
    body_fields_find(body, size, &f);
    const struct body_span *spans = &f.model;
    for (size_t i = 0; i < sizeof f / sizeof *spans; i++)
        CHECK(!spans[i].p || (spans[i].p >= body && spans[i].p + spans[i].n <= body + size),
              "field %zu is outside", i);
    body_span_text(&f.model, text, sizeof text);
    body_span_text(&f.previous, text, sizeof text);
    prefix_hashes_make(&f, 7, &one);
    CHECK(one.n <= HASHES_MAX && (!one.n || one.at[one.n - 1] <= one.length), "too many hashes");
    for (int i = 1; i < one.n; i++)
        CHECK(one.at[i] > one.at[i - 1], "hashes out of order");
    /* The same list with one more member begins with the same hashes. */
    struct body_span m = f.messages;
    if (m.p && m.n > 2 && m.p[0] == '[' && m.p[m.n - 1] == ']') {
        static const char more[] =
            ",{\"role\":\"user\",\"content\":\"and then there was one more\"}]";
        char *longer = malloc(m.n + sizeof more);
        if (longer) {
            memcpy(longer, m.p, m.n - 1);
            memcpy(longer + m.n - 1, more, sizeof more - 1);
            f.messages = (struct body_span){longer, m.n - 1 + sizeof more - 1};
            prefix_hashes_make(&f, 7, &two);
            CHECK(two.n >= one.n && !memcmp(one.hash, two.hash, (size_t)one.n * sizeof *one.hash),
                  "another beginning");
        }
        free(longer);
    }
    free(body);
    return 0;
}
