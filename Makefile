# Steel. `make` builds build/steel; `make try` shows it working; `make test` runs every test.
# `make help` lists the targets. Variables: CC, OPT, STATIC=1 (static third-party libraries), V=1.

CC      ?= gcc
OPT     ?= -O3
B       ?= build
Q       := $(if $(V),,@)
WARN    := -Wall -Wextra -Werror -Wshadow -Wstrict-prototypes -Wpointer-arith
CFLAGS  += -std=gnu17 $(OPT) -g $(WARN) -fno-math-errno -ffp-contract=off -pthread
CPPFLAGS += -Isrc -Iinclude -D_GNU_SOURCE $(DEFS)
LDLIBS_DYN := -ljansson -lpcre2-8 -lutf8proc -lm
CLI_LIBS   := -ledit
SRV_LIBS   := -levent_openssl -levent -lssl -lcrypto
LDLIBS  := $(if $(STATIC),-Wl$(comma)-Bstatic $(filter-out -lm,$(LDLIBS_DYN)) -Wl$(comma)-Bdynamic -lm,$(LDLIBS_DYN))
comma   := ,

# Everything but the commands and the server is the library; tests and fuzzers link it, src/cli makes
# the binary. The server is a library of its own, so that only what serves needs libevent and OpenSSL.
LIB_SRC := $(filter-out src/cli/% src/server/%,$(sort $(wildcard src/*/*.c src/backend/cpu/*.c)))
SRV_SRC := $(sort $(wildcard src/server/*.c))
CLI_SRC := $(sort $(wildcard src/cli/*.c))
LIB_OBJ := $(LIB_SRC:%.c=$(B)/%.o)
SRV_OBJ := $(SRV_SRC:%.c=$(B)/%.o)
CLI_OBJ := $(CLI_SRC:%.c=$(B)/%.o)
TESTS   := $(patsubst tests/%.c,$(B)/tests/%,$(sort $(wildcard tests/test_*.c)))
FUZZERS := $(patsubst fuzz/%.c,$(B)/fuzz/%,$(sort $(wildcard fuzz/fuzz_*.c)))

all: $(B)/steel

help:
	@echo 'make            build $(B)/steel'
	@echo 'make try        install what is missing, build, and show it working'
	@echo 'make test       install what is missing, build, run all tests'
	@echo 'make asan       the tests under AddressSanitizer and UBSan'
	@echo 'make tsan       the threaded tests under ThreadSanitizer'
	@echo 'make fuzz       build the libFuzzer entries (clang) and run each for FUZZ_SECONDS'
	@echo 'make bench      kernel and model benchmarks'
	@echo 'make format     clang-format in place;  make format-check, make tidy: as CI runs them'
	@echo 'make install    into PREFIX (default /usr/local)'

# Files for one instruction set carry its flags in their names; run-time dispatch picks among them.
$(B)/src/backend/cpu/%_avx2.o:   CFLAGS += -mavx2 -mfma -mf16c -mbmi2
$(B)/src/backend/cpu/%_avx512.o: CFLAGS += -mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512bw -mavx512vl -mavx512dq
$(B)/src/backend/cpu/%_vnni.o:   CFLAGS += -mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512vbmi
$(B)/src/backend/cpu/%_amx.o:    CFLAGS += -mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512vbmi -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16

# Vector kernels under the sanitizers: addresses are checked, undefined arithmetic is not (it makes
# minutes of compilation of a file); fuzzers feed parsers, so their kernels stay plain.
ifneq ($(findstring fuzzer,$(OPT)),)
$(B)/src/backend/cpu/%.o: CFLAGS += -fno-sanitize=all
else ifneq ($(findstring undefined,$(OPT)),)
$(B)/src/backend/cpu/%.o: CFLAGS += -fno-sanitize=undefined
endif

# The model in the box is part of the binary.
BUILTIN := $(wildcard demo/steel-demo.gguf)
ifneq ($(BUILTIN),)
$(B)/src/file/builtin.o: CPPFLAGS += -DSTEEL_BUILTIN='"$(BUILTIN)"'
$(B)/src/file/builtin.o: $(BUILTIN)
endif

# -O3 makes these kernels no faster, and six times slower to compile.
$(B)/src/backend/cpu/panel_%.o: CFLAGS += -O2

$(B)/%.o: %.c | deps
	@mkdir -p $(@D)
	$(if $(Q),@echo '  CC $<')
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c -o $@ $<

$(B)/libsteel.a: $(LIB_OBJ)
	$(Q)rm -f $@ && ar rcs $@ $^

$(B)/libserver.a: $(SRV_OBJ)
	$(Q)rm -f $@ && ar rcs $@ $^
$(B)/src/server/web.o: src/server/web/index.html

$(B)/steel: $(CLI_OBJ) $(B)/libserver.a $(B)/libsteel.a
	$(if $(Q),@echo '  LD $@')
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -o $@ $(CLI_OBJ) $(B)/libserver.a $(B)/libsteel.a $(LDLIBS) $(CLI_LIBS) $(SRV_LIBS)

$(B)/tests/%: $(B)/tests/%.o $(B)/libsteel.a
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -o $@ $< $(B)/libsteel.a $(LDLIBS) -lcmocka

$(B)/tests/test_http: $(B)/tests/test_http.o $(B)/libserver.a $(B)/libsteel.a
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -o $@ $< $(B)/libserver.a $(B)/libsteel.a $(LDLIBS) $(SRV_LIBS) -lcmocka

# Counts what the library allocates while it reads hostile files.
$(B)/tests/test_hostile: LDFLAGS += $(patsubst %,-Wl$(comma)--wrap=%,malloc calloc realloc posix_memalign mmap)

$(B)/bench/%: $(B)/bench/%.o $(B)/libsteel.a
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -o $@ $< $(B)/libsteel.a $(LDLIBS)

# Examples see nothing but the public header and the library.
EXAMPLES := $(patsubst examples/%.c,$(B)/examples/%,$(wildcard examples/*.c))
examples: $(EXAMPLES)
$(B)/examples/%: examples/%.c include/steel.h $(B)/libsteel.a
	@mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS) -Iinclude $(LDFLAGS) -o $@ $< $(B)/libsteel.a $(LDLIBS)

deps:
	@sh tools/deps.sh

try: $(B)/steel
	@sh tools/try.sh $(B)/steel

test: $(B)/steel $(TESTS) $(B)/tests/toy_gguf $(EXAMPLES)
	@sh tests/run.sh $(B)

asan:
	$(Q)$(MAKE) --no-print-directory B=build-asan OPT='-O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer' DEFS=-DSTEEL_DEBUG test

tsan:
	$(Q)$(MAKE) --no-print-directory B=build-tsan OPT='-O1 -fsanitize=thread' DEFS=-DSTEEL_DEBUG test

FUZZ_SECONDS ?= 30
fuzz:
	$(Q)$(MAKE) --no-print-directory B=build-fuzz CC=clang OPT='-O1 -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all' fuzz-run
fuzz-build: $(FUZZERS)
fuzz-run: fuzz-build
	@for f in $(FUZZERS); do echo "== $$f"; n=$$(basename $$f); mkdir -p $(B)/corpus/$$n; \
	  $$f -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=2048 -print_final_stats=0 -verbosity=0 \
	    $$(ls fuzz/$$n.dict 2>/dev/null | sed 's/^/-dict=/') $(B)/corpus/$$n $$(ls -d fuzz/seeds/$$n 2>/dev/null) || exit 1; done
$(B)/fuzz/%: $(B)/fuzz/%.o $(B)/libsteel.a
	$(Q)$(CC) $(CFLAGS) -fsanitize=fuzzer $(LDFLAGS) -o $@ $< $(B)/libsteel.a $(LDLIBS)

$(B)/fuzz/fuzz_http $(B)/fuzz/fuzz_request: $(B)/fuzz/%: $(B)/fuzz/%.o $(B)/libserver.a $(B)/libsteel.a
	$(Q)$(CC) $(CFLAGS) -fsanitize=fuzzer $(LDFLAGS) -o $@ $< $(B)/libserver.a $(B)/libsteel.a $(LDLIBS) $(SRV_LIBS)

bench: $(B)/steel $(patsubst bench/%.c,$(B)/bench/%,$(wildcard bench/*.c))
	@sh bench/run.sh $(B)

FORMATTED := $(wildcard src/*/*.[ch] src/backend/*/*.[ch] include/*.h tests/*.[ch] fuzz/*.c bench/*.c examples/*.c)
format:
	clang-format -i $(FORMATTED)
format-check:
	clang-format --dry-run -Werror $(FORMATTED)
tidy:
	@printf "%s\n" $(filter-out %_avx2.c %_avx512.c %_vnni.c %_amx.c,$(LIB_SRC) $(CLI_SRC)) | xargs -P 2 -n 4 sh -c 'clang-tidy --quiet "$$@" -- -std=gnu17 -D_GNU_SOURCE -Isrc -Iinclude 2>/dev/null' tidy

PREFIX ?= /usr/local
install: $(B)/steel $(B)/libsteel.a
	install -D -m 755 $(B)/steel $(DESTDIR)$(PREFIX)/bin/steel
	install -D -m 644 $(B)/libsteel.a $(DESTDIR)$(PREFIX)/lib/libsteel.a
	install -D -m 644 include/steel.h $(DESTDIR)$(PREFIX)/include/steel.h

clean:
	rm -rf build build-*

.PHONY: all help examples deps try test asan tsan fuzz fuzz-build fuzz-run bench format format-check tidy install clean
.SECONDARY:
-include $(shell find $(B) -name '*.d' 2>/dev/null)
