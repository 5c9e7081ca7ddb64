# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""A question to actors of which any can answer: it goes on when one dies, fails or is slow."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megatron_hdp.data.errors import CorpusError
from megatron_hdp.planning.values import PlanError

logger = logging.getLogger(__name__)

PATIENCE_S = 2.0
"""After so long without an answer another actor is asked too; the first answer counts."""
REST_S = 30.0
"""For so long an actor that died, failed or was slow is asked only when no other answers."""
_PAUSE_S = 0.2
"""Before a round of questions begins again; a dead actor needs that to be restarted."""


class Answer(NamedTuple):
    """What came, and how many more questions it took than one."""

    value: Any
    retries: int


class Actors:
    """Actors of which any can answer, and who of them is at rest.

    Args:
        handles: in the order of their numbers.
        who: the actors' name in messages.
        asker: who asks, in the log.
        timeout_s: how long an answer may take.
    """

    def __init__(self, handles: Sequence[Any], who: str, asker: str, timeout_s: float) -> None:
        self.handles, self.who = handles, who
        self._asker, self._timeout_s = asker, timeout_s
        self._rests_until: dict[int, float] = {}

    def ask(self, call: Callable[[Any], Any], what: str, first: int = 0) -> Answer:
        """Asks one actor; asks others when it dies, raises, or does not answer in `PATIENCE_S`.

        Args:
            call: begins the call on an actor and returns Ray's reference to the answer.
            what: ends "HDP waited 600 s for ... to".
            first: number of the actor to begin with, unless it rests.

        Raises:
            Exception: what every actor that was asked raised.
            TimeoutError: no answer came in time; says what became of each actor.
        """
        question = _Question(self, call, self._order(first))
        answer = question.answer(what, self._timeout_s)
        self._let_rest(question.failed())
        return answer

    def _order(self, first: int) -> list[int]:
        count, now = len(self.handles), time.monotonic()
        order = [(first + i) % count for i in range(count)]
        return sorted(order, key=lambda number: self._rests_until.get(number, 0.0) > now)

    def _let_rest(self, failed: dict[int, str]) -> None:
        now = time.monotonic()
        for number, state in failed.items():
            was_at_rest = self._rests_until.get(number, 0.0) > now
            self._rests_until[number] = now + REST_S
            if was_at_rest:
                continue  # said already
            logger.warning("hdp: %s: the loader's %s %d %s", self._asker, self.who, number, state)


class _Question:
    def __init__(self, actors: Actors, call: Callable[[Any], Any], order: list[int]) -> None:
        self._actors, self._call, self._order = actors, call, order
        self._open: dict[Any, int] = {}
        self._state: dict[int, str] = {}
        self._fault: dict[int, str] = {}
        self._refused: dict[int, Exception] = {}
        self._asked_at: dict[int, float] = {}
        self._slow_winner: list[int] = []
        self._asked = 0

    def answer(self, what: str, timeout_s: float) -> Answer:
        deadline, who = time.monotonic() + timeout_s, self._actors.who
        round_ = list(self._order)
        while (left := deadline - time.monotonic()) > 0:
            if round_:
                self._ask(round_.pop(0))
            found = self._wait(min(PATIENCE_S, left) if round_ else left)
            if found is not None:
                return Answer(found[0], self._asked - 1)
            if len(self._refused) == len(self._order):
                raise self._refused[self._order[0]]
            if not round_ and not self._open:
                time.sleep(_PAUSE_S)
                round_ = [number for number in self._order if number not in self._refused]
        states = ", ".join(
            f"{who} {number} {self._state[number]}" for number in sorted(self._state)
        )
        raise TimeoutError(
            f"HDP waited {timeout_s:.0f} s for {who} to {what} ({states}): raise "
            f"--hdp-timeout-minutes if the machine or its storage is that slow."
        )

    def failed(self) -> dict[int, str]:
        """By number, what became of those that died, failed, or left others to answer."""
        late = time.monotonic() - PATIENCE_S
        slow = [n for n in self._open.values() if self._asked_at[n] <= late] + self._slow_winner
        return self._fault | dict.fromkeys(slow, f"did not answer in {PATIENCE_S:.0f} s")

    def _ask(self, number: int) -> None:
        self._asked += 1
        self._asked_at[number] = time.monotonic()
        self._state[number] = "did not answer"
        self._open[self._call(self._actors.handles[number])] = number

    def _wait(self, seconds: float) -> tuple[Any] | None:
        import ray

        ready, _ = ray.wait(list(self._open), num_returns=1, timeout=seconds)
        for reference in ready:
            number = self._open.pop(reference)
            try:
                value = ray.get(reference)
                if self._asked > 1 and time.monotonic() - self._asked_at[number] > PATIENCE_S:
                    self._slow_winner = [number]
                return (value,)
            except ray.exceptions.RayTaskError as error:
                self._refused[number] = cause_of(error)
                self._state[number] = "failed"
                self._fault[number] = f"failed ({self._refused[number]})"
            except ray.exceptions.RayError:
                self._state[number] = self._fault[number] = "had died"
        return None


def cause_of(error: Any) -> Exception:
    """What an actor raised, without its traceback where the sentence says all."""
    cause = error.cause
    if isinstance(cause, CorpusError | PlanError | TimeoutError):
        return type(cause)(str(cause))
    return RuntimeError(f"HDP's loader failed: {error}")
