"""One step of load on one server: open loop (Poisson, at a rate) or closed loop (clients that wait for each answer)."""

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from appliance.bench.answers import judge
from appliance.bench.figures import Figures, Outcome, figures, reasons
from appliance.bench.http import Address, Connections, Unanswered
from appliance.bench.schedule import BODIES_MAX, Lengths, embeddings_bodies, poisson_times
from appliance.bench.server_cpu import CpuTimes, ServerCpu, find_server, spent_s

SETTLE_TIMEOUT_S = 30.0
SETTLE_PAUSE_S = 0.1  # after an answer that came at once because the server is overloaded, or away
SETTLED_ANSWERS = 3  # in a row and within the objective: the last step's backlog is gone
PATH = "/embeddings"


class Server(msgspec.Struct, frozen=True):
    """Whom to load."""

    base_url: str
    model: str
    key: str | None = None
    pid: int | None = None  # of the server process, where looking for who listens is not enough


class Shape(msgspec.Struct, frozen=True):
    """What is the same in every step."""

    lengths: Lengths
    inputs: int
    encoding: str
    slo_s: float
    duration_s: float
    warmup_s: float
    timeout_s: float
    in_flight_max: int


class Measured(msgspec.Struct, frozen=True):
    """A step's figures, and a few reasons of what went wrong."""

    figures: Figures
    reasons: list[str]


