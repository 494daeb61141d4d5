/*
 * libFuzzer entry for the chat parser. The first byte picks the format, the second options, the third the split points and, by
 * sixteenths, the marks of thinking. The rest is the model's text. Every split must give the same message as the whole text.
 */
#include "base/error.h"
#include "text/chat/chat_parse.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static json_t *parse(const uint8_t *data, size_t size, uint32_t cuts, uint8_t format, uint8_t how,
                     enum chat_thoughts thoughts)
{
    struct chat_message m = {0};
    struct chat_parse_options opt = {.thoughts = thoughts,
                                     .tools = !(how & 8),
                                     .reasoning = !(how & 16),
                                     .in_reasoning = how & 32,
                                     .continues = how & 64,
                                     .event = chat_message_event,
                                     .arg = &m};
    struct chat_parser *p = chat_parser_new((enum chat_format)(format % CHAT_N_FORMATS), &opt);
    while (size) {
        size_t n = cuts ? 1 + (cuts >> 24) % 9 : size; /* cuts 0: not split */
        cuts = cuts ? (cuts * 1664525 + 1013904223) | 1 : 0;
        n = n > size ? size : n;
        chat_parser_push(p, (const char *)data, n);
        data += n;
        size -= n;
    }
    chat_parser_finish(p);
    chat_parser_free(p);
    json_t *j = chat_message_json(&m);
    chat_message_clear(&m);
    return j;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 3)
        return 0;
    enum chat_thoughts thoughts = (enum chat_thoughts)(data[2] / 16 % CHAT_N_THOUGHTS);
    json_t *whole = parse(data + 3, size - 3, 0, data[0], data[1], thoughts);
    json_t *split = parse(data + 3, size - 3, data[2] + 1u, data[0], data[1], thoughts);
    CHECK(json_equal(whole, split), "a split changed the message");
    json_decref(whole);
    json_decref(split);
    return 0;
}
