"""docs/operations.md lists the figures that there are."""

import re
from pathlib import Path

from prometheus_client import REGISTRY

from appliance import telemetry

TEXT = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()


def test_every_figure_is_listed_with_its_kind() -> None:
    assert telemetry.CONTENT_TYPE, "its import has made the figures"
    families = [family for family in REGISTRY.collect() if family.name.startswith("appliance_")]
    figures = {f"{one.name}_total" if one.type == "counter" else one.name: one.type for one in families}

    listed = re.findall(r"^\| `(appliance_\w+)` \| (\w+) \|", TEXT, flags=re.MULTILINE)
    assert len(listed) == len(dict(listed)), "none twice"
    assert dict(listed) == figures
