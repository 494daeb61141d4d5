#!/bin/sh
# bench/compare.py and bench/report.py on a model of a few kilobytes, without a peer: every test has a figure, a page
# gets its tables and pictures, and the pictures are well-formed. Figures mean nothing here.
set -u
B=${1:-build}
command -v python3 >/dev/null || { echo "no python3"; exit 77; }
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 tools/tiny_gguf.py "$tmp/tiny.gguf" || exit 1
python3 bench/compare.py --steel "$B/steel" --moe "$tmp/tiny.gguf" --rounds 2 --gen 4 --batch-gen 2 -o "$tmp/r.jsonl" >"$tmp/text" 2>"$tmp/err" ||
    { cat "$tmp/err"; exit 1; }
for t in 'pp512' 'pp128' 'tg4' 'tg2 x4' 'tg2 x16'; do
    [ "$(grep -c "\"test\": \"$t\"" "$tmp/r.jsonl")" = 2 ] || { echo "FAIL: $t was not measured twice"; cat "$tmp/err"; exit 1; }
    grep -q "| $t |" "$tmp/text" || { echo "FAIL: no row for $t"; exit 1; }
done
grep -q '| present | Steel --no-repack |' "$tmp/text" || { echo "FAIL: no start"; exit 1; }
# A peer's figures and a ceiling, made up, to see ratios and limits.
cat >>"$tmp/r.jsonl" <<'EOF'
{"kind": "ceiling", "name": "memory read", "unit": "GB/s", "value": 20.0}
{"kind": "ceiling", "name": "int8 dot, VNNI", "unit": "GOP/s", "value": 400.0}
{"kind": "run", "round": 0, "engine": "Steel", "model": "m", "test": "tg8", "tok_s": 50.0, "bytes_per_token": 2e8, "ops_per_token": 1e9}
{"kind": "run", "round": 0, "engine": "llama.cpp", "model": "m", "test": "tg8", "tok_s": 25.0}
EOF
printf 'before\n<!-- here -->\nold\n<!-- /here -->\nafter\n' >"$tmp/page.md"
python3 bench/report.py "$tmp/r.jsonl" --doc "$tmp/page.md" --section here || exit 1
grep -q '| tg8 | 50.0 ± 0 % | 25.0 ± 0 % | 2.00x | 100 (memory) | 50 % |' "$tmp/page.md" || { echo "FAIL: the table"; cat "$tmp/page.md"; exit 1; }
if grep -q '^old$' "$tmp/page.md" || ! grep -q '^before$' "$tmp/page.md" || ! grep -q '^after$' "$tmp/page.md"; then
    echo "FAIL: the page around the section"; exit 1
fi
for p in $(sed -n 's/.*](\(img.*svg\)).*/\1/p' "$tmp/page.md"); do
    python3 -c 'import sys, xml.dom.minidom as m; m.parse(sys.argv[1])' "$tmp/$p" || exit 1
done
grep -q '2.00x, 50 % of the limit' "$tmp/img/here-m.svg" || { echo "FAIL: the picture"; exit 1; }
# Prompts, then answers, in one figure.
"$B/steel" bench "$tmp/tiny.gguf" -p 0 -n 0 --pg 8,4 --batch 2 -r 1 --json --skip-cost >"$tmp/pg" || exit 1
grep -q '"test": "pp8+tg4 x2", "tok_s": [0-9.]*[1-9]' "$tmp/pg" || { echo "FAIL: --pg"; cat "$tmp/pg"; exit 1; }
# The kernels of the mode that was asked for, whether or not the other one was measured beside it.
for mode in '' --deterministic; do
    for cost in '' --skip-cost; do
        "$B/steel" bench "$tmp/tiny.gguf" -p 64 -n 2 -r 1 --device cpu --kernels $mode $cost >"$tmp/all" || exit 1
        sed -n '/^this model, rows/,$p' "$tmp/all" >"$tmp/kernels$cost"
    done
    [ "$(wc -l <"$tmp/kernels")" -gt 5 ] && cmp "$tmp/kernels" "$tmp/kernels--skip-cost" ||
        { echo "FAIL: --kernels $mode shows the other mode's"; exit 1; }
