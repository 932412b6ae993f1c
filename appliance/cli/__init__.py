"""The command line, and the composition root: the only place that decides which queue and which engine are used."""

import click

from appliance import __version__
from appliance.cli.bench import bench_command
from appliance.cli.config import config_group
from appliance.cli.doctor import doctor_command
from appliance.cli.engines import engines_group
from appliance.cli.gateway import gateway_command
from appliance.cli.up import up_command
from appliance.cli.worker import worker_command


@click.group()
@click.version_option(__version__, prog_name="appliance")
def main() -> None:
    """An OpenAI-compatible inference appliance for small open models on your own hardware."""


for command in (
    up_command,
    gateway_command,
    worker_command,
    config_group,
    doctor_command,
    bench_command,
    engines_group,
):
    main.add_command(command)
