# The commands of this repository; `make help` lists them. Needs Python >= 3.10, g++ and make: everything else is installed into
# .venv. Steps skip themselves when nothing they read has changed (build_tools/wheel.py), so no target has prerequisites by time.

ARCHS   ?= sm_90a
PROFILE ?= default
PYTHON  ?= python3

VENV      := .venv
RUN       := $(VENV)/bin/python
MAKE_ENV  := $(PYTHON) -m build_tools.environment $(VENV)
BUILD_REQ := requirements-torch.txt build_tools/requirements.txt requirements-wheel.txt
TEST_REQ  := $(BUILD_REQ) requirements-release.txt requirements-test.txt requirements-lint.txt

# -n 2: tests are many short ones; more workers than cores only cost memory (each imports torch).
PYTEST_ARGS ?= -n 2

.DEFAULT_GOAL := help
.PHONY: help wheel wheels sdist sdist-traced index bundle pack test lint format clean distclean environment release-tools

help: ## list the targets
	@echo "make TARGET [ARCHS=$(ARCHS)] [PROFILE=$(PROFILE)] [PYTHON=$(PYTHON)]"
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' Makefile | expand -t 16

wheel: ## build the wheel into dist/ and try it in a fresh environment without TileLang and nvcc
	@$(MAKE_ENV) $(BUILD_REQ)
	@$(RUN) -m build_tools.wheel --profile "$(PROFILE)" --archs "$(ARCHS)" --check build/check-venv

wheels: release-tools ## manylinux wheels of every Python found, x86-64 and aarch64, into dist/, each checked
	@$(RUN) -m build_tools.wheels --profile "$(PROFILE)" --archs "$(ARCHS)"

sdist: release-tools ## a source distribution into dist/: builds where TileLang and nvcc are
	@$(RUN) -m build_tools.sdist

sdist-traced: release-tools ## one that holds the compiled kernels: builds where a C++ compiler is
	@$(RUN) -m build_tools build --profile "$(PROFILE)" --archs "$(ARCHS)"
	@$(RUN) -m build_tools.sdist --traced "build/store/$(basename $(notdir $(PROFILE)))"

index: ## dist/index: the wheels of dist/ for pip --index-url, a folder for each CUDA-arch pair
	@$(PYTHON) -m build_tools.index dist dist/index

pack: environment ## variants of PROFILE as a shared object for TILEKERNELS_PACK_PATH, into dist/
	@$(RUN) -m build_tools.overlay --profile "$(PROFILE)" $(if $(filter command environment,$(firstword $(origin ARCHS))),--archs "$(ARCHS)")

bundle: release-tools ## one tar of the wheels of dist/ with checksums, SBOM, papers and an install script
	@$(RUN) -m build_tools.bundle dist

test: lint ## every test that needs no GPU, on the smoke profile for sm_90a
	@$(RUN) -m build_tools.wheel --profile smoke --archs sm_90a --dist build/smoke --install
	@$(RUN) -m pytest -m "not gpu and not benchmark" $(PYTEST_ARGS)

lint: environment ## formatters, linters, type checker and layer rules, at pinned versions
	@$(RUN) -m build_tools.lint

format: environment ## rewrite Python, C++ and CUDA sources as the formatters want them
	@$(RUN) -m build_tools.lint --fix

environment: ## make .venv with everything that building, testing and linting need
	@$(MAKE_ENV) $(TEST_REQ)

release-tools: ## .venv with what wheels of a release need
	@$(MAKE_ENV) $(BUILD_REQ) requirements-release.txt

clean: ## remove what was built, kernels included
	rm -rf build dist

distclean: clean ## remove the environment too
	rm -rf $(VENV)
