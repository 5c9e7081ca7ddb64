# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""A question to actors of which any can answer: it goes on when one dies, fails or is slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megatron_hdp.data.errors import CorpusError

PATIENCE_S = 2.0
"""After so long without an answer another actor is asked too; the first answer counts."""
_PAUSE_S = 0.2
"""Before a round of questions begins again; a dead actor needs that to be restarted."""


class Answer(NamedTuple):
    """What came, and how many more questions it took than one."""

    value: Any
    retries: int


def ask(
    actors: Sequence[Any],
    call: Callable[[Any], Any],
    *,
    what: str,
    who: str,
    timeout_s: float,
    first: int = 0,
) -> Answer:
    """Asks one actor; asks others when it dies, raises, or does not answer in `PATIENCE_S`.

    Args:
        actors: all that can answer, in the order of their numbers.
        call: begins the call on an actor and returns Ray's reference to the answer.
        what: ends "HDP waited 600 s for ... to".
        who: the actors' name in messages.
        first: number of the actor to begin with.

    Raises:
        Exception: what every actor that was asked raised.
        TimeoutError: no answer came in time; says what became of each actor.
    """
    return _Question(actors, call, first, timeout_s).answer(who, what)


class _Question:
    def __init__(
        self, actors: Sequence[Any], call: Callable[[Any], Any], first: int, timeout_s: float
    ) -> None:
        self._actors, self._call, self._timeout_s = actors, call, timeout_s
        count = len(actors)
        self._order = [(first + i) % count for i in range(count)]
        self._open: dict[Any, int] = {}
        self._state: dict[int, str] = {}
        self._refused: dict[int, Exception] = {}
        self._asked = 0

    def answer(self, who: str, what: str) -> Answer:
        deadline = time.monotonic() + self._timeout_s
        round_ = list(self._order)
        while (left := deadline - time.monotonic()) > 0:
            if round_:
                self._ask(round_.pop(0))
            found = self._wait(min(PATIENCE_S, left) if round_ else left)
            if found is not None:
                return Answer(found[0], self._asked - 1)
            if len(self._refused) == len(self._actors):
                raise self._refused[self._order[0]]
            if not round_ and not self._open:
                time.sleep(_PAUSE_S)
                round_ = [number for number in self._order if number not in self._refused]
        states = ", ".join(
            f"{who} {number} {self._state[number]}" for number in sorted(self._state)
        )
        raise TimeoutError(
            f"HDP waited {self._timeout_s:.0f} s for {who} to {what} ({states}): raise "
            f"--hdp-timeout-minutes if the machine or its storage is that slow."
        )

    def _ask(self, number: int) -> None:
        self._asked += 1
        self._state[number] = "did not answer"
        self._open[self._call(self._actors[number])] = number

    def _wait(self, seconds: float) -> tuple[Any] | None:
        import ray

        ready, _ = ray.wait(list(self._open), num_returns=1, timeout=seconds)
        for reference in ready:
            number = self._open.pop(reference)
            try:
                return (ray.get(reference),)
            except ray.exceptions.RayTaskError as error:
                self._refused[number] = cause_of(error)
                self._state[number] = "failed"
            except ray.exceptions.RayError:
                self._state[number] = "had died"
        return None


def cause_of(error: Any) -> Exception:
    """What an actor raised, without its traceback where the sentence says all."""
    cause = error.cause
    if isinstance(cause, CorpusError | TimeoutError) or type(cause).__name__ == "PlanError":
        return type(cause)(str(cause))
    return RuntimeError(f"HDP's loader failed: {error}")
