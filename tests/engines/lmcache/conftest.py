"""A store that the tests share, and engines that are closed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engines.lmcache.harness import Engine
from tests.soak.served import ServedStore

FLAGS = ("--ram", "256MiB")
_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStore]:
    served = ServedStore(tmp_path_factory.mktemp("store"), *FLAGS, drain_s=1.0)
    yield served
    served.stop()


@pytest.fixture
def engine(store: ServedStore) -> Iterator[Callable[..., Engine]]:
    """Make an engine; over the shared store if no members are named."""
    made: list[Engine] = []

    def make(members: str | None = None, **settings: Any) -> Engine:
        made.append(Engine(f"engine-{next(_NUMBERS)}", members or store.address, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()
