#!/bin/sh
# Runs every test: tests/test_*.sh and tests/test_*.py, then build/tests/test_* (cmocka programs). JOBS of them run at a
# time, by default two per core and at most eight: many tests mostly wait. ONLY=text runs the tests whose names contain it,
# NAMES="test_a test_b" those.
# A script gets the build folder as $1. Exit code 77 means skipped. A test that is skipped, whole or in part, prints
# "skipped: WHAT: why", which is shown and counted.
# Each line shows wall and CPU seconds. The last lines are the heaviest tests and the numbers of tests passed, failed and
# skipped; every case of a cmocka program counts.
# A sanitizer's report fails the test, whichever of its processes wrote it.
B=${1:-build}
export STEEL="$B/steel" STEEL_CONFIG= # not the config of whoever runs this

# Prints "passed failed skipped" of a log: a program's numbers are in cmocka's last lines, a script is one test plus its
# skipped parts.
count() { # LOG EXIT-CODE
    awk -v rc="$2" '
        /^\[  (PASSED|FAILED|SKIPPED)  ?\] [0-9]+ test\(s\)/ { n[$2] += $4; cases = 1 }
        /^skipped: / { parts++ }
        END {
            if (cases) {
                if (rc != 0 && !n["FAILED"]) n["FAILED"] = 1
                print n["PASSED"] + 0, n["FAILED"] + 0, n["SKIPPED"] + 0
            } else if (rc == 77)
                print 0, 0, (parts > 1 ? parts : 1)
            else
                print (rc == 0), (rc != 0), parts + 0
        }' "$1"
}

# Prints what a log says was skipped, one line each.
skips() { # LOG
    awk '/^skipped: / { why = substr($0, 10); if (!cmocka) print "      skipped: " why }
         /^\[==========\] Running / { cmocka = 1 }
         /^\[  SKIPPED \] / && !/test\(s\)/ && !seen[$4]++ { print "      skipped: " $4 ": " why }' "$1"
}

# Runs one test. Its numbers, seconds and exit code go to a file beside its log.
run_one() { # TEST
    t=$1 log=$B/tests/$(basename "$1").log
    case $t in
    *.sh) run="sh $t $B" ;;
    *.py) run="python3 $t $B" ;;
    *) run=$t ;;
    esac
    reports=$B/reports/$(basename "$t")
    rm -rf "$reports" && mkdir -p "$reports" && reports=$(cd "$reports" && pwd)
    ASAN_OPTIONS=${ASAN_OPTIONS:+$ASAN_OPTIONS:}log_path=$reports/report
    UBSAN_OPTIONS=${UBSAN_OPTIONS:+$UBSAN_OPTIONS:}abort_on_error=1:print_stacktrace=1 # beside ASan it writes no files
    TSAN_OPTIONS=${TSAN_OPTIONS:+$TSAN_OPTIONS:}log_path=$reports/report
    export ASAN_OPTIONS UBSAN_OPTIONS TSAN_OPTIONS
    start=$(date +%s)
    $run >"$log" 2>&1 </dev/null
    rc=$?
    for r in "$reports"/report.*; do
        grep -qE '(ERROR|WARNING|FATAL): [A-Za-z]*Sanitizer' "$r" 2>/dev/null || continue
        echo "a sanitizer's report: $r"
        case $rc in 0 | 77) rc=99 && sed '/^Shadow bytes/,$d' "$r" | head -n 38 ;; esac # a test that failed anyway keeps its exit code
    done >>"$log"
    took=$(($(date +%s) - start))
    times >"${log%.log}.times" # line 2: CPU time of children, as 0m1.5s 0m0.2s
    cpu=$(awk 'NR == 2 { gsub(/[ms]/, " "); printf "%.0f", ($1 + $3) * 60 + $2 + $4 }' "${log%.log}.times")
    echo "$(count "$log" $rc) $took $rc $t $cpu" >"${log%.log}.result"
    case $rc in
    0) printf 'ok    %-44s %3ds %3ds CPU\n' "$t" $took "$cpu" && skips "$log" ;;
    77) printf 'skip  %-44s %s\n' "$t" "$(tail -1 "$log")" ;;
    *) printf 'FAIL  %-44s %3ds %3ds CPU (exit %d)\n' "$t" $took "$cpu" $rc
       tail -40 "$log" | sed 's/^/    | /' ;;
    esac
}

if [ "$2" = --one ]; then
    said=$(run_one "$3")
    printf '%s\n' "$said" # one write, as other tests print too
    exit 0
fi

rm -f "$B"/tests/*.result
cores=$(nproc 2>/dev/null || echo 1)
for t in tests/test_*.sh tests/test_*.py "$B"/tests/test_*; do
    case $t in *.o | *.d | *.log | *.result | *.times) continue ;; esac
    [ -e "$t" ] || continue
    [ -n "$ONLY" ] && case $t in *"$ONLY"*) ;; *) continue ;; esac
    name=$(basename "$t")
    [ -n "$NAMES" ] && case " $(echo $NAMES) " in *" ${name%.*} "*) ;; *) continue ;; esac
    echo "$t"
done | xargs -r -P "${JOBS:-$((cores < 4 ? 2 * cores : 8))}" -n 1 sh "$0" "$B" --one
cat "$B"/tests/*.result 2>/dev/null | sort -k7,7nr -k6 | awk '
    { passed += $1; failed += $2; skipped += $3; cpu += $7 }
    NR <= 5 { heaviest = heaviest ", " $6 " " $7 "s" }
    $5 != 0 && $5 != 77 { bad = bad " " $6 }
    END {
        print cpu + 0 "s CPU; heaviest: " substr(heaviest, 3)
        if (bad) print "failed:" bad
        print passed + 0 " passed, " failed + 0 " failed, " skipped + 0 " skipped"
        exit !(passed > 0 && failed == 0)
    }'
