"""The PyTorch encoder engine: token ids in, L2-normalized float32 vectors out.

It answers for what no client may ever see: ids the device must not touch, vectors that are not finite, and a precision
that the model does not bear (checked at load against float32, on texts of different lengths and scripts).
"""

import gc
import logging
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from appliance.workers import model_files
from appliance.workers.engine import DeviceLost, OutOfMemory
from appliance.workers.engines.packing import normalize, unpack
from appliance.workers.engines.runner import Runner
from appliance.workers.engines.sentence_runner import SentenceTransformersRunner
from appliance.workers.wire import Encode, Encoded, Load, Loaded

GOLDEN_COSINE_MIN: Final = 0.999
_GOLDEN_TEXTS: Final = (
    "a",
    "How do I reset my password?",
    "Der Vertrag kann mit einer Frist von drei Monaten zum Ende des Quartals gekündigt werden.",
    "東京の天気は明日も晴れるでしょう。 🙂 1,024.50 €",
    "def area(radius: float) -> float:\n    return 3.14159 * radius**2",
    "The committee met on Tuesday to discuss the budget for the coming year. After a long debate about the cost of "
    "the new library, the members agreed to postpone the decision until the figures of the last quarter are known. "
    * 3,
)
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_log = logging.getLogger("appliance.engine")


class _Resident(NamedTuple):
    runner: Runner
    limits: model_files.TokenLimits


class _Golden(NamedTuple):
    """What the model has to agree with: the check texts' ids, their float32 vectors, and samples of the weights."""

    texts: list[npt.NDArray[np.int32]]
    rows: npt.NDArray[np.float32]
    weight_samples: dict[str, list[float]]


class EncoderEngine:
    """`engine.Engine` on PyTorch; holds any number of models on one device."""

    def __init__(self) -> None:
        self._models: dict[str, _Resident] = {}

    def load(self, order: Load) -> Loaded:
        """See `Engine.load`. Loading a name again replaces what it held."""
        started_s = time.perf_counter()
        folder = Path(order.folder)
        if order.dtype not in _DTYPES:
            raise ValueError(f"dtype {order.dtype!r} is none of {', '.join(_DTYPES)}")
        if order.threads > 0:
            torch.set_num_threads(order.threads)
        self._models.pop(order.model, None)
        with _translated():
            limits = model_files.token_limits(folder)
            runner = _verified(folder, limits, _DTYPES[order.dtype], order.device)
        self._models[order.model] = _Resident(runner, limits)
        load_s = time.perf_counter() - started_s
        _log.info("loaded %s: %s on %s in %.1f s", order.model, order.dtype, order.device, load_s)
        return Loaded(order.model, runner.width, limits.tokens_max, order.dtype, runner.weights_bytes, load_s)

    def encode(self, batch: Encode) -> Encoded:
        """See `Engine.encode`. A text may be as long as the model's positions reach, which can be over `tokens_max`."""
        resident = self._models.get(batch.model)
        if resident is None:
            raise ValueError(f"model {batch.model!r} is not loaded")
        runner = resident.runner
        texts = unpack(batch, vocabulary=runner.vocabulary, tokens_max=resident.limits.positions_max)
        started_s = time.perf_counter()
        with _translated():
            rows = runner.run(texts)
        device_s = time.perf_counter() - started_s
        unit, bad = normalize(rows)
        return Encoded(batch.batch, unit.tobytes(), runner.width, bad, device_s)


def _verified(folder: Path, limits: model_files.TokenLimits, dtype: torch.dtype, device: str) -> Runner:
    """The model in `dtype` on its device, if it agrees with a float32 copy on the CPU, which is gone before it comes.

    In float32 too: a weight that its file lacks starts out random, differently in each copy, and is so found out.
    """
    golden = _golden(folder, limits, dtype)
    runner = SentenceTransformersRunner.load(folder, dtype=dtype, device=device)
    _check_weights(runner.weight_samples(dtype), golden.weight_samples)
    rows, bad = normalize(runner.run(golden.texts))
    if bad:
        raise ValueError(f"{len(bad)} of {len(rows)} check texts give vectors that are not finite or are zero")
    check_cosine(rows, golden.rows, dtype=str(dtype).removeprefix("torch."))
    return runner


def _golden(folder: Path, limits: model_files.TokenLimits, dtype: torch.dtype) -> _Golden:
    runner = SentenceTransformersRunner.load(folder, dtype=torch.float32, device="cpu")
    texts = [runner.tokenize(text)[: limits.tokens_max] for text in _GOLDEN_TEXTS]
    rows, _ = normalize(runner.run(texts))
    return _Golden(texts, rows, runner.weight_samples(dtype))


def _check_weights(ours: dict[str, list[float]], golden: dict[str, list[float]]) -> None:
    # NaN differs from itself; weights that are NaN are the vectors' business.
    missing = sorted(name for name in ours if not np.array_equal(ours[name], golden[name], equal_nan=True))
    if missing:
        raise ValueError(f"the model's files lack at least {len(missing)} weights, {missing[0]} among them")


def check_cosine(rows: npt.NDArray[np.float32], reference: npt.NDArray[np.float32], *, dtype: str) -> None:
    """Raise ValueError if any unit row strays from its unit reference by more than `GOLDEN_COSINE_MIN` allows."""
    worst = float((rows * reference).sum(axis=1).min())
    if not worst >= GOLDEN_COSINE_MIN:
        raise ValueError(
            f"in {dtype} the model's vectors have a cosine of {worst:.4f} with its reference, at least "
            f"{GOLDEN_COSINE_MIN} is needed; set dtype to float32"
        )


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
