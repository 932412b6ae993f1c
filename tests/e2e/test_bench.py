"""`appliance bench` against a server whose behaviour is known, and against a real appliance."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from appliance.cli import main
from tests.appliance_process import ApplianceProcess, free_port
from tests.e2e.conftest import ALIAS

pytestmark = pytest.mark.slow

BODY = b'{"data":[{"index":0,"embedding":[1.0,0.0]}],"usage":{"prompt_tokens":3}}'


class StubServer(threading.Thread):
    """Answers one request after another, each after `service_s`; every `fails_every`th with 500."""

    def __init__(self, *, service_s: float, fails_every: int = 0) -> None:
        super().__init__(daemon=True)
        self.service_s = service_s
        self.fails_every = fails_every
        self.requests = 0
        self.authorizations: set[str] = set()
        self.base_url = ""
        self._free_s = 0.0
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._ready = threading.Event()

    def __enter__(self) -> "StubServer":
        self.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self.join(10)

    def run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        self._ready.set()
        await self._ended.wait()
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
                headers = dict(line.split(": ", 1) for line in head[1:] if line)
                await reader.readexactly(int(headers["content-length"]))
                self.authorizations.add(headers.get("authorization", ""))
                assert head[0] == "post /v1/embeddings http/1.1"
                self.requests += 1
                self._free_s = max(self._free_s, self._loop.time()) + self.service_s
                await asyncio.sleep(self._free_s - self._loop.time())
                is_bad = self.fails_every and self.requests % self.fails_every == 0
                status = b"500 Oh" if is_bad else b"200 OK"
                writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(BODY), BODY))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with StubServer(service_s=0.005) as server:
        yield server


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "--model", "m", "--warmup-s", "0.1", "--duration-s", "0.6", *arguments])


def test_the_knee_of_a_known_server_is_found(stub: StubServer, tmp_path: Path) -> None:
    json_file, plot_file = tmp_path / "result.json", tmp_path / "result.svg"
    run = bench(
        *("--base-url", stub.base_url, "--rate", "auto:32", "--slo-p95-ms", "100", "--timeout-s", "0.5"),
        *("--json", str(json_file), "--plot", str(plot_file), "--api-key", "Secret"),
    )

    assert run.exit_code == 0, run.output
    assert "<- knee" in run.stdout
    result = json.loads(json_file.read_text())
    (side,) = result["sides"]
    # It serves 200 a second at most; a busy machine serves fewer, and a window this short may see a few more.
    assert 0 < side["knee_load"] < 300
    assert side["saturation"] < 300
    worst = max(side["steps"], key=lambda step: step["asked"])["merged"]
    assert worst["late"] + worst["timeout"] > 0
    assert result["plan"]["seed"] == 1
    assert result["machine"]["cores"] >= 1
    assert plot_file.read_bytes().startswith(b"<?xml")
    assert stub.authorizations == {"bearer secret"}


def test_failures_are_counted_and_explained() -> None:
    with StubServer(service_s=0.001, fails_every=3) as stub:
        run = bench("--base-url", stub.base_url, "--rate", "50")

    assert run.exit_code == 0, run.output
    assert "knee: none" in run.stdout
    assert "500: " in run.stdout


def test_two_servers_are_measured_in_turn_and_compared(stub: StubServer, tmp_path: Path) -> None:
    json_file = tmp_path / "result.json"
    with StubServer(service_s=0.01) as slower:
        run = bench(
            *("--base-url", stub.base_url, "--against", slower.base_url, "--concurrency", "4", "--repeats", "3"),
            *("--json", str(json_file)),
        )

        assert run.exit_code == 0, run.output
        ratios = json.loads(json_file.read_text())["ratios"]
        # Twice as fast, but for what the machine is busy with.
        assert ratios["saturation"] > 1.2
        assert ratios["p50_ms"] < 0.9
        assert "server 1 ÷ server 2" in run.stdout
        assert slower.authorizations == {""}


def test_a_server_that_is_not_there_is_said_to_be(tmp_path: Path) -> None:
    run = bench("--base-url", f"http://127.0.0.1:{free_port()}/v1")

    assert run.exit_code == 1
    assert "no connection" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "exit_code", "said"),
    [
        (("--rate", "fast"), 2, "auto:20"),
        (("--tokens", "0"), 2, "lognormal"),
        (("--base-url", "ftp://host"), 78, "http://host:8080/v1"),
        (("--plot", "plot.pdf"), 78, ".svg"),
    ],
)
def test_a_bad_option_is_refused_before_anything_is_sent(
    arguments: tuple[str, ...], exit_code: int, said: str, stub: StubServer
) -> None:
    run = bench("--base-url", stub.base_url, *arguments)

    assert run.exit_code == exit_code
    assert said in run.stderr
    assert stub.requests == 0


def test_a_plot_without_matplotlib_says_what_to_install(
    stub: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    run = bench("--base-url", stub.base_url, "--plot", str(tmp_path / "plot.png"))

    assert run.exit_code == 78
    assert "pip install 'appliance[bench]'" in run.stderr


def test_a_real_appliance_is_measured_with_its_cpu(running: ApplianceProcess, tmp_path: Path) -> None:
    json_file = tmp_path / "result.json"
    run = bench(
        *("--base-url", running.base_url, "--model", ALIAS, "--rate", "5", "--tokens", "8-32", "--duration-s", "2"),
        *("--slo-p95-ms", "9000", "--json", str(json_file)),
    )

    assert run.exit_code == 0, run.output
    (side,) = msgspec.json.decode(json_file.read_bytes())["sides"]
    figures = side["steps"][0]["merged"]
    assert figures["good"] == figures["requests"] > 0
    assert figures["server_cpu_ms_per_text"] > 0.5, "gateway, NATS, node and engine were all seen"
