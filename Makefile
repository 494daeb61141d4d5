# Steel. `make` builds build/steel; `make try` shows it working; `make test` runs every test.
# `make help` lists the targets. Variables: CC, OPT, CUDA=0, STATIC=1 (static third-party libraries), V=1.

# All cores, unless -j says otherwise: what the command line gives stands.
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j$(shell nproc)
endif

CC      ?= gcc
OPT     ?= -O3
B       ?= build
Q       := $(if $(V),,@)
WARN    := -Wall -Wextra -Werror -Wshadow -Wstrict-prototypes -Wpointer-arith
CFLAGS  += -std=gnu17 $(OPT) -g $(WARN) -fno-math-errno -ffp-contract=off -pthread -fPIC -fvisibility=hidden
CPPFLAGS += -Isrc -Iinclude -D_GNU_SOURCE $(DEFS)
comma   := ,
# A list of libraries; with STATIC=1 their archives, and what those need.
libs     = $(if $(STATIC),-Wl$(comma)-Bstatic $1 -Wl$(comma)-Bdynamic,$1)
LDLIBS  := $(if $(STATIC),$(B)/static/jansson.o,-ljansson) $(call libs,-lpcre2-8 -lutf8proc) -lm
CLI_LIBS := $(if $(STATIC),$(B)/static/edit.o $(call libs,-ltinfo -lbsd -lmd),-ledit)
SRV_LIBS := $(call libs,-levent_openssl -levent -lssl -lcrypto) $(if $(STATIC),-ldl)

# Source files below folders: $(call find_in,FOLDERS,PATTERN).
find_in = $(sort $(shell find $1 -name '$(strip $2)'))

