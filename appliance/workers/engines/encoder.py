"""The PyTorch encoder engine: token ids in, L2-normalized float32 vectors out.

It answers for what no client may ever see: ids the device must not touch, vectors that are not finite, and a precision
that the model does not bear (checked at load against a reference in float32; golden.py keeps its answer).
"""

import gc
import logging
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from appliance.workers import model_files
from appliance.workers.engine import DeviceLost, OutOfMemory
from appliance.workers.engines import golden
from appliance.workers.engines.folder_check import check_folder
from appliance.workers.engines.packed.runner import PackedRunner
from appliance.workers.engines.packed.unsupported import Unsupported
from appliance.workers.engines.packing import normalize, unpack
from appliance.workers.engines.runner import Runner
from appliance.workers.wire import Encode, Encoded, Load, Loaded

if TYPE_CHECKING:
    from appliance.workers.engines.sentence_runner import SentenceTransformersRunner

GOLDEN_COSINE_MIN: Final = 0.999
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_log = logging.getLogger("appliance.engine")


class _Resident(NamedTuple):
    runner: Runner
    limits: model_files.TokenLimits


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
            runner = _verified(folder, limits, order)
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


def _verified(folder: Path, limits: model_files.TokenLimits, order: Load) -> Runner:
    """The model on its device, if it agrees with its reference in float32 on texts of different lengths and scripts."""
    dtype = _DTYPES[order.dtype]
    check_folder(folder)
    cache = Path(order.cache) if order.cache else None
    digest = golden.digest_of(folder, purpose="embed") if cache is not None else ""
    reference = golden.kept(cache, digest) if cache is not None else None
    weight_samples = None
    if reference is None:
        reference, weight_samples = _asked(folder, limits, digest, dtype)
    runner = _runner(folder, dtype, order.device, weight_samples)
    rows, bad = normalize(runner.run(reference.texts()))
    if bad:
        raise ValueError(f"{len(bad)} of {len(rows)} check texts give vectors that are not finite or are zero")
    worst = check_cosine(rows, reference.matrix(), dtype=order.dtype)
    _log.info("%s in %s agrees with its reference: the worst cosine is %.6f", order.model, order.dtype, worst)
    if cache is not None and weight_samples is not None:
        golden.keep(cache, reference)  # only now: what was refused is asked again
    return runner


def _asked(
    folder: Path, limits: model_files.TokenLimits, digest: str, dtype: torch.dtype
) -> tuple[golden.Golden, dict[str, list[float]]]:
    """The reference's vectors, and samples of its weights as `dtype` holds them. It is gone before the model comes."""
    reference = _padded(folder, torch.float32, "cpu")
    texts = [reference.tokenize(text)[: limits.tokens_max] for text in golden.TEXTS]
    rows, _ = normalize(reference.run(texts))
    return golden.Golden.of(digest, texts, rows), reference.weight_samples(dtype)


def _runner(folder: Path, dtype: torch.dtype, device: str, weight_samples: dict[str, list[float]] | None) -> Runner:
    """Without padding where the model's family allows it, else through sentence-transformers.

    That one fills weights that the files lack with random numbers, differently at each load: `weight_samples` of
    another load find it out. Files that were checked once lack none.
    """
    try:
        return PackedRunner.load(folder, dtype=dtype, device=device)
    except Unsupported as exc:
        _log.info("the model runs padded, through sentence-transformers: %s", exc)
    runner = _padded(folder, dtype, device)
    if weight_samples is not None:
        _check_weights(runner.weight_samples(dtype), weight_samples)
    return runner


def _padded(folder: Path, dtype: torch.dtype, device: str) -> "SentenceTransformersRunner":
    from appliance.workers.engines.sentence_runner import (  # noqa: PLC0415  # takes seconds
        SentenceTransformersRunner,
    )

    return SentenceTransformersRunner.load(folder, dtype=dtype, device=device)


def _check_weights(ours: dict[str, list[float]], golden: dict[str, list[float]]) -> None:
    # NaN differs from itself; weights that are NaN are the vectors' business.
    missing = sorted(name for name in ours if not np.array_equal(ours[name], golden[name], equal_nan=True))
    if missing:
        raise ValueError(f"the model's files lack at least {len(missing)} weights, {missing[0]} among them")


def check_cosine(rows: npt.NDArray[np.float32], reference: npt.NDArray[np.float32], *, dtype: str) -> float:
    """The worst cosine of a unit row with its unit reference. Raises ValueError under `GOLDEN_COSINE_MIN`."""
    if rows.shape != reference.shape:
        raise ValueError(f"the model's vectors are {list(rows.shape)}, its reference {list(reference.shape)}")
    worst = float((rows * reference).sum(axis=1).min())
    if not worst >= GOLDEN_COSINE_MIN:
        raise ValueError(
            f"in {dtype} the model's vectors have a cosine of {worst:.4f} with its reference, at least "
            f"{GOLDEN_COSINE_MIN} is needed; set dtype to float32"
        )
    return worst


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
