/*
 * The formats of JSON Schema as regular expressions. They are as strict as their standards where
 * those are regular: valid calendar days, no leading zeros in IPv4, one "::" in IPv6. Unknown
 * formats are ignored, as the specification says. Standard formats that are not regular (or not
 * implemented) are rejected.
 */
#include "text/grammar/schema_int.h"

#include <string.h>

#define YEAR "[0-9]{4}"
#define DAY                                                                                        \
    "(" YEAR "-(((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01]))|((0[469]|11)-(0[1-9]|[12][0-9]|30))|"  \
    "(02-(0[1-9]|1[0-9]|2[0-8])))|"                                                                \
    "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
#define HOUR   "([01][0-9]|2[0-3])"
#define OFFSET "([Zz]|[+-]" HOUR ":[0-5][0-9])"
#define TIME   HOUR ":[0-5][0-9]:[0-5][0-9](\\.[0-9]+)?" OFFSET
#define CLOCK  "([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
#define LABEL  "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
#define SHORT  "[A-Za-z0-9]([A-Za-z0-9-]{0,22}[A-Za-z0-9])?"
/* At most 253 characters: three labels of any length, or ten of up to 24. */
#define HOST "(" LABEL "(\\." LABEL "){0,2}|" SHORT "(\\." SHORT "){0,9})"
#define BYTE "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
#define IPV4 BYTE "(\\." BYTE "){3}"
#define H16  "[0-9A-Fa-f]{1,4}"
#define LS32 "(" H16 ":" H16 "|" IPV4 ")"
#define IPV6                                                                                       \
    "((" H16 ":){6}" LS32 "|::(" H16 ":){5}" LS32 "|(" H16 ")?::(" H16 ":){4}" LS32 "|((" H16      \
    ":){0,1}" H16 ")?::(" H16 ":){3}" LS32 "|((" H16 ":){0,2}" H16 ")?::(" H16 ":){2}" LS32        \
    "|((" H16 ":){0,3}" H16 ")?::" H16 ":" LS32 "|((" H16 ":){0,4}" H16 ")?::" LS32 "|((" H16      \
    ":){0,5}" H16 ")?::" H16 "|((" H16 ":){0,6}" H16 ")?::)"
#define ATEXT "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
#define PCT   "%[0-9A-Fa-f]{2}"
#define UNRES "A-Za-z0-9._~\\-"
#define SUBD  "!$&'()*+,;="
#define PCHAR "([" UNRES SUBD ":@]|" PCT ")"
#define AUTHORITY                                                                                  \
    "(([" UNRES SUBD ":]|" PCT ")*@)?(\\[(" IPV6 "|[vV][0-9A-Fa-f]+\\.[" UNRES SUBD ":]+)\\]|"     \
    "([" UNRES SUBD "]|" PCT ")*)(:[0-9]*)?"
#define TAIL "(\\?(" PCHAR "|[/?])*)?(#(" PCHAR "|[/?])*)?"
#define URI                                                                                        \
    "[A-Za-z][A-Za-z0-9+.-]*:(//" AUTHORITY "(/" PCHAR "*)*|/(" PCHAR "+(/" PCHAR "*)*)?|" PCHAR   \
    "+(/" PCHAR "*)*)?" TAIL
#define SEG_NC "([" UNRES SUBD "@]|" PCT ")"
#define URI_REF                                                                                    \
    "(" URI "|(//" AUTHORITY "(/" PCHAR "*)*|/(" PCHAR "+(/" PCHAR "*)*)?|" SEG_NC "+(/" PCHAR     \
    "*)*)?" TAIL ")"

static const struct {
    const char *name, *pattern; /* NULL: rejected */
} formats[] = {
    {"date", DAY},
    {"time", TIME},
    {"date-time", "(" DAY ")[Tt]" TIME},
    {"duration",
     "P(([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)(T" CLOCK ")?|T" CLOCK "|[0-9]+W)"},
    {"email",
     ATEXT "+(\\." ATEXT "+)*@(" LABEL "(\\." LABEL ")*|\\[" IPV4 "\\]|\\[IPv6:" IPV6 "\\])"},
    {"hostname", HOST},
    {"ipv4", IPV4},
    {"ipv6", IPV6},
    {"uri", URI},
    {"uri-reference", URI_REF},
    {"uuid", "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"},
    {"json-pointer", "(/([^~/]|~[01])*)*"},
    {"relative-json-pointer", "(0|[1-9][0-9]*)(#|(/([^~/]|~[01])*)*)"},
    /* Restricted to their ASCII subset. */
    {"idn-email", ATEXT "+(\\." ATEXT "+)*@" LABEL "(\\." LABEL ")*"},
    {"idn-hostname", HOST},
    {"iri", URI},
    {"iri-reference", URI_REF},
    {"uri-template", NULL},
    {"regex", NULL},
};

enum format_known schema_format(struct schema *s, const char *name, size_t len, uint32_t *term)
{
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        const char *p = formats[i].pattern;
        if (strlen(formats[i].name) != len || memcmp(formats[i].name, name, len))
            continue;
        if (!p)
            return FORMAT_REFUSED;
        struct error err = {0};
        *term = re_parse(s->pool, p, strlen(p), 0, &err);
        CHECK(!err.msg[0] || re_pool_error(s->pool), "format %s: %s", formats[i].name, err.msg);
        if (strstr(formats[i].name, "hostname")) { /* no punycode: it is not validated */
            static const char coded[] = "(.*\\.)?..--.*";
            uint32_t x = re_parse(s->pool, coded, sizeof coded - 1, 0, NULL);
            *term = re_and(s->pool, *term, re_not(s->pool, x));
        }
        return FORMAT_TERM;
    }
    return FORMAT_UNKNOWN;
}
