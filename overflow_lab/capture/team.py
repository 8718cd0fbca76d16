"""The processes of one scan, as `torchrun` or `accelerate launch` starts them: who there is, who lives, who is done.

They meet in torch.distributed's key-value store and nowhere else: no collective is called, so that nobody waits for
one who was killed. What each records is in its own file.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from overflow_lab.errors import UsageError, one_line

# How long the others may take to start; torch's own limit for that is half an hour.
_JOIN = 300.0
# A process that gives no sign of life for so long is taken as lost; OVERFLOW_LAB_RANK_TIMEOUT overrules it.
_SILENCE = 60.0
# And one that lives is waited for as long as this process's own share took, or this if that is longer.
PATIENCE = 600.0


@dataclass(frozen=True)
class Place:
    """Where this process stands: its `rank` among `ranks`, and its `local` rank on this machine."""

    rank: int
    ranks: int
    local: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks}"


def launched(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return the place that a launcher gave this process; None for a process that is alone."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not all(environment.get(name) for name in names):
        return None
    try:
        rank, ranks, local = (int(environment.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    except ValueError:
        return None
    return Place(rank, ranks, local) if 0 <= rank < ranks and ranks > 1 else None


@dataclass
class Team:
    """This process among the others, whom it meets in a `torch.distributed.Store`.

    One that gives no sign of life for `silence` seconds is lost.
    """

    place: Place
    store: Any
    silence: float = _SILENCE
    _stop: threading.Event = field(default_factory=threading.Event)
    _heard: dict[int, tuple[bytes, float]] = field(default_factory=dict)
    _lost: set[int] = field(default_factory=set)

    def agree(self, value: str | None = None) -> str:
        """Return what rank 0 says, which gives it as `value`; empty where it has nothing to do."""
        if value is not None:
            self.store.set("plan", value)
            return value
        try:
            return str(self.store.get("plan").decode())
        except RuntimeError as error:
            raise UsageError(
                f"{self.place} heard nothing of rank 0; see what that says, and start all again."
            ) from error

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Let the others know that this process lives, as long as the context lasts."""
        beat = threading.Thread(target=self._beat, daemon=True)
        beat.start()
        try:
            yield
        finally:
            self._stop.set()
            beat.join(timeout=5.0)

    def _beat(self) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            try:
                self.store.set(f"pulse/{self.place.rank}", str(number))
            except RuntimeError:  # the store went with rank 0: there is nobody left to tell
                return
            self._stop.wait(min(1.0, self.silence / 4))

    def end(self, said: str = "") -> None:
        """Tell the others that this process has written all that it will, and what went wrong, if anything."""
        with contextlib.suppress(RuntimeError):
            self.store.set(f"end/{self.place.rank}", said)

    def leave(self, *, within: float = 0.0) -> None:
        """Say goodbye; rank 0, in which the store may live, waits for that of the others, those that are lost aside."""
        with contextlib.suppress(RuntimeError):
            self.store.set(f"left/{self.place.rank}", "")
        if not self.place.rank:
            until = time.monotonic() + within
            self.wait_for(
                [rank for rank in range(1, self.place.ranks) if rank not in self._lost], lambda: until, "left"
            )

    def said(self, rank: int, what: str = "end") -> str | None:
        """Return what another said at its end; None where it has not come to it."""
        try:
            key = f"{what}/{rank}"
            return str(self.store.get(key).decode()) if self.store.check([key]) else None
        except RuntimeError:
            return None

    def wait_for(self, ranks: Sequence[int], deadline: Callable[[], float], what: str = "end") -> list[int]:
        """Wait until these have ended, and return those that have not: they are silent, or it is past the deadline.

        `deadline` is asked again and again, in seconds of `time.monotonic`.
        """
        waiting, lost = list(ranks), []
        while waiting and time.monotonic() < deadline():
            waiting = [rank for rank in waiting if self.said(rank, what) is None]
            lost += [rank for rank in waiting if not self._lives(rank)]
            waiting = [rank for rank in waiting if rank not in lost]
            if waiting:
                time.sleep(0.1)
        self._lost |= {*lost, *waiting}
        return sorted([*lost, *waiting])

    def _lives(self, rank: int) -> bool:
        try:
            key = f"pulse/{rank}"
            pulse = self.store.get(key) if self.store.check([key]) else b""
        except RuntimeError:
            return False
        now = time.monotonic()
        known, since = self._heard.get(rank, (b"", now))
        if pulse != known or rank not in self._heard:
            since = now
        self._heard[rank] = (pulse, since)
        return now - since <= self.silence


def join(place: Place, environment: Mapping[str, str] = os.environ) -> Team:
    """Return this process among the others. Raises UsageError where they do not answer in time."""
    import torch

    dist: Any = torch.distributed
    if not dist.is_available():
        raise UsageError("this torch has no torch.distributed; install one that has, or scan with one process.")
    host, port = environment["MASTER_ADDR"], environment["MASTER_PORT"]
    hosted = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    settings: dict[str, Any] = {"is_master": place.rank == 0 and not hosted, "multi_tenant": not hosted}
    try:
        timeout = datetime.timedelta(seconds=_JOIN)
        server = dist.TCPStore(host, int(port), timeout=timeout, wait_for_workers=False, **settings)
        store = dist.PrefixStore(f"overflow_lab/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", server)
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"{place} cannot reach the others at {host}:{port} ({one_line(error, limit=120)}); start them all, or "
            "unset WORLD_SIZE to scan with one process."
        ) from error
    return Team(place, store, silence=_silence(environment))


def _silence(environment: Mapping[str, str]) -> float:
    given = environment.get("OVERFLOW_LAB_RANK_TIMEOUT", "")
    try:
        seconds = float(given) if given else _SILENCE
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise UsageError(f"OVERFLOW_LAB_RANK_TIMEOUT is {given!r}; give seconds, such as 60.")
    return seconds
