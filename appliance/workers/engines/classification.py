"""A classifier (cross-encoder, sequence or token classification), checked against transformers in float32."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch

from appliance.workers import model_files
from appliance.workers.engines import golden
from appliance.workers.engines.folder_check import check_folder
from appliance.workers.engines.label_card import LabelCard, label_card
from appliance.workers.engines.packed.runner import PackedRunner
from appliance.workers.engines.packed.unsupported import Unsupported
from appliance.workers.engines.runner import Runner
from appliance.workers.wire import Load

if TYPE_CHECKING:
    from appliance.workers.engines.classifier_runner import ClassifierRunner

# How far a logit may stray, in parts of the largest logit of the check texts or of 1, whichever is more. The sigmoid
# moves by at most a quarter of what its logit moves: 0.03 is within 0.01 of a score for logits of about 1, and logits
# of 10, where 16 bits stray further, lie where the sigmoid is flat.
DEVIATION_MAX: Final = {torch.float32: 0.001, torch.bfloat16: 0.03, torch.float16: 0.03}

_log = logging.getLogger("appliance.engine")


def load_classifier(order: Load, dtype: torch.dtype, limits: model_files.TokenLimits) -> tuple[Runner, LabelCard]:
    """The model on its device and what its labels are, if its logits agree with its reference's in float32.

    Raises ValueError if they do not, or if it cannot be served.
    """
    folder = Path(order.folder)
    check_folder(folder)
    card = label_card(folder, task=order.task)
    cache = Path(order.cache) if order.cache else None
    digest = golden.digest_of(folder, purpose=order.task) if cache is not None else ""
    kept = golden.kept(cache, digest) if cache is not None else None
    reference = _asked(folder, limits, digest, order.task) if kept is None else kept
    runner = classifier_runner(folder, dtype, order, labels=len(card.labels))
    rows = runner.run(reference.texts(), reference.second_starts)
    deviation = check_logits(rows, reference.matrix(), dtype=dtype)
    _log.info("%s in %s agrees with its reference: logits stray by %.6f", order.model, order.dtype, deviation)
    if cache is not None and kept is None:
        golden.keep(cache, reference)  # only now: what was refused is asked again
    return runner, card


def check_logits(rows: npt.NDArray[np.float32], reference: npt.NDArray[np.float32], *, dtype: torch.dtype) -> float:
    """How far the worst logit strays, on the scale of `DEVIATION_MAX`. Raises ValueError if that is too far."""
    if rows.shape != reference.shape:
        raise ValueError(f"the model's logits are {list(rows.shape)}, its reference {list(reference.shape)}")
    deviation = float(np.abs(rows - reference).max()) / max(1.0, float(np.abs(reference).max()))
    if not deviation <= DEVIATION_MAX[dtype]:
        raise ValueError(
            f"in {str(dtype).removeprefix('torch.')} the model's logits stray by {deviation:.4f} from its reference, "
            f"at most {DEVIATION_MAX[dtype]} is allowed; set dtype to float32"
        )
    return deviation


def _asked(folder: Path, limits: model_files.TokenLimits, digest: str, task: str) -> golden.Golden:
    """The reference's logits: of single texts, and of pairs where pairs are what the model scores."""
    reference = _padded(folder, torch.float32, "cpu", task)
    pairs: list[tuple[str, str | None]] = [(text, None) for text in golden.TEXTS]
    if task == "score":
        pairs += zip(golden.TEXTS, golden.TEXTS[1:], strict=False)
    tokens = [reference.tokenize(*pair, tokens_max=limits.tokens_max) for pair in pairs]
    texts, second_starts = [ids for ids, _ in tokens], [second for _, second in tokens]
    return golden.Golden.of(digest, texts, reference.run(texts, second_starts), second_starts)


def classifier_runner(folder: Path, dtype: torch.dtype, order: Load, *, labels: int) -> Runner:
    """The model on its device, unchecked: without padding where its family allows it, else through transformers."""
    try:
        return PackedRunner.load(folder, dtype=dtype, device=order.device, task=order.task, labels=labels)
    except Unsupported as exc:
        _log.info("the model runs padded, through transformers: %s", exc)
    return _padded(folder, dtype, order.device, order.task)


def _padded(folder: Path, dtype: torch.dtype, device: str, task: str) -> "ClassifierRunner":
    from appliance.workers.engines.classifier_runner import ClassifierRunner  # noqa: PLC0415  # takes seconds

    return ClassifierRunner.load(folder, dtype=dtype, device=device, task=task)
