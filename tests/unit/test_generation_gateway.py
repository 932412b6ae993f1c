"""Endpoints that write texts, over HTTP: whole and streamed, in every dialect, and every way a stream can end."""

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client import REGISTRY

from appliance import logs, tally
from appliance.compat import token_ids
from appliance.compat.openai_chat_stream import ChatWriter
from appliance.errors import EngineFailed, InvalidRequest, Overloaded
from appliance.gateway import pending_calls, protocol
from appliance.gateway.serve import server_of
from appliance.jobs import Beat, Decide, Delta, Done, Failed, Generate, Usage
from appliance.settings import GatewaySettings
from tests.gateway_parts import BODIES, KEY, MESSAGES, Gateway, url_of
from tests.http_parts import serving
from tests.node_parts import until

CHAT = "/v1/chat/completions"
AZURE = "/openai/deployments/org/writer/chat/completions"
STREAMED = {**BODIES[CHAT], "stream": True}
STREAMS = {
    CHAT: "text/event-stream",
    "/openai/deployments/{name}/chat/completions": "text/event-stream",
    "/v1/completions": "text/event-stream",
    "/openai/deployments/{name}/completions": "text/event-stream",
    "/v1/responses": "text/event-stream",
    "/v2/chat": "text/event-stream",
    "/v1/chat": "application/stream+json",
}
MSGPACK = {"content-type": "application/msgpack"}


def events(text: str) -> list[dict[str, Any]]:
    """The data of an OpenAI stream, `[DONE]` left out."""
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def texts(text: str) -> dict[int, list[str]]:
    """The parts of each choice of a stream of chat chunks."""
    found: dict[int, list[str]] = {}
    for event in events(text):
        for choice in event.get("choices", ()):
            if part := choice["delta"].get("content"):
                found.setdefault(choice["index"], []).append(part)
    return found


def figure(name: str, **labels: str) -> float:
    tally.flush()
    return REGISTRY.get_sample_value(name, {"model": "org/writer", **labels}) or 0.0


@asynccontextmanager
async def reading(gateway: Gateway, path: str = CHAT, **body: object) -> AsyncIterator[httpx.Response]:
    """A stream over a socket, of which no more than the head was read yet; leaving closes the connection."""
    async with (
        serving(gateway.app) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers={"authorization": f"Bearer {KEY}"}) as client,
        client.stream("POST", path, json={**STREAMED, **body}) as answer,
    ):
        yield answer


async def begun(gateway: Gateway, *said: Delta | Beat) -> None:
    """The job of a call has come, and says something."""
    await until(lambda: len(gateway.queue.jobs) == 1)
    gateway.queue.say(gateway.queue.jobs[0].id, *said)


async def test_a_whole_answer_is_one_job_for_each_choice_in_their_order() -> None:
    gateway = Gateway()
    written = figure("appliance_output_tokens_total")
    async with gateway.client() as client:
        answer = await client.post(CHAT, json={**BODIES[CHAT], "n": 3, "seed": 7, "colour": "red"})

    assert answer.status_code == 200
    assert [(one["index"], one["message"]["content"]) for one in answer.json()["choices"]] == [
        (number, "one two") for number in range(3)
    ]
    assert answer.json()["usage"] == answer.json()["usage"] | {"prompt_tokens": 10, "completion_tokens": 9}
    assert answer.headers["x-appliance-ignored"] == "colour"
    tasks = [job.task for job in gateway.queue.jobs]
    assert [task.sampling.seed for task in tasks if isinstance(task, Generate)] == [7, 8, 9]
    assert [job.first_index for job in gateway.queue.jobs] == [0, 1, 2]
    assert len({job.id for job in gateway.queue.jobs}) == 3
    assert figure("appliance_output_tokens_total") - written == 9


