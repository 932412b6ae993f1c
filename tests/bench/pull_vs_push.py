"""Pull against push, simulated: eight workers of uneven speed, requests of mixed sizes, the same arrivals for all.

    python -m tests.bench.pull_vs_push [--seeds 5] [--requests 8000] [--quick] [--json FILE]

For each way of placing requests: the largest load whose p99 latency is within the objective (goodput at equal p99).

- pull: a shared queue in arrival order; a node wishes for jobs and gives back as the shipped one does: `Batcher`,
  `Backlog` and `Demand` are the shipped ones, with the tuning of `presets/default/gpu.toml`.
- round robin: each request goes to the next worker.
- least loaded: each goes to the worker with the least predicted time of outstanding work (its own speed known exactly),
  as of a snapshot that is up to 50 ms old and the same for all routers.
- two choices: the less loaded of two random workers, by the same snapshot: what careful routers do against herding.
- own counted: least loaded, by four routers that each add to the snapshot what they placed since: the best push here,
  with the workers' speeds and the requests' costs known exactly to every router, which a real one has to guess.

Workers batch alike in every case, and know their own speed exactly. Speeds are spread evenly from 1 to 4. A request is
1 to 256 texts (log-normal, median 1) of 8 to 256 tokens. A message takes 0.5 ms from one party to the next. Nothing
sleeps: this is a discrete-event simulation, and a seed determines it.
"""

import argparse
import heapq
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from appliance.bench.figures import percentile
from appliance.jobs import Lane
from appliance.presets import Coefficients, load_preset
from appliance.queue.demand import Demand
from appliance.settings import ModelSettings
from appliance.workers.backlog import Backlog
from appliance.workers.batcher import Batcher, Budget
from appliance.workers.cost import CostModel
from tests.bench.harness import Row, report

HOP_S = 0.0005
TEXTS_MEDIAN, TEXTS_SIGMA, TEXTS_MAX = 1.0, 1.2, 256
TOKENS = (8, 256)
COST = Coefficients(batch_ms=2.0, token_ms=0.05, square_ms=0.0, item_ms=0.01)  # of the slowest worker
OBJECTIVE_S = 0.25
WARM_SHARE = 0.25  # of the requests, which are not counted: a load that is too much has to show
ROUTERS = 4  # in "own counted"
LOAD_STEP = 0.02  # the search ends when loads are this close, as a share of the capacity
PRESETS = Path(__file__).parents[2] / "presets"


class Scenario(msgspec.Struct, frozen=True):
    """What is varied."""

    workers: int = 8
    fastest: float = 4.0  # times the slowest
    stale_s: float = 0.05
    objective_s: float = OBJECTIVE_S
    requests: int = 8000

    def speeds(self) -> list[float]:
        """Spread evenly."""
        return [float(speed) for speed in np.linspace(1.0, self.fastest, self.workers)]


class Request:
    """One job: its texts, and when it came."""

    __slots__ = ("arrived_s", "attempt", "finished_s", "left", "lengths")

    def __init__(self, lengths: Sequence[int], arrived_s: float) -> None:
        self.lengths = lengths
        self.arrived_s = arrived_s
        self.left = len(lengths)
        self.attempt = 0
        self.finished_s = float("inf")


class Text:
    """What the batcher holds."""

    __slots__ = ("arrived_s", "cost_ms", "lane", "request", "tokens")

    def __init__(self, request: Request, tokens: int, cost_ms: float, arrived_s: float) -> None:
        self.request = request
        self.tokens = tokens
        self.cost_ms = cost_ms
        self.arrived_s = arrived_s
        self.lane: Lane = "interactive"


