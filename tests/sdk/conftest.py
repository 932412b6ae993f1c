"""The appliances that the vendors' clients are pointed at, and how long their environments took to make."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from appliance.workers.engines.fake import FakeModel
from tests.appliance_process import CONVERSION_S, ApplianceProcess
from tests.fake_model import fake_config, make_fake_model
from tests.sdk import installed

# Collected by the pytest of the clients' own environments, see test_python_clients.py.
collect_ignore = ["python"]

KEY = "sk-of-the-tests"
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
# What `make up` serves, under the vendors' names that their clients insist on, and one alias for each policy.
CONFIG = f"""
[[aliases]]
name = "embed-english-v3.0"
model = "{MODEL}"

[[aliases]]
name = "embed-v4.0"
model = "{MODEL}"

[[aliases]]
name = "rerank-v3.5"
model = "{MODEL}"

[[aliases]]
name = "padded-to-1536"
model = "{MODEL}"
pad_to = 1536

[[aliases]]
name = "refuses-long"
model = "{MODEL}"
too_long = "error"

[[aliases]]
name = "averages-long"
model = "{MODEL}"
too_long = "chunk_mean"
"""
# One request at a time, so that a second one is refused; and bodies of 1 MiB at most.
CROWDED = """
[gateway]
pending_requests_max = 1
body_bytes_max = 1048576
canary_interval_s = 3600
"""
SLOW_BATCH_S = 5.0
MAKER = pytest.StashKey[subprocess.Popen[bytes]]()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApplianceProcess]:
    """A ready appliance with real models, guarded by KEY."""
    environ = {"APPLIANCE_API_KEY": KEY}
    with ApplianceProcess(tmp_path_factory.mktemp("served"), environ=environ, config=CONFIG) as appliance:
        appliance.wait_for_line("ready:", within_s=CONVERSION_S)
        yield appliance


@pytest.fixture(scope="session")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApplianceProcess]:
    """A ready appliance that takes one request at a time, and holds "slow" for SLOW_BATCH_S."""
    folder = tmp_path_factory.mktemp("crowded")
    slow = make_fake_model(folder / "slow", FakeModel(batch_s=SLOW_BATCH_S))
    config = fake_config(folder / "quick", alias="quick").replace(
        "[worker]", f"{CROWDED}\n[worker]\nengines = 2\ncalibration_s = 0"
    )
    config += f'\n[[models]]\nname = "fake/slow"\nfolder = "{slow}"\naliases = ["slow"]\n'
    with ApplianceProcess(folder, environ={"APPLIANCE_API_KEY": KEY}, config=config) as appliance:
        appliance.wait_for_line("ready:")
        yield appliance


@pytest.fixture(scope="session")
def surroundings(served: ApplianceProcess, crowded: ApplianceProcess) -> Mapping[str, str]:
    """The environment variables of a client's process. The vendors' own ones are all that names the appliance."""
    return {
        "OPENAI_BASE_URL": served.base_url,
        "OPENAI_API_KEY": KEY,
        "CO_API_URL": served.url,
        "CO_API_KEY": KEY,
        "COHERE_API_KEY": KEY,
        "CROWDED_URL": crowded.url,
    }


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make the environments that will be used while the tests before run: the network is slow, and one core is free."""
    used = [item.callspec.params for item in session.items if isinstance(item, pytest.Function) and _is_client_s(item)]
    if not used or session.config.option.collectonly:
        return
    names = dict.fromkeys(str(params.get("environment", "node")) for params in used)
    maker = session.stash[MAKER] = subprocess.Popen(
        [sys.executable, "-m", "tests.sdk.installed", *names],
        cwd=session.config.rootpath,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # a test that finds its environment not made makes it, and says what is wrong
    )
    psutil.Process(maker.pid).nice(19)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Leave nothing running."""
    if maker := session.stash.get(MAKER, None):
        maker.terminate()
        maker.wait()


def _is_client_s(item: pytest.Function) -> bool:
    return item.originalname == "test_client" and item.path.parent == Path(__file__).parent


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Installing is no part of the tests' time: say what it took."""
    for name, seconds in installed.made_s.items():
        terminalreporter.write_line(f"clients' environment {name}: made in {seconds:.0f} s")
