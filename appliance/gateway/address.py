"""Where the gateway listens, and who of our own asks there."""

import socket
from typing import Any, Final

from appliance.errors import StartupError

SUPERVISOR: Final = b"appliance-up"  # as it names itself (`user-agent`) while it waits for /readyz


def address_of(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """What to bind. Raises StartupError for a host that is none."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:  # the resolver's refusal, and the encoder's before it
        raise StartupError(f'gateway.host is "{host[:80]}", which is no host of this machine: {error}') from error
    return family, address  # `Any`: its shape depends on the family