# CUDA, wherever its compiler is found (CUDA=0 leaves it out). The runtime is linked statically, so the
# binary also starts where there is no driver. By default Hopper's own code and PTX for the rest;
# CUDA_ARCHS=all builds every target.
NVCC    ?= $(shell command -v nvcc 2>/dev/null || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
# `make try` and the tests leave CUDA out where no driver could run it.
ifeq ($(origin CUDA) $(wildcard /dev/nvidiactl /dev/dxg),undefined )
ifneq ($(MAKECMDGOALS),)
ifeq ($(filter-out try test test-build test-all test-busy test-faults,$(MAKECMDGOALS)),)
CUDA := 0
$(if $(NVCC),$(info steel: no NVIDIA driver here: built without CUDA (`make` builds it)))
endif
endif
endif
ifneq ($(CUDA),0)
ifneq ($(NVCC),)
# Where its libraries are, only nvcc knows: the one on PATH may be a script that starts another.
CUDA_DIRS := $(subst ",,$(shell $(NVCC) --dryrun -x cu -c /dev/null 2>&1 | sed -n 's/^\#\$$ LIBRARIES=//p'))
ifeq ($(wildcard $(addsuffix /libcudart_static.a,$(patsubst -L%,%,$(CUDA_DIRS)))),)
$(info steel: $(NVCC) has no libcudart_static.a beside it: building without CUDA)
else
CUDA_SRC  := $(call find_in,src/backend/cuda,*.cu)
CUDA_OBJ  := $(CUDA_SRC:%.cu=$(B)/%.o)
CUDA_LIBS := $(CUDA_DIRS) -lcudart_static -ldl -lrt
CUDA_ARCHS ?= 90a ptx80
cuda_gencode = $(if $(filter ptx%,$1),-gencode=arch=compute_$(1:ptx%=%)$(comma)code=compute_$(1:ptx%=%),-gencode=arch=compute_$1$(comma)code=sm_$1)
CUDA_GEN  := $(foreach a,$(if $(filter all,$(CUDA_ARCHS)),80 86 89 90a 100 120,$(CUDA_ARCHS)),$(call cuda_gencode,$a))
# For others' machines (dist, deb) as small as can be; here with line numbers, for profilers.
CUDA_SMALL = $(if $(shell $(NVCC) --help 2>/dev/null | grep -e --compress-mode),--compress-mode=size,-Xfatbin -compress-all)
NVCCFLAGS += -std=c++17 -O3 $(if $(DIST),$(CUDA_SMALL),-lineinfo -Xfatbin -compress-all) $(CUDA_GEN) -Xcompiler -Wall,-Werror,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics,-fPIC,-fvisibility=hidden
NVCCFLAGS += $(if $(TRACE),-DSTEEL_CUDA_TRACE)
CPPFLAGS  += $(if $(TRACE),-DSTEEL_CUDA_TRACE)
LDLIBS    += $(CUDA_LIBS)
endif
endif
endif

# Everything but the commands and the server is the library; tests and fuzzers link it, src/cli makes
# the binary. The server is a library of its own, so that only what serves needs libevent and OpenSSL.
LIB_SRC := $(filter-out src/cli/% src/server/% src/route/% src/dist/ranks_mpi.c,$(call find_in,src,*.c))
SRV_SRC := $(call find_in,src/server src/route,*.c)
CLI_SRC := $(call find_in,src/cli,*.c)
LIB_OBJ := $(LIB_SRC:%.c=$(B)/%.o)
SRV_OBJ := $(SRV_SRC:%.c=$(B)/%.o)
CLI_OBJ := $(CLI_SRC:%.c=$(B)/%.o)
TESTS   := $(patsubst tests/%.c,$(B)/tests/%,$(sort $(wildcard tests/test_*.c)))
FUZZERS := $(patsubst fuzz/%.c,$(B)/fuzz/%,$(sort $(wildcard fuzz/fuzz_*.c)))

# What speaks MPI, where it is installed: loaded only by a process that mpirun or the like has started.
MPICC ?= $(shell command -v mpicc 2>/dev/null)
all: $(B)/steel $(if $(MPICC),$(B)/steel-mpi.so)
mpi: $(B)/steel-mpi.so
$(B)/steel-mpi.so: src/dist/ranks_mpi.c src/dist/ranks_link.h
	@mkdir -p $(@D)
	$(if $(Q),@echo '  MPICC $<')
	$(Q)OMPI_CC=gcc $(MPICC) -std=gnu17 -O2 $(WARN) -Isrc -fPIC -fvisibility=hidden -shared -o $@ $<

help:
	@echo 'make            build $(B)/steel'
	@echo 'make try        install what is missing, build, and show it working'
	@echo 'make test       install what is missing, build, run the tests;  make test-all: the long ones, too'
	@echo 'make test-busy  the tests, three times in a row, on a machine kept busy'
	@echo 'make asan       the tests under AddressSanitizer and UBSan'
	@echo 'make test-faults  every allocation, read, write, accept, thread start fails once'
	@echo 'make tsan       the tests under ThreadSanitizer'
	@echo 'make fuzz       build the libFuzzer entries (clang) and run each for FUZZ_SECONDS'
	@echo 'make test-gpu   every GPU op against the reference;  make bench-gpu: its speed'
	@echo 'make test-sim   the same GPU kernels, simulated on the CPU'
	@echo 'make test-amx   ops and golden models through AMX kernels, tiles emulated in C'
	@echo 'make bench      kernel and model benchmarks'
	@echo 'make format     clang-format in place;  make format-check, make tidy [ALL=1]: as CI runs them'
	@echo 'make install    into PREFIX (default /usr/local);  make uninstall'
	@echo 'make dist       dist/steel: one binary for other machines;  make deb: a Debian package'
	@echo 'make deps       install the Debian packages that build and tests need (test does so too; try: the build only)'

# Files for one instruction set carry its flags in their names; run-time dispatch picks among them.
$(B)/src/backend/cpu/%_avx2.o $(B)/src/quant/%_avx2.o:   CFLAGS += -mavx2 -mfma -mf16c -mbmi2
$(B)/src/backend/cpu/%_avx512.o $(B)/src/quant/%_avx512.o: CFLAGS += -mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512bw -mavx512vl -mavx512dq
$(B)/src/backend/cpu/%_vnni.o:   CFLAGS += -mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512vbmi
$(B)/src/backend/cpu/%_amx.o:    CFLAGS += -mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512vbmi -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16

# Vector kernels under the sanitizers: addresses are checked, undefined arithmetic is not (it makes
# minutes of compilation of a file); fuzzers feed parsers, so their kernels stay plain.
ifneq ($(findstring fuzzer,$(OPT)),)
$(B)/src/backend/cpu/%.o $(B)/src/quant/quantize%.o: CFLAGS += -fno-sanitize=all
else ifneq ($(findstring undefined,$(OPT)),)
$(B)/src/backend/cpu/%.o $(B)/src/quant/quantize%.o: CFLAGS += -fno-sanitize=undefined,float-cast-overflow
endif

# The model in the box is part of the binary.
BUILTIN := $(wildcard demo/steel-demo.gguf)
ifneq ($(BUILTIN),)
$(B)/src/file/builtin.o: CPPFLAGS += -DSTEEL_BUILTIN='"$(BUILTIN)"'
$(B)/src/file/builtin.o: $(BUILTIN)
endif

# The version stands in the file VERSION, the commit in git: one file is compiled again when they change.
VERSION := $(shell cat VERSION)
COMMIT  := $(shell git describe --always --dirty=+changes --exclude='*' 2>/dev/null)
BUILT   := $(VERSION) $(COMMIT) $(if $(CUDA_OBJ),CUDA)
ifneq ($(shell cat $(B)/version 2>/dev/null),$(strip $(BUILT)))
$(shell mkdir -p $(B) && echo '$(strip $(BUILT))' > $(B)/version)
endif
CUDA_VERSION = $(shell $(NVCC) --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
$(B)/src/base/version.o: CPPFLAGS += -DSTEEL_VERSION='"$(VERSION)"' -DSTEEL_COMMIT='"$(COMMIT)"' $(if $(CUDA_OBJ),-DSTEEL_BUILD='"$(comma) CUDA $(CUDA_VERSION)"')
$(B)/src/base/version.o: $(B)/version

# With or without CUDA: the one file that knows is compiled again when that changes.
CUDA_STAMP := $(B)/with$(if $(CUDA_OBJ),,out)-cuda
ifeq ($(wildcard $(CUDA_STAMP)),)
$(shell mkdir -p $(B) && rm -f $(B)/with-cuda $(B)/without-cuda && touch $(CUDA_STAMP))
endif
$(B)/src/backend/devices.o $(B)/tests/ops/test_ops.o: CPPFLAGS += $(if $(CUDA_OBJ),-DSTEEL_CUDA)
$(B)/src/backend/devices.o: $(CUDA_STAMP)

# -O3 makes these kernels no faster, and six times slower to compile.
$(B)/src/backend/cpu/gemm_int8_%.o $(B)/src/backend/cpu/gemm_float_%.o: CFLAGS += -O2
# The tile kernels with their tiles emulated.
$(B)/tests/test_gemm_int8_amx.o $(B)/tests/test_gemm_bf16_amx.o $(B)/tests/test_gemm_split_amx.o: CFLAGS += -mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16

$(B)/%.o: %.c | deps-check
	@mkdir -p $(@D)
	$(if $(Q),@echo '  CC $<')
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c -o $@ $<

$(B)/%.o: %.cu | deps-check
	@mkdir -p $(@D)
	$(if $(Q),@echo '  NVCC $<')
	$(Q)$(NVCC) -Isrc -Iinclude -D_GNU_SOURCE $(NVCCFLAGS) -MMD -MP -MF $(@:.o=.d) -c -o $@ $<

$(B)/libsteel.a: $(LIB_OBJ) $(CUDA_OBJ)
	$(Q)rm -f $@ && ar rcs $@ $^

$(B)/libserver.a: $(SRV_OBJ)
	$(Q)rm -f $@ && ar rcs $@ $^

# The web page and the libraries it renders with, where they are installed, are packed into the server.
WEB_LIBS := $(wildcard /usr/share/javascript/marked/*.js /usr/share/nodejs/dompurify/dist/*.min.js \
	/usr/share/javascript/katex/*.js /usr/share/javascript/highlight.js/*.js)
ifneq ($(shell cat $(B)/web-libs 2>/dev/null || echo new),$(strip $(WEB_LIBS)))
$(shell mkdir -p $(B) && echo '$(strip $(WEB_LIBS))' > $(B)/web-libs)
endif
$(B)/web/assets.inc: $(filter-out %.c,$(wildcard src/server/web/*)) tools/web.sh $(B)/web-libs | deps-check
	$(Q)sh tools/web.sh $(B)/web
$(B)/src/server/web/web.o: CPPFLAGS += -iquote . -DWEB_ASSETS='"$(B)/web/assets.inc"'
$(B)/src/server/web/web.o: $(B)/web/assets.inc

# Archives with names that are ours too (map_init, utf8_encode): only their interface stays visible.
$(B)/static/%.o:
	@mkdir -p $(@D)
	$(Q)ld -r -o $@ --whole-archive $$($(CC) -print-file-name=lib$*.a)
	$(Q)objcopy -w --keep-global-symbol='el_*' --keep-global-symbol='history*' --keep-global-symbol='json*' $@
$(B)/libsteel.a: | $(filter $(B)/static/%,$(LDLIBS))

$(B)/steel: $(CLI_OBJ) $(B)/libserver.a $(B)/libsteel.a $(filter $(B)/static/%,$(CLI_LIBS))
	$(if $(Q),@echo '  LD $@')
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -o $@ $(CLI_OBJ) $(B)/libserver.a $(B)/libsteel.a $(LDLIBS) $(CLI_LIBS) $(SRV_LIBS)

$(B)/tests/%: $(B)/tests/%.o $(B)/libsteel.a
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -o $@ $< $(B)/libsteel.a $(LDLIBS) -lcmocka

SRV_TESTS := $(addprefix $(B)/tests/,test_endpoints test_http test_http_faults test_jobs test_route)
$(SRV_TESTS): $(B)/tests/%: $(B)/tests/%.o $(B)/libserver.a $(B)/libsteel.a
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -o $@ $< $(B)/libserver.a $(B)/libsteel.a $(LDLIBS) $(SRV_LIBS) -lcmocka

# What the terminal draws, without a terminal.
$(B)/tests/test_markdown: $(B)/tests/test_markdown.o $(addprefix $(B)/src/cli/term/,markdown.o table.o flow.o) $(B)/libsteel.a
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -o $@ $^ $(LDLIBS) -lcmocka

# Lets the server's allocations fail.
$(B)/tests/test_http_faults: LDFLAGS += $(patsubst %,-Wl$(comma)--wrap=%,malloc calloc realloc)

# Counts what the library allocates while it reads hostile files.
$(B)/tests/test_hostile: LDFLAGS += $(patsubst %,-Wl$(comma)--wrap=%,malloc calloc realloc posix_memalign mmap)

# Preloaded by tests/test_faults.py: the k-th allocation, read, write, accept or thread start fails. Built
# without what the rest is built with: sanitizers would look into themselves.
$(B)/tests/faults.so: tests/faults.c
	@mkdir -p $(@D)
	$(Q)$(CC) -std=gnu17 -O1 $(WARN) -D_GNU_SOURCE -fPIC -shared -o $@ $< -ldl
$(B)/tests/test_mem: LDFLAGS += $(patsubst %,-Wl$(comma)--wrap=%,malloc calloc realloc free)

$(B)/bench/%: $(B)/bench/%.o $(B)/libsteel.a
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -o $@ $< $(B)/libsteel.a $(LDLIBS)

# The library as programs outside get it: one object that shows the names of steel.h and no others.
$(B)/lib/libsteel.a: $(B)/libsteel.a
	@mkdir -p $(@D)
	$(Q)ld -r -o $(B)/lib/steel.o --whole-archive $<
	$(Q)objcopy -w --keep-global-symbol='steel_*' $(B)/lib/steel.o
	$(Q)rm -f $@ && ar rcs $@ $(B)/lib/steel.o && rm $(B)/lib/steel.o

# Examples see nothing but the public header and the library.
EXAMPLES := $(patsubst examples/%.c,$(B)/examples/%,$(wildcard examples/*.c))
examples: $(EXAMPLES)
$(B)/examples/%: examples/%.c include/steel.h $(B)/lib/libsteel.a
	@mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS) -Iinclude $(LDFLAGS) -o $@ $< $(B)/lib/libsteel.a $(LDLIBS)

# Only who asks for it (deps, try, test) gets packages installed; plain `make` says what is missing.
deps:
	@sh tools/deps.sh $(if $(filter deps test test-all,$(MAKECMDGOALS)),test)
deps-check: $(if $(filter try test test-all deps,$(MAKECMDGOALS)),deps)
	@sh tools/deps.sh check

try: $(B)/steel
	@sh tools/try.sh $(B)/steel

TEST_TOOLS := $(B)/tests/toy_gguf $(B)/tests/faults.so $(B)/tests/ops/test_ops
test-build: $(if $(MPICC),$(B)/steel-mpi.so) $(B)/steel $(TESTS) $(TEST_TOOLS) $(EXAMPLES)
test: $(if $(MPICC),$(B)/steel-mpi.so) $(B)/steel $(TESTS) $(TEST_TOOLS) $(EXAMPLES)
	@sh tests/run.sh $(B)

# Screens for the docs, as the tests see them.
pictures: $(B)/steel
	@python3 tests/test_terminal.py $(B) picture && cp $(B)/terminal.svg $(B)/terminal-markdown.svg docs/img/

# The whole walk of tests/test_faults.py, of which make test takes a sample.
test-faults: $(B)/steel $(TEST_TOOLS)
	@python3 tests/test_faults.py $(B) all

# All of it: what make test leaves out takes long.
test-all: test test-faults
	@RANKS_ALL=1 ONLY=test_ranks sh tests/run.sh $(B)
	@STEEL_TEST_SECONDS=60 ONLY=test_route.py sh tests/run.sh $(B)
	@STEEL_TEST_AGENTS=1 ONLY=test_clients sh tests/run.sh $(B)
	$(Q)$(MAKE) --no-print-directory test-amx
test-busy: test-build
	@sh tests/busy.sh $(B)

asan:
	$(Q)$(MAKE) --no-print-directory B=build-asan CUDA=0 OPT='-O1 -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -fno-omit-frame-pointer' DEFS=-DSTEEL_DEBUG test

tsan: export TSAN_OPTIONS := suppressions=$(CURDIR)/tests/tsan.supp:$(TSAN_OPTIONS)
tsan:
	$(Q)$(MAKE) --no-print-directory B=build-tsan CUDA=0 OPT='-O1 -fsanitize=thread' DEFS=-DSTEEL_DEBUG test

test-amx:
	$(Q)$(MAKE) --no-print-directory B=build-emu CUDA=0 DEFS=-DAMX_EMULATE amx-run
amx-run: $(B)/tests/test_ops $(B)/tests/test_golden $(B)/tests/test_invariance
	@set -e; for t in $^; do echo "== $$t"; $$t; done

FUZZ_SECONDS ?= 30
fuzz:
	@command -v clang >/dev/null || { echo 'steel: make fuzz needs clang: `sh tools/deps.sh dev` installs it' >&2; exit 1; }
	$(Q)$(MAKE) --no-print-directory B=build-fuzz CUDA=0 CC=clang OPT='-O1 -fsanitize=fuzzer-no-link,address,undefined,float-cast-overflow -fno-sanitize-recover=all' fuzz-run
fuzz-build: $(FUZZERS)
fuzz-run: fuzz-build
	@for f in $(FUZZERS); do echo "== $$f"; n=$$(basename $$f); mkdir -p $(B)/corpus/$$n; \
	  $$f -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=2048 -print_final_stats=0 -verbosity=0 -artifact_prefix=$(B)/$$n- \
	    $$(ls fuzz/$$n.dict 2>/dev/null | sed 's/^/-dict=/') $(B)/corpus/$$n $$(ls -d fuzz/seeds/$$n 2>/dev/null) || exit 1; done
$(B)/fuzz/%: $(B)/fuzz/%.o $(B)/libsteel.a
	$(Q)$(CC) $(CFLAGS) -fsanitize=fuzzer $(LDFLAGS) -o $@ $< $(B)/libsteel.a $(LDLIBS)

$(B)/fuzz/fuzz_markdown: $(B)/fuzz/fuzz_markdown.o $(addprefix $(B)/src/cli/term/,markdown.o table.o flow.o) $(B)/libsteel.a
	$(Q)$(CC) $(CFLAGS) -fsanitize=fuzzer $(LDFLAGS) -o $@ $^ $(LDLIBS)

$(B)/fuzz/fuzz_embeddings $(B)/fuzz/fuzz_forwarded $(B)/fuzz/fuzz_http $(B)/fuzz/fuzz_prefix_hash $(B)/fuzz/fuzz_request $(B)/fuzz/fuzz_upstream: $(B)/fuzz/%: $(B)/fuzz/%.o $(B)/libserver.a $(B)/libsteel.a
	$(Q)$(CC) $(CFLAGS) -fsanitize=fuzzer $(LDFLAGS) -o $@ $< $(B)/libserver.a $(B)/libsteel.a $(LDLIBS) $(SRV_LIBS)

# The GPU's tests and benchmark, on a machine that has one; and the same kernels on the CPU, simulated.
gpu-tools: $(B)/tests/ops/test_ops $(B)/tests/gpu/bench_gpu
$(B)/tests/ops/%.o $(B)/tests/gpu/%.o: CPPFLAGS += -Itests/ops
$(B)/tests/ops/test_ops: $(B)/tests/ops/test_ops.o $(B)/tests/ops/duo.o $(B)/tests/ops/steps.o $(B)/tests/ops/parts.o $(B)/tests/ops/lora.o $(B)/tests/ops/heads.o $(B)/tests/ops/mixers.o $(B)/tests/ops/encoders.o $(B)/tests/ops/picks.o
$(B)/tests/gpu/bench_gpu: $(B)/tests/gpu/bench_gpu.o
$(B)/tests/ops/test_ops $(B)/tests/gpu/bench_gpu: $(B)/tests/ops/random_weight.o $(B)/libsteel.a
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -o $@ $(filter %.o,$^) $(B)/libsteel.a $(CUDA_LIBS) -lm
test-gpu: gpu-tools
	$(B)/tests/ops/test_ops --backend cuda --jobs 8
bench-gpu: gpu-tools
	$(B)/tests/gpu/bench_gpu
SIM_SRC := $(call find_in,src/backend/cuda,*.cu) tests/gpu/cudasim.cpp
SIM_OBJ := $(patsubst %,$(B)/sim/%.o,$(SIM_SRC) tests/ops/test_ops.c tests/ops/steps.c tests/ops/parts.c tests/ops/lora.c tests/ops/heads.c tests/ops/mixers.c tests/ops/encoders.c tests/ops/picks.c tests/ops/duo.c tests/ops/random_weight.c \
	src/backend/ref.c src/backend/ref_mixer.c src/backend/ref_mlp.c src/backend/lora.c src/backend/layer.c src/backend/no_gpu.c src/quant/quant.c src/backend/rawweight.c src/base/error.c src/base/mem.c \
	src/base/pool.c src/base/cpu.c src/sample/sampler.c)
SIM_OBJ += $(B)/sim/src/quant/grids.c.o
SIM_FLAGS = -O1 -g -DSTEEL_CUDA_SIM -D_GNU_SOURCE -Isrc -Iinclude -Itests/gpu -Itests/ops -pthread $(SIM_SAN)
$(B)/sim/%.c.o: %.c
	@mkdir -p $(@D)
	$(Q)$(CC) -std=gnu17 $(SIM_FLAGS) -MMD -MP -c -o $@ $<
$(B)/sim/%.o: %
	@mkdir -p $(@D)
	$(if $(Q),@echo '  SIM $<')
	$(Q)$(CXX) -std=gnu++17 -Wall -Wno-unknown-pragmas $(SIM_FLAGS) -MMD -MP -x c++ -c -o $@ $<
$(B)/sim/test_ops: $(SIM_OBJ)
	$(Q)$(CXX) $(SIM_SAN) -rdynamic -o $@ $^ -lm -ldl -pthread
# The program with a simulated GPU: what several ranks do with one (tests/gpu/ranks_sim.py).
$(B)/sim/src/backend/devices.c.o: SIM_FLAGS += -DSTEEL_CUDA
$(B)/sim/steel: $(CLI_OBJ) $(B)/sim/src/backend/devices.c.o $(patsubst %,$(B)/sim/%.o,$(SIM_SRC)) $(B)/libserver.a $(B)/libsteel.a
	$(Q)$(CXX) $(CFLAGS) $(LDFLAGS) $(SIM_SAN) -rdynamic -o $@ $^ $(LDLIBS) $(SRV_LIBS) $(CLI_LIBS) -ldl -pthread
# Speculation with a simulated GPU (STEEL_TEST_DEVICE=cuda): by hand, it takes long.
$(B)/sim/test_speculate: $(B)/tests/test_speculate.o $(B)/sim/src/backend/devices.c.o $(patsubst %,$(B)/sim/%.o,$(SIM_SRC)) $(B)/libsteel.a
	$(Q)$(CXX) $(CFLAGS) $(LDFLAGS) $(SIM_SAN) -rdynamic -o $@ $^ $(LDLIBS) -lcmocka -ldl -pthread
$(B)/sim/libnccl.so.2: tests/gpu/fakenccl.cpp tests/gpu/cudasim.h
	@mkdir -p $(@D)
	$(Q)$(CXX) -std=gnu++17 -Wall $(SIM_FLAGS) -fPIC -shared -o $@ $<
test-sim: $(B)/sim/test_ops $(B)/sim/steel $(B)/sim/libnccl.so.2 $(if $(MPICC),$(B)/steel-mpi.so)
	LD_LIBRARY_PATH=$(B)/sim $(B)/sim/test_ops
	python3 tests/gpu/ranks_sim.py $(B)

bench: $(B)/steel $(patsubst bench/%.c,$(B)/bench/%,$(wildcard bench/*.c))
	@sh bench/run.sh $(B)

FORMATTED = $(call find_in,src include tests fuzz bench examples,*.[ch]) $(call find_in,src tests,*.cu) $(call find_in,src,*.cuh) $(call find_in,tests,*.cpp)
format:
	clang-format -i $(FORMATTED)
format-check:
	clang-format --dry-run -Werror $(FORMATTED)
tidy:
	@sh tools/tidy.sh $(if $(ALL),all)

# What is installed. DESTDIR stands before everything, for packages.
PREFIX   ?= /usr/local
LIBDIR   ?= $(PREFIX)/lib
SONAME   := libsteel.so.$(firstword $(subst ., ,$(VERSION)))
SHARED   := libsteel.so.$(VERSION)
PAGES     = $(shell $(B)/steel help --pages)
INSTALL_D = $(DESTDIR)$(PREFIX)
INSTALL_L = $(DESTDIR)$(LIBDIR)

# The library with its interface alone, and versions on its names.
$(B)/lib/$(SHARED): $(LIB_OBJ) $(CUDA_OBJ) packaging/steel.map
	@mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS) -shared -Wl,-soname,$(SONAME) -Wl,--version-script=packaging/steel.map -Wl,-z,defs $(LDFLAGS) \
	  -o $@ $(LIB_OBJ) $(CUDA_OBJ) $(LDLIBS)

# Man pages and completions come from the tables of options.
docs-build: $(B)/steel
	@mkdir -p $(B)/man $(B)/completions
	@for p in $(PAGES); do STEEL_CONFIG= $(B)/steel help --man $$(echo $$p | sed 's/^steel//; s/-/ /g') > $(B)/man/$$p.1 || exit 1; done
	@for s in bash zsh fish; do STEEL_CONFIG= $(B)/steel completion $$s > $(B)/completions/$$s || exit 1; done

install: install-program install-library
install-program: all docs-build
	install -D -m 755 $(B)/steel $(INSTALL_D)/bin/steel
	$(if $(MPICC),install -D -m 755 $(B)/steel-mpi.so $(INSTALL_L)/steel/steel-mpi.so)
	$(if $(STRIP),strip $(INSTALL_D)/bin/steel)
	install -D -m 644 -t $(INSTALL_D)/share/man/man1 $(patsubst %,$(B)/man/%.1,$(PAGES))
	install -D -m 644 $(B)/completions/bash $(INSTALL_D)/share/bash-completion/completions/steel
	install -D -m 644 $(B)/completions/zsh $(INSTALL_D)/share/zsh/site-functions/_steel
	install -D -m 644 $(B)/completions/fish $(INSTALL_D)/share/fish/vendor_completions.d/steel.fish
	@mkdir -p $(INSTALL_L)/systemd/system
	sed 's|@BINDIR@|$(PREFIX)/bin|' packaging/steel.service.in > $(INSTALL_L)/systemd/system/steel.service
install-library: $(B)/lib/libsteel.a $(B)/lib/$(SHARED)
	install -D -m 644 $(B)/lib/libsteel.a $(INSTALL_L)/libsteel.a
	install -D -m 755 $(B)/lib/$(SHARED) $(INSTALL_L)/$(SHARED)
	ln -sf $(SHARED) $(INSTALL_L)/$(SONAME)
	ln -sf $(SONAME) $(INSTALL_L)/libsteel.so
	install -D -m 644 include/steel.h $(INSTALL_D)/include/steel.h
	@mkdir -p $(INSTALL_L)/pkgconfig
	sed 's|@PREFIX@|$(PREFIX)|; s|@LIBDIR@|$(LIBDIR)|; s|@VERSION@|$(VERSION)|; s|@PRIVATE@|$(LDLIBS) -pthread|' packaging/steel.pc.in > $(INSTALL_L)/pkgconfig/steel.pc
	$(if $(DESTDIR),,$(if $(filter /usr/lib /usr/local/lib,$(LIBDIR)),-ldconfig))

uninstall:
	rm -f $(INSTALL_L)/steel/steel-mpi.so
	-rmdir $(INSTALL_L)/steel 2>/dev/null
	rm -f $(INSTALL_D)/bin/steel $(INSTALL_D)/include/steel.h $(INSTALL_L)/libsteel.a $(INSTALL_L)/libsteel.so* \
	  $(INSTALL_L)/pkgconfig/steel.pc $(INSTALL_L)/systemd/system/steel.service \
	  $(INSTALL_D)/share/man/man1/steel.1* $(INSTALL_D)/share/man/man1/steel-*.1* \
	  $(INSTALL_D)/share/bash-completion/completions/steel $(INSTALL_D)/share/zsh/site-functions/_steel \
	  $(INSTALL_D)/share/fish/vendor_completions.d/steel.fish

# For other machines: the binary with its libraries inside (libc and the GPU's driver excepted).
dist:
	$(Q)$(MAKE) --no-print-directory B=build-dist DIST=1 STATIC=1 build-dist/steel
	@mkdir -p dist && cp build-dist/steel dist/steel && strip dist/steel
	@size=$$(stat -c %s dist/steel); echo "dist/steel: $$((size / 1000000)) MB, version $(VERSION)"; [ $$size -lt 40000000 ]
deb:
	$(Q)rm -rf build-dist/deb
	$(Q)$(MAKE) --no-print-directory B=build-dist DIST=1 STATIC=1 STRIP=1 MPICC= DESTDIR=build-dist/deb PREFIX=/usr install-program
	@mkdir -p dist && sh packaging/deb.sh build-dist/deb $(VERSION) dist/steel-llm_$(VERSION)_$$(dpkg --print-architecture).deb

clean:
	rm -rf build build-* dist

.PHONY: pictures test-build test-all test-busy test-faults gpu-tools test-gpu bench-gpu test-sim all help examples deps try test asan tsan fuzz fuzz-build fuzz-run bench format format-check tidy install install-program install-library uninstall docs-build dist deb deps-check clean test-amx amx-run
.SECONDARY:
-include $(shell find $(B) -type f -name '*.d' 2>/dev/null)
