"""An embedding model, checked: it agrees with sentence-transformers in float32 before it serves."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch

from appliance.workers import model_files
from appliance.workers.engines import golden
from appliance.workers.engines.folder_check import check_folder
from appliance.workers.engines.packed.runner import PackedRunner
from appliance.workers.engines.packed.unsupported import Unsupported
from appliance.workers.engines.packing import normalize
from appliance.workers.engines.runner import Runner
from appliance.workers.wire import Load

if TYPE_CHECKING:
    from appliance.workers.engines.sentence_runner import SentenceTransformersRunner

GOLDEN_COSINE_MIN: Final = 0.999

_log = logging.getLogger("appliance.engine")


def load_embedder(order: Load, dtype: torch.dtype, limits: model_files.TokenLimits) -> Runner:
    """The model on its device, if it agrees with its reference in float32 on texts of different lengths and scripts.

    Raises ValueError if it does not, or cannot be served.
    """
    folder = Path(order.folder)
    check_folder(folder)
    cache = Path(order.cache) if order.cache else None
    digest = golden.digest_of(folder, purpose="embed") if cache is not None else ""
    reference = golden.kept(cache, digest) if cache is not None else None
    weight_samples = None
    if reference is None:
        reference, weight_samples = _asked(folder, limits, digest, dtype)
    runner = embedder_runner(folder, dtype, order.device, weight_samples)
    rows, bad = normalize(runner.run(reference.texts()))
    if bad:
        raise ValueError(f"{len(bad)} of {len(rows)} check texts give vectors that are not finite or are zero")
    worst = check_cosine(rows, reference.matrix(), dtype=order.dtype)
    _log.info("%s in %s agrees with its reference: the worst cosine is %.6f", order.model, order.dtype, worst)
    if cache is not None and weight_samples is not None:
        golden.keep(cache, reference)  # only now: what was refused is asked again
    return runner


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


def _asked(
    folder: Path, limits: model_files.TokenLimits, digest: str, dtype: torch.dtype
) -> tuple[golden.Golden, dict[str, list[float]]]:
    """The reference's vectors, and samples of its weights as `dtype` holds them. It is gone before the model comes."""
    reference = _padded(folder, torch.float32, "cpu")
    texts = [reference.tokenize(text)[: limits.tokens_max] for text in golden.TEXTS]
    rows, _ = normalize(reference.run(texts))
    return golden.Golden.of(digest, texts, rows), reference.weight_samples(dtype)


def embedder_runner(
    folder: Path, dtype: torch.dtype, device: str, weight_samples: dict[str, list[float]] | None = None
) -> Runner:
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


def _check_weights(ours: dict[str, list[float]], reference: dict[str, list[float]]) -> None:
    # NaN differs from itself; weights that are NaN are the vectors' business.
    missing = sorted(name for name in ours if not np.array_equal(ours[name], reference[name], equal_nan=True))
    if missing:
        raise ValueError(f"the model's files lack at least {len(missing)} weights, {missing[0]} among them")