class Loader:
    """Loads one server, step by step."""

    def __init__(self, server: Server, shape: Shape) -> None:
        self._server = server
        self._shape = shape
        self._address = Address.of(server.base_url)
        self._cpu: ServerCpu | None = None

    @property
    def sees_cpu(self) -> bool:
        """Whether the server's processes were found on this machine."""
        return self._cpu is not None

    async def reach(self) -> None:
        """Find the server's processes, and make sure that it answers. Raises Unanswered with the reason."""
        self._cpu = await asyncio.to_thread(find_server, self._address.host, self._address.port, pid=self._server.pid)
        async with Connections(self._address) as connections:
            outcome = await self._ask(connections, self._requests(connections, count=1, seed=0)[0], self._clock())
        if outcome.kind != "right":
            raise Unanswered(f"{self._server.base_url} does not answer as it should: {outcome.reason}")

    async def open_loop(self, rate: float, *, seed: int) -> Measured:
        """Send at `rate` whatever comes back, and wait for the last answer at most `timeout_s`."""
        shape = self._shape
        random = np.random.default_rng(seed)
        times = poisson_times(rate, start_s=-shape.warmup_s, end_s=shape.duration_s, random=random)
        async with Connections(self._address) as connections:
            requests = itertools.cycle(self._requests(connections, count=max(1, len(times)), seed=seed))
            await self._settle(connections, next(requests))
            clock = self._clock()
            async with asyncio.TaskGroup() as group:
                looking = group.create_task(self._look(clock))
                outcomes = await self._send_all(connections, times, requests, clock)
            return self._measured(outcomes, await looking, is_open=True)

    async def closed_loop(self, clients: int, *, seed: int) -> Measured:
        """`clients` that each send their next request when the last one is answered."""
        async with Connections(self._address) as connections:
            requests = itertools.cycle(self._requests(connections, count=BODIES_MAX, seed=seed))
            await self._settle(connections, next(requests))
            clock = self._clock()
            outcomes: list[Outcome] = []

            async def client() -> None:
                while clock() < self._shape.duration_s:
                    outcomes.append(await self._ask(connections, next(requests), clock))

            async with asyncio.TaskGroup() as group:
                looking = group.create_task(self._look(clock))
                for _ in range(clients):
                    group.create_task(client())
            return self._measured(outcomes, await looking, is_open=False)

    async def _send_all(
        self, connections: Connections, times: Sequence[float], requests: Iterator[bytes], clock: "_Clock"
    ) -> list[Outcome]:
        """Start a request at each time. No more than `in_flight_max` are on the wire; the others wait, and are late."""
        room = asyncio.Semaphore(self._shape.in_flight_max)

        async def one(scheduled_s: float, lag_s: float, request: bytes) -> Outcome:
            is_held = room.locked()
            try:
                async with asyncio.timeout_at(clock.loop_time(scheduled_s + self._shape.timeout_s)), room:
                    return await self._ask(
                        connections, request, clock, scheduled_s=scheduled_s, lag_s=lag_s, is_held=is_held
                    )
            except TimeoutError:
                return Outcome(
                    scheduled_s, clock(), "timeout", self._shape.inputs, 0, lag_s, is_held, "no answer in time"
                )

        async with asyncio.TaskGroup() as group:
            tasks: list[asyncio.Task[Outcome]] = []
            for scheduled_s in times:
                if (wait_s := scheduled_s - clock()) > 0:
                    await asyncio.sleep(wait_s)
                lag_s = max(0.0, clock() - scheduled_s)
                tasks.append(group.create_task(one(scheduled_s, lag_s, next(requests))))
        return [task.result() for task in tasks]

    async def _ask(
        self,
        connections: Connections,
        request: bytes,
        clock: "_Clock",
        *,
        scheduled_s: float | None = None,
        lag_s: float = 0.0,
        is_held: bool = False,
    ) -> Outcome:
        """Send one request and judge the answer. Without a scheduled time it is scheduled now."""
        sent_s = clock() if scheduled_s is None else scheduled_s
        texts = self._shape.inputs
        try:
            async with asyncio.timeout_at(clock.loop_time(sent_s + self._shape.timeout_s)):
                answer = await connections.send(request)
        except Unanswered as error:
            return Outcome(sent_s, clock(), "unanswered", texts, 0, lag_s, is_held, str(error))
        except TimeoutError:
            return Outcome(sent_s, clock(), "timeout", texts, 0, lag_s, is_held, "no answer in time")
        finished_s = clock()
        verdict = judge(answer.status, answer.body, inputs=texts)
        return Outcome(sent_s, finished_s, verdict.kind, texts, verdict.tokens, lag_s, is_held, verdict.reason)

    async def _settle(self, connections: Connections, request: bytes) -> None:
        """Wait until the server is idle again, at most `SETTLE_TIMEOUT_S`: a step must not pay for the one before."""
        clock = self._clock()
        answers = 0
        while answers < SETTLED_ANSWERS and clock() < SETTLE_TIMEOUT_S - self._shape.warmup_s:
            outcome = await self._ask(connections, request, clock)
            is_idle = outcome.kind in {"right", "wrong", "failed"}
            answers = answers + 1 if is_idle and outcome.finished_s - outcome.scheduled_s <= self._shape.slo_s else 0
            if outcome.kind in {"refused", "unanswered"}:
                await asyncio.sleep(SETTLE_PAUSE_S)

    async def _look(self, clock: "_Clock") -> tuple[float, float | None]:
        """CPU seconds of this client and of the server within the window; None for a server that is not seen."""
        await asyncio.sleep(-clock())
        ours_s = time.process_time()
        before = await self._cpu_times()
        await asyncio.sleep(self._shape.duration_s - clock())
        after = await self._cpu_times()
        return time.process_time() - ours_s, spent_s(before, after) if self._cpu else None

    async def _cpu_times(self) -> CpuTimes:
        # Looking through all processes takes milliseconds, in which no request could be sent.
        return await asyncio.to_thread(self._cpu.times) if self._cpu else {}

    def _requests(self, connections: Connections, *, count: int, seed: int) -> list[bytes]:
        """Made before the step, so that making them costs it nothing."""
        bodies = embeddings_bodies(
            model=self._server.model,
            lengths=self._shape.lengths,
            inputs=self._shape.inputs,
            count=count,
            encoding=self._shape.encoding,
            random=np.random.default_rng([seed, 1]),
        )
        return [connections.post(PATH, body, key=self._server.key) for body in bodies]

    def _measured(self, outcomes: list[Outcome], cpu: tuple[float, float | None], *, is_open: bool) -> Measured:
        client_cpu_s, server_cpu_s = cpu
        return Measured(
            figures(
                outcomes,
                window_s=self._shape.duration_s,
                slo_s=self._shape.slo_s,
                is_open=is_open,
                client_cpu_s=client_cpu_s,
                server_cpu_s=server_cpu_s,
            ),
            reasons(outcomes),
        )

    def _clock(self) -> "_Clock":
        return _Clock(zero_s=asyncio.get_running_loop().time() + self._shape.warmup_s)


class _Clock:
    """Seconds since the measured window began; negative during the warm-up."""

    def __init__(self, *, zero_s: float) -> None:
        self._zero_s = zero_s
        self._time = asyncio.get_running_loop().time

    def __call__(self) -> float:
        return self._time() - self._zero_s

    def loop_time(self, seconds: float) -> float:
        """The event loop's own time at this moment."""
        return seconds + self._zero_s
