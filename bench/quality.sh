#!/bin/sh
# The quality of each quantisation of a model: bench/quality.sh MODEL.gguf TEXT [TYPE...]
# MODEL is F32, F16 or BF16. Prints size, perplexity, KL to MODEL and same top token, as Markdown.
set -e
[ $# -ge 2 ] || { sed -n 2,3p "$0" >&2; exit 2; }
steel=${STEEL:-build/steel} model=$1 text=$2
shift 2
[ $# -gt 0 ] || set -- Q8_0 Q6_K Q5_K_M Q5_1 Q5_0 Q4_K_M Q4_1 Q4_0 IQ4_NL IQ4_XS MXFP4 Q3_K_M IQ3_S Q2_K
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT INT TERM
measure() { # name file [--kl base]
    name=$1 file=$2
    shift 2
    "$steel" perplexity "$file" "$text" "$@" 2>/dev/null | awk -v n="$name" -v s="$(wc -c <"$file")" '
        /^perplexity/ { p = $2 " ± " $4 } /^KL/ { k = $3 " ± " $5 } /^same top/ { t = $4 " %" }
        END { sub(",", "", k); printf "| %s | %.2f MB | %s | %s | %s |\n", n, s / 1e6, p, k, t }'
}
echo '| type | size | perplexity | KL | same top token |'
echo '|---|---|---|---|---|'
measure source "$model" --save "$tmp/base.bin"
for type; do
    "$steel" quantize "$model" "$tmp/q.gguf" "$type" --force 2>/dev/null
    measure "$type" "$tmp/q.gguf" --kl "$tmp/base.bin"
done
