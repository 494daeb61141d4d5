/*
 * The pre-tokenizers that GGUF files name ("tokenizer.ggml.pre"): the regexes of the model's
 * tokenizer.json, plus settings implied by the name (ignore_merges, BOS by default, NFC). An
 * unknown name is refused: a wrong split would silently degrade the model.
 */
#include "base/mem.h"
#include "text/tokenizer/tokenizer_impl.h"

#include <string.h>

enum { MAX_REGEXES = 6 };
enum {
    IGNORE_MERGES = 1,
    ADD_BOS = 2,
    NFC = 4,
    ADD_SEP = 8, /* a separator after the text, as in BERT */
};

/* The published pattern of GPT-2 and its successors. */
#define GPT2         "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
#define CONTRACTIONS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define SPACES       "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define OTHERS       " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
#define CL100K(NUM)  CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" NUM "|" OTHERS SPACES
#define QWEN35                                                                                     \
    CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| "                                 \
                 "?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|" SPACES

/* Words by case: capitals followed by small letters, or small letters alone. */
#define UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define CASED(UP, LOW, TAIL)                                                                       \
    "[^\\r\\n\\p{L}\\p{N}]?" UP "*" LOW "+" TAIL "|[^\\r\\n\\p{L}\\p{N}]?" UP "+" LOW "*" TAIL "|"
#define O200K(NUM, TAIL) CASED(UPPER, LOWER, TAIL) NUM "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|" SPACES
#define NO_HAN(SET)      "[" SET "&&[^\\p{Han}]]"

