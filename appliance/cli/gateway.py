"""`appliance gateway`: the HTTP face alone, on a NATS given by URL."""

from pathlib import Path

import click

from appliance.catalog import Catalog
from appliance.cli.startup import config_option, prepare, run, startup_errors
from appliance.errors import StartupError
from appliance.gateway.serve import serve_gateway
from appliance.presets import load_facts, presets_dirs
from appliance.queue.jetstream import JetStreamGatewayQueue
from appliance.settings import Settings


@click.command("gateway")
@config_option
def gateway_command(config_file: Path | None) -> None:
    """Run a gateway; needs `nats.url`."""
    with startup_errors():
        settings = prepare(config_file, part="gateway")
        require_nats(settings)
        run(
            serve_gateway(
                settings,
                catalog=catalog_of(settings),
                queue_of=lambda listener: JetStreamGatewayQueue(settings.nats, settings.queue, listener),
            )
        )


def catalog_of(settings: Settings) -> Catalog:
    """The public names of the configured models. Reads presets, no model files."""
    directories = presets_dirs(settings.presets_dir)
    return Catalog.of((load_facts(model, presets_dirs=directories) for model in settings.models), settings.aliases)


def require_nats(settings: Settings) -> None:
    """A part that runs on its own needs a NATS to meet the others on."""
    if not settings.nats.url:
        raise StartupError(
            "nats.url is empty; set APPLIANCE_NATS_URL, for example nats://nats.internal:4222, "
            "or run `appliance up`, which brings its own"
        )
