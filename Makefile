# Two commands on a fresh machine that has python3 (with venv and pip), gcc, g++ and make:
#   make demo   prefill and decode in two real vLLM servers on the CPU, KV cache moved by KBTP
#   make test   every check of this repository
# Both set up what they need inside this folder, and start at once the next time.
PYTHON ?= python3
export PIP_DISABLE_PIP_VERSION_CHECK = 1
.PHONY: demo test dev docs clean

demo: .venv/bin/python
	@.venv/bin/python scripts/setup_vllm_cpu.py
	@.venv/bin/python examples/disagg_vllm/demo.py $(ARGS)

test: .tools/bin/nox
	@.tools/bin/nox $(ARGS)

# An environment to work in: .venv-dev/bin/python -m pytest --ignore=tests/engines
dev: .venv-dev/bin/python
	@.venv-dev/bin/python scripts/setup_dev.py

docs: .tools/bin/nox
	@.tools/bin/nox -s docs

clean:
	rm -rf .venv .venv-dev .tools .nox build site

.venv/bin/python .venv-dev/bin/python:
	@echo "making $(patsubst %/bin/python,%,$@) with $(PYTHON)"
	@$(PYTHON) -m venv $(patsubst %/bin/python,%,$@)

.tools/bin/nox:
	@echo "making .tools with nox, which runs the checks"
	@$(PYTHON) -m venv .tools
	@.tools/bin/python -m pip install -qq "nox>=2024.10"
