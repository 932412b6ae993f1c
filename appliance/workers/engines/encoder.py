"""The PyTorch encoder engine: token ids in; L2-normalized vectors, or logits of texts or tokens, out, in float32.

It answers for what no client may ever see: ids the device must not touch, numbers that are not finite, and a precision
that the model does not bear (checked at load against a reference in float32; golden.py keeps its answer).
"""

import gc
import logging
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from appliance.workers import model_files
from appliance.workers.engine import DeviceLost, OutOfMemory
from appliance.workers.engines.classification import classifier_runner, load_classifier
from appliance.workers.engines.embedding import embedder_runner, load_embedder
from appliance.workers.engines.exact import ExactTwin, Texts
from appliance.workers.engines.label_card import LabelCard
from appliance.workers.engines.packing import (
    PAIR_NUMBERS,
    finite,
    normalize,
    pairs,
    per_token_of,
    row_counts,
    second_starts_of,
    unpack,
)
from appliance.workers.engines.runner import Runner
from appliance.workers.wire import Encode, Encoded, Load, Loaded

TASKS: Final = ("embed", "score", "tag", "sparse")
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Rows = npt.NDArray[np.float32]

_log = logging.getLogger("appliance.engine")


class _Resident(NamedTuple):
    runner: Runner
    limits: model_files.TokenLimits
    task: str
    exact: ExactTwin | None  # of a model in 16 bits

    def checked(self, rows: Rows, counts: Sequence[int]) -> tuple[Rows, tuple[int, ...]]:
        """As clients may see them, and the positions of texts that have no answer."""
        return normalize(rows, counts) if self.task == "embed" else finite(rows, counts)


class EncoderEngine:
    """`engine.Engine` on PyTorch; holds any number of models on one device."""

    def __init__(self) -> None:
        self._models: dict[str, _Resident] = {}

    def load(self, order: Load) -> Loaded:
        """See `Engine.load`. Loading a name again replaces what it held."""
        started_s = time.perf_counter()
        if order.dtype not in _DTYPES:
            raise ValueError(f"dtype {order.dtype!r} is none of {', '.join(_DTYPES)}")
        if order.task not in TASKS:
            raise ValueError(f"task {order.task!r} is none of {', '.join(TASKS)}")
        if order.threads > 0:
            torch.set_num_threads(order.threads)
        self._models.pop(order.model, None)
        card = LabelCard((), "")
        with _translated():
            limits = model_files.token_limits(Path(order.folder))
            if order.task == "embed":
                runner = load_embedder(order, _DTYPES[order.dtype], limits)
            elif order.task == "sparse":
                runner = _sparse(order, _DTYPES[order.dtype], limits)
            else:
                runner, card = load_classifier(order, _DTYPES[order.dtype], limits)
        exact = (
            None if order.dtype == "float32" else ExactTwin(order.model, partial(_in_float32, order, len(card.labels)))
        )
        self._models[order.model] = _Resident(runner, limits, order.task, exact)
        load_s = time.perf_counter() - started_s
        _log.info("loaded %s: %s on %s in %.1f s", order.model, order.dtype, order.device, load_s)
        return Loaded(
            model=order.model,
            width=PAIR_NUMBERS if order.task == "sparse" else runner.width,
            tokens_max=limits.tokens_max,
            dtype=order.dtype,
            weights_bytes=runner.weights_bytes,
            load_s=load_s,
            labels=card.labels,
            activation=card.activation,
            has_token_vectors=runner.has_token_vectors,
        )

    def encode(self, batch: Encode) -> Encoded:
        """See `Engine.encode`. A text may be as long as the model's positions reach, which can be over `tokens_max`."""
        resident = self._models.get(batch.model)
        if resident is None:
            raise ValueError(f"model {batch.model!r} is not loaded")
        runner = resident.runner
        texts = unpack(batch, vocabulary=runner.vocabulary, tokens_max=resident.limits.positions_max)
        second_starts = second_starts_of(batch)
        if resident.task in {"embed", "sparse"} and any(second_starts):
            raise ValueError("an embedding model takes single texts")
        per_token = per_token_of(batch, is_able=runner.has_token_vectors)
        started_s = time.perf_counter()
        with _translated():
            rows = runner.run(texts, second_starts, per_token)
        counts = batch.lengths if resident.task == "tag" else row_counts(batch.lengths, per_token)
        rows, bad = resident.checked(rows, counts)
        if bad and resident.exact is not None:
            rows, bad = _again(resident, rows, bad, counts, (texts, second_starts, per_token))
        if resident.task == "sparse":
            rows, counts = pairs(rows)
        device_s = time.perf_counter() - started_s
        is_plain = all(count == 1 for count in counts)
        return Encoded(batch.batch, rows.tobytes(), rows.shape[1], bad, device_s, () if is_plain else counts)


def _again(
    resident: _Resident,
    rows: Rows,
    bad: Sequence[int],
    counts: Sequence[int],
    batch: tuple[Texts, Sequence[int], Sequence[int]],
) -> tuple[Rows, tuple[int, ...]]:
    """The rows, with what float32 gives for the bad texts, and the texts that are bad in it too."""
    assert resident.exact is not None, "asked for of a model in float32"
    texts, second_starts, per_token = batch
    own_per_token = [place for place, position in enumerate(bad) if position in per_token]
    with _translated():
        found = resident.exact.run([texts[at] for at in bad], [second_starts[at] for at in bad], own_per_token)
    if found is None:
        return rows, tuple(bad)
    found, still_bad = resident.checked(found, [counts[position] for position in bad])
    ends = np.cumsum(counts)
    rows[np.concatenate([np.arange(ends[at] - counts[at], ends[at]) for at in bad])] = found
    return rows, tuple(bad[place] for place in still_bad)


def _sparse(order: Load, dtype: torch.dtype, limits: model_files.TokenLimits) -> Runner:
    from appliance.workers.engines.sparse import load_sparse  # noqa: PLC0415  # imports transformers, which takes seconds

    return load_sparse(order, dtype, limits)


def _in_float32(order: Load, labels: int) -> Runner:
    with _translated():
        if order.task == "embed":
            return embedder_runner(Path(order.folder), torch.float32, order.device)
        if order.task == "sparse":
            from appliance.workers.engines.sparse_runner import SparseRunner  # noqa: PLC0415  # imports transformers

            return SparseRunner.load(Path(order.folder), dtype=torch.float32, device=order.device)
        return classifier_runner(Path(order.folder), torch.float32, order, labels=labels)


@contextmanager
def _translated() -> Iterator[None]:
    """Turn the runtime's exceptions into the engine protocol's."""
    try:
        yield
    except torch.OutOfMemoryError as exc:
        _free(exc)
        raise OutOfMemory("the device is out of memory") from exc
    except torch.AcceleratorError as exc:
        raise DeviceLost(str(exc)) from exc
    except RuntimeError as exc:
        if "can't allocate memory" in str(exc):  # the CPU allocator has no class of its own for it
            _free(exc)
            raise OutOfMemory("the machine is out of memory") from exc
        raise


def _free(exc: BaseException) -> None:
    """Give back what the failed batch holds; the frames of its traceback would keep its tensors alive."""
    traceback.clear_frames(exc.__traceback__)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
