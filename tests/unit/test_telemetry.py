"""Figures are read out also where their shared folder is gone."""

from pathlib import Path

import pytest

from appliance import telemetry


def test_without_the_shared_folder_a_process_shows_its_own_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(telemetry.MULTIPROCESS_VARIABLE, str(tmp_path / "removed"))

    assert b"appliance_pending_requests" in telemetry.exposition()
