/* libFuzzer entry: files of saved prefixes. The shape that is wanted is read from the input's own head, and the
 * checksums of head and ids are made right, so that the parts behind them are reached. */
#include "engine/prefix_file.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_TOKENS = 64, MOST_RECORD = 4096, HEAD = 104, IDS_SUM = 88, HEAD_SUM = 96 };

static uint64_t number(const uint8_t *p)
{
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static void put(uint8_t *p, uint64_t v)
{
    memcpy(p, &v, sizeof v);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint8_t b[1 << 16], record[MOST_RECORD];
    struct prefix_shape want = {.page_len = 4, .page_bytes = 8};
    struct error err = {0};
    if (size > sizeof b)
        return 0;
    if (size)
        memcpy(b, data, size);
    if (size >= HEAD) {
        uint32_t len;
        memcpy(&len, b + 12, sizeof len);
        want = (struct prefix_shape){.model = {number(b + 16), number(b + 24)},
                                     .owner = {number(b + 32), number(b + 40)},
                                     .page_bytes = number(b + 48) % MOST_RECORD,
                                     .state_bytes = number(b + 56) % MOST_RECORD,
                                     .page_len = len ? len : 1};
        uint64_t n = number(b + 72) % (MOST_TOKENS * 2), states = number(b + 80) % 8;
        if (HEAD + (n + states) * 8 <= size)
            put(b + IDS_SUM,
                prefix_checksum(prefix_checksum(1, b + HEAD, n * 8), b + HEAD + n * 8, states * 8));
        put(b + HEAD_SUM, prefix_checksum(0, b, HEAD_SUM));
    }
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    CHECK(fd >= 0 && write(fd, b, size) == (ssize_t)size, "no file");
    struct prefix_reader *r = prefix_reader_open_fd(fd, &want, MOST_TOKENS, &err);
    if (!r) {
        CHECK(err.msg[0] && !strchr(err.msg, '\n'), "a refusal without a reason");
        return 0;
    }
    const struct prefix_ids *ids = prefix_reader_ids(r);
    CHECK(ids->n_tokens > 0 && ids->n_tokens <= MOST_TOKENS, "%d tokens", ids->n_tokens);
    CHECK(!ids->n_states || ids->places[ids->n_states - 1] == (uint64_t)ids->n_tokens, "places");
    int n_pages = (int)(((uint64_t)ids->n_tokens + want.page_len - 1) / want.page_len);
    for (int i = 0; i < n_pages + ids->n_states; i++)
        CHECK(prefix_reader_record(r, i, record, &err), "record %d: %s", i, err.msg);
    CHECK(prefix_reader_bytes(r) == size, "%zu bytes", size);
    prefix_reader_free(r);
    return 0;
}
