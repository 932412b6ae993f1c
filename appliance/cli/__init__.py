"""The command line, and the composition root: the only place that decides which queue and which engine are used.

A command is imported when it is called: `appliance worker` has no use for a web framework, nor has `appliance up` for
what it starts, and each took a second of every start.
"""

import importlib
from typing import Final

import click

from appliance import __version__

COMMANDS: Final = {
    "bench": "bench_command",
    "config": "config_group",
    "doctor": "doctor_command",
    "engines": "engines_group",
    "gateway": "gateway_command",
    "up": "up_command",
    "worker": "worker_command",
}


class _Commands(click.Group):
    """Each command is the attribute that `COMMANDS` names, of the module that is called as the command is."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"appliance.cli.{cmd_name}"), COMMANDS[cmd_name])
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Commands)
@click.version_option(__version__, prog_name="appliance")
def main() -> None:
    """An OpenAI- and Cohere-compatible inference appliance: small open models on your own machine."""