done
# What a row of the tables gains: a line for each row that a test picks and that another one can replace.
"$B/steel" bench "$tmp/tiny.gguf" --picks -p 40 -n 2 --batch 3 -d 8 -r 1 --device cpu --json >"$tmp/picks" || exit 1
if STEEL_PICK=gemv_float_avx2 "$B/steel" bench "$tmp/tiny.gguf" -p 8 -n 0 -r 1 --device cpu >"$tmp/avx2" 2>&1; then
    for t in '"prompt", "rows": 40' '"decode", "rows": 3'; do
        grep -q "\"test\": $t, \"depth\": 8, \"gain\": [-0-9.]*, \"spread\": [0-9.]*, \"tok_s\": [0-9.]*, \"instead\": \"[a-z]" "$tmp/picks" ||
            { echo "FAIL: --picks"; cat "$tmp/picks"; exit 1; }
    done
    python3 bench/picks.py --steel "$B/steel" -o "$tmp/picks.jsonl" "$tmp/tiny.gguf:-p 0 -n 2 -d 0 --batch 1 --device cpu" >"$tmp/text" || exit 1
    [ "$(wc -l <"$tmp/picks.jsonl")" = "$(wc -l <"$tmp/text")" ] || { echo "FAIL: picks.py"; cat "$tmp/text"; exit 1; }
fi
STEEL_PICK=-attn_decode_c "$B/steel" bench "$tmp/tiny.gguf" --picks -r 1 --device cpu >/dev/null 2>"$tmp/err"
grep -q 'picks cannot be combined with' "$tmp/err" || { echo "FAIL: --picks with STEEL_PICK"; cat "$tmp/err"; exit 1; }
# Every repetition's figure, and with --ceiling the memory's speed between them.
"$B/steel" bench "$tmp/tiny.gguf" -p 0 -n 2 -r 3 --json --skip-cost --ceiling --device cpu >"$tmp/ceiling" || exit 1
grep -q '"rates": \[[0-9.]*, [0-9.]*, [0-9.]*\], "read_gb_s": [0-9.]*[1-9][0-9.]*, "percent_of_read": [0-9.]*, ' "$tmp/ceiling" ||
    { echo "FAIL: --ceiling"; cat "$tmp/ceiling"; exit 1; }
# What --deterministic costs: of one test, one figure, however far below zero (the other mode ran first, and cold). Nothing, where
# there is but one mode.
"$B/steel" bench tests/golden/qwen3moe -p 16 -n 0 -r 1 --no-warmup --device cpu --deterministic >"$tmp/cost" || exit 1
costs='^--deterministic costs (-?[0-9.]+) % to \1 % of the speed$'
if grep -q '"invariance": "always"' "$tmp/ceiling"; then costs='^--deterministic costs nothing: '; fi
grep -Eq "$costs" "$tmp/cost" || { echo "FAIL: the cost"; cat "$tmp/cost"; exit 1; }
"$B/steel" bench "$tmp/tiny.gguf" --pg 8 >/dev/null 2>&1
[ $? = 2 ] || { echo "FAIL: --pg with one number is a usage error"; exit 1; }
# Embeddings: an encoder has no other figure, a decoder has them when asked; and their script, without a peer.
python3 bench/synth_gguf.py "$tmp/encoder.gguf" --shape bge-base --layers 1 --vocab 200 --quant q8_0 2>/dev/null || exit 1
"$B/steel" bench tests/golden/bert -r 1 --json >"$tmp/embed" || exit 1
grep -q '"test": "embed x512", "tok_s": [0-9.]*[1-9]' "$tmp/embed" || { echo "FAIL: an encoder"; cat "$tmp/embed"; exit 1; }
"$B/steel" bench "$tmp/tiny.gguf" --texts 3 -r 1 >"$tmp/embed" || exit 1
grep -q '^| embed x3 ' "$tmp/embed" || { echo "FAIL: a decoder's embeddings"; cat "$tmp/embed"; exit 1; }
mv "$tmp/encoder.gguf" "$tmp/bge-base-q8_0.gguf"
python3 bench/compare_embed.py --steel "$B/steel" --shapes bge-base --quants q8_0 --texts 4 --rounds 2 --dir "$tmp" -o "$tmp/e.jsonl" \
    >"$tmp/text" 2>"$tmp/err" || { cat "$tmp/err"; exit 1; }
