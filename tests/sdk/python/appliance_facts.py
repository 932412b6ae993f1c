"""What the clients' tests know of the appliance, and what they ask of it."""

import json
import os
import select
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
ALIAS = "text-embedding-3-small"
EMBED = "embed-english-v3.0"
RERANK = "rerank-v3.5"
GPT = "gpt-4o-mini"  # what the default chat model is known by to OpenAI's clients
CHAT = "command-a-03-2025"  # what the default chat model is known by to Cohere's clients
WIDTH = 384
BASE_URL = os.environ["OPENAI_BASE_URL"]  # ends in /v1, as OpenAI's clients want it
URL = os.environ["CO_API_URL"]  # as Cohere's clients want it
KEY = os.environ["OPENAI_API_KEY"]
CROWDED_URL = os.environ["CROWDED_URL"]  # takes one request at a time
CALLERS = 64
SETTLED = 50  # just settled requests, so that a refusal says that a second's patience will do
CROWD_S = 30.0
REFUSED = 'status="503"'

TEXTS = (
    "The cat sleeps on the warm windowsill.",
    "Quarterly revenue rose by eleven percent.",
    "emoji 🦀 and Ünïcödé, 漢字, עברית",
    'line\nbreaks, "quotes" and \\ backslashes',
    "word " * 150,
)
QUESTION = "Where is the Eiffel Tower?"
DOCUMENTS = (
    "Photosynthesis turns light into chemical energy.",
    "The Eiffel Tower stands in Paris, the capital of France.",
    "Bread is made of flour, water, salt and yeast.",
)
ANSWER = 1  # the document that answers QUESTION

Vectors = npt.NDArray[np.float32]


def as_vectors(rows: Sequence[Sequence[float]], *, count: int, width: int = WIDTH) -> Vectors:
    """The rows, checked for number, width and length one."""
    vectors = np.asarray(rows, dtype=np.float32)
    assert vectors.shape == (count, width)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-3)
    return vectors


def worst_cosine(left: Vectors, right: Vectors) -> float:
    """Of unit vectors, row by row."""
    return float((left * right).sum(axis=1).min())


@contextmanager
def crowd() -> Iterator[None]:
    """Entered, the crowded appliance is busy with another's request, for some seconds, and refuses more."""
    for _ in range(SETTLED):
        assert not _is_refused()
    deadline_s = time.monotonic() + CROWD_S
    while time.monotonic() < deadline_s:
        with _others_request() as other:
            while not select.select([other], [], [], 0)[0]:  # answered early it was itself one too many: try again
                if _is_refused():
                    yield
                    return
    raise AssertionError("the crowded appliance never refused a request")


def _others_request() -> socket.socket:
    """A connection on which a slow request was sent."""
    target = urlsplit(CROWDED_URL)
    other = socket.create_connection((str(target.hostname), int(target.port or 80)))
    body = json.dumps({"model": "slow", "input": "x"})
    other.sendall(
        f"POST /v1/embeddings HTTP/1.1\r\nhost: {target.netloc}\r\nauthorization: Bearer {KEY}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
    )
    return other


def _is_refused() -> bool:
    """Whether one more request is, for being one too many."""
    request = urllib.request.Request(
        f"{CROWDED_URL}/v1/embeddings",
        data=json.dumps({"model": "quick", "input": "x"}).encode(),
        headers={"authorization": f"Bearer {KEY}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=CROWD_S) as answer:
            answer.read()
    except urllib.error.HTTPError as refusal:
        refusal.close()
        if refusal.code == HTTPStatus.SERVICE_UNAVAILABLE:
            return True
        raise
    return False


def refusals() -> float:
    """How many requests the crowded appliance has refused so far for being one too many."""
    request = urllib.request.Request(f"{CROWDED_URL}/metrics", headers={"authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=CROWD_S) as answer:
        lines = answer.read().decode().splitlines()
    counts = [
        line.rpartition(" ")[2] for line in lines if line.startswith("appliance_requests_total{") and REFUSED in line
    ]
    return sum(map(float, counts))
