"""`appliance config`: show, check and list settings."""

import os
from pathlib import Path

import click

from appliance.errors import StartupError
from appliance.presets import load_preset, presets_dirs
from appliance.settings_show import reference, show
from appliance.settings_source import LoadedSettings, read_settings

_config_option = click.option(
    "--config", "config_file", type=click.Path(path_type=Path), help="The configuration file to read."
)


@click.group("config")
def config_group() -> None:
    """Show, check and list settings."""


@config_group.command("show")
@_config_option
def show_command(config_file: Path | None) -> None:
    """Print the effective settings as TOML, each with where it comes from. Secrets are masked."""
    loaded = _read(config_file)
    click.echo(show(loaded.settings, origins=loaded.origins), nl=False)


@config_group.command("check")
@_config_option
def check_command(config_file: Path | None) -> None:
    """Check settings and the presets they choose; exit with 1 and the reason if something is wrong."""
    loaded = _read(config_file)
    try:
        directories = presets_dirs(loaded.settings.presets_dir)
        for model in loaded.settings.models:
            load_preset(model, hardware="cpu", presets_dirs=directories)
    except StartupError as exc:
        raise click.ClickException(exc.message) from exc
    click.echo("the configuration is valid")


@config_group.command("list")
def list_command() -> None:
    """Print every setting with its environment variable, what it takes and its default."""
    click.echo(reference())


def _read(config_file: Path | None) -> LoadedSettings:
    try:
        loaded = read_settings(config_file=config_file, environ=os.environ)
    except StartupError as exc:
        raise click.ClickException(exc.message) from exc
    for warning in loaded.warnings:
        click.echo(f"warning: {warning}", err=True)
    return loaded
