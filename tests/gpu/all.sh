#!/bin/bash
# all.sh [BUILD]: every test that wants a GPU, a line each, logs in BUILD/gpu-logs (OUT names another folder):
#   the op suite; goldens, bytes beside others and with draft tokens (--deterministic), towers, embedders, draft tokens and canaries on the device; compute-sanitizer over every kernel;
#   with SOAK=SECONDS mixed load. ONLY="ops golden" chooses. Exits with 1 if one failed.
B=${1:-build} out=${OUT:-$B/gpu-logs} jobs=${JOBS:-8}
here=$(dirname "$0")
export LD_LIBRARY_PATH=$B/lib:$LD_LIBRARY_PATH STEEL_TEST_DEVICE=cuda STEEL_CONFIG=
mkdir -p "$out"
wanted() { [ -z "$ONLY" ] || [[ " $ONLY " == *" $1 "* ]]; }
one() { # NAME COMMAND...
    local name=$1 start=$SECONDS rc
    wanted "$name" || return 0
    shift
    "$@" >"$out/$name.log" 2>&1
    rc=$?
    [ $rc = 0 ] || failed="$failed $name"
    echo "$([ $rc = 0 ] && echo ok || echo FAIL) $name: $((SECONDS - start)) s, $(grep -E 'checks,|PASSED|FAILED|rounds|answers' "$out/$name.log" | tail -2 | tr '\n' ' ')"
    grep '^skipped: ' "$out/$name.log" | sort -u | sed 's/^/    /'
    [ $rc = 0 ] || tail -15 "$out/$name.log" | sed 's/^/    | /'
}
failed=
one ops "$B/tests/ops/test_ops" --backend cuda --jobs "$jobs"
for t in golden invariance vision embed speculate draft_text draft_model eagle canary; do one $t "$B/tests/test_$t"; done
one memcheck "$here/sanitize.sh" memcheck "$out/memcheck" "$B/tests/ops/test_ops" "$jobs"
one racecheck "$here/sanitize.sh" racecheck "$out/racecheck" "$B/tests/ops/test_ops" "$jobs"
[ -z "$SOAK" ] || one soak env DEVICE=cuda python3 "$here/../soak.py" "$B" "$SOAK"
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
