"""Metric names, and how they are read out. Labels are bounded: served models and fixed words, never a client's input.

Several processes of one machine share their figures through files in `PROMETHEUS_MULTIPROC_DIR` (prometheus_client's
multiprocess mode): `appliance up` sets it, so one scrape of any gateway shows gateways, node and all. Without it a
process shows its own. What is counted often is tallied first (`tally.py`), so another process' figures are late by
`tally.FLUSH_INTERVAL_S`.
"""

import os

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from appliance.tally import Counter, Histogram, Sum, flush

CONTENT_TYPE = b"text/plain; version=1.0.0; charset=utf-8"
MULTIPROCESS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_POWERS_OF_TWO = tuple(2**power for power in range(15))

# Gateway
REQUESTS = Counter("appliance_requests_total", "Answered HTTP requests", ["endpoint", "status"])
REQUEST_SECONDS = Histogram(
    "appliance_request_seconds", "From the request's first byte to its answer", ["endpoint"], buckets=_SECONDS
)
INPUT_TOKENS = Counter("appliance_input_tokens_total", "Model tokens answered for", ["model"])
OUTPUT_TOKENS = Counter("appliance_output_tokens_total", "Tokens of texts that were written", ["model"])
FIRST_TOKEN_SECONDS = Histogram(
    "appliance_first_token_seconds",
    "From a streamed request to the first part of its text; a node's own is of all texts",
    ["model"],
    buckets=_SECONDS,
)
LATER_TOKEN_SECONDS = Histogram(
    "appliance_later_token_seconds",
    "Of a streamed text: the mean time from a token to the next, as its client got them",
    ["model"],
    buckets=_SECONDS,
)
BROKEN_STREAMS = Counter(
    "appliance_broken_streams_total", "Streams that ended before their texts, by the error's code", ["model", "code"]
)
TRUNCATED_INPUTS = Counter("appliance_truncated_inputs_total", "Inputs cut to the model's length", ["model"])
PENDING_REQUESTS = Sum(Gauge("appliance_pending_requests", "Requests waiting for a node", multiprocess_mode="livesum"))
STALE_REPLIES = Counter("appliance_stale_replies_total", "Replies that settled nothing", ["reason"])
RESUBMITTED_JOBS = prometheus_client.Counter(
    "appliance_resubmitted_jobs_total", "Jobs sent again after the queue was lost"
)
READY = Gauge(
    "appliance_ready",
    "1 for a model that has answered lately, as /readyz tells",
    ["model"],
    multiprocess_mode="livemin",
)
CANARY_SECONDS = Gauge(
    "appliance_canary_seconds", "Round trip of the last canary", ["model"], multiprocess_mode="mostrecent"
)

# Node
BATCHES = Counter("appliance_batches_total", "Batches by outcome", ["model", "outcome"])
BATCH_ITEMS = Histogram("appliance_batch_items", "Texts in a batch", ["model"], buckets=_POWERS_OF_TWO)
BATCH_TOKENS = Histogram("appliance_batch_tokens", "Tokens in a batch", ["model"], buckets=_POWERS_OF_TWO)
STEP_TEXTS = Histogram(
    "appliance_step_texts", "Texts that a step of an engine wrote on", ["model"], buckets=_POWERS_OF_TWO
)
WRITTEN_TOKENS = Counter(
    "appliance_written_tokens_total", "Tokens of texts as they are written, of those that nobody gets too", ["model"]
)
NODE_FIRST_TOKEN_SECONDS = Histogram(
    "appliance_node_first_token_seconds",
    "From a job's delivery to the first token of its text, streamed or not",
    ["model"],
    buckets=_SECONDS,
)
TEXTS = Gauge(
    "appliance_texts",
    "Texts at a node: running, or waiting for a place",
    ["model", "device", "state"],
    multiprocess_mode="livesum",
)
TEXT_PLACES = Gauge(
    "appliance_text_places", "Texts that an engine can write at once", ["model", "device"], multiprocess_mode="livesum"
)
BATCH_RATIO = Histogram(
    "appliance_batch_measured_to_predicted_ratio",
    "Measured time of a batch by its predicted time",
    ["model"],
    buckets=(0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0),
)
COST_ERROR = Gauge(
    "appliance_cost_fit_error_ratio",
    "Relative error of the cost model on the batches it was fitted to",
    ["model", "quantile"],
    multiprocess_mode="mostrecent",
)
GIVEN_BACK_JOBS = Counter("appliance_given_back_jobs_total", "Jobs pulled and given back unstarted", ["model"])
DEVICE_SECONDS = Counter("appliance_device_seconds_total", "Time a device spent computing", ["model", "device"])
NODE_SECONDS = Histogram(
    "appliance_node_seconds", "From a job's delivery to its last reply", ["model"], buckets=_SECONDS
)
JOBS = Counter("appliance_jobs_total", "Settled jobs by outcome", ["model", "outcome"])
REDELIVERED_JOBS = Counter(
    "appliance_redelivered_jobs_total", "Jobs that an earlier delivery did not finish", ["model"]
)
MISSING_PROMPTS = prometheus_client.Counter(  # counted on the tokenizer's threads, where no tally may be
    "appliance_prompt_missing_total",
    "Inputs embedded without the prompt that their model wants, as nobody said which",
    ["model"],
)
DEAD_LETTERS = Counter("appliance_dead_letters_total", "Jobs moved to the dead-letter stream", ["model"])
ENGINE_STARTS = Counter("appliance_engine_starts_total", "Engine processes started", ["device"])
RESIDENT_BYTES = Gauge(
    "appliance_resident_bytes", "Weights resident on a device", ["model", "device"], multiprocess_mode="livesum"
)


def exposition() -> bytes:
    """All figures in Prometheus' text format; this process' own where the shared files are not there, or gone."""
    flush()
    if not os.path.isdir(os.environ.get(MULTIPROCESS_VARIABLE, "")):
        return generate_latest()
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]  # the library leaves it untyped
    return generate_latest(registry)
