"""One frozen `Settings`, from `appliance.toml` and the environment; `settings_source.py` alone reads either.

Every field can be set as `APPLIANCE_<SECTION>_<FIELD>` (`APPLIANCE_NATS_URL`); the few everyone needs have a short name
(`SHORT_NAMES`). The environment wins over the file, the file over the defaults here. Tuning belongs to presets.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Port = Annotated[int, Meta(ge=1, le=65535)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
Bytes = Annotated[int, Meta(ge=1024, le=2**50)]

SHORT_NAMES = {
    "APPLIANCE_PORT": "gateway.port",
    "APPLIANCE_HOST": "gateway.host",
    "APPLIANCE_API_KEY": "gateway.api_keys",
}
SECRET_FIELDS = frozenset({"gateway.api_keys", "nats.password"})


class GatewaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP face."""

    host: str = "127.0.0.1"
    port: Port = 8080
    processes: Annotated[int, Meta(ge=1, le=64)] = 1
    api_keys: tuple[str, ...] = ()  # in the environment: comma-separated
    key_requests_per_minute: Annotated[int, Meta(ge=0, le=10_000_000)] = 0  # of inference by one key; 0: any number
    body_bytes_max: Annotated[int, Meta(ge=1024, le=256 * 1024 * 1024)] = 20 * 1024 * 1024
    request_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0  # of an answer, or of a stream's first part
    text_timeout_s: Annotated[float, Meta(gt=0, le=86_400)] = 600.0  # of a text that is written, to its end
    pending_requests_max: Annotated[int, Meta(ge=1, le=1_000_000)] = 4096
    pending_bytes_max: Bytes = 512 * 1024 * 1024
    canary_interval_s: Annotated[float, Meta(ge=0.1, le=3600)] = 5.0
    drain_s: Annotated[float, Meta(ge=0, le=600)] = 20.0  # how long SIGTERM waits for requests in flight


class NatsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to reach NATS. Without `url` the appliance runs its own server, on loopback with credentials of its own."""

    url: str = ""  # "nats://host:4222" or "tls://host:4222"; several, comma-separated, for a cluster
    user: str = ""
    password: str = ""
    nkey_seed_file: str = ""
    credentials_file: str = ""
    tls_ca_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""
    connect_timeout_s: Seconds = 5.0


class QueueSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Streams, deliveries, and how requests are cut into jobs."""

    chunk_bytes_max: Annotated[int, Meta(ge=1024, le=8 * 1024 * 1024)] = 256 * 1024
    chunk_inputs_max: Annotated[int, Meta(ge=1, le=2048)] = 256
    ack_wait_s: Annotated[float, Meta(ge=0.5, le=600)] = 5.0
    deliveries_max: Annotated[int, Meta(ge=1, le=20)] = 3
    interactive_bytes_max: Bytes = 512 * 1024 * 1024
    bulk_bytes_max: Bytes = 4 * 1024 * 1024 * 1024
    dead_bytes_max: Bytes = 256 * 1024 * 1024
    job_age_max_s: Annotated[float, Meta(ge=1, le=30 * 86400)] = 86400.0
    replicas: Annotated[int, Meta(ge=1, le=5)] = 1


class WorkerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One node and its engine processes."""

    device: str = "auto"  # "auto", "cpu", "cuda:0"
    engine: Literal["encoder", "fake"] = "encoder"  # "fake" computes without a model: for tests and load studies
    engine_threads: Annotated[int, Meta(ge=0, le=256)] = 0  # of one engine on a CPU; 0: as the preset says
    engines: Annotated[int, Meta(ge=0, le=64)] = 0  # on a CPU; 0: as many as its cores allow
    tokenizer_threads: Annotated[int, Meta(ge=1, le=64)] = 2
    engine_start_s: Seconds = 300.0
    calibration_s: Annotated[float, Meta(ge=0, le=600)] = 2.0  # spent on measuring a model without known costs; 0: none
    batch_timeout_s: Seconds = 120.0
    bulk_share: Annotated[float, Meta(ge=0, le=1)] = 0.1  # of the batches, promised to the bulk lane while it has work
    drain_s: Annotated[float, Meta(ge=0, le=600)] = 20.0  # how long SIGTERM waits for open jobs
    metrics_host: str = "127.0.0.1"
    metrics_port: Annotated[int, Meta(ge=0, le=65535)] = 0  # for a worker run apart; 0: none


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One served model: what to load, and what to change of its preset."""

    name: str  # a preset's model, a Hugging Face hub id, or a name of your own with `folder`
    folder: str = ""  # a local folder of safetensors, tokenizer and config
    revision: str = ""  # a hub commit; the preset's when empty
    aliases: tuple[str, ...] | None = None  # public names besides `name`; None takes the preset's
    facts: dict[str, Any] = {}  # overrides of model.toml, same keys
    tuning: dict[str, Any] = {}  # overrides of <class>.toml, same keys; those of `generation` one by one too


class AliasSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One more public name of a served model, with a policy of its own.

    `name` may be the model's own: the policy is then that of the model's name.
    """

    name: str
    model: str
    intent: Literal["", "query", "document"] = ""  # for clients that cannot say which; a client that can wins
    width: Annotated[int, Meta(ge=1, le=65_536)] | None = None  # Matryoshka cut; None: the model's own
    pad_to: Annotated[int, Meta(ge=1, le=65_536)] | None = None  # zeros up to this width: cosine, dot and L2 stay
    too_long: Literal["truncate", "error", "chunk_mean"] = "truncate"
    integers: Literal["openai", "native"] = "openai"  # what token ids as inputs are: cl100k/o200k, or the model's own


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of it."""

    state_dir: str = ".appliance"  # sockets, NATS storage, metrics, caches
    presets_dir: str = ""  # extra presets, looked at before the shipped ones
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    gateway: GatewaySettings = GatewaySettings()
    nats: NatsSettings = NatsSettings()
    queue: QueueSettings = QueueSettings()
    worker: WorkerSettings = WorkerSettings()
    # They come as packages: the first embeds and reranks, the second finds named entities, the third chats.
    models: tuple[ModelSettings, ...] = (
        ModelSettings(name="sentence-transformers/all-MiniLM-L6-v2"),
        ModelSettings(name="spacy/en_core_web_sm"),
        ModelSettings(name="HuggingFaceTB/SmolLM2-135M-Instruct"),
    )
    aliases: tuple[AliasSettings, ...] = ()
