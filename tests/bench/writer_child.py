"""The embedded generator alone in a process of its own, and transformers' continuous batching as another way to write.

Started by `generation.py`: it obeys lines. `write N TOKENS` begins N texts at once and steps until all are written;
`first` writes one token; `transformers N TOKENS` does the same as `write` through transformers; `products N` does
nothing but the matrix products of one step of N texts, several times.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self  # Any: lines of JSON, and transformers

import msgspec

from appliance.hardware import detect
from appliance.jobs import Generate, Sampling
from appliance.presets import Preset, load_preset, presets_dirs
from appliance.settings import ModelSettings
from appliance.workers.store import verified_folder
from appliance.workers.wire import Begin, Load
from appliance.workers.writing.writer import Writer

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
CACHE = Path(__file__).resolve().parents[2] / ".appliance" / "models"
SUBJECTS = ("the sea", "trains", "bread", "the moon", "bees", "paper", "salt", "bridges")
REPEATS = 20
END_ID = 2  # never written, so that all texts are as long as they may be


class Written(msgspec.Struct, frozen=True):
    """What a round wrote."""

    tokens: int
    wall_s: float
    cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        """By the clock."""
        return self.tokens / self.wall_s


def prompt(number: int) -> str:
    """What a text is about."""
    return f"Write a long story about {SUBJECTS[number % len(SUBJECTS)]}."


def preset() -> Preset:
    """As the appliance runs the model here."""
    hardware = detect("auto", environ=os.environ)
    return load_preset(ModelSettings(name=MODEL), hardware=hardware.kind, presets_dirs=presets_dirs(""))


class WriterChild:
    """The child, from this side."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.writer_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(preset().tuning.engine_threads or 1)},
        )

    def __enter__(self) -> Self:
        self._ask("ready")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def write(self, texts: int, tokens: int) -> Written:
        """So many texts at once."""
        return msgspec.convert(self._ask(f"write {texts} {tokens}"), Written)

    def transformers(self, texts: int, tokens: int) -> Written:
        """The same through transformers' continuous batching."""
        return msgspec.convert(self._ask(f"transformers {texts} {tokens}"), Written)

    def products_s(self, texts: int) -> float:
        """Of one step's matrix products: what reading the weights costs, whatever else a step does."""
        return float(self._ask(f"products {texts}")["wall_s"])

    def first_s(self) -> float:
        """From a prompt's tokens to the first token after it."""
        return float(self._ask("first")["wall_s"])

    def _ask(self, line: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        while not (answer := self._process.stdout.readline()).startswith("{"):
            assert self._process.poll() is None, "the child has ended"
        return json.loads(answer)


class _Child:
    def __init__(self) -> None:
        from appliance.workers.engines.generator.engine import GeneratorEngine  # noqa: PLC0415  # not in the parent

        found = preset()
        generation = found.tuning.generation
        assert generation is not None
        self._folder = verified_folder(found.facts, ModelSettings(name=MODEL), cache_dir=CACHE)
        self._writer = Writer.load(self._folder, found.facts, tokens_max=generation.sequence_tokens_max)
        self._dtype = found.tuning.dtype
        self._engine = GeneratorEngine()
        self._engine.load(
            Load(
                MODEL,
                str(self._folder),
                found.tuning.dtype,
                "cpu",
                found.tuning.engine_threads,
                task="generate",
                sequences_max=generation.sequences_max,
                tokens_max=self._writer.tokens_max,
            )
        )
        self._number = 0
        self._transformers: Any = None

    def write(self, texts: int, tokens: int) -> Written:
        begins = [self._begin(number, tokens) for number in range(texts)]
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        for begin in begins:
            self._engine.begin(begin)
        count = 0
        while not self._engine.is_idle:
            count += sum(len(grown.ids) for grown in self._engine.step().grown)
        return Written(count, time.perf_counter() - started_s, time.process_time() - started_cpu_s)

    def transformers(self, texts: int, tokens: int) -> Written:
        import torch  # noqa: PLC0415
        from transformers import AutoModelForCausalLM, GenerationConfig  # noqa: PLC0415

        if self._transformers is None:
            kind = getattr(torch, self._dtype)
            self._transformers = AutoModelForCausalLM.from_pretrained(str(self._folder), dtype=kind)
        prompts = [self._ids(number) for number in range(texts)]
        config = GenerationConfig(
            max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=END_ID, use_cuda_graph=False
        )
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        found = self._transformers.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
        count = sum(len(one.generated_tokens) for one in found.values())
        return Written(count, time.perf_counter() - started_s, time.process_time() - started_cpu_s)

    def products(self, texts: int) -> Written:
        import torch  # noqa: PLC0415

        model: Any = self._engine._loaded._model  # `Any`: a look at what only this measurement needs
        products = [
            product
            for layer in model._stack.layers
            for product in (layer.attention.qkv, layer.attention.out, layer.mlp.gate, layer.mlp.up, layer.mlp.down)
        ]
        dtype = model._stack.embedding.words.dtype
        rows = {id(product): torch.randn(texts, product.width_in, dtype=dtype) for product in [*products, model._head]}
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            for _ in range(REPEATS):
                for product in [*products, model._head]:
                    product(rows[id(product)])
        wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
        return Written(texts, wall_s / REPEATS, cpu_s / REPEATS)

    def _ids(self, number: int) -> list[int]:
        import numpy as np  # noqa: PLC0415

        ids: list[int] = np.frombuffer(self._begin(number, 1).ids, dtype="<i4").tolist()
        return ids

    def _begin(self, number: int, tokens: int) -> Begin:
        self._number += 1
        # Each prompt is one that was not computed before.
        message = {"role": "user", "content": f"{self._number} {prompt(number)}"}
        sampling = Sampling(temperature=0.0, logit_bias=((END_ID, -100.0),))
        task = Generate(messages=msgspec.json.encode([message]), tokens_max=tokens, sampling=sampling)
        prepared = self._writer.prepare(task)
        return Begin(self._number, MODEL, prepared.ids, tokens, sampling)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    child = _Child()
    for line in sys.stdin:
        match line.split():
            case ["ready"]:
                answer = Written(0, 0.0, 0.0)
            case ["write", texts, tokens]:
                answer = child.write(int(texts), int(tokens))
            case ["transformers", texts, tokens]:
                answer = child.transformers(int(texts), int(tokens))
            case ["products", texts]:
                answer = child.products(int(texts))
            case ["first"]:
                answer = child.write(1, 1)
            case _:
                return
        print(msgspec.json.encode(answer).decode(), flush=True)


if __name__ == "__main__":
    main()
