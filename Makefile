# Steel. `make` builds build/steel, `make try` shows it working, `make test` runs the tests, `make help` lists the targets.
# Variables: CC, OPT, B (the build folder), CUDA=0, STATIC=1 (static third-party libraries), V=1 (prints commands), CROSS
# (a cross compiler's prefix, as aarch64-linux-gnu) with SYSROOT (where its libraries are, if not in Debian's place; by
# default what `make sysroot` has unpacked).

# All cores by default; -j on the command line overrides it.
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j$(shell nproc)
endif

CC      ?= gcc
OPT     ?= -O3
B       ?= build$(CROSS:%=-%)
ARCH    := $(if $(CROSS),$(firstword $(subst -, ,$(CROSS))),$(shell uname -m))
ifneq ($(CROSS),)
override CC := $(filter ccache,$(CC)) $(CROSS)-gcc
CUDA    := 0
MPICC   :=
TOOL    := $(CROSS)-
SYSROOT ?= $(patsubst %/complete,%,$(wildcard build-$(CROSS)/sysroot/complete))
RUN     ?= qemu-$(ARCH)$(SYSROOT:%= -L %) # starts programs of this build
ifneq ($(SYSROOT),)
CPPFLAGS += -isystem $(SYSROOT)/usr/include -isystem $(SYSROOT)/usr/include/$(CROSS)
LDFLAGS += -L$(SYSROOT)/usr/lib/$(CROSS) -Wl,-rpath-link=$(SYSROOT)/usr/lib/$(CROSS):$(SYSROOT)/lib/$(CROSS)
endif
endif
Q       := $(if $(V),,@)
say      = $(if $(Q),@mkdir -p $(@D) && echo '  $1 $(or $2,$<)',@mkdir -p $(@D))
WARN    := -Wall -Wextra -Werror -Wshadow -Wstrict-prototypes -Wpointer-arith
CFLAGS  += -std=gnu17 $(OPT) -g $(WARN) -fno-math-errno -ffp-contract=off -pthread -fPIC -fvisibility=hidden
CPPFLAGS += -Isrc -Iinclude -D_GNU_SOURCE $(DEFS)
comma   := ,
# Libraries; with STATIC=1 their archives and what those depend on.
libs     = $(if $(STATIC),-Wl$(comma)-Bstatic $1 -Wl$(comma)-Bdynamic,$1)
IMG_LIBS := -lwebpdemux -lwebp -lgif -ljpeg -lpng16 -lz
LDLIBS  := $(if $(STATIC),$(B)/static/jansson.o,-ljansson) $(call libs,-lpcre2-8 -lutf8proc $(IMG_LIBS)) -lm
CLI_LIBS := $(if $(STATIC),$(B)/static/edit.o $(call libs,-ltinfo -lbsd -lmd),-ledit)
SRV_LIBS := $(call libs,-levent_openssl -levent -lssl -lcrypto) $(if $(STATIC),-ldl)

# Links the objects and archives among the prerequisites; libserver.a comes before libsteel.a, which it needs.
LIBS     = $(LDLIBS) $(if $(filter %/libserver.a,$^),$(SRV_LIBS))
link     = $(Q)$(CC) $(CFLAGS) $(LDFLAGS) -o $@ $(filter %.o,$^) $(sort $(filter %.a,$^)) $(LIBS)
wrap     = $(patsubst %,-Wl$(comma)--wrap=%,$1)
# Source files: $(call find_in,FOLDERS,PATTERN).
find_in  = $(sort $(shell find $1 -name node_modules -prune -o -name '$(strip $2)' -print))
# $(call stamp,FILE,TEXT): rewrites B/FILE when TEXT changes; what depends on it is built again then.
stamp    = $(if $(subst x$(strip $2),,x$(shell cat $(B)/$1 2>/dev/null || echo none)),$(shell mkdir -p $(B) && echo '$(strip $2)' >$(B)/$1))

