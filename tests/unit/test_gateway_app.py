"""The HTTP face in process: what holds on every path, and what each endpoint says."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Sequence

import httpx
import numpy as np
import pytest
from litestar.types import HTTPReceiveMessage, HTTPRequestEvent, Message, Scope

from appliance.catalog import Catalog
from appliance.errors import Overloaded
from appliance.gateway.app import build_app
from appliance.gateway.calls import deadline_after_s
from appliance.gateway.dispatch import Dispatcher
from appliance.gateway.front import Keys
from appliance.gateway.health import Canary
from appliance.gateway.http import Request
from appliance.jobs import Done, Embed, Failed, Job, Lane, Reply, Rows, Usage, decode_job, encode_replies
from appliance.presets import Facts
from appliance.settings import GatewaySettings, QueueSettings, Settings

KEY = "sk-the-key"
BODY_BYTES_MAX = 2048
MODEL = "org/model-1.5"


def inputs_of(job: Job) -> tuple[str, ...]:
    assert isinstance(job.task, Embed)
    return job.task.inputs


class AnsweringQueue:
    """Answers each job at once: the vector of the n-th input of a request is [n, 1]."""

    reply_to = "replies.here"
    payload_bytes_max = 100_000

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.is_connected = True
        self.jobs: list[Job] = []
        self.cancelled: list[str] = []
        self.failure: Failed | None = None
        self.is_silent = False
        self.truncated: tuple[int, ...] = ()
        self._dispatcher = dispatcher

    async def submit(self, *, job_id: str, message_id: str, model: str, lane: Lane, payload: bytes) -> None:
        job = decode_job(payload)
        self.jobs.append(job)
        assert isinstance(job.task, Embed)
        numbers = range(job.first_index, job.first_index + len(job.task.inputs))
        rows = Rows(np.array([[number, 1] for number in numbers], dtype="<f4").tobytes(), 2)
        done = Done(Usage(10 * len(numbers)), tuple(number for number in self.truncated if number in numbers))
        replies = [Reply(job_id, 1, 0, rows), Reply(job_id, 1, 1, done)]
        if self.failure is not None:
            replies = [Reply(job_id, 1, 0, self.failure)]
        if not self.is_silent:
            asyncio.get_running_loop().call_soon(self._dispatcher.on_replies, encode_replies(replies))

    async def cancel(self, job_ids: Sequence[str]) -> None:
        self.cancelled += job_ids


class Bench:
    """The app over an answering queue."""

    def __init__(self, *, keys: tuple[str, ...] = (KEY,), bytes_max: int = 1_000_000) -> None:
        self.dispatcher = Dispatcher(pending_requests_max=10, pending_bytes_max=bytes_max)
        self.queue = AnsweringQueue(self.dispatcher)
        self.dispatcher.attach(self.queue)
        catalog = Catalog.of([Facts(MODEL, width=2, tokens_max=64, aliases=("alias",)), Facts("plain")])
        self.canary = Canary(self.dispatcher, catalog.tasks(), interval_s=5.0)
        gateway = GatewaySettings(api_keys=keys, body_bytes_max=BODY_BYTES_MAX)
        settings = Settings(gateway=gateway, queue=QueueSettings(chunk_inputs_max=3))
        self.app = build_app(settings, catalog=catalog, dispatcher=self.dispatcher, canary=self.canary)

    def client(self, **headers: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app)  # type: ignore[arg-type]  # the two ASGI types differ in name only
        return httpx.AsyncClient(transport=transport, base_url="http://appliance", headers=headers)


@pytest.fixture
async def bench() -> Bench:
    return Bench()


@pytest.fixture
async def client(bench: Bench) -> AsyncIterator[httpx.AsyncClient]:
    async with bench.client(authorization=f"Bearer {KEY}") as client:
        yield client


def error_of(answer: httpx.Response) -> dict[str, str | None]:
    """The error object, with its shape checked."""
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    error: dict[str, str | None] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert body["message"] == error["message"]
    return error


@pytest.mark.parametrize(
    "path", ["/", "/nothing", "/v1", "/v1/nothing", "/v1/embeddings/x", "/v1/v1/v1/embeddings", "/docs"]
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_an_unknown_path_is_told(client: httpx.AsyncClient, path: str, method: str) -> None:
    answer = await client.request(method, path)

    error = error_of(answer)
    assert (answer.status_code, error["code"], error["type"]) == (404, "unknown_url", "invalid_request_error")
    assert path in str(error["message"])


@pytest.mark.parametrize(
    ("path", "is_hinted"),
    [
        ("/images/generations", True),
        ("/v1/v1/nothing", True),
        ("/v2/v1/nothing", True),
        ("/v1/nothing", False),
        ("/v1/images/generations", False),
        ("/v2/nothing", False),
    ],
)
async def test_a_wrong_base_url_is_hinted_at(client: httpx.AsyncClient, path: str, is_hinted: bool) -> None:
    error = error_of(await client.post(path))

    assert ("base_url must end in /v1" in str(error["message"])) == is_hinted


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/v1/embeddings", "/v2/v1/embeddings", "/embeddings"])
async def test_what_clients_make_of_a_base_url_is_served(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.post(path, json={"model": MODEL, "input": "a"})

    assert answer.status_code == 200


@pytest.mark.parametrize("prefix", ["/v1/models", "/v1/v1/models", "/v2/v1/models", "/models"])
async def test_models_are_served_there_too(client: httpx.AsyncClient, prefix: str) -> None:
    models, model = await client.get(prefix), await client.get(f"{prefix}/{MODEL}")

    assert (models.json()["object"], model.json()["id"]) == ("list", MODEL)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/embeddings", "POST"),
        ("PUT", "/v1/embeddings", "POST"),
        ("OPTIONS", "/v1/embeddings", "POST"),
        ("POST", "/v1/models", "GET"),
        ("DELETE", "/v1/models", "GET"),
        ("POST", "/healthz", "GET, HEAD"),
        ("POST", "/metrics", "GET"),
    ],
)
async def test_a_wrong_method_is_told_the_right_one(
    client: httpx.AsyncClient, method: str, path: str, allowed: str
) -> None:
    answer = await client.request(method, path)

    assert (answer.status_code, error_of(answer)["code"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] == allowed


async def test_a_wrong_method_on_a_model_is_told(client: httpx.AsyncClient) -> None:
    answer = await client.delete(f"/v1/models/{MODEL}")

    assert (answer.status_code, error_of(answer)["code"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "GET"


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", f"Bearer {KEY}x", f"Basic {KEY}", KEY, f"Bearer {KEY} {KEY}"],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/embeddings", "/metrics", "/nothing"])
async def test_without_the_key_nothing_is_served(bench: Bench, authorization: str | None, path: str) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    async with bench.client(**headers) as client:
        answer = await client.get(path)

    error = error_of(answer)
    assert (answer.status_code, error["code"], error["type"]) == (401, "invalid_api_key", "invalid_request_error")
    assert KEY not in answer.text
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("authorization", [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER {KEY}", f"Bearer   {KEY} "])
@pytest.mark.parametrize("name", ["Authorization", "authorization"])
async def test_the_key_is_taken_as_the_sdks_send_it(bench: Bench, name: str, authorization: str) -> None:
    async with bench.client(**{name: authorization}) as client:
        assert (await client.get("/v1/models")).status_code == 200


async def test_any_of_several_keys_is_taken() -> None:
    keys = Keys(("one", "zwei-ü"))

    keys.check(b"Bearer one")
    keys.check("Bearer zwei-ü".encode())


async def test_without_keys_set_all_is_served() -> None:
    async with Bench(keys=()).client() as client:
        assert (await client.get("/v1/models")).status_code == 200


async def test_health_is_open(bench: Bench) -> None:
    async with bench.client() as client:
        alive, ready = await client.get("/healthz"), await client.get("/readyz")

    assert (alive.status_code, alive.json()) == (200, {"status": "ok"})
    assert ready.status_code == 503
    assert ready.json() == {"status": "unready", "models": {MODEL: "starting", "plain": "starting"}}


async def test_an_answered_request_proves_its_model(bench: Bench, client: httpx.AsyncClient) -> None:
    await client.post("/v1/embeddings", json={"model": "alias", "input": "x"})
    assert (await client.get("/readyz")).json()["models"] == {MODEL: "ready", "plain": "starting"}

    await client.post("/v1/embeddings", json={"model": "plain", "input": "x"})
    ready = await client.get("/readyz")
    assert (ready.status_code, ready.json()["status"]) == (200, "ready")


@pytest.mark.parametrize("path", ["/healthz", "/v1/models", "/v1/nothing", "/v1/embeddings", f"/v1/models/{MODEL}"])
async def test_every_answer_has_a_request_id_of_its_own(client: httpx.AsyncClient, path: str) -> None:
    first, second = await client.get(path), await client.get(path)

    assert first.headers["x-request-id"].startswith("req_")
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert first.headers["openai-processing-ms"].isdigit()


async def test_a_harmless_request_id_comes_back(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/models", headers={"x-request-id": "abc-1.2:3_D"})

    assert answer.headers["x-request-id"] == "abc-1.2:3_D"


@pytest.mark.parametrize("offered", [b"", b"a b", b"x" * 129, b"a\r\nset-cookie: b", b"abc\n", b"\xff", b"<script>"])
async def test_any_other_request_id_is_replaced(bench: Bench, offered: bytes) -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("nothing is to be read")

    async def send(message: Message) -> None:
        sent.append(message)

    await bench.app(scope_of("GET", "/healthz", [(b"x-request-id", offered)]), receive, send)  # type: ignore[arg-type]

    start = sent[0]
    assert start["type"] == "http.response.start"
    ids = [value for name, value in start["headers"] if name == b"x-request-id"]
    assert len(ids) == 1
    assert ids[0].startswith(b"req_")


def scope_of(method: str, path: str, headers: list[tuple[bytes, bytes]]) -> Scope:
    return {  # type: ignore[return-value]  # litestar's scope names more than ASGI asks for
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "extensions": {},
    }


@pytest.mark.parametrize("size", [BODY_BYTES_MAX + 1, 10**6])
async def test_a_body_announced_too_large_is_refused(client: httpx.AsyncClient, size: int) -> None:
    answer = await client.post("/v1/embeddings", content=b" " * size)

    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (413, "request_too_large")
    assert str(BODY_BYTES_MAX) in str(error["message"])


async def test_a_body_that_grows_too_large_is_refused_while_it_comes(client: httpx.AsyncClient) -> None:
    sent = 0

    async def parts() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 1
            yield b" " * 1000

    answer = await client.post("/v1/embeddings", content=parts())

    assert (answer.status_code, error_of(answer)["code"]) == (413, "request_too_large")
    assert sent == 3


async def test_a_body_of_exactly_the_limit_is_read(client: httpx.AsyncClient) -> None:
    body = json.dumps({"model": MODEL, "input": "x"}).encode()

    answer = await client.post("/v1/embeddings", content=body.ljust(BODY_BYTES_MAX))

    assert answer.status_code == 200


async def test_models_are_listed(client: httpx.AsyncClient) -> None:
    answer = (await client.get("/v1/models")).json()

    assert answer["object"] == "list"
    assert [(model["id"], model["object"], model["owned_by"]) for model in answer["data"]] == [
        (MODEL, "model", "org"),
        ("alias", "model", "org"),
        ("plain", "model", "appliance"),
    ]
    assert answer["data"][1]["root"] == MODEL


@pytest.mark.parametrize(
    ("path", "name"),
    [(MODEL, MODEL), (MODEL.replace("/", "%2F"), MODEL), ("alias", "alias"), ("%70lain", "plain")],
)
async def test_a_model_is_found_by_its_name(client: httpx.AsyncClient, path: str, name: str) -> None:
    answer = await client.get(f"/v1/models/{path}")

    assert answer.status_code == 200
    assert answer.json()["id"] == name


@pytest.mark.parametrize("name", ["other", "org", "org/other", "ORG/model-1.5", "a%0Ab", "%22", "x" * 300])
async def test_another_model_is_not_found(client: httpx.AsyncClient, name: str) -> None:
    answer = await client.get(f"/v1/models/{name}")

    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")


async def test_metrics_are_shown_and_count_by_endpoint(client: httpx.AsyncClient) -> None:
    await client.get("/v1/models")
    await client.get("/v1/nothing")
    answer = await client.get("/metrics")

    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert 'appliance_requests_total{endpoint="models",status="200"}' in answer.text
    assert 'appliance_requests_total{endpoint="other",status="404"}' in answer.text
    assert "/v1/nothing" not in answer.text


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
async def test_a_request_of_several_chunks_is_one_answer(
    bench: Bench, client: httpx.AsyncClient, encoding_format: str
) -> None:
    body = {"model": "alias", "input": list("abcdefgh"), "encoding_format": encoding_format}

    answer = await client.post("/v1/embeddings", json=body)

    assert answer.status_code == 200
    data = answer.json()
    assert data["model"] == "alias"
    assert data["usage"] == {"prompt_tokens": 80, "total_tokens": 80}
    vectors = [
        one["embedding"]
        if encoding_format == "float"
        else np.frombuffer(base64.b64decode(one["embedding"]), dtype="<f4").tolist()
        for one in data["data"]
    ]
    assert vectors == [[float(number), 1.0] for number in range(8)]
    assert [(job.model, job.first_index, len(inputs_of(job))) for job in bench.queue.jobs] == [
        (MODEL, 0, 3),
        (MODEL, 3, 3),
        (MODEL, 6, 2),
    ]


async def test_what_was_done_to_the_request_is_said(bench: Bench, client: httpx.AsyncClient) -> None:
    bench.queue.truncated = (1, 4)
    body = {"model": MODEL, "input": list("abcde"), "zebra": 1, "b\u00fcrste": 2, "two\nlines": 3}

    answer = await client.post("/v1/embeddings", json=body)

    assert answer.headers["x-appliance-truncated"] == "1,4"
    assert answer.headers["x-appliance-ignored"] == "zebra"


async def test_an_ordinary_answer_says_nothing_more(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/embeddings", json={"model": MODEL, "input": "a", "user": "u"})

    assert not [name for name in answer.headers if name.startswith("x-appliance")]


@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        (b"", (400, "invalid_json", None)),
        (b"[]", (400, "invalid_json", None)),
        (b'{"model":"org/model-1.5"}', (400, "invalid_value", "input")),
        (b'{"model":"org/model-1.5","input":[1,-2]}', (400, "invalid_value", "input[0]")),
        (b'{"model":"nothing","input":"a"}', (404, "model_not_found", "model")),
    ],
)
async def test_a_wrong_request_is_refused_before_it_is_queued(
    bench: Bench, client: httpx.AsyncClient, body: bytes, refusal: tuple[int, str, str | None]
) -> None:
    answer = await client.post("/v1/embeddings", content=body)

    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == refusal
    assert bench.queue.jobs == []


async def test_a_nodes_refusal_reaches_the_client(bench: Bench, client: httpx.AsyncClient) -> None:
    bench.queue.failure = Failed("context_length_exceeded", "too long", "input[0]")

    answer = await client.post("/v1/embeddings", json={"model": MODEL, "input": "a"})

    assert (answer.status_code, error_of(answer)["param"]) == (400, "input[0]")
    assert "retry-after" not in answer.headers


async def test_overload_says_when_to_return(bench: Bench, client: httpx.AsyncClient) -> None:
    bench.queue.failure = Failed.of(Overloaded("full", retry_after_s=2.5))

    answer = await client.post("/v1/embeddings", json={"model": MODEL, "input": "a"})

    assert (answer.status_code, error_of(answer)["type"]) == (503, "overloaded_error")
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("3", "2500")


async def test_a_full_gateway_refuses_at_once() -> None:
    bench = Bench(keys=(), bytes_max=100)
    async with bench.client() as client:
        answer = await client.post("/v1/embeddings", json={"model": MODEL, "input": "a" * 200})

    assert (answer.status_code, error_of(answer)["code"]) == (503, "overloaded")
    assert 1 <= int(answer.headers["retry-after"]) <= 60


async def test_a_queue_out_of_reach_is_told(bench: Bench, client: httpx.AsyncClient) -> None:
    bench.queue.is_connected = False

    answer = await client.post("/v1/embeddings", json={"model": MODEL, "input": "a"})

    assert (answer.status_code, error_of(answer)["code"]) == (503, "queue_unavailable")


async def test_a_silent_queue_is_a_timeout(bench: Bench, client: httpx.AsyncClient) -> None:
    bench.queue.is_silent = True
    body = {"model": MODEL, "input": "a"}

    answer = await client.post("/v1/embeddings", json=body, headers={"x-stainless-read-timeout": "0.02"})

    assert (answer.status_code, error_of(answer)["code"]) == (504, "deadline_exceeded")
    assert answer.headers["x-should-retry"] == "false"
    assert bench.queue.cancelled == [bench.queue.jobs[0].id]


async def test_a_client_that_leaves_cancels_its_work(bench: Bench) -> None:
    bench.queue.is_silent = True
    body = json.dumps({"model": MODEL, "input": "a"}).encode()
    request: HTTPRequestEvent = {"type": "http.request", "body": body, "more_body": False}
    incoming: list[HTTPReceiveMessage] = [request, {"type": "http.disconnect"}]
    sent: list[Message] = []

    async def receive() -> HTTPReceiveMessage:
        return incoming.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    key = (b"authorization", f"Bearer {KEY}".encode())
    await bench.app(scope_of("POST", "/v1/embeddings", [key]), receive, send)

    assert bench.queue.cancelled == [bench.queue.jobs[0].id]
    assert sent[0]["type"] == "http.response.start"
    assert sent[0]["status"] == 499


@pytest.mark.parametrize(
    ("name", "offered", "seconds"),
    [
        (b"x-stainless-read-timeout", b"10", 10.0),
        (b"x-stainless-timeout", b"2.5", 2.5),
        (b"x-stainless-read-timeout", b"600", 60.0),
        (b"x-stainless-read-timeout", b"0", 60.0),
        (b"x-stainless-read-timeout", b"-1", 60.0),
        (b"x-stainless-read-timeout", b"nan", 60.0),
        (b"x-stainless-read-timeout", b"inf", 60.0),
        (b"x-stainless-read-timeout", b"NOT_GIVEN", 60.0),
        (b"x-stainless-read-timeout", b"\xff", 60.0),
        (b"another", b"10", 60.0),
    ],
)
def test_the_clients_own_timeout_is_the_deadline(name: bytes, offered: bytes, seconds: float) -> None:
    async def receive() -> Message:
        raise AssertionError("nothing is to be read")

    request = Request(scope_of("POST", "/", [(name, offered)]), receive)  # type: ignore[arg-type]

    assert deadline_after_s(request, timeout_s_max=60.0) == seconds


@pytest.mark.parametrize(
    ("offered", "is_carried"),
    [
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", True),
        ("00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01", False),
        ("nonsense", False),
        ("x" * 5000, False),
    ],
)
async def test_only_a_trace_context_is_carried(
    bench: Bench, client: httpx.AsyncClient, offered: str, is_carried: bool
) -> None:
    answer = await client.post("/v1/embeddings", json={"model": MODEL, "input": "a"}, headers={"traceparent": offered})

    assert answer.status_code == 200
    assert bench.queue.jobs[0].traceparent == (offered if is_carried else "")
