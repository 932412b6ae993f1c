"""Log lines: one an event, for a person or for a collector."""

import json
import logging
from collections.abc import Iterator

import pytest

from appliance import logs


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    root.handlers = []  # those of pytest are kept open
    yield
    root.handlers, root.level = handlers, level


def test_json_lines_are_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(level="info", format="json", part="gateway")
    log = logging.getLogger("appliance.test")
    log.debug("too quiet")
    log.info("two\nlines of %s", "ü")
    try:
        raise ValueError("the cause")
    except ValueError:
        log.exception("it failed")

    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())

    assert {key: first[key] for key in ("level", "part", "logger", "message")} == {
        "level": "info",
        "part": "gateway",
        "logger": "appliance.test",
        "message": "two\nlines of ü",
    }
    assert first["time"].endswith("Z")
    assert "exception" not in first
    assert second["level"] == "error"
    assert "ValueError: the cause" in second["exception"]


def test_text_lines_name_the_part(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(level="warning", format="text", part="worker")
    logging.getLogger("appliance.test").warning("look")
    logging.getLogger("appliance.test").info("quiet")

    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("WARNING worker: look")


def test_libraries_speak_only_of_trouble() -> None:
    logs.configure(level="debug", format="text", part="worker")

    assert not logging.getLogger("uvicorn").isEnabledFor(logging.INFO)
    assert logging.getLogger("appliance").isEnabledFor(logging.DEBUG)
