"""`appliance engines`: runtimes that live in environments of their own, as their requirements and ours compete."""

import os
from collections.abc import Callable
from pathlib import Path

import click

from appliance.cli.startup import config_option, startup_errors
from appliance.errors import StartupError
from appliance.hardware import GpuQuery, query_gpus
from appliance.settings_source import load_settings
from appliance.workers.engines.sglang import install as sglang
from appliance.workers.engines.sglang.environment import KINDS, Environment, Kind, has_adapter_client

NAMES = ("sglang",)
_name = click.argument("name", type=click.Choice(NAMES))


@click.group("engines")
def engines_group() -> None:
    """Install, list and remove SGLang, which has its own environment."""


@engines_group.command("install")
@_name
@click.option("--kind", type=click.Choice(KINDS), help="For a GPU or without one; by default as this machine is.")
@click.option("--force", "is_forced", is_flag=True, help="Build it again though it is complete.")
@config_option
def install_command(name: str, kind: Kind | None, is_forced: bool, config_file: Path | None) -> None:
    """Build an engine's environment under `state_dir`; takes minutes and gigabytes. One that is complete is kept."""
    with startup_errors():
        environment = _environment(config_file)
        chosen = kind or kind_for(query_gpus(visible=None))
        sglang.install(chosen, environment, say=_say(name), is_forced=is_forced)
        if not has_adapter_client():
            click.echo("aiohttp is missing here, which the engine's adapter needs: pip install 'appliance[sglang]'")


@engines_group.command("list")
@config_option
def list_command(config_file: Path | None) -> None:
    """Show which engines are installed, and where."""
    with startup_errors():
        environment = _environment(config_file)
        installed = environment.installed()
        what = f"  {installed.version} for {installed.kind}  {environment.folder}" if installed else ""
        click.echo(f"sglang  {environment.state()}{what}")


@engines_group.command("remove")
@_name
@config_option
def remove_command(name: str, config_file: Path | None) -> None:
    """Delete an engine's environment."""
    with startup_errors():
        environment = _environment(config_file)
        was_there = sglang.remove(environment)
        click.echo(f"{name} is removed from {environment.folder}" if was_there else f"{name} is not installed")


def kind_for(query: GpuQuery) -> Kind:
    """What this machine takes. Raises `StartupError` where the driver is there and does not answer."""
    if query.problem:
        raise StartupError(
            f"the GPU driver does not answer: {query.problem}; repair it, or say `--kind cpu` or `--kind cuda`"
        )
    return "cuda" if query.gpus else "cpu"


def _environment(config_file: Path | None) -> Environment:
    return Environment.of(load_settings(config_file=config_file, environ=os.environ).state_dir)


def _say(name: str) -> Callable[[str], None]:
    return lambda line: click.echo(f"{name}: {line}")
