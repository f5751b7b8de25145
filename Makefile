# `make demo` and `make test` do all the set-up on a fresh machine: a venv, the installs, the work.
VENV ?= .venv
PY := $(VENV)/bin/python
TORCH ?= torch==2.13.0
DEMO_KERNELS ?= 2
TIER ?= core
GPU_JOBS ?= 5
# Their ranks are streams of one process; the others start processes, or measure, and run alone.
IN_PROCESS = tests/gpu/test_fused.py tests/gpu/test_flat.py tests/conformance/test_kernels.py
DEVICE_CODE = $(shell find templates/include tests -name '*.cuh' -o -name '*.h' -o -name '*.cu' \
  -not -path '*/golden/*' -o -name '*.cpp')
# The machine's own GPU where that is a Hopper, which the demo then measures on.
DEMO_TARGET ?= $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
  grep -q '^9.0' && echo auto || echo h100-sxm)

.PHONY: demo test quick lint format gpu-test gpu-kernels setup clean
.DELETE_ON_ERROR:

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	python3 -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(PY) -m pip install --quiet --disable-pip-version-check "nvidia-cutlass==4.2.0.0" --no-deps
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[tune,test,lint]"
	@command -v nvcc >/dev/null || test -x /usr/local/cuda/bin/nvcc || \
	  $(PY) -m pip install --quiet --disable-pip-version-check -e ".[nvcc]"
	touch $@

demo: setup
	$(PY) -m fluxgen doctor
	$(PY) -m fluxgen tune --model llama-3.1-8b --tp 8 --target $(DEMO_TARGET) --link nvlink
	@echo "Compiling the support kernels and the first $(DEMO_KERNELS) of the winners" \
	  "(all of them: fluxgen build --model llama-3.1-8b --tp 8 --target $(DEMO_TARGET)):"
	$(PY) -m fluxgen build --model llama-3.1-8b --tp 8 --target $(DEMO_TARGET) --link nvlink \
	  --out $(VENV)/demo-sources --limit $(DEMO_KERNELS)
	$(PY) examples/lookup.py
	$(PY) -m fluxgen plan --model llama-3.1-8b --target h100-sxm --gpus 64 --batch 256 --seq 8192

test: setup lint
	$(PY) -m pytest -n 2 -m "not gpu and not multigpu"

# The inner loop: what takes seconds, compiles or starts groups of processes is left out.
quick: setup
	$(PY) -m pytest -n 2 -q -m "not slow and not nvcc and not dist and not gpu and not multigpu"

lint: setup
	$(VENV)/bin/ruff check fluxgen tests examples
	$(VENV)/bin/ruff format --check fluxgen tests examples
	$(VENV)/bin/clang-format --dry-run -Werror $(DEVICE_CODE)
	$(VENV)/bin/mypy fluxgen
	$(VENV)/bin/lint-imports
	$(PY) -m fluxgen build --check

# The GPU tests, on a machine with a Hopper GPU: TIER=core takes 24 kernels and minutes, TIER=full
# all of them. Kernels are compiled here first. A GPU needs a CUDA build of Torch: make TORCH=torch.
gpu-test: gpu-kernels
	FLUXGEN_GPU_TIER=$(TIER) $(PY) -m pytest -n $(GPU_JOBS) $(IN_PROCESS)
	FLUXGEN_GPU_TIER=$(TIER) $(PY) -m pytest tests/gpu $(IN_PROCESS:%=--ignore=%)

# Their kernels alone, to be carried to a machine with a GPU and no compiler.
gpu-kernels: setup
	$(PY) -m tests.gpu.build_kernels --tier $(TIER)

format: setup
	$(VENV)/bin/ruff format fluxgen tests examples
	$(VENV)/bin/clang-format -i $(DEVICE_CODE)

clean:
	rm -rf $(VENV) build_out
