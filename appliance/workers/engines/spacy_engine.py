"""The spaCy engine: raw texts in, the entities of each out. On the CPU, whatever device the order names.

spaCy's entity recognizer decides step by step and gives no probability of what it found: every score is 1.
"""

import time
from pathlib import Path
from typing import Final

import numpy as np
import spacy
from spacy.language import Language

from appliance.workers.wire import Encode, Encoded, Load, Loaded

_NEEDED: Final = "ner"
_SPAN_NUMBERS: Final = 4
_CHARS_A_TOKEN: Final = 4  # as the node estimates
_SCORE: Final = 1.0


class SpacyEngine:
    """`engine.Engine` on spaCy; holds any number of models."""

    def __init__(self) -> None:
        self._models: dict[str, Language] = {}

    def load(self, order: Load) -> Loaded:
        """See `Engine.load`. The node has verified the folder: see spacy_files.py."""
        started_s = time.perf_counter()
        folder = Path(order.folder)
        try:
            pipeline = _loaded(folder)
        except (OSError, KeyError, TypeError) as exc:
            raise ValueError(f"spaCy cannot load the model: {exc}") from exc
        self._models[order.model] = pipeline
        labels = tuple(pipeline.get_pipe(_NEEDED).labels)
        return Loaded(
            model=order.model,
            width=_SPAN_NUMBERS,
            tokens_max=pipeline.max_length // _CHARS_A_TOKEN,
            dtype="float32",
            weights_bytes=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
            load_s=time.perf_counter() - started_s,
            labels=labels,
        )

    def encode(self, batch: Encode) -> Encoded:
        """See `Engine.encode`: rows of (start, end, index of the label, score), in characters."""
        pipeline = self._models.get(batch.model)
        if pipeline is None:
            raise ValueError(f"model {batch.model!r} is not loaded")
        if len(batch.texts) != len(batch.lengths):
            raise ValueError(f"{len(batch.texts)} texts came with {len(batch.lengths)} lengths")
        started_s = time.perf_counter()
        numbers = {label: number for number, label in enumerate(pipeline.get_pipe(_NEEDED).labels)}
        rows: list[tuple[float, ...]] = []
        counts: list[int] = []
        for document in pipeline.pipe(batch.texts):
            spans = [(span.start_char, span.end_char, numbers[span.label_], _SCORE) for span in document.ents]
            rows += spans
            counts.append(len(spans))
        return Encoded(
            batch=batch.batch,
            rows=np.array(rows, dtype="<f4").reshape(-1, _SPAN_NUMBERS).tobytes(),
            width=_SPAN_NUMBERS,
            bad=(),
            device_s=time.perf_counter() - started_s,
            counts=tuple(counts),
        )


def _loaded(folder: Path) -> Language:
    """The model with what entities need, and nothing else."""
    names = set(spacy.util.load_config(folder / "config.cfg")["components"])
    if _NEEDED not in names:
        raise ValueError(f"the model has no component {_NEEDED!r}: it finds no entities")
    pipeline = spacy.load(folder, exclude=sorted(names - {_NEEDED}))
    listening = pipeline.config["components"][_NEEDED]["model"]["tok2vec"]["@architectures"]
    if "Listener" in listening:
        raise ValueError(f"the component {_NEEDED!r} of the model reads another's vectors, which is not supported")
    return pipeline
