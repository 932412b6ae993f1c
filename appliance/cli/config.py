"""`appliance config`: show, check and list settings."""

import os
from pathlib import Path

import click

from appliance.cli.plan import check_start
from appliance.cli.startup import Role, config_option, role_option
from appliance.errors import StartupError
from appliance.settings_show import reference, show
from appliance.settings_source import LoadedSettings, read_settings


@click.group("config")
def config_group() -> None:
    """Show, check and list settings."""


@config_group.command("show")
@config_option
def show_command(config_file: Path | None) -> None:
    """Print the effective settings as TOML, each with where it comes from. Secrets are masked."""
    loaded = _read(config_file)
    click.echo(show(loaded.settings, origins=loaded.origins), nl=False)


@config_group.command("check")
@config_option
@role_option
def check_command(config_file: Path | None, role: Role) -> None:
    """Say whether the appliance would start with them here.

    Checks settings, presets, names and models as a start does; exits with 1 and the reason if one would fail.
    """
    settings = _read(config_file).settings
    try:
        for warning in check_start(settings, role=role, environ=os.environ):
            click.echo(f"warning: {warning}", err=True)
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
