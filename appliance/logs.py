"""How the processes log: one line an event on stderr, as text for a person or as JSON for a collector.

What is logged on behalf of a request has its id, the `x-request-id` of the answer.
"""

import json
import logging
import sys
import threading
import time
from contextvars import ContextVar
from types import TracebackType
from typing import Literal

Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]

request_id: ContextVar[str] = ContextVar("request_id", default="")  # of the request that is being served

_log = logging.getLogger(__name__)


def configure(*, level: Level, format: Format, part: str) -> None:
    """Set up logging for this process; `part` says which of the appliance's processes speaks."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonLines(part) if format == "json" else _TextLines(part))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Libraries speak when something is wrong.
    for name in ("uvicorn", "nats", "httpx", "urllib3", "huggingface_hub", "sentence_transformers"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Its warnings are about its own transports (TLS ends, children of a closed loop): nothing that a reader can act on.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    log_crashes()


def log_crashes() -> None:
    """Log what Python would print by itself: exceptions that nobody caught, which are bugs, and warnings."""
    sys.excepthook = _crashed
    threading.excepthook = lambda found: _crashed(found.exc_type, found.exc_value, found.exc_traceback)
    logging.captureWarnings(True)


def _crashed(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        _log.critical("an uncaught exception", exc_info=(kind, error or kind(), trace))


def are_json() -> bool:
    """Whether this process logs JSON, so that nothing else may be printed between."""
    return any(isinstance(handler.formatter, _JsonLines) for handler in logging.getLogger().handlers)


class _TextLines(logging.Formatter):
    def __init__(self, part: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {part}: %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # overrides the library's
        """One line, whatever a client put into a path."""
        line = super().formatMessage(record).replace("\r", "\\r").replace("\n", "\\n")
        return f"{line} [{found}]" if (found := request_id.get()) else line


class _JsonLines(logging.Formatter):
    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "part": self._part,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if found := request_id.get():
            line["request_id"] = found
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
