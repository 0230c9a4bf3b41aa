"""Child processes of the bench, steered over a pipe.

The parent asks, the child answers, one question at a time; a child that does not answer in time ends the run. A question is the name
of a method of the child's object and its arguments.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from kbtp_core.errors import KbtpError

if TYPE_CHECKING:
    from typing_extensions import Self

ANSWER_TIMEOUT_S = 60


class Answers(Protocol):
    """What a child makes of its arguments; its methods are the questions."""

    def end(self) -> None:
        """The parent has gone, or wants no more."""


class ChildProcess:
    """A child, as the parent sees it. A context manager: leaving it ends the child."""

    def __init__(self, role: str, make: Callable[..., Answers], *arguments: Any) -> None:
        self._role = role
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(theirs, make, arguments), name=f"kbtp-bench-{role}", daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pipe.close()  # the child's main loop ends
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def ask(self, name: str, *arguments: Any) -> Any:
        self.begin(name, *arguments)
        return self.answer(name)

    def begin(self, name: str, *arguments: Any) -> None:
        """Ask, and do something else until `answer`."""
        try:
            self._pipe.send((name, arguments))
        except ConnectionError as error:
            raise self._ended() from error

    def answer(self, name: str) -> Any:
        try:
            if not self._pipe.poll(ANSWER_TIMEOUT_S):
                raise KbtpError(f"the bench's {self._role} process did not answer {name!r} within {ANSWER_TIMEOUT_S} s")
            is_good, answer = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise self._ended() from error
        if not is_good:
            raise KbtpError(f"the bench's {self._role} process failed at {name!r}:\n{answer}")
        return answer

    def _ended(self) -> KbtpError:
        return KbtpError(f"the bench's {self._role} process ended; its last words are above")


def _main(pipe: Connection, make: Callable[..., Answers], arguments: tuple[Any, ...]) -> None:
    child = make(*arguments)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            break
        try:
            answer = (True, getattr(child, name)(*arguments))
        except Exception:  # noqa: BLE001 - the parent shows it
            answer = (False, traceback.format_exc())
        pipe.send(answer)
    child.end()
