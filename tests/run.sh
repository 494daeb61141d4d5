#!/bin/sh
# Runs every test: build/tests/test_* (cmocka programs), then tests/test_*.sh and tests/test_*.py.
# A script gets the build folder as $1; exit 77 means skipped (it says why). Closing line counts.
B=${1:-build}
passed=0 failed=0 skipped=0 bad=
export STEEL="$B/steel"
for t in "$B"/tests/test_* tests/test_*.sh tests/test_*.py; do
    case $t in
    *.o | *.d | *.log) continue ;;
    *.sh) run="sh $t $B" ;;
    *.py) run="python3 $t $B" ;;
    *) run=$t ;;
    esac
    [ -e "$t" ] || continue
    [ -n "$ONLY" ] && case $t in *"$ONLY"*) ;; *) continue ;; esac
    start=$(date +%s)
    $run >"$B/tests/$(basename "$t").log" 2>&1 </dev/null
    rc=$?
    took=$(($(date +%s) - start))
    case $rc in
    0) passed=$((passed + 1)) && printf 'ok    %-44s %3ds\n' "$t" $took ;;
    77) skipped=$((skipped + 1)) && printf 'skip  %-44s %s\n' "$t" "$(tail -1 "$B/tests/$(basename "$t").log")" ;;
    *) failed=$((failed + 1)) && bad="$bad $t" && printf 'FAIL  %-44s %3ds (exit %d)\n' "$t" $took $rc
       tail -40 "$B/tests/$(basename "$t").log" | sed 's/^/    | /' ;;
    esac
done
[ -n "$bad" ] && echo "failed:$bad"
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ] && [ $passed -gt 0 ]
