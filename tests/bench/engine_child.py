"""The engine object alone in a process of its own, as a yardstick for the whole appliance on the same machine.

Started by the benchmarks: it loads the default model into an `EncoderEngine` and then obeys lines: `loop SECONDS` takes
batches of the token budget from texts to vectors, one after the other; `text N` is the bare forward of that one text.
"""

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Self  # Any: lines of JSON from the child

import msgspec

from appliance.hardware import detect
from appliance.presets import Tuning, load_preset, presets_dirs
from appliance.settings import ModelSettings
from tests.bench.harness import sample_texts
from tests.fake_model import packaged_minilm

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
TEXTS = 512


class LoopRound(msgspec.Struct, frozen=True):
    """What a loop got done."""

    texts: int
    wall_s: float
    cpu_s: float

    @property
    def texts_per_s(self) -> float:
        """By the clock."""
        return self.texts / self.wall_s

    @property
    def texts_per_cpu_s(self) -> float:
        """By CPU time."""
        return self.texts / self.cpu_s


class EngineChildren:
    """Several engine processes of so many threads each: a layout of the machine's cores."""

    def __init__(self, processes: int, threads: int) -> None:
        self.name = f"{processes} x {threads} threads"
        self._commands = [[sys.executable, "-m", "tests.bench.engine_child", "--threads", str(threads)]] * processes
        self._children: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        for command in self._commands:
            pipe = subprocess.PIPE
            self._children.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        for child in self._children:
            self._answer(child)
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()

    def loop(self, seconds: float) -> LoopRound:
        """All of them at once."""
        for child in self._children:
            self._tell(child, f"loop {seconds}")
        answers = [self._answer(child) for child in self._children]
        return LoopRound(
            texts=sum(answer["texts"] for answer in answers),
            wall_s=max(answer["wall_s"] for answer in answers),
            cpu_s=sum(answer["cpu_s"] for answer in answers),
        )

    def text_s(self, text: int) -> float:
        """Seconds of one forward of this text, by the first of them."""
        self._tell(self._children[0], f"text {text}")
        return float(self._answer(self._children[0])["wall_s"])

    def _tell(self, child: subprocess.Popen[str], line: str) -> None:
        assert child.stdin is not None
        print(line, file=child.stdin, flush=True)

    def _answer(self, child: subprocess.Popen[str]) -> dict[str, Any]:
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine child ended with {child.wait()}; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def layouts() -> Iterator[dict[str, EngineChildren]]:
    """Every sensible way to share the cores out: one engine with all of them, and one engine a core."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        found = [EngineChildren(processes, cores // processes) for processes in dict.fromkeys((1, cores))]
        yield {each.name: stack.enter_context(each) for each in found}


def shipped_tuning() -> Tuning:
    """How the appliance runs the default model on this machine's CPU."""
    hardware = detect("cpu", environ=os.environ)
    return load_preset(ModelSettings(name=MODEL), hardware=hardware.kind, presets_dirs=presets_dirs("")).tuning


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, required=True)
    threads = parser.parse_args().threads
    # Before torch is imported, as the engine's host does.
    os.environ.update(OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1")
    from appliance.workers.engines.encoder import EncoderEngine  # noqa: PLC0415
    from appliance.workers.tokenize import Tokenizer  # noqa: PLC0415
    from appliance.workers.tokens import Tokens  # noqa: PLC0415
    from appliance.workers.wire import Encode, Load  # noqa: PLC0415

    folder, tuning = packaged_minilm(), shipped_tuning()
    engine = EncoderEngine()
    engine.load(Load("m", str(folder), tuning.dtype, "cpu", threads))
    tokenizer, texts = Tokenizer.load(folder), sample_texts(TEXTS)
    tokens = tokenizer.encode(texts)

    def forward(batch: Sequence[Tokens]) -> None:
        engine.encode(Encode(0, "m", b"".join(each.ids for each in batch), tuple(each.count for each in batch)))

    batches = _batches(texts, [each.count for each in tokens], tuning.batch_tokens_max)
    turn = itertools.cycle(batches)
    for batch in batches[:2]:
        forward(tokenizer.encode(batch))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        word, argument = line.split()
        done, began_s, cpu_s = 0, time.perf_counter(), time.process_time()
        if word == "text":
            forward([tokens[int(argument)]])
            done = 1
        while word == "loop" and time.perf_counter() - began_s < float(argument):
            batch = next(turn)
            forward(tokenizer.encode(batch))
            done += len(batch)
        wall_s = time.perf_counter() - began_s
        print(json.dumps({"texts": done, "wall_s": wall_s, "cpu_s": time.process_time() - cpu_s}), flush=True)


def _batches(texts: Sequence[str], counts: Sequence[int], tokens_max: int) -> list[list[str]]:
    """In the order they came, full by the token budget."""
    batches: list[list[str]] = [[]]
    tokens = 0
    for text, count in zip(texts, counts, strict=True):
        if batches[-1] and tokens + count > tokens_max:
            batches.append([])
            tokens = 0
        batches[-1].append(text)
        tokens += count
    return batches


if __name__ == "__main__":
    main()
