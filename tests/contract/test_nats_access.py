"""How the queue gets into a NATS server, and what a role may do in ours."""

import asyncio
import base64
import hashlib
import json
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import nkeys
import pytest
import trustme

from appliance.errors import StartupError
from appliance.queue.jetstream import JetStreamGatewayQueue, JetStreamNodeQueue
from appliance.queue.server import ServerPlan, free_port, permissions, plan_server
from appliance.queue.subjects import Role
from appliance.settings import NatsSettings
from tests.contract.queues import SETTINGS, Gateway, Node, nats_client, until
from tests.nats import NatsServer, is_listening

pytestmark = pytest.mark.slow


async def check_round_trip(gateway_nats: NatsSettings, node_nats: NatsSettings) -> None:
    """Everything that the roles do, once."""
    gateway = Gateway()
    async with (
        JetStreamGatewayQueue(gateway_nats, SETTINGS, gateway) as gateway.queue,
        JetStreamNodeQueue(node_nats, SETTINGS) as queue,
    ):
        node = Node(queue)
        cancelled: list[bytes] = []
        queue.on_cancel(cancelled.append)
        async with node.pull() as pull:
            await pull.want(5)
            await gateway.submit(b"job")
            await gateway.submit(b"poison")
            await (await node.next(1)).extend()
            await node.deliveries[0].give_back()
            await (await node.next(3)).ack()
            await node.deliveries[1].bury("poison")
            await queue.reply(gateway.queue.reply_to, b"done")
            await gateway.queue.cancel(["job"])
            await until(lambda: bool(gateway.replies) and bool(cancelled))
        assert gateway.refused == []


async def check_refused(settings: NatsSettings, match: str) -> None:
    """Neither role starts, soon, and says why."""
    for queue in (JetStreamGatewayQueue(settings, SETTINGS, Gateway()), JetStreamNodeQueue(settings, SETTINGS)):
        async with asyncio.timeout(5):
            with pytest.raises(StartupError, match=match):
                async with queue:
                    pass


async def test_user_and_password(tmp_path: Path) -> None:
    with NatsServer(tmp_path, config='authorization { user: "app", password: "right" }') as server:
        good = NatsSettings(url=server.url, user="app", password="right")
        await check_round_trip(good, NatsSettings(url=server.url.replace("//", "//app:right@")))
        await check_refused(NatsSettings(url=server.url, user="app", password="wrong"), "refuses our credentials")
        await check_refused(NatsSettings(url=server.url), "refuses our credentials")


async def test_nkey_seed_file(tmp_path: Path) -> None:
    user, other, file, wrong = new_key("U"), new_key("U"), tmp_path / "user.nk", tmp_path / "other.nk"
    file.write_bytes(user.seed + b"\n")
    wrong.write_bytes(other.seed)
    with NatsServer(
        tmp_path, config=f"authorization {{ users: [ {{ nkey: {user.public_key.decode()} }} ] }}"
    ) as server:
        good = NatsSettings(url=server.url, nkey_seed_file=str(file))
        await check_round_trip(good, good)
        await check_refused(NatsSettings(url=server.url, nkey_seed_file=str(wrong)), "refuses our credentials")


