"""What the appliance adds to the latency of a lone request: one client on an idle machine, against the bare forward.

    python -m tests.bench.latency [--texts 300] [--quick] [--json FILE]

Each text goes through the appliance and then through the engine object alone, in a process with as many threads as the
appliance's engines have; the difference, text by text, is what HTTP, queue, tokenizing and hand-over add.
"""

import itertools
import os
import tempfile
import time
from pathlib import Path

import orjson
import uvloop

from appliance.bench.answers import judge
from appliance.bench.figures import percentile
from appliance.bench.http import Address, Connections
from tests.bench.engine_child import TEXTS, EngineChildren, shipped_tuning
from tests.bench.harness import MODEL, Row, options, parsed, real_appliance, report, sample_texts

WARM = 20


def main() -> None:
    parser = options(__doc__, rounds=1, round_s=0.0)
    parser.add_argument("--texts", type=int, default=300)
    found = parsed(parser)
    count = 40 if found.quick else found.texts
    threads = shipped_tuning().engine_threads or len(os.sched_getaffinity(0))
    with (
        tempfile.TemporaryDirectory() as folder,
        EngineChildren(1, threads) as engine,
        real_appliance(Path(folder)) as appliance,
    ):
        appliance.wait_ready()
        whole_s, forward_s = uvloop.run(_measure(appliance.base_url, engine, count))
    added_ms = sorted(1000 * (whole - forward) for whole, forward in zip(whole_s, forward_s, strict=True))
    rows = [
        Row("added latency, p50", percentile(added_ms, 0.50), "ms", at_most=3.0),
        Row("added latency, p99", percentile(added_ms, 0.99), "ms", at_most=10.0),
        Row("whole, p50", 1000 * percentile(sorted(whole_s), 0.50), "ms"),
        Row("whole, p99", 1000 * percentile(sorted(whole_s), 0.99), "ms"),
        Row("forward, p50", 1000 * percentile(sorted(forward_s), 0.50), "ms"),
        Row("forward, p99", 1000 * percentile(sorted(forward_s), 0.99), "ms"),
    ]
    report("latency", rows, found)


async def _measure(base_url: str, engine: EngineChildren, count: int) -> tuple[list[float], list[float]]:
    """Seconds of each text, through the appliance and in the engine alone, in turn."""
    whole_s: list[float] = []
    forward_s: list[float] = []
    texts = sample_texts(TEXTS)
    async with Connections(Address.of(base_url)) as connections:
        for number in itertools.islice(itertools.cycle(range(TEXTS)), WARM + count):
            body = orjson.dumps({"model": MODEL, "input": texts[number], "encoding_format": "base64"})
            request = connections.post("/embeddings", body, key=None)
            began_s = time.perf_counter()
            answer = await connections.send(request)
            whole_s.append(time.perf_counter() - began_s)
            verdict = judge(answer.status, answer.body, inputs=1)
            if verdict.kind != "right":
                raise RuntimeError(verdict.reason)
            forward_s.append(engine.text_s(number))  # nothing else is to happen meanwhile
    return whole_s[WARM:], forward_s[WARM:]


if __name__ == "__main__":
    main()
