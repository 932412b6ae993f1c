"""One real appliance for all tests that only ask it things; tests that break it start their own."""

from collections.abc import Iterator

import pytest

from tests.appliance_process import CONVERSION_S, ApplianceProcess

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
ALIAS = "text-embedding-3-small"
CHAT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"

# float32, so that vectors can be held against sentence-transformers' own.
CONFIG = f"""
[[models]]
name = "{MODEL}"
tuning = {{ dtype = "float32" }}

[[models]]
name = "{CHAT_MODEL}"
"""


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApplianceProcess]:
    """A ready appliance that embeds and chats."""
    with ApplianceProcess(tmp_path_factory.mktemp("appliance"), config=CONFIG) as appliance:
        appliance.wait_for_line("ready:", within_s=CONVERSION_S)
        yield appliance