async def test_credentials_file(tmp_path: Path) -> None:
    operator, system, account, user = new_key("O"), new_key("A"), new_key("A"), new_key("U")
    user_jwt = signed(account, user, {"type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1})
    file = tmp_path / "user.creds"
    file.write_text(
        f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )
    claims = {"type": "account", "version": 2}
    storage = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
    traffic = {"subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": True, "conn": -1}
    accounts = {
        system.public_key.decode(): signed(operator, system, claims | {"limits": traffic}),
        account.public_key.decode(): signed(operator, account, claims | {"limits": traffic | storage}),
    }
    config = (
        f"operator: {signed(operator, operator, {'type': 'operator', 'version': 2})}\n"
        f"system_account: {system.public_key.decode()}\nresolver: MEMORY\n"
        f"resolver_preload {{ {', '.join(f'{name}: {jwt}' for name, jwt in accounts.items())} }}"
    )
    with NatsServer(tmp_path, config=config) as server:
        good = NatsSettings(url=server.url, credentials_file=str(file))
        await check_round_trip(good, good)
        await check_refused(NatsSettings(url=server.url), "refuses our credentials")


@pytest.mark.parametrize("field", ["credentials_file", "nkey_seed_file"])
@pytest.mark.parametrize("content", [None, b"", b"not a key", b"SUAXXX"])
async def test_key_files_that_are_none_stop_start_up(tmp_path: Path, field: str, content: bytes | None) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    settings = msgspec.structs.replace(NatsSettings(url="nats://127.0.0.1:1"), **{field: str(file)})
    await check_refused(settings, f"nats.{field} {file}")


async def test_no_url_stops_start_up() -> None:
    await check_refused(NatsSettings(), r"nats\.url is empty")


async def test_tls_with_a_private_authority_and_client_certificates(tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    ca, other_ca = tmp_path / "ca.pem", tmp_path / "other.pem"
    authority.cert_pem.write_to_path(ca)
    stranger.cert_pem.write_to_path(other_ca)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(key)
    for blob in issued.cert_chain_pems:
        blob.write_to_path(cert, append=True)
    config = f'tls {{ cert_file: "{cert}", key_file: "{key}", ca_file: "{ca}", verify: true }}'
    with NatsServer(tmp_path, config=config) as server:
        url = server.url.replace("nats://", "tls://")
        good = NatsSettings(url=url, tls_ca_file=str(ca), tls_cert_file=str(cert), tls_key_file=str(key))
        await check_round_trip(good, good)
        strange = NatsSettings(url=url, tls_ca_file=str(other_ca), connect_timeout_s=0.3)
        await check_refused(strange, r"(?i)certificate.verify.failed.*nats\.tls_ca_file")
        await check_refused(NatsSettings(url=url, tls_ca_file=str(key)), "TLS files of nats")


async def test_no_credentials_go_to_a_server_without_the_tls_we_asked_for(tmp_path: Path) -> None:
    with NatsServer(tmp_path) as server:
        url = server.url.replace("nats://", "tls://")
        await check_refused(NatsSettings(url=url, user="u", password="p", connect_timeout_s=0.3), "offers no TLS")


async def test_a_server_without_jetstream_stops_start_up(tmp_path: Path) -> None:
    with NatsServer(tmp_path, config="jetstream: disabled") as server:
        await check_refused(NatsSettings(url=server.url, connect_timeout_s=0.3), "JetStream")


@pytest.fixture
def plan(tmp_path: Path) -> Iterator[ServerPlan]:
    """The embedded server, running as planned."""
    port = free_port()
    plan = plan_server(state_dir=tmp_path / "état 状态", queue=SETTINGS, port=port, connect_timeout_s=5)
    plan.write()
    process = subprocess.Popen(plan.argv, stderr=subprocess.DEVNULL)
    try:
        asyncio.run(until(lambda: is_listening(port)))
        yield plan
    finally:
        process.kill()
        process.wait()


async def test_the_embedded_server_serves_both_roles(plan: ServerPlan) -> None:
    await check_round_trip(plan.gateway, plan.node)


async def test_the_embedded_server_lets_nobody_else_in(plan: ServerPlan) -> None:
    await check_refused(NatsSettings(url=plan.node.url), "refuses our credentials")
    await check_refused(NatsSettings(url=plan.node.url, user="node", password="guess"), "refuses our credentials")


def test_the_configuration_is_private_and_valid(plan: ServerPlan) -> None:
    config = Path(plan.argv[-1])
    assert stat.S_IMODE(os.stat(config).st_mode) == 0o600
    assert not any(settings.password in argument for settings in (plan.gateway, plan.node) for argument in plan.argv)
    assert len({plan.gateway.password, plan.node.password, ""}) == 3
    subprocess.run([plan.argv[0], "-t", "-c", config], check=True, capture_output=True)


FORBIDDEN: list[tuple[Role, str, str]] = [
    ("gateway", "subscribe", "jobs.>"),
    ("gateway", "subscribe", ">"),
    ("gateway", "subscribe", "cancel"),
    ("gateway", "subscribe", "_INBOX.node.>"),
    ("gateway", "publish", "replies.x"),
    ("gateway", "publish", "dead.interactive.m"),
    ("gateway", "publish", "$JS.API.CONSUMER.MSG.NEXT.JOBS_INTERACTIVE.interactive-m"),
    ("gateway", "publish", "$JS.ACK.JOBS_INTERACTIVE.interactive-m.1.1.1.1.0"),
    ("gateway", "publish", "$JS.API.STREAM.DELETE.JOBS_BULK"),
    ("gateway", "publish", "$JS.API.STREAM.PURGE.JOBS_BULK"),
    ("gateway", "publish", "$JS.API.STREAM.MSG.GET.JOBS_BULK"),
    ("gateway", "publish", "$JS.API.STREAM.CREATE.MINE"),
    ("node", "subscribe", "replies.>"),
    ("node", "subscribe", "jobs.>"),
    ("node", "subscribe", "_INBOX.gateway.>"),
    ("node", "publish", "jobs.interactive.m"),
    ("node", "publish", "cancel"),
    ("node", "publish", "$JS.API.STREAM.DELETE.DEAD"),
    ("node", "publish", "$JS.API.CONSUMER.DELETE.JOBS_BULK.bulk-m"),
    ("node", "publish", "$SYS.REQ.SERVER.PING"),
]


@pytest.mark.parametrize(("role", "verb", "subject"), FORBIDDEN)
async def test_a_role_may_not(plan: ServerPlan, role: Role, verb: str, subject: str) -> None:
    problems: list[str] = []

    async def note(error: Exception) -> None:
        problems.append(str(error))

    settings = plan.gateway if role == "gateway" else plan.node
    server = settings.url
    async with nats_client(server, user=settings.user, password=settings.password, error_cb=note) as client:
        if verb == "publish":
            await client.publish(subject, b"")
        else:
            await client.subscribe(subject)
        await until(lambda: bool(problems))
        assert "permissions violation" in problems[0]


def test_permissions_name_no_wildcard_over_everything() -> None:
    for role in ("gateway", "node"):
        allowed = permissions(role)
        assert not {">", "*", "$JS.API.>", "$JS.>"} & {*allowed["publish"]["allow"], *allowed["subscribe"]["allow"]}


def new_key(kind: str) -> nkeys.KeyPair:
    """A fresh nkey: operator, account or user."""
    prefix = {"O": nkeys.PREFIX_BYTE_OPERATOR, "A": nkeys.PREFIX_BYTE_ACCOUNT, "U": nkeys.PREFIX_BYTE_USER}[kind]
    return nkeys.from_seed(bytearray(nkeys.encode_seed(os.urandom(32), prefix)))


def signed(issuer: nkeys.KeyPair, subject: nkeys.KeyPair, claims: dict[str, object]) -> str:
    """A NATS JWT, as `nsc` makes them."""
    body = {"iat": 1700000000, "iss": issuer.public_key.decode(), "sub": subject.public_key.decode(), "nats": claims}
    body["jti"] = base64.b32encode(hashlib.sha256(json.dumps(body).encode()).digest()).decode().rstrip("=")
    text = b".".join(encoded(json.dumps(part).encode()) for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, body))
    return (text + b"." + encoded(issuer.sign(text))).decode()


def encoded(data: bytes) -> bytes:
    """Base64 as JWTs have it."""
    return base64.urlsafe_b64encode(data).rstrip(b"=")
