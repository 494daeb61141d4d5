#!/bin/sh
# The whole suite, TIMES (3) times in a row, beside LOOPS (4) processes that never rest: a test that needs a quiet
# machine fails here. No test is repeated. ONLY=text as in run.sh.
B=${1:-build} loops=
trap 'kill $loops 2>/dev/null' EXIT
trap 'exit 130' INT TERM
for i in $(seq "${LOOPS:-4}"); do
    while :; do :; done &
    loops="$loops $!"
done
for i in $(seq "${TIMES:-3}"); do
    echo "== run $i beside ${LOOPS:-4} busy loops"
    sh "$(dirname "$0")/run.sh" "$B" || exit 1
done