grep -q '^| bge-base q8_0 | [0-9,]* | - | - | - |$' "$tmp/text" || { echo "FAIL: compare_embed.py"; cat "$tmp/text"; exit 1; }
# The GPU's script, on the CPU: every test has a figure; and its report from made-up lines of a peer and of a server.
python3 bench/compare_gpu.py --quick --steel "$B/steel" --device cpu --moe "$tmp/tiny.gguf" --rounds 1 -o "$tmp/g.jsonl" >"$tmp/text" 2>"$tmp/err" ||
    { cat "$tmp/err"; exit 1; }
for t in 'pp64' 'tg8' 'pp64 @32' 'tg8 @32' 'tg8 x2 @256'; do
    grep -q "\"test\": \"$t\"" "$tmp/g.jsonl" || { echo "FAIL: $t was not measured"; cat "$tmp/err"; exit 1; }
done
grep -q '"kind": "profile".*"experts": {"us": ' "$tmp/g.jsonl" || { echo "FAIL: no profile"; exit 1; }
cat >"$tmp/gpu.jsonl" <<'EOF'
{"kind": "machine", "name": "G1", "gpu": "G1"}
{"kind": "ceiling", "name": "memory read", "unit": "GB/s", "value": 4000.0}
{"kind": "ceiling", "name": "tensor cores, large bf16 products", "unit": "GFLOP/s", "value": 800000.0, "measured": false}
{"kind": "run", "round": 0, "engine": "Steel", "model": "m", "test": "tg8 x32 @256", "tok_s": 5000.0, "bytes_per_token": 3e8, "kv_bytes_per_token": 1e8, "ops_per_token": 6e9}
{"kind": "run", "round": 0, "engine": "llama.cpp", "model": "m", "test": "tg8 x32 @256", "tok_s": 2500.0}
{"kind": "run", "round": 0, "engine": "Steel", "model": "m", "test": "pp64", "tok_s": 20000.0, "bytes_per_token": 1e6, "ops_per_token": 8e9}
{"kind": "profile", "model": "m", "test": "tg8", "stages": {"qkv": {"us": 100.0, "bytes": 2e8, "ops": 1e9}, "head": {"us": 10.0, "bytes": 1e6, "ops": 4e9}}}
{"kind": "serve", "round": 0, "model": "m", "clients": 32, "tok_s": 2850.0, "raw_tok_s": 3000.0, "ttft_ms": {"p50": 90.0, "p99": 99.0}, "itl_ms": {"p50": 6.4, "p99": 9.0}}
EOF
python3 bench/report.py "$tmp/gpu.jsonl" --doc "$tmp/page.md" --section here || exit 1
for row in '| tg8 x32 @256 | 5,000 ± 0 % | 2,500 ± 0 % | 2.00x | 10,000 (memory) | 50 % |' \
    '| pp64 | 20,000 ± 0 % | - | - | 100,000 (tensor cores) | 20 % |' \
    '| 32, greedy | 3,000 | 2,850 | 95 % | 5,000 | 5,000 | 100 % | 90.0 / 99.0 ms | 6.4 / 9.0 ms |' 'known, not measured here' \
    '| qkv | 100 | 200.0 | 2.00 | 1.0 | 10.0 | 50 % (memory) |' '| head | 10 | 1.0 | 0.10 | 4.0 | 400.0 | 50 % (arithmetic) |'; do
    grep -qF "$row" "$tmp/page.md" || { echo "FAIL: no row $row"; cat "$tmp/page.md"; exit 1; }
done
python3 -c 'import sys, xml.dom.minidom as m; m.parse(sys.argv[1])' "$tmp/img/here-serve.svg" || exit 1

# The cache benchmark of agents, which must fail where nothing is cached.
python3 bench/agents.py "$B/steel" --agents pi --variants recorded || { echo "FAIL: bench/agents.py"; exit 1; }
python3 bench/agents.py "$B/steel" --agents pi --variants recorded --flags "-c 65536 --no-prefix-cache" >"$tmp/agents" &&
    { echo "FAIL: bench/agents.py without a prefix cache"; exit 1; }
grep -q 'common prefixes   0.0 %  MISSED' "$tmp/agents" || { echo "FAIL: bench/agents.py without a prefix cache:"; cat "$tmp/agents"; exit 1; }
