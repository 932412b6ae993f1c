"""A deterministic engine without a runtime: the same tokens give the same unit vector, anywhere and forever.

For tests and for exercising a cluster without models. A file `fake.json` (`FakeModel`) in the model's folder sets its
width and makes it slow, or makes chosen tokens fail in each way that a real engine can fail.
"""

import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from appliance.workers.engine import OutOfMemory
from appliance.workers.engines.packing import per_token_of, row_counts, unpack
from appliance.workers.wire import Encode, Encoded, Load, Loaded

FILE_NAME = "fake.json"


class FakeModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the fake behaves. Tokens of None never occur; with `tokens_before_oom` 0 memory is unlimited."""

    width: int = 8
    labels: tuple[str, ...] = ("LABEL_0",)  # of a model that is loaded to score or to tag
    tokens_max: int = 512
    vocabulary: int = 1_000_000
    load_s: float = 0.0
    batch_s: float = 0.0
    token_s: float = 0.0
    crash_token: int | None = None  # the process exits at once with `crash_status`
    crash_status: int = 9
    fault_token: int | None = None  # an unexpected exception
    nan_token: int | None = None  # that text's vector is not finite
    tokens_before_oom: int = 0  # a batch with more tokens runs out of memory


_decoder = msgspec.json.Decoder(FakeModel)


class FakeEngine:
    """The protocol of `engine.Engine`, kept without a model."""

    def __init__(self) -> None:
        self._models: dict[str, _Resident] = {}

    def load(self, order: Load) -> Loaded:
        started_s = time.perf_counter()
        model = _model(Path(order.folder))
        time.sleep(model.load_s)
        self._models[order.model] = _Resident(model, order.task)
        labels = () if order.task == "embed" else model.labels
        activation = "" if order.task == "embed" else "softmax" if len(labels) > 1 else "sigmoid"
        width = len(labels) or model.width
        load_s = time.perf_counter() - started_s
        return Loaded(
            order.model, width, model.tokens_max, order.dtype, 0, load_s, labels, activation, order.task == "embed"
        )

    def encode(self, batch: Encode) -> Encoded:
        resident = self._models.get(batch.model)
        if resident is None:
            raise ValueError(f"model {batch.model!r} is not loaded")
        model = resident.model
        started_s = time.perf_counter()
        texts = unpack(batch, vocabulary=model.vocabulary, tokens_max=model.tokens_max)
        tokens = sum(batch.lengths)
        _fail_as_told(model, np.concatenate(texts), tokens)
        time.sleep(model.batch_s + tokens * model.token_s)
        per_token = per_token_of(batch, is_able=resident.task == "embed")
        counts = batch.lengths if resident.task == "tag" else row_counts(batch.lengths, per_token)
        rows = resident.rows(texts, counts)
        bad = tuple(i for i, ids in enumerate(texts) if model.nan_token is not None and model.nan_token in ids)
        rows[np.repeat(np.isin(np.arange(len(texts)), bad), counts)] = 0.0
        return Encoded(batch.batch, rows.tobytes(), rows.shape[1], bad, time.perf_counter() - started_s, counts)


class _Resident(NamedTuple):
    model: FakeModel
    task: str

    def rows(self, texts: list[npt.NDArray[np.int32]], counts: Sequence[int]) -> npt.NDArray[np.float32]:
        """Vectors or logits, one of a text or one of each of its tokens: the same tokens always give the same."""
        pieces = [
            piece
            for ids, count in zip(texts, counts, strict=True)
            for piece in ([ids] if count == 1 else [ids[at : at + 1] for at in range(count)])
        ]
        if self.task == "embed":
            return np.stack([_unit_vector(ids, self.model.width) for ids in pieces])
        return np.stack([4 * _unit_vector(ids, len(self.model.labels)) for ids in pieces])


def _model(folder: Path) -> FakeModel:
    path = folder / FILE_NAME
    try:
        return _decoder.decode(path.read_bytes()) if path.exists() else FakeModel()
    except msgspec.DecodeError as exc:
        raise ValueError(f"{FILE_NAME} cannot be read: {exc}") from exc


def _fail_as_told(model: FakeModel, ids: npt.NDArray[np.int32], tokens: int) -> None:
    if model.crash_token is not None and model.crash_token in ids:
        os._exit(model.crash_status)
    if model.fault_token is not None and model.fault_token in ids:
        raise RuntimeError(f"token {model.fault_token} was met")
    if model.tokens_before_oom and tokens > model.tokens_before_oom:
        raise OutOfMemory(f"{tokens} tokens do not fit; {model.tokens_before_oom} do")


def _unit_vector(ids: npt.NDArray[np.int32], width: int) -> npt.NDArray[np.float32]:
    """Uniform bytes of a hash of the tokens, centred so that none is zero, scaled to length one."""
    stream = hashlib.shake_128(ids.astype("<i4").tobytes()).digest(width)
    vector = np.frombuffer(stream, dtype=np.uint8).astype(np.float64) - 127.5
    return (vector / np.linalg.norm(vector)).astype("<f4")
