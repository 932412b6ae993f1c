"""Log lines: one an event, for a person or for a collector."""

import json
import logging
import sys
import threading
import warnings

import pytest

from appliance import logs
from appliance.cli.startup import prepare, startup_errors, tell

pytestmark = pytest.mark.usefixtures("own_logging")


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


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_line_of_a_request_has_its_id(form: logs.Format, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(level="info", format=form, part="gateway")
    logging.getLogger("appliance.test").info("of nobody")
    token = logs.request_id.set("req_7")
    logging.getLogger("appliance.test").info("of a client")
    logs.request_id.reset(token)

    of_nobody, of_a_client = capsys.readouterr().err.splitlines()
    assert "req_7" not in of_nobody
    assert (json.loads(of_a_client)["request_id"] == "req_7") if form == "json" else of_a_client.endswith("[req_7]")


@pytest.mark.parametrize("is_error", [True, False])
def test_what_is_said_to_a_person_is_json_where_all_is(is_error: bool, capsys: pytest.CaptureFixture[str]) -> None:
    tell("two\nlines", is_error=is_error)
    plain = capsys.readouterr()
    assert (plain.err if is_error else plain.out) == "two\nlines\n"

    logs.configure(level="info", format="json", part="appliance")
    tell("two\nlines", is_error=is_error)
    told = capsys.readouterr()
    assert not told.out
    line = json.loads(told.err)
    assert (line["level"], line["message"]) == ("error" if is_error else "info", "two\nlines")


@pytest.mark.filterwarnings("default")  # as outside of tests
def test_what_python_would_print_by_itself_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ValueError("the cause")

    logs.configure(level="info", format="json", part="worker")
    warnings.warn("old\nways", UserWarning, stacklevel=1)
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    try:
        fail()
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)

    warned, *crashes = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert warned["level"] == "warning"
    assert "UserWarning: old\nways" in warned["message"]
    assert [crash["level"] for crash in crashes] == ["critical"] * 2, "Ctrl-C is no bug"
    assert all("ValueError: the cause" in crash["exception"] for crash in crashes)


@pytest.mark.parametrize(("environ", "told"), [({}, "text"), ({"APPLIANCE_LOG_FORMAT": "json"}, "json")])
def test_wrong_settings_are_told_in_the_form_that_the_environment_says(
    environ: dict[str, str], told: logs.Format, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**environ, "APPLIANCE_PORT": "abc", "APPLIANCE_LOG_LEVEL": "debug"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit), startup_errors():
        prepare(None, part="gateway")

    (line,) = capsys.readouterr().err.splitlines()
    assert (
        ("gateway.port" in json.loads(line)["message"])
        if told == "json"
        else line.startswith("appliance: gateway.port")
    )
