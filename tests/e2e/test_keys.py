"""With a key set, every path but health asks for it."""

from collections.abc import Iterator

import httpx
import openai
import pytest
from openai import OpenAI

from tests.appliance_process import ApplianceProcess
from tests.e2e.conftest import ALIAS
from tests.fake_model import fake_config

pytestmark = pytest.mark.slow

KEYS = ("first-key-of-two", "second-key-of-two")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApplianceProcess]:
    folder = tmp_path_factory.mktemp("guarded")
    config = fake_config(folder / "model", alias=ALIAS)
    with ApplianceProcess(folder, environ={"APPLIANCE_API_KEY": ",".join(KEYS)}, config=config) as appliance:
        appliance.wait_for_line("ready:")
        yield appliance


@pytest.mark.parametrize("key", KEYS)
def test_each_key_is_taken(guarded: ApplianceProcess, key: str) -> None:
    with OpenAI(base_url=guarded.base_url, api_key=key) as client:
        assert client.embeddings.create(model=ALIAS, input="x").data


@pytest.mark.parametrize("key", ["wrong", KEYS[0][:-1], KEYS[0] + "x", KEYS[0].upper()])
def test_a_wrong_key_is_an_authentication_error(guarded: ApplianceProcess, key: str) -> None:
    with OpenAI(base_url=guarded.base_url, api_key=key) as client, pytest.raises(openai.AuthenticationError) as caught:
        client.embeddings.create(model=ALIAS, input="x")
    assert caught.value.code == "invalid_api_key"
    assert caught.value.request_id


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/models", "/v1/models/x", "/metrics", "/nowhere", "/"])
def test_no_path_is_open_without_a_key(guarded: ApplianceProcess, path: str) -> None:
    for method in ("GET", "POST"):
        answer = httpx.request(method, guarded.url + path)
        assert answer.status_code == 401
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_health_is_open(guarded: ApplianceProcess) -> None:
    assert httpx.get(guarded.url + "/healthz").status_code == 200
    assert httpx.get(guarded.url + "/readyz").status_code == 200


def test_the_keys_are_shown_nowhere(guarded: ApplianceProcess) -> None:
    for key in KEYS:
        assert key not in guarded.output
        for process in guarded.family():
            assert key not in " ".join(process.cmdline())


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApplianceProcess]:
    """Each key may send 60 requests a minute: one a second, when the first sixty are spent."""
    folder = tmp_path_factory.mktemp("limited")
    config = fake_config(folder / "model", alias=ALIAS)
    environ = {"APPLIANCE_API_KEY": ",".join(KEYS), "APPLIANCE_GATEWAY_KEY_REQUESTS_PER_MINUTE": "60"}
    with ApplianceProcess(folder, environ=environ, config=config) as appliance:
        appliance.wait_for_line("ready:")
        yield appliance


def spend(client: OpenAI, requests: int) -> None:
    for _ in range(requests):
        client.embeddings.create(model=ALIAS, input="x")


def test_a_client_over_its_keys_limit_waits_as_told_and_others_do_not(limited: ApplianceProcess) -> None:
    with OpenAI(base_url=limited.base_url, api_key=KEYS[0], max_retries=0) as hasty:
        with pytest.raises(openai.RateLimitError) as caught:
            spend(hasty, 200)
        assert caught.value.code == "rate_limit_exceeded"
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        # The official client obeys the header, and its retry is served.
        assert hasty.with_options(max_retries=5).embeddings.create(model=ALIAS, input="x").data
    with OpenAI(base_url=limited.base_url, api_key=KEYS[1], max_retries=0) as other:
        assert other.embeddings.create(model=ALIAS, input="x").data