class Clock:
    """The events to come, in order of time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Do it then."""
        self._count += 1
        heapq.heappush(self._events, (time_s, self._count, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do it so much later."""
        self.at(self.now_s + delay_s, action)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now_s, _, action = heapq.heappop(self._events)
            action()


class Tuning(msgspec.Struct, frozen=True):
    """Of the batcher and the pull, as shipped."""

    budget: Budget
    backlog_ms: float


class Worker:
    """A node with one device. A batch leaves as soon as the device is free."""

    def __init__(self, clock: Clock, speed: float, tuning: Tuning) -> None:
        self.outstanding_ms = 0.0  # placed here and not computed yet
        self.on_computed: Callable[[float], None] = lambda work_ms: None
        self.cost = CostModel(
            Coefficients(
                batch_ms=COST.batch_ms / speed,
                token_ms=COST.token_ms / speed,
                square_ms=COST.square_ms / speed,
                item_ms=COST.item_ms / speed,
            )
        )
        self._clock = clock
        self._batcher: Batcher[Text] = Batcher(tuning.budget)
        self._is_busy = False

    def job_ms(self, request: Request) -> float:
        """Predicted work of a request."""
        return sum(self.cost.item_ms(tokens) for tokens in request.lengths)

    def take(self, request: Request) -> None:
        """A request is here."""
        for tokens in request.lengths:
            self._batcher.add(Text(request, tokens, self.cost.item_ms(tokens), self._clock.now_s))
        self._run()

    def _run(self) -> None:
        if self._is_busy or not self._batcher.items_waiting:
            return
        batch, _ = self._batcher.next_batch(lambda _: True)
        self._is_busy = True
        batch_ms = self.cost.batch_ms([text.tokens for text in batch])
        self._clock.after(batch_ms / 1000, lambda: self._computed(batch))

    def _computed(self, batch: Sequence[Text]) -> None:
        self._is_busy = False
        work_ms = 0.0
        for text in batch:
            work_ms += text.cost_ms
            text.request.left -= 1
            if text.request.left == 0:
                text.request.finished_s = self._clock.now_s + HOP_S
        self.outstanding_ms -= work_ms
        self._run()
        self.on_computed(work_ms)


class Placement(Protocol):
    """Where requests go."""

    def arrive(self, request: Request) -> None:
        """A request came in."""


class Pull:
    """A shared queue in arrival order; waiting pulls are served in turn, a job each, as the NATS server does."""

    def __init__(self, clock: Clock, workers: Sequence[Worker], tuning: Tuning) -> None:
        self._clock = clock
        self._waiting: deque[Request] = deque()
        self._pulls = deque(_NodePull(clock, worker, tuning, self) for worker in workers)
        for pull in self._pulls:
            pull.renew()

    def arrive(self, request: Request) -> None:
        """A request came in."""
        self._clock.after(HOP_S, lambda: self._store(request, is_new=True))

    def returned(self, request: Request) -> None:
        """A node gave it back; it is the next one out."""
        self._clock.after(HOP_S, lambda: self._store(request, is_new=False))

    def serve(self) -> None:
        """Send out what waits, as far as it is asked for."""
        idle = 0
        while self._waiting and idle < len(self._pulls):
            pull = self._pulls[0]
            self._pulls.rotate(-1)
            if pull.granted == 0:
                idle += 1
                continue
            idle = 0
            pull.granted -= 1
            pull.send(self._waiting.popleft())

    def _store(self, request: Request, *, is_new: bool) -> None:
        if is_new:
            self._waiting.append(request)
        else:
            self._waiting.appendleft(request)
        self.serve()


class _NodePull:
    """One node's side: the shipped rule for how much to wish for, and when to give back."""

    def __init__(self, clock: Clock, worker: Worker, tuning: Tuning, queue: Pull) -> None:
        self.granted = 0  # what the server knows of
        self._clock = clock
        self._worker = worker
        self._queue = queue
        self._backlog = Backlog(limit_ms=lambda: tuning.backlog_ms)
        self._demand = Demand(now=0.0)
        worker.on_computed = self._computed

    def renew(self) -> None:
        """Tell the server of the present wish, as far as it is worth a message."""
        self._demand.want(self._backlog.wish(unread_jobs=0))
        if jobs := self._demand.ask(now=self._clock.now_s):
            self._clock.after(HOP_S, lambda: self._grant(jobs))

    def send(self, request: Request) -> None:
        """A job is on its way here."""
        self._clock.after(HOP_S, lambda: self._receive(request))

    def _grant(self, jobs: int) -> None:
        self.granted += jobs
        self._queue.serve()

    def _receive(self, request: Request) -> None:
        self._demand.delivered(now=self._clock.now_s)
        request.attempt += 1
        job_ms = self._worker.job_ms(request)
        self._backlog.measured(job_ms)
        if self._backlog.is_overfull and request.attempt == 1:
            self._queue.returned(request)
        else:
            self._backlog.opened(job_ms)
            self._worker.take(request)
        self.renew()

    def _computed(self, work_ms: float) -> None:
        self._backlog.closed(work_ms)
        self.renew()


class Push:
    """A router that places each request at once."""

    def __init__(
        self,
        clock: Clock,
        workers: Sequence[Worker],
        choose: Callable[[Sequence[float]], int],
        *,
        stale_s: float,
        routers: int = 0,
    ) -> None:
        """`choose` gets each worker's outstanding work in milliseconds, as of a snapshot at most `stale_s` old.

        With `routers`, each of them adds what it placed since; requests come to them in turn.
        """
        self._clock = clock
        self._workers = workers
        self._choose = choose
        self._stale_s = stale_s
        self._routers = routers
        self._turn = 0
        self._seen_ms = [0.0] * len(workers)
        self._seen_s = 0.0
        self._own_ms: list[list[float]] = []
        self._look()

    def arrive(self, request: Request) -> None:
        """A request came in."""
        now_s = self._clock.now_s
        if now_s - self._seen_s >= self._stale_s:
            # The snapshots come at fixed times, not when a request asks for one.
            self._seen_s = now_s - now_s % self._stale_s if self._stale_s else now_s
            self._look()
        self._turn = (self._turn + 1) % max(1, self._routers)
        own_ms = self._own_ms[self._turn]
        index = self._choose([seen + own for seen, own in zip(self._seen_ms, own_ms, strict=True)])
        worker = self._workers[index]
        job_ms = worker.job_ms(request)
        worker.outstanding_ms += job_ms
        if self._routers:
            own_ms[index] += job_ms
        self._clock.after(HOP_S, lambda: worker.take(request))

    def _look(self) -> None:
        self._seen_ms = [worker.outstanding_ms for worker in self._workers]
        self._own_ms = [[0.0] * len(self._workers) for _ in range(max(1, self._routers))]


class Stream(msgspec.Struct, frozen=True):
    """Requests at a load of one: arrival times are divided by the load."""

    arrivals: tuple[float, ...]  # requests a second is 1
    lengths: tuple[tuple[int, ...], ...]


WAYS = ("pull", "round robin", "least loaded", "two choices", "own counted")


def goodput(way: str, scenario: Scenario, stream: Stream, *, seed: int) -> float:
    """The largest load, as a share of the capacity of all workers, with p99 within the objective."""
    borne, failed = 0.0, 1.2
    capacity = capacity_per_s(scenario, stream)
    while failed - borne > LOAD_STEP:
        share = (borne + failed) / 2
        if p99_s(way, scenario, stream, load=share * capacity, seed=seed) <= scenario.objective_s:
            borne = share
        else:
            failed = share
    return borne


def p99_s(way: str, scenario: Scenario, stream: Stream, *, load: float, seed: int) -> float:
    """Latency that one request in a hundred exceeds at `load` requests a second."""
    clock = Clock()
    tuning = shipped_tuning()
    workers = [Worker(clock, speed, tuning) for speed in scenario.speeds()]
    placement = _placement(way, clock, workers, tuning=tuning, scenario=scenario, seed=seed)
    requests = [Request(lengths, time / load) for time, lengths in zip(stream.arrivals, stream.lengths, strict=True)]
    for request in requests:
        clock.at(request.arrived_s, lambda request=request: placement.arrive(request))  # type: ignore[misc]
    clock.run()
    counted = requests[int(WARM_SHARE * len(requests)) :]
    return percentile(sorted(request.finished_s - request.arrived_s for request in counted), 0.99)


def stream_of(scenario: Scenario, *, seed: int) -> Stream:
    """Poisson arrivals of heavy-tailed requests."""
    random = np.random.default_rng(seed)
    count = scenario.requests
    texts = np.clip(np.rint(random.lognormal(np.log(TEXTS_MEDIAN), TEXTS_SIGMA, count)), 1, TEXTS_MAX)
    return Stream(
        arrivals=tuple(float(time) for time in np.cumsum(random.exponential(1.0, count))),
        lengths=tuple(
            tuple(int(length) for length in random.integers(*TOKENS, int(number), endpoint=True)) for number in texts
        ),
    )


def capacity_per_s(scenario: Scenario, stream: Stream) -> float:
    """Requests a second of all workers together, were no time lost between and for batches."""
    slowest_ms = statistics.fmean(
        sum(COST.token_ms * length + COST.item_ms for length in lengths) for lengths in stream.lengths
    )
    return sum(scenario.speeds()) * 1000 / slowest_ms


def shipped_tuning() -> Tuning:
    """What a GPU without a preset of its own gets."""
    model = ModelSettings(name="simulated", folder="/")
    tuning = load_preset(model, hardware="gpu", presets_dirs=[PRESETS]).tuning
    budget = Budget(
        tokens_max=tuning.batch_tokens_max,
        items_max=tuning.batch_items_max,
        cost_ms_max=tuning.batch_ms_max,
        max_wait_s=tuning.max_wait_ms / 1000,
        length_bands=tuning.length_bands,
    )
    return Tuning(budget, tuning.backlog_batches * tuning.batch_ms_max)


def _placement(
    way: str, clock: Clock, workers: Sequence[Worker], *, tuning: Tuning, scenario: Scenario, seed: int
) -> Placement:
    random = np.random.default_rng([seed, 1])
    turn = iter(range(10**12))

    def least(seen_ms: Sequence[float]) -> int:
        return min(range(len(workers)), key=lambda index: (seen_ms[index], random.random()))

    def two(seen_ms: Sequence[float]) -> int:
        first, second = (int(index) for index in random.choice(len(workers), 2, replace=False))
        return first if seen_ms[first] <= seen_ms[second] else second

    match way:
        case "pull":
            return Pull(clock, workers, tuning)
        case "round robin":
            return Push(clock, workers, lambda _: next(turn) % len(workers), stale_s=scenario.stale_s)
        case "least loaded":
            return Push(clock, workers, least, stale_s=scenario.stale_s)
        case "two choices":
            return Push(clock, workers, two, stale_s=scenario.stale_s)
        case "own counted":
            return Push(clock, workers, least, stale_s=scenario.stale_s, routers=ROUTERS)
        case _:
            raise ValueError(f"{way!r} is none of {', '.join(WAYS)}")


def compare(scenario: Scenario, seeds: Sequence[int], ways: Sequence[str] = WAYS) -> dict[str, list[float]]:
    """Goodput by way, one figure a seed."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    for seed in seeds:
        stream = stream_of(scenario, seed=seed)
        for way in ways:
            found[way].append(goodput(way, scenario, stream, seed=seed))
    return found


def rows_of(title: str, found: dict[str, list[float]], targets: dict[str, float]) -> list[Row]:
    """The ratios of pull to every other way."""
    rows = []
    for way, others in found.items():
        if way == "pull":
            continue
        ratios = [pull / other if other else float("inf") for pull, other in zip(found["pull"], others, strict=True)]
        spread = (min(ratios), max(ratios))
        rows.append(Row(f"{title}: pull / {way}", statistics.median(ratios), "x", targets.get(way), spread=spread))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, few requests: to see that it works")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--json", type=Path, help="write the findings here")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.requests = 1, 3000
    base = Scenario(requests=options.requests)
    seeds = range(1, options.seeds + 1)

    found = compare(base, seeds)
    rows = [
        Row(
            f"{way}: goodput at p99 <= {1000 * base.objective_s:.0f} ms",
            100 * statistics.median(found[way]),
            "% of capacity",
        )
        for way in WAYS
    ]
    rows += rows_of("base", found, {"round robin": 2.0, "least loaded": 1.3})
    variants = {} if options.quick else _variants(base)
    for title, variant in variants.items():
        rows += rows_of(title, compare(variant, seeds[: max(1, options.seeds // 3)]), {})
    report("pull_vs_push", rows, options)


def _variants(base: Scenario) -> dict[str, Scenario]:
    """One thing at a time is otherwise."""
    variants = {
        f"fastest is {fastest:g}x": msgspec.structs.replace(base, fastest=fastest) for fastest in (1.0, 2.0, 8.0)
    }
    variants |= {
        f"state {1000 * stale_s:.0f} ms old": msgspec.structs.replace(base, stale_s=stale_s)
        for stale_s in (0.0, 0.01, 0.2)
    }
    variants |= {
        f"p99 <= {1000 * objective_s:.0f} ms": msgspec.structs.replace(base, objective_s=objective_s)
        for objective_s in (0.15, 0.5)
    }
    return variants


if __name__ == "__main__":
    main()
