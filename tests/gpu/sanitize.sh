#!/bin/bash
# Runs compute-sanitizer over every row of the kernel tables and over the test groups without a table. Shapes are small, and the GPU is
# limited to 16 SMs so that rings wrap around. One process and one line of output per row.
#   tests/gpu/sanitize.sh memcheck|racecheck OUT_DIR [TEST_OPS [JOBS [SECONDS_A_ROW]]]
# Exits with 1 if a row was not clean.
tool=${1:?memcheck or racecheck} out=${2:?a directory for logs} ops=${3:-build/tests/ops/test_ops} jobs=${4:-8} most=${5:-120}
san=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
[ -n "$san" ] || { echo "no compute-sanitizer here" >&2; exit 1; }
here=$(dirname "$0")
mkdir -p "$out" && : > "$out/rows.txt"
export tool out ops most san STEEL_SMS=16
row() {
    log="$out/${1// /_}.log" start=$SECONDS
    timeout "$most" "$san" --tool "$tool" --error-exitcode 9 "$ops" --backend cuda --small "$1" > "$log" 2>&1
    echo "rc $? $1: $((SECONDS - start)) s, $(grep -h SUMMARY "$log" | tail -1 | sed 's/=* *//'), $(grep -h 'checks,' "$log" | tail -1)" >> "$out/rows.txt"
}
export -f row
{
    grep -ho '^    {"[a-z_]*"' "$here"/../../src/backend/cuda/core/pick*.cu | cut -d'"' -f2 | sort -u | sed 's/^/picks=/'
    printf '%s\n' sampling embed norm 'delta net' latent ssm 'short convolution' parts towers encoders adapters drafts
} | xargs -P "$jobs" -d '\n' -I{} bash -c 'row "{}"'
sort "$out/rows.txt"
! grep -v '^rc 0 ' "$out/rows.txt" > /dev/null
