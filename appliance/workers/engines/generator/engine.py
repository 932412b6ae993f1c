"""The embedded generator as a `TextEngine`: one model, on the packed stack."""

import time
from collections.abc import Iterable
from pathlib import Path

import torch

from appliance.workers import model_files
from appliance.workers.engine import OutOfMemory
from appliance.workers.engines.generator.constraint import Grammars
from appliance.workers.engines.generator.generator import Generator
from appliance.workers.engines.generator.model import CausalModel
from appliance.workers.engines.packed.unsupported import Unsupported
from appliance.workers.wire import Begin, Load, Loaded, Step

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class GeneratorEngine:
    """See `engine.TextEngine`."""

    def __init__(self) -> None:
        self._generator: Generator | None = None

    def load(self, order: Load) -> Loaded:
        """Raises ValueError for a model that it does not know or whose files are not complete."""
        started_s = time.perf_counter()
        torch.set_num_threads(order.threads or torch.get_num_threads())
        folder = Path(order.folder)
        try:
            model = CausalModel.load(
                folder,
                dtype=_DTYPES[order.dtype],
                device=order.device,
                places=order.sequences_max,
                tokens_max=order.tokens_max,
            )
        except Unsupported as exc:
            raise ValueError(f"the embedded generator cannot run this model: {exc}; SGLang may") from exc
        except torch.OutOfMemoryError as exc:
            raise OutOfMemory(str(exc)) from exc
        end_ids = model_files.end_ids(folder)
        grammars = Grammars(folder, vocabulary=model.vocabulary, end_ids=end_ids)
        self._generator = Generator(
            model, grammars, places=order.sequences_max, end_ids=end_ids, tokens_max=model.cache.capacity
        )
        return Loaded(
            model=order.model,
            width=0,
            tokens_max=model.cache.capacity,
            dtype=order.dtype,
            weights_bytes=model.weights_bytes,
            load_s=time.perf_counter() - started_s,
            sequences_max=order.sequences_max,
        )

    @property
    def is_idle(self) -> bool:
        """See `engine.TextEngine`."""
        return self._generator is None or self._generator.is_idle

    def begin(self, begin: Begin) -> None:
        """See `engine.TextEngine`."""
        self._loaded.begin(begin)

    def abort(self, numbers: Iterable[int]) -> None:
        """See `engine.TextEngine`."""
        self._loaded.abort(numbers)

    def step(self) -> Step:
        """See `engine.TextEngine`."""
        return self._loaded.step()

    @property
    def _loaded(self) -> Generator:
        assert self._generator is not None, "the node loads a model first"
        return self._generator