# CUDA, if nvcc is found. The runtime is linked statically, so the binary also starts on machines without a driver. By
# default code for Hopper and PTX for others; CUDA_ARCHS=all builds every target.
NVCC    ?= $(shell command -v nvcc 2>/dev/null || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
# `make try` and the tests leave CUDA out where no driver could run it.
ifeq ($(origin CUDA) $(wildcard /dev/nvidiactl /dev/dxg),undefined )
ifeq ($(if $(MAKECMDGOALS),$(filter-out try test test-build test-all test-busy test-faults,$(MAKECMDGOALS)),all),)
CUDA := 0
$(if $(NVCC),$(info steel: no NVIDIA driver here: built without CUDA (`make` builds it)))
endif
endif
ifneq ($(if $(filter 0,$(CUDA)),,$(NVCC)),)
CUDA_ALL  := $(patsubst %.cu,$(B)/%.o,$(call find_in,src/backend/cuda,*.cu))
# Only nvcc knows where its libraries are: the one on PATH may be a script that starts another.
cuda_dirs  = $(subst ",,$(shell $(NVCC) --dryrun -x cu -c /dev/null 2>&1 | sed -n 's/^\#$$ $1=//p'))
CUDA_DIRS := $(call cuda_dirs,LIBRARIES)
# For ARM hosts (CROSS with CUDA=1) the headers are the same; libraries to link are in sbsa-linux.
ifneq ($(CROSS),)
NVCCFLAGS += -ccbin $(CROSS)-g++ $(call cuda_dirs,INCLUDES)
CUDA_DIRS := $(subst /x86_64-linux/,/sbsa-linux/,$(CUDA_DIRS))
endif
ifeq ($(wildcard $(addsuffix /libcudart_static.a,$(patsubst -L%,%,$(CUDA_DIRS)))),)
$(info steel: $(NVCC) has no libcudart_static.a$(if $(CROSS), for $(ARCH)) beside it: building without CUDA)
else
CUDA_OBJ  := $(CUDA_ALL)
CUDA_LIBS := $(CUDA_DIRS) -lcudart_static -ldl -lrt
LDLIBS    += $(CUDA_LIBS)
endif
CUDA_ARCHS ?= 90a ptx80
cuda_gencode = $(if $(filter ptx%,$1),-gencode=arch=compute_$(1:ptx%=%)$(comma)code=compute_$(1:ptx%=%),-gencode=arch=compute_$1$(comma)code=sm_$1)
CUDA_GEN  := $(foreach a,$(if $(filter all,$(CUDA_ARCHS)),80 86 89 90a 100 120 121,$(CUDA_ARCHS)),$(call cuda_gencode,$a))
# Packages (dist, deb) are compressed; other builds have line numbers, for profilers.
CUDA_SMALL = $(if $(shell $(NVCC) --help 2>/dev/null | grep -e --compress-mode),--compress-mode=size,-Xfatbin -compress-all)
NVCCFLAGS += -std=c++17 -O3 $(if $(DIST),$(CUDA_SMALL),-lineinfo -Xfatbin -compress-all) $(CUDA_GEN) -Xcompiler -Wall,-Werror,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics,-fPIC,-fvisibility=hidden
NVCCFLAGS += $(if $(TRACE),-DSTEEL_CUDA_TRACE)
CPPFLAGS  += $(if $(TRACE),-DSTEEL_CUDA_TRACE)
endif

# Vulkan, if glslc and Vulkan's headers are found. Shaders become part of the binary; the loader is opened at run time.
# VULKAN=0 leaves it out.
GLSLC     ?= $(shell command -v glslc 2>/dev/null)
VULKAN_HEADER := $(wildcard /usr/include/vulkan/vulkan_core.h /usr/local/include/vulkan/vulkan_core.h)
ifneq ($(if $(filter 0,$(VULKAN))$(CROSS),,$(if $(VULKAN_HEADER),$(GLSLC))),)
HAS_VULKAN := 1
SHADERS    := $(patsubst src/backend/vulkan/shaders/%.comp,$(B)/vulkan/%.inc,$(call find_in,src/backend/vulkan/shaders,*.comp))
endif

# Files for one instruction set have its name at their end: they are compiled with its flags, if it is the target's, and
# chosen at run time.
KERNELS  := avx2 avx512 vnni amx neon dotprod i8mm
KERNELS_x86_64  := avx2 avx512 vnni amx
KERNELS_aarch64 := neon dotprod i8mm
FLAGS_avx2   := -mavx2 -mfma -mf16c -mbmi2
FLAGS_avx512 := $(FLAGS_avx2) -mavx512f -mavx512bw -mavx512vl -mavx512dq
FLAGS_vnni   := $(FLAGS_avx512) -mavx512vnni -mavx512vbmi
FLAGS_amx    := $(FLAGS_vnni) -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16
# Every aarch64 compiler has NEON on: the macro tells these files from plain C.
FLAGS_neon    := -DSTEEL_NEON
FLAGS_dotprod := $(FLAGS_neon) -march=armv8.2-a+dotprod
FLAGS_i8mm    := $(FLAGS_neon) -march=armv8.2-a+dotprod+i8mm
$(foreach k,$(KERNELS),$(eval $(B)/src/backend/cpu/%_$k.o $(B)/src/quant/%_$k.o: CFLAGS += $(FLAGS_$k)))
native    = $(filter-out $(foreach k,$(filter-out $(KERNELS_$(ARCH)),$(KERNELS)),%_$k.c),$1)

# The library is everything but the commands and the server, which is an archive of its own: only programs that serve
# need libevent and OpenSSL. Tests and fuzzers link the library; src/cli is the program. PARTS=kernels (with a B of its own)
# leaves out what tests of kernels do not need.
PARTS_kernels := $(addprefix src/,base/% quant/% file/% sample/% backend/%)
LIB_SRC := $(call native,$(filter-out src/cli/% src/server/% src/route/% src/dist/ranks_mpi.c,$(call find_in,src,*.c)))
LIB_SRC := $(if $(HAS_VULKAN),$(LIB_SRC),$(filter-out src/backend/vulkan/%,$(LIB_SRC)))
LIB_SRC := $(if $(PARTS),$(filter $(PARTS_$(PARTS)),$(LIB_SRC)),$(LIB_SRC))
LIB_OBJ := $(LIB_SRC:%.c=$(B)/%.o)
SRV_OBJ := $(patsubst %.c,$(B)/%.o,$(call find_in,src/server src/route,*.c))
CLI_OBJ := $(patsubst %.c,$(B)/%.o,$(call find_in,src/cli,*.c))
TESTS   := $(patsubst %.c,$(B)/%,$(call native,$(sort $(wildcard tests/test_*.c))))
TESTS   := $(if $(HAS_VULKAN),$(TESTS),$(filter-out $(B)/tests/test_coop_words,$(TESTS)))
FUZZERS := $(patsubst %.c,$(B)/%,$(sort $(wildcard fuzz/fuzz_*.c)))
EXAMPLES := $(patsubst %.c,$(B)/%,$(wildcard examples/*.c))

# The MPI code, if MPI is installed: loaded only in processes that a launcher such as mpirun has started.
MPICC ?= $(shell command -v mpicc 2>/dev/null)
MPI   := $(if $(MPICC),$(B)/steel-mpi.so)
all: $(B)/steel $(MPI) ## build $(B)/steel
mpi: $(B)/steel-mpi.so
cuda-objects: $(CUDA_ALL) ## compile the CUDA code without linking it, as for ARM hosts: CROSS=aarch64-linux-gnu CUDA=1
$(B)/steel-mpi.so: src/dist/ranks_mpi.c src/dist/ranks_link.h
	$(call say,MPICC)
	$(Q)OMPI_CC=gcc $(MPICC) -std=gnu17 -O2 $(WARN) -Isrc -fPIC -fvisibility=hidden -shared -o $@ $<

help:
	@sed -n 's/^\([a-z][a-z-]*\):[^#]*## /make \1|/p' $(MAKEFILE_LIST) | sed 's|$$(B)|$(B)|' | while IFS='|' read -r t d; do printf '%-17s %s\n' "$$t" "$$d"; done

# Sanitizers check the addresses of vector kernels, but not their arithmetic, which takes minutes to compile. Fuzzers feed
# parsers, so there kernels are compiled without.
ifneq ($(findstring fuzzer,$(OPT)),)
$(B)/src/backend/cpu/%.o $(B)/src/quant/quantize%.o: CFLAGS += -fno-sanitize=all
else ifneq ($(findstring undefined,$(OPT)),)
$(B)/src/backend/cpu/%.o $(B)/src/quant/quantize%.o: CFLAGS += -fno-sanitize=undefined,float-cast-overflow
endif
# Scheduling before registers are allocated makes gcc spill tiles of sixteen sums.
$(B)/src/backend/cpu/gemm_int8_i8mm.o: CFLAGS += -fno-schedule-insns
# -O3 makes these kernels no faster, and six times slower to compile.
$(B)/src/backend/cpu/gemm_int8_%.o $(B)/src/backend/cpu/gemm_float_%.o: CFLAGS += -O2
# Their tiles are emulated.
$(patsubst %,$(B)/tests/test_gemm_%_amx.o,int8 bf16 split): CFLAGS += $(FLAGS_avx512) -mavx512bf16

# The built-in models are part of the binary.
BUILTIN       := $(wildcard demo/steel-demo.gguf)
BUILTIN_SEE   := $(wildcard demo/see/steel-see.gguf)
BUILTIN_TOWER := $(wildcard demo/see/mmproj-steel-see.gguf)
$(B)/src/file/builtin.o: CPPFLAGS += $(BUILTIN:%=-DSTEEL_BUILTIN='"%"') $(BUILTIN_SEE:%=-DSTEEL_BUILTIN_SEE='"%"') \
	$(BUILTIN_TOWER:%=-DSTEEL_BUILTIN_TOWER='"%"')
$(B)/src/file/builtin.o: $(BUILTIN) $(BUILTIN_SEE) $(BUILTIN_TOWER)

# One file is compiled again when the version (VERSION, git's commit) changes, one when CUDA comes or goes.
VERSION := $(shell cat VERSION)
COMMIT  := $(shell git describe --always --dirty=+changes --exclude='*' 2>/dev/null)
CUDA_VERSION = $(shell $(NVCC) --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
$(call stamp,version,$(VERSION) $(COMMIT) $(if $(CUDA_OBJ),CUDA))
$(call stamp,cuda,$(if $(CUDA_OBJ),with,without) CUDA)
$(call stamp,vulkan-here,$(if $(HAS_VULKAN),with,without) Vulkan)
$(B)/src/base/version.o: CPPFLAGS += -DSTEEL_VERSION='"$(VERSION)"' -DSTEEL_COMMIT='"$(COMMIT)"' $(if $(CUDA_OBJ),-DSTEEL_BUILD='"$(comma) CUDA $(CUDA_VERSION)"')
$(B)/src/base/version.o: $(B)/version
$(B)/src/backend/devices.o $(B)/tests/ops/test_ops.o: CPPFLAGS += $(if $(CUDA_OBJ),-DSTEEL_CUDA)
$(B)/src/backend/devices.o $(B)/tests/ops/test_ops.o: $(B)/cuda
$(B)/src/backend/devices.o: CPPFLAGS += $(if $(HAS_VULKAN),-DSTEEL_VULKAN)
$(B)/src/backend/devices.o: $(B)/vulkan-here

$(B)/src/backend/vulkan/pipeline.o: CPPFLAGS += -iquote $(B)/vulkan
$(B)/src/backend/vulkan/pipeline.o: $(B)/vulkan/modules.h
$(B)/vulkan/modules.h: $(SHADERS)
	$(Q)for f in $(sort $(SHADERS)); do echo "static const uint32_t $$(basename $$f .inc)_words[] = {"; cat $$f; echo "};"; done >$@
# Kernels on cooperative matrices become valid in src/backend/vulkan/coop.c, and glslc optimises nothing that is not.
$(B)/vulkan/%.inc: src/backend/vulkan/shaders/%.comp $(wildcard src/backend/vulkan/shaders/*.glsl src/backend/vulkan/shaders/*.h)
	$(call say,GLSLC)
	$(Q)$(GLSLC) --target-env=vulkan1.2 $(if $(findstring _coop,$<),-O0,-O) -mfmt=num -o $@ $<

$(B)/%.o: %.c | deps-check
	$(call say,CC)
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c -o $@ $<

$(B)/%.o: %.cu | deps-check
	$(call say,NVCC)
	$(Q)$(NVCC) -Isrc -Iinclude -D_GNU_SOURCE $(NVCCFLAGS) -MMD -MP -MF $(@:.o=.d) -c -o $@ $<

$(B)/libsteel.a: $(LIB_OBJ) $(CUDA_OBJ)
$(B)/libserver.a: $(SRV_OBJ)
$(B)/libsteel.a $(B)/libserver.a:
	$(Q)rm -f $@ && $(TOOL)ar rcs $@ $^

# The web page and the libraries that render it, where they are installed, are packed into the server.
$(call stamp,web-libs,$(wildcard /usr/share/javascript/marked/*.js /usr/share/nodejs/dompurify/dist/*.min.js \
	/usr/share/javascript/katex/*.js /usr/share/javascript/highlight.js/*.js))
$(B)/web/assets.inc: $(filter-out %.c,$(wildcard src/server/web/*)) tools/web.sh $(B)/web-libs | deps-check
	$(Q)sh tools/web.sh $(B)/web
$(B)/src/server/web/web.o: CPPFLAGS += -iquote . -DWEB_ASSETS='"$(B)/web/assets.inc"'
$(B)/src/server/web/web.o: $(B)/web/assets.inc

# Some archives define names that are ours, too (map_init, utf8_encode): only their interface stays visible.
$(B)/static/%.o:
	@mkdir -p $(@D)
	$(Q)$(TOOL)ld -r -o $@ --whole-archive $$($(CC) $(SYSROOT:%=-B%/usr/lib/$(CROSS)/) -print-file-name=lib$*.a)
	$(Q)$(TOOL)objcopy -w --keep-global-symbol='el_*' --keep-global-symbol='history*' --keep-global-symbol='json*' $@
$(B)/libsteel.a: | $(filter $(B)/static/%,$(LDLIBS))

$(B)/steel: $(CLI_OBJ) $(B)/libserver.a $(B)/libsteel.a | $(filter $(B)/static/%,$(CLI_LIBS))
	$(call say,LD,$@)
	$(link) $(CLI_LIBS)

# Programs of one file, the library, and what some need besides.
$(B)/tests/%: LIBS += -lcmocka
$(B)/tests/ops/% $(B)/tests/gpu/%: LIBS = $(CUDA_LIBS) -lm
$(B)/fuzz/%:  LIBS += -fsanitize=fuzzer
$(B)/tests/%: $(B)/tests/%.o $(B)/libsteel.a
	$(link)
$(B)/fuzz/%: $(B)/fuzz/%.o $(B)/libsteel.a
	$(link)
$(B)/bench/%: $(B)/bench/%.o $(B)/libsteel.a
	$(link)
$(addprefix $(B)/tests/test_,endpoints http http_faults jobs route): $(B)/libserver.a
$(addprefix $(B)/fuzz/fuzz_,embeddings forwarded http mcp modelfile prefix_hash request responses_tools upstream): $(B)/libserver.a
$(B)/fuzz/fuzz_config: $(B)/src/cli/config_lines.o
$(B)/tests/test_markdown $(B)/fuzz/fuzz_markdown: $(addprefix $(B)/src/cli/term/,markdown.o table.o flow.o highlight.o)
$(B)/tests/ops/%.o $(B)/tests/gpu/%.o: CPPFLAGS += -Itests/ops
$(B)/tests/ops/test_ops: $(patsubst %.c,$(B)/%.o,$(wildcard tests/ops/*.c))
$(B)/tests/gpu/bench_gpu: $(B)/tests/ops/random_weight.o
# Tests that let allocations fail, or count them, and one whose disk is full.
$(B)/tests/test_http_faults: LDFLAGS += $(call wrap,malloc calloc realloc)
$(B)/tests/test_hostile: LDFLAGS += $(call wrap,malloc calloc realloc posix_memalign mmap)
$(B)/tests/test_mem: LDFLAGS += $(call wrap,malloc calloc realloc free)
$(B)/tests/test_fit: LDFLAGS += $(call wrap,mem_aligned mem_aligned_free)
$(B)/tests/test_prefix_disk: LDFLAGS += $(call wrap,statvfs)
# Preloaded by tests/test_faults.py. Without the build's own flags: sanitizers would watch themselves.
$(B)/tests/vulkan_faults/libvulkan.so.1: tests/vulkan_faults.c
	@mkdir -p $(@D)
	$(Q)$(CC) -std=gnu17 -O1 $(WARN) -D_GNU_SOURCE -fPIC -fvisibility=hidden -shared -o $@ $< -ldl
$(B)/tests/faults.so: tests/faults.c
	@mkdir -p $(@D)
	$(Q)$(CC) -std=gnu17 -O1 $(WARN) -D_GNU_SOURCE -fPIC -shared -o $@ $< -ldl

# The library for other programs: one object that exports the names of steel.h only. Examples see nothing else.
$(B)/lib/libsteel.a: $(B)/libsteel.a
	@mkdir -p $(@D)
	$(Q)$(TOOL)ld -r -o $(B)/lib/steel.o --whole-archive $<
	$(Q)$(TOOL)objcopy -w --keep-global-symbol='steel_*' $(B)/lib/steel.o
	$(Q)rm -f $@ && $(TOOL)ar rcs $@ $(B)/lib/steel.o && rm $(B)/lib/steel.o
examples: $(EXAMPLES)
$(B)/examples/%: examples/%.c include/steel.h $(B)/lib/libsteel.a
	@mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS) -Iinclude $(LDFLAGS) -o $@ $< $(B)/lib/libsteel.a $(LDLIBS)

# deps, try and the tests install missing packages; other targets only name them.
TESTING := $(filter deps test test-all,$(MAKECMDGOALS))
deps: ## install the Debian packages that building and testing need (test does that too; try: building only)
	@sh tools/deps.sh $(if $(TESTING),test)
sysroot: ## with CROSS: libraries for the cross build, from Debian's packages
	@sh tools/sysroot.sh $(CROSS)
deps-check: $(if $(filter try,$(MAKECMDGOALS))$(TESTING),deps)
	@sh tools/deps.sh check

try: $(B)/steel ## install what is missing, build, and show it working
	@sh tools/try.sh $(B)/steel

TEST_TOOLS := $(addprefix $(B)/tests/,toy_gguf faults.so ops/test_ops $(if $(HAS_VULKAN),vulkan_faults/libvulkan.so.1))
test-build: $(MPI) $(B)/steel $(TESTS) $(TEST_TOOLS) $(EXAMPLES)
test: test-build ## install what is missing, build, run the tests
	@sh tests/run.sh $(B)
test-all: test test-faults ## the same and what takes long
	@RANKS_ALL=1 ONLY=test_ranks sh tests/run.sh $(B)
	@STEEL_TEST_SECONDS=60 ONLY=test_route.py sh tests/run.sh $(B)
	@STEEL_TEST_SECONDS=60 ONLY=test_models.py sh tests/run.sh $(B)
	@STEEL_TEST_AGENTS=1 ONLY=test_clients sh tests/run.sh $(B)
	@sh tests/test_vulkan.sh $(B) all || [ $$? = 77 ]
	$(Q)$(MAKE) --no-print-directory test-amx test-arm
	$(Q)$(MAKE) --no-print-directory CUDA=0 test-cuda-faults
	$(Q)$(MAKE) --no-print-directory CUDA=0 SECONDS=120 soak
SECONDS ?= 3600
soak: $(B)/steel $(TEST_TOOLS) ## mixed load for SECONDS; every answer is compared with what the request gives alone
	@python3 tests/soak.py $(B) $(SECONDS)
test-busy: test-build ## the tests, three times in a row, beside busy loops
	@sh tests/busy.sh $(B)
test-faults: $(B)/steel $(TEST_TOOLS) ## every allocation, read, write, accept and thread start fails once
	@python3 tests/test_faults.py $(B) all

test-arm: ## build for aarch64 and run the tests that tests/arm.sh lists, under qemu-user, on three CPUs
	@sh tests/arm.sh
pictures: $(B)/steel ## the docs' terminal screens, as the tests see them
	@python3 tests/test_terminal.py $(B) picture && cp $(B)/terminal.svg $(B)/terminal-markdown.svg docs/img/

asan: export ASAN_OPTIONS := detect_stack_use_after_return=0:$(ASAN_OPTIONS)# some gcc 13 misalign vectors on its stack
asan: ## the tests under AddressSanitizer and UBSan
	$(Q)$(MAKE) --no-print-directory B=build-asan CUDA=0 OPT='-O1 -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -fno-omit-frame-pointer' DEFS=-DSTEEL_DEBUG test
tsan: export TSAN_OPTIONS := suppressions=$(CURDIR)/tests/tsan.supp:$(TSAN_OPTIONS)
tsan: ## the tests under ThreadSanitizer
	$(Q)$(MAKE) --no-print-directory B=build-tsan CUDA=0 OPT='-O1 -fsanitize=thread' DEFS=-DSTEEL_DEBUG test

test-amx: ## ops and golden models through AMX kernels whose tiles are emulated
	$(Q)$(MAKE) --no-print-directory B=build-emu CUDA=0 DEFS=-DAMX_EMULATE amx-run
amx-run: $(B)/tests/test_ops $(B)/tests/test_golden $(B)/tests/test_invariance
	@set -e; for t in $^; do echo "== $$t"; $$t; done

FUZZ_SECONDS ?= 30
fuzz: ## build the libFuzzer programs (clang) and run each for FUZZ_SECONDS
	@command -v clang >/dev/null || { echo 'steel: make fuzz needs clang: `sh tools/deps.sh dev` installs it' >&2; exit 1; }
	$(Q)$(MAKE) --no-print-directory B=build-fuzz CUDA=0 CC=clang OPT='-O1 -fsanitize=fuzzer-no-link,address,undefined,float-cast-overflow -fno-sanitize-recover=all' fuzz-run
fuzz-build: $(FUZZERS)
fuzz-run: fuzz-build
	@for f in $(FUZZERS); do echo "== $$f"; n=$$(basename $$f); mkdir -p $(B)/corpus/$$n; \
	  $$f -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=2048 -print_final_stats=0 -verbosity=0 -artifact_prefix=$(B)/$$n- \
	    $$(ls fuzz/$$n.dict 2>/dev/null | sed 's/^/-dict=/') $(B)/corpus/$$n $$(ls -d fuzz/seeds/$$n 2>/dev/null) || exit 1; done

bench: $(B)/steel $(patsubst %.c,$(B)/%,$(wildcard bench/*.c)) ## kernel and model benchmarks
	@sh bench/run.sh $(B)

FORMATTED = $(call find_in,src include tests fuzz bench examples,*.[ch]) $(call find_in,src tests,*.cu) $(call find_in,src,*.cuh) $(call find_in,tests,*.cpp)
format: ## clang-format in place
	clang-format -i $(FORMATTED)
format-check: ## clang-format, as CI runs it
	clang-format --dry-run -Werror $(FORMATTED)
tidy: ## clang-tidy over what differs from origin/main; ALL=1: over all
	@sh tools/tidy.sh $(if $(ALL),all)

include tests/gpu/gpu.mk packaging/install.mk

clean:
	rm -rf build build-* dist

.PHONY: $(shell sed -n 's/^\([a-z][a-z-]*\):.*/\1/p' $(MAKEFILE_LIST))
.SECONDARY:
-include $(shell find $(B) -type f -name '*.d' 2>/dev/null)
