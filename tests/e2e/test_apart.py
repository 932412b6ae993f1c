"""Gateway and workers run apart, on a NATS of somebody else's: TLS, users, two workers on one queue."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import trustme
from openai import OpenAI

from appliance.queue.server import permissions
from appliance.workers.engines.fake import FakeModel
from tests.appliance_process import ApplianceProcess, free_port, metric_at
from tests.e2e.conftest import ALIAS
from tests.fake_model import fake_config
from tests.nats import NatsServer

pytestmark = pytest.mark.slow


@pytest.fixture
def secure_nats(tmp_path: Path) -> Iterator[tuple[NatsServer, Path]]:
    """A server with TLS and a user per role that may do what the role needs, and the CA that signed it."""
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    files = {name: tmp_path / f"{name}.pem" for name in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(str(files["ca"]))
    certificate.cert_chain_pems[0].write_to_path(str(files["cert"]))
    certificate.private_key_pem.write_to_path(str(files["key"]))
    users = "\n".join(_user(role) for role in ("gateway", "node"))
    config = f"""
tls {{ cert_file: "{files["cert"]}", key_file: "{files["key"]}" }}
authorization {{ users: [ {users} ] }}
"""
    with NatsServer(tmp_path, config=config) as server:
        yield server, files["ca"]


def _user(role: str) -> str:
    allowed = permissions("gateway" if role == "gateway" else "node")
    rules = ", ".join(
        f"{verb}: {{ allow: [{', '.join(repr(subject) for subject in allowed[verb]['allow'])}] }}"
        for verb in ("publish", "subscribe")
    )
    return f'{{ user: {role}, password: "secret-of-{role}", permissions: {{ {rules} }} }}'


def test_two_workers_share_a_queue_over_tls(tmp_path: Path, secure_nats: tuple[NatsServer, Path]) -> None:
    server, authority = secure_nats
    model = fake_config(tmp_path / "model", FakeModel(batch_s=0.05), alias=ALIAS)
    tuning = "tuning = { batch_items_max = 8 }\n"

    def part(name: str, command: str, role: str, **environ: str) -> ApplianceProcess:
        nats = {
            "APPLIANCE_NATS_URL": server.url.replace("nats://", "tls://"),
            "APPLIANCE_NATS_USER": role,
            "APPLIANCE_NATS_PASSWORD": f"secret-of-{role}",
            "APPLIANCE_NATS_TLS_CA_FILE": str(authority),
        }
        return ApplianceProcess(tmp_path / name, [command], environ={**nats, **environ}, config=model + tuning)

    ports = [free_port(), free_port()]
    with contextlib.ExitStack() as parts:
        gateway = parts.enter_context(part("gateway", "gateway", "gateway"))
        workers = [
            parts.enter_context(part(f"worker-{port}", "worker", "node", APPLIANCE_WORKER_METRICS_PORT=str(port)))
            for port in ports
        ]
        for worker in workers:
            worker.wait_for_line("serving")
        gateway.wait_ready()
        client = parts.enter_context(OpenAI(base_url=gateway.base_url, api_key="any", max_retries=0))
        with ThreadPoolExecutor(32) as pool:
            answers = list(
                pool.map(lambda number: client.embeddings.create(model=ALIAS, input=f"text {number}"), range(256))
            )

        assert [len(answer.data) for answer in answers] == [1] * 256
        items = [metric_at(port, "appliance_batch_items_sum") for port in ports]
        assert min(items) >= 32, f"the work was shared as {items}"
        for worker in workers:
            assert worker.stop() == 0
        assert gateway.stop() == 0


@pytest.mark.parametrize("command", ["gateway", "worker"])
def test_a_part_without_nats_says_what_to_set(tmp_path: Path, command: str) -> None:
    with ApplianceProcess(tmp_path, [command], config=fake_config(tmp_path / "model", alias=ALIAS)) as part:
        assert part.process.wait(20) == 78
        part.wait_ended()
        assert "APPLIANCE_NATS_URL" in part.output


@pytest.mark.parametrize("command", ["gateway", "worker"])
def test_a_nats_that_is_not_there_is_named_without_its_password(tmp_path: Path, command: str) -> None:
    environ = {"APPLIANCE_NATS_URL": f"nats://me:hidden-word@127.0.0.1:{free_port()}"}
    config = fake_config(tmp_path / "model", alias=ALIAS)
    with ApplianceProcess(tmp_path, [command], environ=environ, config=config) as part:
        assert part.process.wait(30) == 78
        part.wait_ended()
        assert "127.0.0.1" in part.output
        assert "hidden-word" not in part.output