@pytest.mark.parametrize("path", ["/v1/completions", "/openai/deployments/{name}/completions"])
async def test_ids_of_prompts_are_read_on_a_thread(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tables take two seconds to load, during which all other streams would stand still."""
    readers: list[int] = []

    def texts_of(ids: Sequence[Sequence[int]], *, model: str) -> tuple[str, ...]:
        readers.append(threading.get_ident())
        return tuple(f"{model}: {len(each)}" for each in ids)

    monkeypatch.setattr(token_ids, "texts", texts_of)
    gateway = Gateway()
    async with gateway.client() as client:
        answer = await client.post(url_of(path), json={**BODIES[path], "prompt": [[5, 6], [7]]})

    assert answer.status_code == 200
    tasks = [job.task for job in gateway.queue.jobs]
    assert [task.prompt for task in tasks if isinstance(task, Generate)] == ["org/writer: 2", "org/writer: 1"]
    assert readers
    assert threading.get_ident() not in readers


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, b'{"model":"org/writer","messages":[{"role":"user","content":"\xff"}]}'),
        (AZURE, b'{"messages":[{"role":"user","content":"\xff"}]}'),
        ("/v1/completions", b'{"model":"org/writer","prompt":[[]]}'),
        ("/v1/completions", b'{"model":"org/writer","prompt":[[5],[]],"stream":true}'),
    ],
)
async def test_text_that_is_none_is_refused(path: str, body: bytes) -> None:
    gateway = Gateway()
    async with gateway.client() as client:
        answer = await client.post(path, content=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert not gateway.queue.jobs


@pytest.mark.parametrize("path", STREAMS)
async def test_every_dialect_answers_whole_and_as_a_stream(path: str) -> None:
    gateway = Gateway()
    async with gateway.client() as client:
        whole = await client.post(url_of(path), json=BODIES[path])
        streamed = await client.post(url_of(path), json={**BODIES[path], "stream": True, "colour": "red"})

    assert (whole.status_code, streamed.status_code) == (200, 200)
    assert "one two" in whole.text
    assert streamed.headers["content-type"] == STREAMS[path]
    assert streamed.headers["cache-control"] == "no-cache"
    assert streamed.headers["x-accel-buffering"] == "no"
    assert streamed.headers["x-appliance-ignored"] == "colour"
    assert "content-length" not in streamed.headers
    assert streamed.headers["x-request-id"]
    assert '"one"' in streamed.text
    assert '" two"' in streamed.text
    tasks = [job.task for job in gateway.queue.jobs]
    assert [task.is_streamed for task in tasks if isinstance(task, Generate)] == [False, True]


async def test_parts_go_out_as_they_come_and_keep_their_order() -> None:
    gateway = Gateway()
    gateway.queue.is_silent = True
    began = figure("appliance_first_token_seconds_count")
    paced = figure("appliance_later_token_seconds_count")
    async with serving(gateway.app) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        asked = asyncio.create_task(
            client.send(
                client.build_request(
                    "POST", CHAT, json={**STREAMED, "n": 2}, headers={"authorization": f"Bearer {KEY}"}
                ),
                stream=True,
            )
        )
        await until(lambda: len(gateway.queue.jobs) == 2)
        first, second = (job.id for job in gateway.queue.jobs)
        gateway.queue.say(second, Beat())
        assert not asked.done()  # no head before there is something to answer
        gateway.queue.say(second, Delta("b1"))
        answer = await asked
        lines = answer.aiter_lines()
        seen = ""
        while "b1" not in seen:
            seen += await anext(lines) + "\n"
        gateway.queue.say(first, Delta("a1"), Delta("a2"), Done(Usage(10, 2)))
        while "a2" not in seen:  # while the other is not complete
            seen += await anext(lines) + "\n"
        gateway.queue.say(second, Delta("b2"), Done(Usage(10, 2)))
        seen += "\n".join([line async for line in lines])

    assert texts(seen) == {0: ["a1", "a2"], 1: ["b1", "b2"]}
    assert seen.rstrip().endswith("data: [DONE]")
    assert gateway.queue.cancelled == []
    assert figure("appliance_first_token_seconds_count") - began == 1
    assert figure("appliance_later_token_seconds_count") - paced == 1


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize(
    ("error", "status"), [(InvalidRequest("too odd", param="tools"), 400), (Overloaded("full", retry_after_s=3), 503)]
)
async def test_a_refusal_before_the_first_part_has_a_status_of_its_own(
    path: str, error: InvalidRequest | Overloaded, status: int
) -> None:
    gateway = Gateway()
    gateway.queue.failure = Failed.of(error)
    async with gateway.client() as client:
        answer = await client.post(url_of(path), json={**BODIES[path], "stream": True})

    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert error.message in answer.json()["message"]
    assert answer.headers.get("retry-after") == ("3" if status == 503 else None)


async def test_a_failure_after_a_beat_and_before_a_part_still_has_a_status() -> None:
    gateway = Gateway()
    gateway.queue.is_silent = True
    async with gateway.client() as client:
        asked = asyncio.create_task(client.post(CHAT, json=STREAMED))
        await begun(gateway, Beat())
        gateway.queue.say(gateway.queue.jobs[0].id, Failed.of(EngineFailed("broke")))
        answer = await asked

    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_failed")


@pytest.mark.parametrize("path", STREAMS)
async def test_a_failure_in_mid_stream_is_told_within_it_and_there_is_no_good_end(path: str) -> None:
    gateway = Gateway()
    gateway.queue.is_silent = True
    broken = figure("appliance_broken_streams_total", code="engine_failed")
    async with gateway.client() as client:
        asked = asyncio.create_task(client.post(url_of(path), json={**BODIES[path], "stream": True}))
        await begun(gateway, Delta("one"))
        gateway.queue.say(gateway.queue.jobs[0].id, Failed.of(EngineFailed("the engine broke")))
        answer = await asked

    assert answer.status_code == 200
    assert "one" in answer.text
    assert "the engine broke" in answer.text.strip().splitlines()[-1]
    for good in ("[DONE]", "COMPLETE", "response.completed", '"stop"'):
        assert good not in answer.text
    assert figure("appliance_broken_streams_total", code="engine_failed") - broken == 1


async def test_one_broken_text_of_several_breaks_the_stream_and_stops_the_others() -> None:
    gateway = Gateway()
    gateway.queue.is_silent = True
    async with gateway.client() as client:
        asked = asyncio.create_task(client.post(CHAT, json={**STREAMED, "n": 2}))
        await until(lambda: len(gateway.queue.jobs) == 2)
        first, second = (job.id for job in gateway.queue.jobs)
        gateway.queue.say(first, Delta("fine"))
        gateway.queue.say(second, Failed.of(EngineFailed("broke")))
        answer = await asked

    assert events(answer.text)[-1]["error"]["code"] == "engine_failed"
    assert gateway.queue.cancelled == [first]


async def test_a_bug_in_mid_stream_tells_the_client_that_the_text_is_not_all_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: ChatWriter, choice: int, done: Done) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(ChatWriter, "finish", fail)
    async with Gateway().client() as client:
        answer = await client.post(CHAT, json=STREAMED)

    assert texts(answer.text) == {0: ["one", " two"]}
    last = events(answer.text)[-1]["error"]
    assert (last["code"], "ZeroDivision" in answer.text, "[DONE]" in answer.text) == ("internal_error", False, False)


@pytest.mark.slow
@pytest.mark.parametrize("path", [CHAT, AZURE])
async def test_a_client_that_leaves_stops_its_jobs_though_nothing_more_comes(path: str) -> None:
    gateway = Gateway()
    gateway.queue.is_silent = True
    left = figure("appliance_broken_streams_total", code="client_closed_request")
    speaking = asyncio.create_task(begun(gateway, Delta("one")))
    async with reading(gateway, path) as answer:
        assert answer.status_code == 200
        await speaking
        await answer.aclose()
        await until(lambda: gateway.queue.cancelled == [gateway.queue.jobs[0].id])

    assert figure("appliance_broken_streams_total", code="client_closed_request") - left == 1


async def test_a_client_that_leaves_before_the_first_part_stops_its_jobs() -> None:
    gateway = Gateway()
    gateway.queue.is_silent = True
    async with serving(gateway.app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps(STREAMED).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await until(lambda: len(gateway.queue.jobs) == 1)
        writer.close()
        await until(lambda: gateway.queue.cancelled == [gateway.queue.jobs[0].id])


@pytest.mark.slow
async def test_a_client_that_does_not_read_is_bounded_and_stalls_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_calls, "STREAM_BYTES_MAX", 1_000_000)
    gateway = Gateway()
    gateway.queue.is_silent = True
    speaking = asyncio.create_task(begun(gateway, Delta("one")))
    async with reading(gateway) as answer:
        await speaking
        job_id = gateway.queue.jobs[0].id
        said = 0
        while not gateway.queue.cancelled and said < 1000:  # sockets of this machine hold some megabytes
            gateway.queue.say(job_id, Delta("x" * 100_000))
            said += 1
            await asyncio.sleep(0)
        assert gateway.queue.cancelled == [job_id]
        assert said < 1000

        gateway.queue.is_silent = False
        async with gateway.client() as other:
            assert (await other.post(CHAT, json=STREAMED)).text.endswith("data: [DONE]\n\n")
        seen = (await answer.aread()).decode()
    assert events(seen)[-1]["error"]["code"] == "overloaded"
    assert "[DONE]" not in seen


@pytest.mark.slow
async def test_a_client_that_takes_nothing_for_long_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_calls, "STREAM_BYTES_MAX", 100_000_000)
    monkeypatch.setattr(protocol, "READ_S_MAX", 0.02)
    gateway = Gateway()
    gateway.queue.is_silent = True
    speaking = asyncio.create_task(begun(gateway, Delta("one")))
    async with reading(gateway) as answer:
        await speaking
        gateway.queue.say(gateway.queue.jobs[0].id, *[Delta("x" * 100_000)] * 200)  # more than sockets hold
        await until(lambda: gateway.queue.cancelled == [gateway.queue.jobs[0].id])
        with pytest.raises(httpx.TransportError):  # not a good end
            await answer.aread()


@pytest.mark.slow
async def test_a_server_that_stops_ends_its_streams_with_an_error_event() -> None:
    gateway = Gateway()
    gateway.queue.is_silent = True
    server = server_of(gateway.app, drain_s=1, give_up=gateway.give_up)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving_it = asyncio.create_task(server.serve(sockets=[listener]))
        speaking = asyncio.create_task(begun(gateway, Delta("one")))
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}") as client,
            client.stream("POST", CHAT, json=STREAMED, headers={"authorization": f"Bearer {KEY}"}) as answer,
        ):
            await speaking
            server.should_exit = True
            seen = (await answer.aread()).decode()
        await serving_it

    assert texts(seen) == {0: ["one"]}
    assert events(seen)[-1]["error"]["code"] == "overloaded"
    assert gateway.queue.cancelled == [gateway.queue.jobs[0].id]


async def test_a_text_that_does_not_begin_in_time_is_a_504(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Gateway(limits=GatewaySettings(api_keys=(KEY,), request_timeout_s=0.05))
    gateway.queue.is_silent = True
    async with gateway.client() as client:
        answer = await client.post(CHAT, json=STREAMED)

    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert gateway.queue.cancelled == [gateway.queue.jobs[0].id]


async def test_a_text_that_has_begun_may_take_longer_than_an_answer() -> None:
    gateway = Gateway(limits=GatewaySettings(api_keys=(KEY,), request_timeout_s=0.05, text_timeout_s=60))
    gateway.queue.is_silent = True
    async with gateway.client() as client:
        asked = asyncio.create_task(client.post(CHAT, json=STREAMED))
        await begun(gateway, Delta("one"))
        late_s = time.monotonic() + 0.1
        await until(lambda: time.monotonic() > late_s)
        gateway.queue.say(gateway.queue.jobs[0].id, Delta(" two"), Done())
        answer = await asked

    assert texts(answer.text) == {0: ["one", " two"]}
    assert answer.text.endswith("data: [DONE]\n\n")
    job = gateway.queue.jobs[0]
    assert job.deadline_s - time.time() > 30


async def test_each_part_of_a_text_proves_that_its_model_lives() -> None:
    gateway = Gateway()
    gateway.queue.is_silent = True
    async with gateway.client() as client:
        asked = asyncio.create_task(client.post(CHAT, json=STREAMED))
        await begun(gateway, Delta("one"))
        await until(lambda: "org/writer" not in gateway.canary.faults())
        gateway.canary._proved_s.clear()  # as if it were long ago
        assert "org/writer" in gateway.canary.faults()
        gateway.queue.say(gateway.queue.jobs[0].id, Delta(" two"))
        await until(lambda: "org/writer" not in gateway.canary.faults())
        gateway.queue.say(gateway.queue.jobs[0].id, Done())
        await asked


async def test_a_text_has_its_limit_too() -> None:
    gateway = Gateway(limits=GatewaySettings(api_keys=(KEY,), text_timeout_s=0.05))
    gateway.queue.is_silent = True
    async with gateway.client() as client:
        whole = await client.post(CHAT, json=BODIES[CHAT])
        asked = asyncio.create_task(client.post(CHAT, json=STREAMED))
        await until(lambda: len(gateway.queue.jobs) == 2)
        gateway.queue.say(gateway.queue.jobs[1].id, Delta("one"))
        answer = await asked

    assert whole.status_code == 504
    assert events(answer.text)[-1]["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize(("path", "is_pinged"), [(CHAT, True), ("/v2/chat", False), ("/v1/chat", False)])
async def test_an_idle_stream_is_shown_to_live_where_the_client_understands_that(
    path: str, is_pinged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = Gateway()
    gateway.queue.is_silent = True
    async with gateway.client() as client:
        asked = asyncio.create_task(client.post(path, json={**BODIES[path], "stream": True}))
        await until(lambda: len(gateway.queue.jobs) == 1)
        monkeypatch.setattr(pending_calls, "IDLE_S", 0.001)
        gateway.queue.say(gateway.queue.jobs[0].id, Delta("one"))
        late_s = time.monotonic() + 0.05
        await until(lambda: time.monotonic() > late_s)
        gateway.queue.say(gateway.queue.jobs[0].id, Done())
        answer = await asked

    assert (": ping\n\n" in answer.text) == is_pinged
    assert answer.status_code == 200


async def test_azures_path_names_the_model_whatever_the_body_says() -> None:
    gateway = Gateway()
    async with gateway.client() as client:
        bare = await client.post(AZURE, json={"messages": MESSAGES})
        other = await client.post(AZURE, json={"messages": MESSAGES, "model": "gpt-99"})
        unknown = await client.post(AZURE.replace("writer", "nobody"), json={"messages": MESSAGES})
        wrong = await client.post(AZURE, content=b"[1]")

    assert [answer.status_code for answer in (bare, other, unknown, wrong)] == [200, 200, 404, 400]
    assert bare.json()["model"] == other.json()["model"] == "org/writer"


async def test_azures_client_asks_for_responses_and_models_below_its_endpoint() -> None:
    async with Gateway().client() as client:
        response = await client.post("/openai/responses?api-version=v", json={"input": "x", "model": "org/writer"})
        listed = await client.get("/openai/models?api-version=v")
        one = await client.get("/openai/v1/models/org/writer")

    assert [answer.status_code for answer in (response, listed, one)] == [200, 200, 200]
    assert "org/writer" in {each["id"] for each in listed.json()["data"]}


async def test_an_alias_is_echoed_and_what_does_not_write_is_refused() -> None:
    async with Gateway().client() as client:
        alias = await client.post(CHAT, json={**STREAMED, "model": "gpt-4o-mini"})
        embeds = await client.post(CHAT, json={**STREAMED, "model": "org/embedder"})
        unnamed = await client.post("/v1/chat", json={"message": "one two"})

    assert {event["model"] for event in events(alias.text)} == {"gpt-4o-mini"}
    assert (embeds.status_code, embeds.json()["error"]["param"]) == (400, "model")
    assert "/v1/embeddings" in embeds.json()["error"]["message"]
    assert unnamed.json()["text"] == "one two"


@pytest.mark.parametrize("content", [b"\xc4\x01a", float("nan"), float("inf"), {1: "a"}])
async def test_msgpack_that_json_cannot_say_is_refused_and_not_made_into_something_else(content: object) -> None:
    body = {**BODIES[CHAT], "metadata": {"deep": [content]}}
    packed = msgspec.msgpack.encode(body)
    if isinstance(content, bytes):
        assert b"\xc4" in packed
    async with Gateway().client(**MSGPACK) as client:
        refused = await client.post(CHAT, content=packed)
        taken = await client.post(CHAT, content=msgspec.msgpack.encode({**body, "metadata": {"deep": ["a", 1, None]}}))

    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_json")
    assert taken.status_code == 200


async def test_many_questions_become_a_few_jobs_and_one_answer_in_their_order() -> None:
    gateway = Gateway()
    questions = [
        {
            "type": "choice",
            "instructions": f"question {number}",
            "choices": [{"value": f"{number}{letter}"} for letter in "ab"],
        }
        for number in range(40)
    ]
    async with gateway.client() as client:
        answer = await client.post("/v1/decisions", json={**BODIES["/v1/decisions"], "questions": questions})

    assert answer.status_code == 200, answer.text
    assert [len(job.task.questions) for job in gateway.queue.jobs if isinstance(job.task, Decide)] == [16, 16, 8]
    for number in range(40):
        assert f'"{number}a"' in answer.text


async def test_what_went_wrong_is_found_in_the_log_by_the_requests_id(caplog: pytest.LogCaptureFixture) -> None:
    found: list[tuple[str, str]] = []

    class Reading(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append((record.getMessage(), logs.request_id.get()))

    caplog.set_level(logging.DEBUG, "appliance")
    logging.getLogger("appliance").addHandler(handler := Reading())
    gateway = Gateway()
    gateway.queue.failure = Failed.of(EngineFailed("the engine died"))
    try:
        async with gateway.client() as client:
            answer = await client.post(CHAT, json=STREAMED, headers={"x-request-id": "mine"})
    finally:
        logging.getLogger("appliance").removeHandler(handler)

    assert answer.status_code == 500
    assert {request_id for _, request_id in found} == {"mine"}
    assert any("the engine died" in message for message, _ in found)
    (line,) = [message for message, _ in found if message.startswith(f"POST {CHAT}: 500 after ")]
    (job,) = gateway.queue.jobs
    assert line.endswith(f" ms, of org/writer in jobs {job.id.removesuffix('-0')}-*"), (
        "so that a worker's log can be read"
    )
    assert "one two" not in line
