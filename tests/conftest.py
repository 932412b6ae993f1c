"""Fixtures that every folder of tests may use."""

import logging
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.nats import nats_server

__all__ = ["nats_server"]


@pytest.fixture
def own_logging() -> Iterator[None]:
    """For tests of what sets up logging for its process: this one's is as before afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    hooks = sys.excepthook, threading.excepthook
    root.handlers = []  # those of pytest are kept open
    yield
    logging.captureWarnings(False)
    sys.excepthook, threading.excepthook = hooks
    root.handlers, root.level = handlers, level
