"""A sparse embedding model, checked: it agrees with itself in float32 before it serves."""

import logging
from pathlib import Path

import torch

from appliance.workers import model_files
from appliance.workers.engines import golden
from appliance.workers.engines.classification import check_logits
from appliance.workers.engines.folder_check import check_folder
from appliance.workers.engines.sparse_runner import SparseRunner
from appliance.workers.wire import Load

_log = logging.getLogger("appliance.engine")


def load_sparse(order: Load, dtype: torch.dtype, limits: model_files.TokenLimits) -> SparseRunner:
    """The model on its device, if its weights of check texts stay near those in float32 on the CPU.

    Raises ValueError if they do not, or if it cannot be served.
    """
    folder = Path(order.folder)
    check_folder(folder)
    cache = Path(order.cache) if order.cache else None
    digest = golden.digest_of(folder, purpose=order.task) if cache is not None else ""
    kept = golden.kept(cache, digest) if cache is not None else None
    reference = _asked(folder, limits, digest) if kept is None else kept
    runner = SparseRunner.load(folder, dtype=dtype, device=order.device)
    deviation = check_logits(runner.run(reference.texts()), reference.matrix(), dtype=dtype)
    _log.info("%s in %s agrees with its reference: weights stray by %.6f", order.model, order.dtype, deviation)
    if cache is not None and kept is None:
        golden.keep(cache, reference)  # only now: what was refused is asked again
    return runner


def _asked(folder: Path, limits: model_files.TokenLimits, digest: str) -> golden.Golden:
    reference = SparseRunner.load(folder, dtype=torch.float32, device="cpu")
    texts = [reference.tokenize(text, tokens_max=limits.tokens_max) for text in golden.TEXTS]
    return golden.Golden.of(digest, texts, reference.run(texts))