#define DEEPSEEK3                                                                                  \
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|"                                       \
    "[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*|" SPACES
#define CJK   "[\\x{4E00}-\\x{9FA5}\\x{3040}-\\x{309F}\\x{30A0}-\\x{30FF}]+"
#define ASIAN "[\\x{4E00}-\\x{9FA5}\\x{0800}-\\x{4E00}\\x{AC00}-\\x{D7FF}]+"
#define BLOOM " ?[^(\\s|.,!?\\x{2026}\\x{3002}\\x{FF0C}\\x{3001}\\x{0964}\\x{06D4}\\x{060C})]+"

/* The letters that DeepSeek's first models list individually. */
#define DEEPSEEK_LETTERS                                                                           \
    "A-Za-z\\x{B5}\\x{C0}-\\x{D6}\\x{D8}-\\x{F6}\\x{F8}-\\x{1BA}\\x{1BC}-\\x{1BF}"                 \
    "\\x{1C4}-\\x{293}\\x{295}-\\x{2AF}\\x{370}-\\x{373}\\x{376}\\x{377}\\x{37B}-\\x{37D}"         \
    "\\x{37F}\\x{386}\\x{388}-\\x{38A}\\x{38C}\\x{38E}-\\x{3A1}\\x{3A3}-\\x{3F5}"                  \
    "\\x{3F7}-\\x{481}\\x{48A}-\\x{52F}\\x{531}-\\x{556}\\x{10A0}-\\x{10C5}"                       \
    "\\x{13A0}-\\x{13F5}\\x{13F8}-\\x{13FD}\\x{1C90}-\\x{1CBA}\\x{1CBD}-\\x{1CBF}"                 \
    "\\x{1D00}-\\x{1D2B}\\x{1D6B}-\\x{1D77}\\x{1D79}-\\x{1D9A}\\x{1E00}-\\x{1F15}"                 \
    "\\x{1F18}-\\x{1F1D}\\x{1F20}-\\x{1F45}\\x{1F48}-\\x{1F4D}\\x{1F50}-\\x{1F57}"                 \
    "\\x{1F59}\\x{1F5B}\\x{1F5D}\\x{1F5F}-\\x{1F7D}\\x{1F80}-\\x{1FB4}\\x{1FB6}-\\x{1FBC}"         \
    "\\x{1FBE}\\x{1FC2}-\\x{1FC4}\\x{1FC6}-\\x{1FCC}\\x{1FD0}-\\x{1FD3}"                           \
    "\\x{1FD6}-\\x{1FDB}\\x{1FE0}-\\x{1FEC}\\x{1FF2}-\\x{1FF4}\\x{1FF6}-\\x{1FFC}"                 \
    "\\x{2102}\\x{2107}\\x{210A}-\\x{2113}\\x{2115}\\x{2119}-\\x{211D}\\x{2124}\\x{2126}"          \
    "\\x{2128}\\x{212A}-\\x{212D}\\x{212F}-\\x{2134}\\x{2139}\\x{213C}-\\x{213F}"                  \
    "\\x{2145}-\\x{2149}\\x{214E}\\x{2183}\\x{2184}\\x{2C00}-\\x{2C7B}\\x{2C7E}-\\x{2CE4}"         \
    "\\x{2CEB}-\\x{2CEE}\\x{2CF2}\\x{2CF3}\\x{A640}-\\x{A66D}\\x{A680}-\\x{A69B}"                  \
    "\\x{A722}-\\x{A76F}\\x{A771}-\\x{A787}\\x{A78B}-\\x{A78E}\\x{AB70}-\\x{ABBF}"                 \
    "\\x{FB00}-\\x{FB06}\\x{FB13}-\\x{FB17}\\x{FF21}-\\x{FF3A}\\x{FF41}-\\x{FF5A}"                 \
    "\\x{10400}-\\x{1044F}\\x{104B0}-\\x{104D3}\\x{104D8}-\\x{104FB}\\x{10C80}-\\x{10CB2}"         \
    "\\x{10CC0}-\\x{10CF2}\\x{118A0}-\\x{118DF}\\x{1E900}-\\x{1E943}"

static const struct pre_preset {
    const char *names; /* separated by spaces */
    int flags;
    const char *regexes[MAX_REGEXES]; /* applied in order */
} table[] = {
    {"gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum exaone4 jais "
     "trillion granite-docling",
     0,
     {GPT2}},
    {"mpt olmo modern-bert", NFC, {GPT2}},
    {"jina-v1-en jina-v2-code roberta-bpe", ADD_SEP, {GPT2}},
    {"llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
     IGNORE_MERGES | ADD_BOS,
     {CL100K("\\p{N}{1,3}")}},
    {"dbrx smaug-bpe glm4 chatglm-bpe", 0, {CL100K("\\p{N}{1,3}")}},
    {"qwen2 deepseek-r1-qwen megrez kormo f2llmv2", NFC, {CL100K("\\p{N}")}},
    {"stablelm2 hunyuan solar-open grok-2", 0, {CL100K("\\p{N}")}},
    {"qwen35", NFC, {QWEN35}},
    {"minicpm5", IGNORE_MERGES, {"\\p{N}{1,3}", CL100K("\\p{N}+")}},
    {"laguna", 0, {"[^\\n]+|[\\n]+", CL100K("\\p{N}")}},
    {"jais-2",
     0,
     {CONTRACTIONS
      "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|" OTHERS
      "\\s*[\\r\\n]+|\\s{512}(?!\\S)|\\s{256}(?!\\S)|\\s{128}(?!\\S)|\\s{64}(?!\\S)|"
      "\\s{32}(?!\\S)|\\s{16}(?!\\S)|\\s{8}(?!\\S)|\\s{4}(?!\\S)|\\s{1,2}(?!\\S)|\\s{1}"}},
    {"seed-coder",
     0,
     {CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\\r\\n]+|" SPACES}},
    {"bailingmoe bailingmoe2 llada-moe",
     0,
     {"'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|"
      "\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"}},
    {"exaone-moe",
     0,
     {CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?(?:\\p{L}\\p{M}*(?: \\p{L}\\p{M}*)*)+|\\p{N}|"
                   " ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]?|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"}},
    {"gpt-4o llama4 kanana2 talkie minimax-m2", 0, {O200K("\\p{N}{1,3}", CONTRACTIONS "?")}},
    {"granite-embed-multi-97m", IGNORE_MERGES, {O200K("\\p{N}{1,3}", CONTRACTIONS "?")}},
    {"tiny_aya cohere2moe",
     0,
     {"\\d{1,3}(?=(?:\\d{3})*\\b)", O200K("\\p{N}{1,3}", CONTRACTIONS "?")}},
    {"tekken", IGNORE_MERGES | ADD_BOS, {O200K("\\p{N}", "")}},
    {"youtu",
     IGNORE_MERGES,
     {"[\\x{AC00}-\\x{D7A3}\\x{3131}-\\x{318E}]+|[\\x{FF01}\\x{2026}\\x{201C}\\x{201D}\\x{2018}"
      "\\x{2019}\\x{2014}\\x{FF1A}\\x{FF1B}\\x{FF0C}\\x{3001}-\\x{303F}\\x{FE30}-\\x{FE4F}]+|"
      "[\\x{3105}-\\x{312F}]+|" CJK,
      O200K("\\p{N}", CONTRACTIONS "?")}},
    {"kimi-k2",
     0,
     {"[\\p{Han}]+|" CASED(NO_HAN("\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}"),
                           NO_HAN("\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}"),
                           CONTRACTIONS "?") "\\p{N}{1,3}|" OTHERS SPACES}},
    {"deepseek-llm",
     0,
     {"[\\r\\n]", "\\s?[" DEEPSEEK_LETTERS "]+",
      "\\s?[!-/:-~\\x{FF01}-\\x{FF0F}\\x{FF1A}-\\x{FF5E}\\x{2018}-\\x{201F}\\x{3000}-\\x{3002}]+",
      "\\s+$", ASIAN, "\\p{N}+"}},
    {"deepseek-coder", 0, {"[\\r\\n]", "\\s?\\p{L}+", "\\s?\\p{P}+", ASIAN, "\\p{N}"}},
    {"deepseek-v3 hunyuan-dense joyai-llm", 0, {"\\p{N}{1,3}", CJK, DEEPSEEK3}},
    {"afmoe",
     0,
     {/* groups of three counted from the right: the first group has the one or two left over */
      "(?<!\\p{N})\\p{N}{1,2}(?=(?:\\p{N}{3})+(?!\\p{N}))|\\p{N}{1,3}",
      "[\\x{4E00}-\\x{9FFF}\\x{3400}-\\x{4DBF}\\x{F900}-\\x{FAFF}\\x{3040}-\\x{309F}\\x{30A0}-"
      "\\x{30FF}\\x{FF65}-\\x{FF9F}\\x{2F00}-\\x{2FDF}\\x{0E40}-\\x{0E7F}\\x{0E80}-\\x{0EFF}"
      "\\x{1780}-\\x{17FF}\\x{1000}-\\x{109F}\\x{AA60}-\\x{AA7F}\\x{A9E0}-\\x{A9FF}\\x{AC00}-"
      "\\x{D7AF}\\x{1100}-\\x{11FF}]+",
      DEEPSEEK3}},
    {"falcon", 0, {"[\\p{P}\\$\\+<=>\\^~\\|`]+", GPT2, "[0-9][0-9][0-9]"}},
    {"default", 0, {"[\\p{P}\\$\\+<=>\\^~\\|]+", GPT2, "\\p{N}+", "[0-9][0-9][0-9]"}},
    {"starcoder refact smollm codeshell exaone minerva-7b mellum2", 0, {"\\p{N}", GPT2}},
    {"command-r", NFC, {"\\p{N}", GPT2}},
    {"chameleon",
     ADD_BOS,
     {"<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", "([\\t\\n]|    |  )", "\\p{N}",
      "[\\p{P}!-/:-@\\[-`{-~]", GPT2}},
    {"poro-chat bloom gpt3-finnish", 0, {BLOOM}},
    {"viking", 0, {BLOOM, "\\p{N}"}},
    {"superbpe", 0, {"\\p{N}+", "(?=(\\d{3})+(?!\\d))"}},
};

static const struct pre_preset *find_named(const char *name)
{
    size_t n = strlen(name);
    if (!n || strchr(name, ' '))
        return NULL;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        for (const char *p = table[i].names; (p = strstr(p, name)); p += n)
            if ((p == table[i].names || p[-1] == ' ') && (!p[n] || p[n] == ' '))
                return &table[i];
    return NULL;
}

bool pretokenizer_named(struct tokenizer *t, const char *name, struct error *err)
{
    const struct pre_preset *e = find_named(name);
    if (!e)
        return error_set(err, "tokenizer.ggml.pre: pre-tokenizer \"%.60s\" is not supported", name);
    for (int i = 0; i < MAX_REGEXES && e->regexes[i]; i++) {
        struct pre_step *s = pretokenizer_add(&t->pretokenizer, PRE_REGEX);
        const char *re = e->regexes[i];
        s->split = split_find(re, strlen(re));
        if (!s->split && !(s->re = regex_new(re, strlen(re), false, err)))
            return error_prefix(err, "tokenizer.ggml.pre: \"%s\"", name);
    }
    pretokenizer_add(&t->pretokenizer, PRE_BYTES);
    if (e->flags & NFC)
        normalizer_add(&t->normalizer, NORM_FORM)->form = NORMAL_NFC;
    t->bpe.ignore_merges = e->flags & IGNORE_MERGES;
    t->add_bos = e->flags & ADD_BOS;
    t->add_sep = e->flags & ADD_SEP;
    return true;
}

const char *pretokenizer_name_at(size_t i)
{
    return i < sizeof table / sizeof *table ? table[i].names : NULL;
}
