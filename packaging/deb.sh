#!/bin/sh
# Makes OUT.deb of what `make install` puts into a root: packaging/deb.sh ROOT VERSION ARCH OUT.deb
# OBJDUMP reads the binary (default objdump).
# The binary holds its libraries, so the package needs no other than libc; libcurl, which `steel pull` loads, is recommended.
set -eu
root=$1 version=$2 arch=$3 out=$4
mkdir -p "$root/DEBIAN" "$root/etc/default" "$root/usr/share/doc/steel"
cp packaging/steel.default "$root/etc/default/steel"
cp "$root/../web/licences.txt" "$root/usr/share/doc/steel/copyright" # ours, and those of the web page's libraries
gzip -9nc CHANGELOG.md >"$root/usr/share/doc/steel/changelog.gz"
gzip -9nf "$root"/usr/share/man/man1/*.1
echo /etc/default/steel >"$root/DEBIAN/conffiles"
libc=$("${OBJDUMP:-objdump}" -T "$root/usr/bin/steel" | sed -n 's/.*GLIBC_\([0-9.]*\).*/\1/p' | sort -V | tail -1)
cat >"$root/DEBIAN/control" <<-END
	Package: steel-llm
	Version: $version
	Section: science
	Priority: optional
	Architecture: $arch
	Installed-Size: $(du -sk "$root" | cut -f1)
	Depends: libc6 (>= $libc), libgcc-s1
	Recommends: libcurl4 | libcurl4t64, ca-certificates
	Maintainer: The Steel authors <steel@localhost>
	Description: runs large language models
	 One binary that takes a model file (GGUF, or a Hugging Face folder) and runs it: in a
	 terminal, behind the APIs of OpenAI, Anthropic and Ollama, or as a C library.
	END
dpkg-deb --build --root-owner-group "$root" "$out" >/dev/null
echo "$out: $(du -h "$out" | cut -f1)"
