#!/bin/sh
# Packs the web page for the binary: web.sh OUT. Takes src/server/web/ and, if installed, the rendering libraries
# (marked, DOMPurify, KaTeX, highlight.js: Debian's packages, which `make deps` installs). Compresses each file and writes
# OUT/assets.inc, one line per file, for src/server/web/web.c. Without the libraries the page shows plain text. Of KaTeX's fonts
# and highlight.js' 185 languages only those that chats use are kept.
set -eu
out=$1 src=src/server/web
rm -rf "$out" && mkdir -p "$out"
missing='' licences=''

first() { # the first of the files that is there
    for f; do [ -f "$f" ] && echo "$f" && return; done
    return 1
}
lib() { # NAME PACKAGE FILES...: copies the library, notes its licence
    name=$1 package=$2
    shift 2
    if file=$(first "$@"); then
        grep -v '^//# sourceMappingURL' "$file" >"$out/$name"
        licences="$licences /usr/share/doc/$package/copyright"
    else
        missing="$missing $package"
    fi
}

cp "$src"/* "$out" && rm -f "$out"/*.c
js=${WEB_ROOT:-}/usr/share/javascript node=${WEB_ROOT:-}/usr/share/nodejs # tests have roots of their own
lib marked.js libjs-marked $js/marked/marked.umd.min.js $js/marked/marked.min.js
lib purify.js node-dompurify $node/dompurify/dist/purify.min.js
lib katex.js libjs-katex $js/katex/katex.min.js $js/katex/katex.js
lib highlight.js libjs-highlight.js $js/highlight.js/highlight.min.js

# KaTeX: its style names three formats of every font; current browsers use woff2.
fonts='AMS-Regular Caligraphic-Regular Fraktur-Regular Main-Bold Main-Italic Main-Regular Math-BoldItalic Math-Italic
    SansSerif-Regular Script-Regular Size1-Regular Size2-Regular Size3-Regular Size4-Regular Typewriter-Regular'
if [ -f "$out/katex.js" ]; then
    keep=$(echo $fonts | sed 's/ /|/g')
    sed 's/@font-face{/\n&/g; s/}\(\.katex\)/}\n\1/' $js/katex/katex.min.css |
        grep -Ev "^@font-face" >"$out/katex.css"
    sed 's/@font-face{[^}]*}/\n&\n/g' $js/katex/katex.min.css | grep -E "^@font-face.*KaTeX_($keep)\.woff2" |
        sed "s/,url([^)]*\.woff) format('woff')//; s/,url([^)]*\.ttf) format('truetype')//; s|url(fonts/|url(|" >>"$out/katex.css"
    for f in $fonts; do cp "$js/katex/fonts/KaTeX_$f.woff2" "$out"; done
fi

# highlight.js: the core, and these languages.
if [ -f "$out/highlight.js" ]; then
    languages='bash|c|c-like|clojure|cmake|cpp|cs|csharp|css|dart|diff|dockerfile|elixir|erlang|fortran|go|haskell|http|ini|java|javascript|json|julia|kotlin|latex|tex|less|lisp|lua|makefile|markdown|matlab|nginx|nix|objectivec|ocaml|perl|pgsql|php|plaintext|powershell|properties|protobuf|python|r|ruby|rust|scala|scss|sql|swift|typescript|vim|x86asm|xml|yaml'
    sed 's/hljs\.registerLanguage(/\n&/g' "$out/highlight.js" |
        grep -E "^(var hljs|hljs\.registerLanguage\(\"($languages)\")" >"$out/highlight.tmp"
    mv "$out/highlight.tmp" "$out/highlight.js"
fi

# Missing libraries are not requested by the page.
for f in marked.js purify.js katex.js katex.css highlight.js; do
    [ -f "$out/$f" ] || sed -i "/web\/$f/d" "$out/index.html"
done
[ -z "$missing" ] || echo "steel: the web page shows plain text without$missing (\`make deps\` installs them)" >&2
cat LICENSE $(for f in $licences; do first $f || :; done) >"$out/licences.txt"

for f in "$out"/*; do
    name=$(basename "$f")
    case $name in
    *.html) type='text/html; charset=utf-8' ;;
    *.js) type='text/javascript; charset=utf-8' ;;
    *.css) type='text/css; charset=utf-8' ;;
    *.svg) type='image/svg+xml' ;;
    *.png) type='image/png' ;;
    *.webmanifest) type='application/manifest+json' ;;
    *.txt) type='text/plain; charset=utf-8' ;;
    *.woff2) type='font/woff2' ;;
    esac
    packed=false file=$f
    # index.html is small and often read by hand; fonts and pictures are already compressed.
    case $name in
    *.html | *.woff2 | *.png) ;;
    *) gzip -9nc "$f" >"$f.gz" && packed=true file=$f.gz ;;
    esac
    label=$(echo "$name" | tr -c 'A-Za-z0-9\n' _)
    tag=$(sha256sum <"$f" | cut -c1-16)
    echo "ASSET($label, \"$name\", \"$type\", $packed, \"\\\"$tag\\\"\", \"$file\")" >>"$out/assets.tmp"
done
mv "$out/assets.tmp" "$out/assets.inc"
