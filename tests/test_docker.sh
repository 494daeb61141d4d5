#!/bin/sh
# The Dockerfile, without docker: what it copies is there, what it makes is a target, the image starts what it holds, and
# the server takes the command that is the image's. With STEEL_DOCKER=1, as root, with a bare Debian in
# $STEEL_DEBIAN_ROOT (debootstrap --variant=minbase), its steps are carried out in copies of that.
set -u
B=${1:-build}
file=packaging/Dockerfile
failures=0
fail() { echo "FAIL: $*"; failures=$((failures + 1)); }
# One instruction a line, comments and continuations gone.
plain() { sed -e '/^#/d' -e '/^$/d' "$file" | sed -e ':a' -e '/\\$/N; s/\\\n//; ta'; }

plain | awk '{ print $1 }' | sort -u | grep -qvx 'ARG\|FROM\|RUN\|WORKDIR\|COPY\|USER\|ENV\|VOLUME\|EXPOSE\|ENTRYPOINT\|CMD' &&
    fail "an instruction that is none"
[ "$(plain | grep -c '^FROM')" = 2 ] || fail "there are two stages"
# The server does not run as root: the last USER of the last stage.
user=$(plain | sed -n '/^FROM.*RUN_BASE/,$p' | awk '$1 == "USER" { u = $2 } END { print u }')
case $user in '' | root | 0) fail "the image runs as root" ;; esac
for arg in $(plain | sed -n 's/^FROM \${\([A-Z_]*\)}.*/\1/p'); do
    plain | grep -q "^ARG $arg=" || fail "$arg is not set"
done
for target in $(plain | grep '^RUN' | grep -o 'make [a-z]*' | awk '{ print $2 }' | grep -v '^git$' | sort -u); do
    grep -q "^$target:" Makefile packaging/install.mk || fail "make $target is no target"
done
program=$(plain | sed -n 's/^ENTRYPOINT \["\([^"]*\)"\]/\1/p')
plain | grep -q "^COPY --from=build /steel/dist/steel $program\$" || fail "the entry point is not what is copied"
"$B/steel" $(plain | sed -n 's/^CMD \[\(.*\)\]/\1/p' | tr -d '",') --help >/dev/null || fail "steel does not take the image's command"
for line in $(cat .dockerignore); do
    git ls-files --error-unmatch "$line" >/dev/null 2>&1 && fail ".dockerignore leaves out $line"
done

root=${STEEL_DEBIAN_ROOT:-}
if [ -z "${STEEL_DOCKER:-}" ] || [ ! -d "$root/usr" ] || [ "$(id -u)" != 0 ]; then
    echo "skipped: building the image: STEEL_DOCKER=1, root and a Debian in STEEL_DEBIAN_ROOT"
    exit $((failures > 0))
fi
tmp=$(mktemp -d)
leave() { umount "$tmp"/*/proc "$tmp"/*/dev 2>/dev/null; rm -rf --one-file-system "$tmp"; }
trap leave EXIT
stage=0 where=/
plain >"$tmp/steps"
while read -r word rest; do
    case $word in
    FROM)
        stage=$((stage + 1)) where=/
        cp -a --one-file-system "$root" "$tmp/$stage"
        mount -t proc proc "$tmp/$stage/proc" && mount --bind /dev "$tmp/$stage/dev" ;;
    WORKDIR) where=$rest && mkdir -p "$tmp/$stage$where" ;;
    COPY)
        case $rest in
        --from=build*) set -- $rest && cp "$tmp/1$2" "$tmp/$stage$3" ;;
        *) git ls-files -z | xargs -0 tar c | tar x -C "$tmp/$stage$where" ;;
        esac || fail "COPY $rest" ;;
    RUN)
        echo "$rest"
        chroot "$tmp/$stage" sh -c "cd $where && $rest" >"$tmp/log" 2>&1 </dev/null ||
            { fail "RUN $rest"; tail -20 "$tmp/log"; break; } ;;
    esac
done <"$tmp/steps"
chroot "$tmp/2" "$program" run -p Hello -n 8 >"$tmp/out" 2>&1 || fail "the image's program: $(tail -1 "$tmp/out")"
chroot "$tmp/2" "$program" --version
chroot "$tmp/2" "$program" pull http://127.0.0.1:9/x.gguf >"$tmp/out" 2>&1
grep -qi 'connect' "$tmp/out" || fail "pull has no libcurl: $(cat "$tmp/out")"
[ $failures = 0 ] && echo "built and started"
exit $((failures > 0))
