"""The command line's own words."""

import re
from pathlib import Path

from click.testing import CliRunner

from appliance.cli import COMMANDS, main

README = (Path(__file__).parents[2] / "README.md").read_text()


def help_of(*command: str) -> str:
    """As one line, so that it does not matter where a terminal breaks it."""
    shown = CliRunner().invoke(main, [*command, "--help"], prog_name="appliance")
    assert shown.exit_code == 0
    return " ".join(shown.output.split())


def test_the_help_names_the_product_as_the_readme_does() -> None:
    found = re.search(r"\*\*(.+?)\.\*\*", README)
    assert found is not None

    assert found[1] in help_of()


def test_every_command_is_told_in_one_line_that_is_not_cut() -> None:
    text = help_of()

    assert [name for name in COMMANDS if f" {name} " not in text] == []
    assert "..." not in text.replace("COMMAND [ARGS]...", "")


def test_bench_says_that_it_loads_embeddings_alone() -> None:
    assert "Chats and other calls are not loaded" in help_of("bench")
