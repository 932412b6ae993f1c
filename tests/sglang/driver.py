"""Drives an engine that writes texts as a node does: over a Unix socket, by frames. For tests; any thread may ask."""

import contextlib
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

import numpy as np
import psutil

from appliance.jobs import Sampling
from appliance.workers import wire
from appliance.workers.wire import Abort, Begin, Fault, FromEngine, Grown, Load, Loaded, Step, Stop, ToEngine

LOAD_S = 240.0
WRITE_S = 120.0
END_S = 30.0
GREEDY = Sampling(temperature=0)


@dataclass
class Written:
    """What has come of one sequence."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[dict[int, float]] = field(default_factory=list)
    finish: Literal["", "stop", "length", "fault", "refused"] = ""
    fault: str = ""
    cached: int = 0
    parts: int = 0

    def add(self, grown: Grown) -> None:
        """The next part."""
        assert not self.finish, f"more came after the end: {grown}"
        self.ids += grown.ids
        self.logprobs += grown.logprobs
        pairs = zip(grown.top_ids, grown.top_logprobs, strict=True)
        self.tops += [dict(zip(ids, logprobs, strict=True)) for ids, logprobs in pairs]
        self.finish, self.fault = grown.finish, grown.fault
        self.cached += grown.cached
        self.parts += 1


class Driver:
    """One engine process, from the start to the end of a `with`."""

    def __init__(self, command: Sequence[str]) -> None:
        self.written: dict[int, Written] = {}
        self.steps: list[Step] = []
        self.output: list[str] = []
        self._command = list(command)
        self._answer: Loaded | Fault | None = None
        self._is_gone = False
        self._changed = threading.Condition()
        self._numbers = iter(range(1, 1_000_000))

    def __enter__(self) -> Self:
        with tempfile.TemporaryDirectory(prefix="s") as folder, socket.socket(socket.AF_UNIX) as listener:
            path = str(Path(folder, "s"))
            listener.bind(path)
            listener.listen(1)
            listener.settimeout(END_S)
            self.process = subprocess.Popen(
                [*self._command, "--socket", path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            self._connection, _ = listener.accept()
        self._connection.settimeout(None)
        self._threads = [threading.Thread(target=task, daemon=True) for task in (self._receive, self._read_output)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        family = self.family()
        with contextlib.suppress(OSError):
            self.send(Stop())
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(END_S)
        for thread in self._threads:
            thread.join(END_S)
        self._connection.close()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def family(self) -> list[psutil.Process]:
        """The engine and everything below it, now."""
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def send(self, order: ToEngine) -> None:
        """One frame."""
        self._connection.sendall(wire.frame(order))

    def load(self, order: Load) -> Loaded | Fault:
        """Wait for the answer."""
        self._answer = None
        self.send(order)
        self._wait(lambda: self._answer is not None, within_s=LOAD_S, what="answer to the load")
        assert self._answer is not None
        return self._answer

    def begin(
        self,
        ids: Sequence[int],
        *,
        tokens_max: int = 16,
        sampling: Sampling = GREEDY,
        stop_ids: tuple[int, ...] = (),
        grammar: str = "",
        top_logprobs: int | None = None,
        weighed: tuple[int, ...] = (),
        adapter: str = "",
    ) -> int:
        """A sequence; its number."""
        number = next(self._numbers)
        with self._changed:
            self.written[number] = Written()
        packed = np.array(ids, dtype="<i4").tobytes()
        self.send(Begin(number, "m", packed, tokens_max, sampling, stop_ids, grammar, top_logprobs, weighed, adapter))
        return number

    def abort(self, *numbers: int) -> None:
        """Nobody wants them."""
        self.send(Abort(numbers))

    def whole(self, number: int, *, within_s: float = WRITE_S) -> Written:
        """Wait for a sequence's end."""
        written = self.written[number]
        self._wait(lambda: bool(written.finish), within_s=within_s, what=f"end of {written}")
        return written

    def wait_for_ids(self, number: int, count: int, *, within_s: float = WRITE_S) -> None:
        """Until it has so many, or is over."""
        written = self.written[number]
        self._wait(
            lambda: len(written.ids) >= count or bool(written.finish),
            within_s=within_s,
            what=f"{count} ids of {number}",
        )

    def wait_for_child(self) -> None:
        """Until the engine has started a process of its own."""
        deadline_s = time.monotonic() + END_S
        while len(self.family()) < 2:
            assert time.monotonic() < deadline_s, "it starts nothing"

    def wait_gone(self, *, within_s: float = END_S) -> int:
        """Until the process has ended, with all that it printed in `output`; its exit code."""
        code = self.process.wait(within_s)
        for thread in self._threads:
            thread.join(END_S)
        return code

    def _wait(self, is_true: Callable[[], bool], *, within_s: float, what: str) -> None:
        deadline_s = time.monotonic() + within_s
        with self._changed:
            while not is_true():
                assert not self._is_gone, f"the engine hung up before the {what}:\n{self._tail()}"
                left_s = deadline_s - time.monotonic()
                assert left_s > 0, f"no {what} in {within_s} s:\n{self._tail()}"
                self._changed.wait(left_s)

    def _tail(self) -> str:
        return "".join(self.output[-40:])

    def _receive(self) -> None:
        with self._connection.makefile("rb") as stream:
            while header := stream.read(wire.LENGTH_BYTES):
                message = wire.decode_from_engine(stream.read(wire.body_length(header)))
                with self._changed:
                    self._take(message)
                    self._changed.notify_all()
        with self._changed:
            self._is_gone = True
            self._changed.notify_all()

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Loaded | Fault):
            self._answer = message
        elif isinstance(message, Step):
            self.steps.append(message)
            for grown in message.grown:
                self.written[grown.sequence].add(grown)

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        self.output.extend(iter(self.process.stdout.readline, ""))
