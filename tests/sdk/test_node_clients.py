"""The vendors' clients for Node.js, against a running appliance."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.sdk.installed import NODE, Unavailable, node_environment

pytestmark = pytest.mark.slow

RUN_S = 300.0
CLIENTS = tuple(sorted(path.name.removesuffix(".test.js") for path in NODE.glob("*.test.js")))


@pytest.mark.parametrize("client", CLIENTS)
def test_client(client: str, surroundings: Mapping[str, str], tmp_path: Path) -> None:
    try:
        node = node_environment()
    except Unavailable as missing:
        pytest.skip(str(missing))

    result = subprocess.run(
        [node, "--test", "--test-reporter=spec", NODE / f"{client}.test.js"],
        env={**surroundings, "HOME": str(tmp_path), "PATH": os.environ["PATH"]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_S,
        check=False,
    )

    print(result.stdout)
    assert result.returncode == 0, f"{client}: see its own report above"
