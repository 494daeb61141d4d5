#!/bin/sh
# Installs the Debian packages that the build needs and that are missing. Prints what it does, and nothing if there is
# nothing to do. `deps.sh test` adds packages that only tests use (without them tests are skipped), `deps.sh dev` those that
# only CI uses. `deps.sh check` installs nothing, and fails if a package that the build needs is missing.
missing= extra= arm=
have() { # header, file or program
    case $1 in
    /*) [ -e "$1" ] ;;
    *.h) for d in /usr/include "/usr/include/$(uname -m)-linux-gnu" /usr/local/include; do [ -e "$d/$1" ] && return; done
        return 1 ;;
    *) command -v "$1" >/dev/null 2>&1 ;;
    esac
}
need() { have "$1" || missing="$missing $2"; } # WHAT PACKAGE
want() { have "$1" || extra="$extra $2"; }     # optional
need gcc gcc
need jansson.h libjansson-dev
need pcre2.h libpcre2-dev
need utf8proc.h libutf8proc-dev
need cmocka.h libcmocka-dev
need event2/event.h libevent-dev
need openssl/ssl.h libssl-dev
need histedit.h libedit-dev
need curl/curl.h libcurl4-openssl-dev
need png.h libpng-dev
need jpeglib.h libjpeg-dev
need webp/demux.h libwebp-dev
need gif_lib.h libgif-dev
# Shaders of the Vulkan backend; without them it is left out.
want glslc glslc
want vulkan/vulkan_core.h libvulkan-dev
# Renderers of the web page; without them it shows plain text.
want /usr/share/javascript/marked libjs-marked
want /usr/share/nodejs/dompurify node-dompurify
want /usr/share/javascript/katex libjs-katex
want /usr/share/javascript/highlight.js libjs-highlight.js
if [ "$1" = dev ]; then
    want clang clang
    want clang-format clang-format
    want clang-tidy clang-tidy
    # `make test-arm`; tools/sysroot.sh unpacks arm64 packages. g++: `make cuda-objects` for ARM hosts, bench/arm.
    want aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu
    want aarch64-linux-gnu-g++ g++-aarch64-linux-gnu
    want qemu-aarch64 qemu-user
    [ "$(uname -m)" != x86_64 ] || ! have dpkg || dpkg --print-foreign-architectures | grep -qx arm64 || arm=1
fi
if [ "$1" = dev ] || [ "$1" = test ]; then
    want python3 python3
    want xz xz-utils
    want tmux tmux
    want chromium chromium
    want node nodejs
    want npm npm
    want pkg-config pkgconf
    want man man-db
    want zsh zsh
    want fish fish
    want mpicc libopenmpi-dev
    want mpirun openmpi-bin
    # A software device, and the layer that checks the use of Vulkan.
    [ -n "$(ls /usr/share/vulkan/icd.d/lvp_icd.*.json 2>/dev/null)" ] || extra="$extra mesa-vulkan-drivers"
    want /usr/share/vulkan/explicit_layer.d/VkLayer_khronos_validation.json vulkan-validationlayers
fi
if [ "$1" = check ]; then
    [ -z "$missing" ] && exit 0
    echo "steel: missing:$missing" >&2
    echo "steel: \`make deps\` installs them (apt-get), or install them your own way" >&2
    exit 1
fi
[ -z "$missing$extra$arm" ] && exit 0
if ! command -v apt-get >/dev/null 2>&1; then
    echo "steel: please install:$missing$extra (no apt-get here)" >&2
    [ -z "$missing" ]
    exit
fi
sudo=
[ "$(id -u)" = 0 ] || sudo=sudo
install() { DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq "$@" >&2; }
# A system whose mirrors have no arm64 goes on without: `make test-arm` says that it is skipped.
if [ -n "$arm" ]; then
    echo "steel: adding arm64 to dpkg's architectures" >&2
    $sudo dpkg --add-architecture arm64
    $sudo apt-get update -qq >&2 || { $sudo dpkg --remove-architecture arm64; $sudo apt-get update -qq >&2; }
fi
[ -z "$missing$extra" ] && exit 0
echo "steel: installing missing packages with ${sudo:+$sudo }apt-get:$missing$extra" >&2
$sudo apt-get update -qq >&2
if [ -n "$missing" ]; then
    install $missing || exit 1
fi
if [ -n "$extra" ]; then
    install $extra || for p in $extra; do
        install "$p" || echo "steel: $p could not be installed: continuing without" >&2
    done
fi
exit 0
