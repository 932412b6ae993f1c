"""`appliance gateway`: the HTTP face alone, on a NATS given by URL."""

from pathlib import Path

import click

from appliance.cli.startup import catalog_of, config_option, prepare, require_nats, run, startup_errors
from appliance.gateway.serve import serve_gateway
from appliance.queue.jetstream import JetStreamGatewayQueue


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
