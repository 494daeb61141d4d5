# The GPU's op suite and benchmark, for a machine that has one, and the same kernels simulated on the CPU (cudasim.h).
gpu-tools: $(B)/tests/ops/test_ops $(B)/tests/gpu/bench_gpu
test-gpu: gpu-tools ## every GPU op against the reference
	$(B)/tests/ops/test_ops --backend cuda --jobs 8
bench-gpu: gpu-tools ## their speed
	$(B)/tests/gpu/bench_gpu

SIM_FLAGS = -O1 -g -DSTEEL_CUDA_SIM -D_GNU_SOURCE -Isrc -Iinclude -Itests/gpu -Itests/ops -pthread $(SIM_SAN)
SIM_CUDA := $(patsubst %,$(B)/sim/%.o,$(call find_in,src/backend/cuda,*.cu) tests/gpu/cudasim.cpp)
SIM_OPS  := $(patsubst %,$(B)/sim/%.o,$(wildcard tests/ops/*.c) $(addprefix src/,$(addsuffix .c,base/error base/mem base/os base/pool base/cpu $(addprefix sample/,sampler scan draw candidates sample_chain) \
	$(addprefix quant/,quant grids) $(addprefix backend/,canary $(patsubst src/backend/%.c,%,$(wildcard src/backend/ref*.c)) lora layer no_gpu rawweight))))
sim_link  = $(Q)$(CXX) $(CFLAGS) $(LDFLAGS) $(SIM_SAN) -rdynamic -o $@ $(filter %.o,$^) $(sort $(filter %.a,$^)) $(LIBS) -ldl -pthread
$(B)/sim/%.c.o: %.c
	@mkdir -p $(@D)
	$(Q)$(CC) -std=gnu17 $(SIM_FLAGS) -MMD -MP -c -o $@ $<
$(B)/sim/%.o: %
	$(call say,SIM)
	$(Q)$(CXX) -std=gnu++17 -Wall -Wno-unknown-pragmas $(SIM_FLAGS) -MMD -MP -x c++ -c -o $@ $<
$(B)/sim/tests/gpu/cudasim.cpp.o: SIM_FLAGS += -O2
# The archive has the CPU backend, which is the host of experts.
$(B)/sim/test_ops: $(SIM_CUDA) $(SIM_OPS) $(B)/libsteel.a
	$(Q)$(CXX) $(SIM_SAN) -rdynamic -o $@ $^ -lm -ldl -pthread
SIM_DRAFTS := $(addprefix $(B)/sim/test_,draft_text draft_model eagle)
# The program with a simulated GPU, for ranks_sim.py; and by hand, as they take long, speculation, the goldens and invariance
# of every family (STEEL_TEST_DEVICE=cuda).
$(B)/sim/src/backend/devices.c.o: SIM_FLAGS += -DSTEEL_CUDA
$(B)/sim/steel: LIBS += $(CLI_LIBS)
$(B)/sim/steel: $(CLI_OBJ) $(B)/libserver.a
$(B)/sim/test_speculate $(SIM_DRAFTS) $(B)/sim/test_canary $(B)/sim/test_golden $(B)/sim/test_invariance $(B)/sim/test_vision: LIBS += -lcmocka
$(B)/sim/test_speculate: $(B)/tests/test_speculate.o
$(SIM_DRAFTS): $(B)/sim/%: $(B)/tests/%.o
$(B)/sim/test_canary: $(B)/tests/test_canary.o
$(B)/sim/test_golden: $(B)/tests/test_golden.o
$(B)/sim/test_invariance: $(B)/tests/test_invariance.o
$(B)/sim/test_vision: $(B)/tests/test_vision.o
$(B)/sim/steel $(B)/sim/test_speculate $(SIM_DRAFTS) $(B)/sim/test_canary $(B)/sim/test_golden $(B)/sim/test_invariance $(B)/sim/test_vision: $(B)/sim/src/backend/devices.c.o $(SIM_CUDA) $(B)/libsteel.a
	$(sim_link)
$(B)/sim/libnccl.so.2: tests/gpu/fakenccl.cpp tests/gpu/cudasim.h
	@mkdir -p $(@D)
	$(Q)$(CXX) -std=gnu++17 -Wall $(SIM_FLAGS) -fPIC -shared -o $@ $<
test-cuda-faults: test-build $(B)/sim/steel $(B)/sim/libnccl.so.2 ## CUDA and NCCL calls fail, in the simulator
	@SIM_TESTS=1 ONLY=test_cuda_faults sh tests/run.sh $(B)
test-sim: $(B)/sim/test_ops $(B)/sim/steel $(B)/sim/libnccl.so.2 $(B)/sim/test_canary $(B)/sim/test_vision $(MPI) ## the GPU's kernels, simulated on the CPU
	LD_LIBRARY_PATH=$(B)/sim $(B)/sim/test_ops
	STEEL_TEST_DEVICE=cuda $(B)/sim/test_canary
	STEEL_TEST_DEVICE=cuda $(B)/sim/test_vision
	python3 tests/gpu/ranks_sim.py $(B)
	python3 tests/gpu/offload_sim.py $(B)
