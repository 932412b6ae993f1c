"""Texts through the whole appliance against the engine alone, one text against eight, and transformers' batching.

    python -m tests.bench.generation [--rounds 5] [--tokens 128] [--quick] [--json FILE]

The engine alone runs in a process of its own, with the same threads; the two take turns. All texts have the same number
of tokens. The time to the first token is that of one short chat on an idle machine, through HTTP as a stream, less that
of the same prompt's tokens in the engine.
"""

import asyncio
import itertools
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from appliance.bench.figures import percentile
from tests.appliance_process import ApplianceProcess
from tests.bench.harness import Rounds, Row, options, parsed, report
from tests.bench.writer_child import END_ID, MODEL, WriterChild, Written, prompt

TEXTS = 8
CONFIG = f'[[models]]\nname = "{MODEL}"\n'
FIRSTS = 60

_numbers = itertools.count()


def main() -> None:
    parser = options(__doc__, rounds=5, round_s=0.0)
    parser.add_argument("--tokens", type=int, default=128, help="of each text")
    parser.add_argument("--transformers", action="store_true", help="also transformers' continuous batching")
    found = parsed(parser)
    tokens = min(found.tokens, 32) if found.quick else found.tokens
    with (
        tempfile.TemporaryDirectory() as folder,
        WriterChild() as child,
        ApplianceProcess(Path(folder), config=CONFIG) as appliance,
    ):
        appliance.wait_ready()
        contenders: dict[str, Callable[[], Written]] = {
            "appliance": lambda: asyncio.run(_texts(appliance, TEXTS, tokens)),
            "engine": lambda: child.write(TEXTS, tokens),
            "engine, one text": lambda: child.write(1, tokens),
        }
        if found.transformers:
            contenders["transformers"] = lambda: child.transformers(TEXTS, tokens)
        for contender in contenders.values():
            contender()
        rounds = Rounds(contenders, found.rounds)
        products_s = [(child.products_s(1), child.products_s(TEXTS)) for _ in range(found.rounds)]
        whole_s, bare_s = _firsts(appliance, child, 10 if found.quick else FIRSTS)
    ceilings = [TEXTS * one / many for one, many in products_s]
    rows = [
        _ratio(rounds, "appliance", "engine", at_least=0.95),
        _ratio(rounds, "engine", "engine, one text"),
        Row(
            "ceiling of that: matrix products alone", statistics.median(ceilings), spread=(min(ceilings), max(ceilings))
        ),
    ]
    if found.transformers:
        rows.append(_ratio(rounds, "engine", "transformers"))
    rows += [Row(name, rounds.median(name, lambda each: each.tokens_per_s), "tokens/s") for name in contenders]
    rows += [
        Row(f"{name}, by CPU", rounds.median(name, lambda each: each.tokens / each.cpu_s), "tokens/CPU s")
        for name in contenders
        if name != "appliance"
    ]
    added_ms = sorted(1000 * (whole - bare) for whole, bare in zip(whole_s, bare_s, strict=True))
    rows += [
        Row("added time to the first token, p50", percentile(added_ms, 0.5), "ms", at_most=10.0),
        Row("added time to the first token, p95", percentile(added_ms, 0.95), "ms"),
        Row("time to the first token, engine, p50", 1000 * statistics.median(bare_s), "ms"),
    ]
    report("generation", rows, found)


def _ratio(rounds: Rounds[Written], upper: str, lower: str, *, at_least: float | None = None) -> Row:
    value, spread = rounds.ratio(upper, lower, lambda each: each.tokens_per_s)
    return Row(f"{upper} / {lower}", value, "", at_least=at_least, spread=spread)


async def _texts(appliance: ApplianceProcess, texts: int, tokens: int) -> Written:
    started_s = time.perf_counter()
    counts = await asyncio.gather(*(_text(appliance.port, number, tokens) for number in range(texts)))
    return Written(sum(counts), time.perf_counter() - started_s, 0.0)


async def _text(port: int, number: int, tokens: int) -> int:
    """The tokens of one streamed text, as the last chunk counts them.

    By hand: a client's CPU comes off the same cores, and an HTTP library's is more than the appliance's.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(_body(number, tokens)).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    writer.write(head + body)
    received = bytearray()
    while b"data: [DONE]" not in received[-64:]:
        piece = await reader.read(65536)
        assert piece, f"the stream broke off: {received[-300:]!r}"
        received += piece
    writer.close()
    (usage,) = re.findall(rb'"completion_tokens":(\d+)', received)
    return int(usage)


def _body(number: int, tokens: int) -> dict[str, object]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{next(_numbers)} {prompt(number)}"}],
        "max_tokens": tokens,
        "temperature": 0,
        "logit_bias": {str(END_ID): -100},
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _firsts(appliance: ApplianceProcess, child: WriterChild, count: int) -> tuple[list[float], list[float]]:
    """Seconds to the first token, through the appliance and in the engine alone, in turn."""
    whole_s: list[float] = []
    bare_s: list[float] = []
    with httpx.Client(timeout=60) as client:
        for number in range(count):
            started_s = time.perf_counter()
            with client.stream("POST", f"{appliance.base_url}/chat/completions", json=_body(number, 1)) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {") and '"content":"' in line and '"content":""' not in line:
                        whole_s.append(time.perf_counter() - started_s)
                        break
                else:
                    raise AssertionError("no token came")
            bare_s.append(child.first_s())
    return whole_s, bare_s


if __name__ == "__main__":
    main()
