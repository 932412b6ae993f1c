"""One engine process for models of several runtimes: each is imported when a first model needs it."""

from appliance.workers.engine import Engine
from appliance.workers.wire import Encode, Encoded, Load, Loaded


class EngineByTask:
    """`engine.Engine`: models that parse raw texts run on spaCy, all others on PyTorch."""

    def __init__(self) -> None:
        self._engines: dict[bool, Engine] = {}  # by whether it parses
        self._of: dict[str, Engine] = {}  # by model

    def load(self, order: Load) -> Loaded:
        """See `Engine.load`."""
        parses = order.task == "parse"
        if parses not in self._engines:
            self._engines[parses] = _parser() if parses else _encoder()
        engine = self._engines[parses]
        loaded = engine.load(order)
        self._of[order.model] = engine
        return loaded

    def encode(self, batch: Encode) -> Encoded:
        """See `Engine.encode`."""
        engine = self._of.get(batch.model)
        if engine is None:
            raise ValueError(f"model {batch.model!r} is not loaded")
        return engine.encode(batch)


def _encoder() -> Engine:
    from appliance.workers.engines.encoder import EncoderEngine  # noqa: PLC0415  # takes seconds: it imports torch

    return EncoderEngine()


def _parser() -> Engine:
    try:
        from appliance.workers.engines.spacy_engine import SpacyEngine  # noqa: PLC0415  # takes a second
    except ImportError as exc:
        raise ValueError("spaCy is not installed; install the extra `models`") from exc
    return SpacyEngine()
