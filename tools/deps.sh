#!/bin/sh
# Installs the Debian packages the build needs and does not find. Says what it does; quiet when
# there is nothing to do. `deps.sh dev` adds what only tests and CI use; `deps.sh check` installs nothing, and
# fails where something is missing.
missing=
need() { # header-or-program package
    case $1 in
    *.h) for d in /usr/include /usr/include/x86_64-linux-gnu /usr/local/include; do [ -e "$d/$1" ] && return; done ;;
    *) command -v "$1" >/dev/null 2>&1 && return ;;
    esac
    missing="$missing $2"
}
need gcc gcc
need jansson.h libjansson-dev
need pcre2.h libpcre2-dev
need utf8proc.h libutf8proc-dev
need cmocka.h libcmocka-dev
need event2/event.h libevent-dev
need openssl/ssl.h libssl-dev
need histedit.h libedit-dev
need curl/curl.h libcurl4-openssl-dev
if [ "$1" = dev ]; then
    need clang clang
    need clang-format clang-format
    need clang-tidy clang-tidy
    need python3 python3
    need xz xz-utils
    need tmux tmux
    need chromium chromium
    need pkg-config pkgconf
    need man man-db
    need zsh zsh
    need fish fish
fi
[ -z "$missing" ] && exit 0
if [ "$1" = check ]; then
    echo "steel: missing:$missing" >&2
    echo "steel: \`make deps\` installs them (apt-get), or install them your own way" >&2
    exit 1
fi
if ! command -v apt-get >/dev/null 2>&1; then
    echo "steel: please install:$missing (no apt-get here)" >&2
    exit 1
fi
sudo=
[ "$(id -u)" = 0 ] || sudo=sudo
echo "steel: installing missing packages with ${sudo:+$sudo }apt-get:$missing" >&2
$sudo apt-get update -qq >&2 && DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq $missing >&2
