#!/bin/sh
# Runs every test: build/tests/test_* (cmocka programs), then tests/test_*.sh and tests/test_*.py.
# A script gets the build folder as $1; exit 77 means skipped. What is skipped, whole or in part, says so in a
# line "skipped: WHAT: why"; it is named and counted. ONLY=text runs the tests with that text in their names.
# Closes with the slowest tests and one line: tests passed, failed, skipped. Cases of a program count one each.
B=${1:-build}
passed=0 failed=0 skipped=0 bad= times=
export STEEL="$B/steel" STEEL_CONFIG= # not the config of whoever runs this

# Numbers of a log: "passed failed skipped". Programs: cmocka's closing lines. Scripts: themselves, and their parts
# that were skipped.
count() { # LOG EXIT-CODE
    awk -v rc="$2" '
        /^\[  (PASSED|FAILED|SKIPPED)  ?\] [0-9]+ test\(s\)/ { n[$2] += $4; cases = 1 }
        /^skipped: / { parts++ }
        END {
            if (cases) {
                if (rc != 0 && !n["FAILED"]) n["FAILED"] = 1
                print n["PASSED"] + 0, n["FAILED"] + 0, n["SKIPPED"] + 0
            } else if (rc == 77)
                print 0, 0, parts > 1 ? parts : 1
            else
                print (rc == 0), (rc != 0), parts + 0
        }' "$1"
}

# What a log says was skipped, one line each.
skips() { # LOG
    awk '/^skipped: / { why = substr($0, 10); if (!cmocka) print "      skipped: " why }
         /^\[==========\] Running / { cmocka = 1 }
         /^\[  SKIPPED \] / && !/test\(s\)/ && !seen[$4]++ { print "      skipped: " $4 ": " why }' "$1"
}

for t in "$B"/tests/test_* tests/test_*.sh tests/test_*.py; do
    case $t in
    *.o | *.d | *.log) continue ;;
    *.sh) run="sh $t $B" ;;
    *.py) run="python3 $t $B" ;;
    *) run=$t ;;
    esac
    [ -e "$t" ] || continue
    [ -n "$ONLY" ] && case $t in *"$ONLY"*) ;; *) continue ;; esac
    log=$B/tests/$(basename "$t").log
    start=$(date +%s)
    $run >"$log" 2>&1 </dev/null
    rc=$?
    took=$(($(date +%s) - start))
    read -r p f s <<-END
	$(count "$log" $rc)
	END
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    times="$times$took $t
"
    case $rc in
    0) printf 'ok    %-44s %3ds\n' "$t" $took && skips "$log" ;;
    77) printf 'skip  %-44s %s\n' "$t" "$(tail -1 "$log")" ;;
    *) bad="$bad $t" && printf 'FAIL  %-44s %3ds (exit %d)\n' "$t" $took $rc
       tail -40 "$log" | sed 's/^/    | /' ;;
    esac
done
echo "slowest:$(printf '%s' "$times" | sort -rn | head -5 | awk '{ printf " %s %ds,", $2, $1 }' | sed 's/,$//')"
[ -n "$bad" ] && echo "failed:$bad"
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ] && [ $passed -gt 0 ]
