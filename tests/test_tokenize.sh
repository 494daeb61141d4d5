#!/bin/sh
# steel tokenize and detokenize as a user meets them: readable output, ids, JSON lines, the way back,
# exit codes and messages. Uses a tokenizer.json written here.
set -u
B=${1:-build}
steel=$B/steel
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
failures=0

python3 - "$tmp" <<'PY' || exit 1
import json, os, sys
dir = sys.argv[1]
def spelled(b):
    keep = list(range(0x21, 0x7f)) + list(range(0xa1, 0xad)) + list(range(0xae, 0x100))
    return chr(b) if b in keep else chr(0x100 + [x for x in range(256) if x not in keep].index(b))
vocab = {spelled(i): i for i in range(256)}
merges = []
for a, b in ["He", "ll", ("He", "ll"), ("Hell", "o"), ("Ġ", "w")]:
    merges.append([a, b])
    vocab[a + b] = len(vocab)
added = [{"id": len(vocab), "content": "<s>", "special": True, "normalized": False},
         {"id": len(vocab) + 1, "content": "<|im_end|>", "special": True, "normalized": False}]
json.dump({"added_tokens": added, "normalizer": None,
           "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
           "decoder": {"type": "ByteLevel"},
           "post_processor": {"type": "TemplateProcessing",
                              "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],
                              "special_tokens": {"<s>": {"ids": [added[0]["id"]]}}},
           "model": {"type": "BPE", "vocab": vocab, "merges": merges}},
          open(os.path.join(dir, "tokenizer.json"), "w"))
PY

# same WANT COMMAND...: stdout is exactly WANT
same() {
    want=$1
    shift
    got=$("$@" 2>"$tmp/err")
    if [ "$got" != "$want" ]; then
        printf 'FAIL: %s\n  want: %s\n  got:  %s\n' "$*" "$want" "$got"
        cat "$tmp/err"
        failures=$((failures + 1))
    fi
}
# fails CODE PATTERN COMMAND...: exit code, one line on stderr, nothing on stdout
fails() {
    code=$1 pattern=$2
    shift 2
    "$@" >"$tmp/out" 2>"$tmp/err"
    rc=$?
    if [ $rc != "$code" ] || ! grep -q -e "$pattern" "$tmp/err" || [ -s "$tmp/out" ]; then
        printf 'FAIL: %s: exit %s\n' "$*" $rc
        cat "$tmp/out" "$tmp/err"
        failures=$((failures + 1))
    fi
}

m=$tmp/tokenizer.json
same '259 260 111 114 108 100' "$steel" tokenize "$m" --ids 'Hello world'
same '259 260 111 114 108 100' "$steel" tokenize "$tmp" --ids 'Hello world' # the folder
same '261 259' "$steel" tokenize "$m" --ids --bos Hello
same '261 259' "$steel" tokenize "$m" --ids --bos '<s>Hello'
same '259 262' "$steel" tokenize "$m" --ids 'Hello<|im_end|>'
same '60 115 62' "$steel" tokenize "$m" --ids --no-special '<s>'
same '' "$steel" tokenize "$m" ''
same "$(printf '     259  "Hello"\n      10  "\\n"\n     195  "\\xc3"\n     169  "\\xa9"\n     261  "<s>"  control')" \
    "$steel" tokenize "$m" "$(printf 'Hello\né<s>')"
same '259 10' sh -c "echo Hello | $steel tokenize $m --ids"
same 'Hello world<s>' "$steel" detokenize "$m" 259 260 111 114 108 100 261
same 'Hello' "$steel" detokenize "$m" --no-special 261 259
same 'Hello' "$steel" detokenize "$m" '[261, 259]' --no-special
same 'Hello' sh -c "echo 259 | $steel detokenize $m"
printf '{"text": "Hello"}\n\n{"text": "\\u00e9\\u0000"}\n' >"$tmp/in"
same "$(printf '{"ids": [259]}\n{"ids": [195, 169, 0]}')" sh -c "$steel tokenize $m --jsonl <$tmp/in"
same "$(printf '{"text": "Hello"}\n{"text": "é\\u0000"}')" \
    sh -c "$steel tokenize $m --jsonl <$tmp/in | $steel detokenize $m --jsonl"
same '{"text": "�H"}' sh -c "echo '{\"ids\": [195, 72]}' | $steel detokenize $m --jsonl"

# any bytes come back as they were
head -c 100000 /dev/urandom >"$tmp/bytes"
"$steel" tokenize "$m" --ids <"$tmp/bytes" | "$steel" detokenize "$m" >"$tmp/back"
cmp "$tmp/bytes" "$tmp/back" || failures=$((failures + 1))

fails 1 'no-such: No such file' "$steel" tokenize "$tmp/no-such" hi
fails 1 'id 999 is not in the vocabulary of 263 tokens' "$steel" detokenize "$m" 999
fails 1 '"x" is not a token id' "$steel" detokenize "$m" x
fails 1 'line 2: "text" is not a string' \
    sh -c "printf '\n{\"txt\": 1}\n' | $steel tokenize $m --jsonl"
fails 1 'line 1: ' sh -c "echo '{' | $steel tokenize $m --jsonl"
fails 2 'standard input, not TEXT' "$steel" tokenize "$m" hi --jsonl
fails 2 'unknown option' "$steel" tokenize "$m" hi --frob
sed 's/"BPE"/"Magic"/' "$m" >"$tmp/bad.json"
fails 1 'bad.json: model.type: "Magic" is not supported' "$steel" tokenize "$tmp/bad.json" hi
[ $failures = 0 ] && echo "all well"
exit $failures
