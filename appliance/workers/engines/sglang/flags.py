"""Which of SGLang's flags a preset may set. Pure.

An allow-list: what opens a port, runs code, reads a path or changes how requests are answered is the adapter's own, and
so is every flag that nobody has looked at. Names and values are checked by SGLang's own parser after that.
"""

from collections.abc import Mapping
from typing import Final

Flag = str | int | float | bool

ALLOWED: Final = frozenset(
    {
        # memory and length
        "context-length",
        "cpu-offload-gb",
        "kv-cache-dtype",
        "max-total-tokens",
        "mem-fraction-static",
        "page-size",
        "quantization",
        "swa-full-tokens-ratio",
        # several GPUs
        "disable-custom-all-reduce",
        "dp-size",
        "ep-size",
        "pp-size",
        "tp-size",
        # scheduling
        "chunked-prefill-size",
        "disable-overlap-schedule",
        "disable-radix-cache",
        "enable-mixed-chunk",
        "max-prefill-tokens",
        "max-queued-requests",
        "max-running-requests",
        "num-continuous-decode-steps",
        "prefill-max-requests",
        "radix-eviction-policy",
        "schedule-conservativeness",
        "schedule-policy",
        "stream-interval",
        # kernels
        "attention-backend",
        "cuda-graph-backend-decode",
        "cuda-graph-backend-prefill",
        "cuda-graph-max-bs-decode",
        "cuda-graph-max-bs-prefill",
        "decode-attention-backend",
        "enable-deterministic-inference",
        "enable-torch-compile",
        "fp8-gemm-backend",
        "moe-runner-backend",
        "prefill-attention-backend",
        "sampling-backend",
        "torch-compile-max-bs",
        "triton-attention-num-kv-splits",
        # speculation that needs no second model
        "speculative-algorithm",
        "speculative-eagle-topk",
        "speculative-num-draft-tokens",
        "speculative-num-steps",
        # adapters
        "enable-lora",
        "lora-backend",
        "lora-eviction-policy",
        "lora-target-modules",
        "max-loaded-loras",
        "max-lora-chunk-size",
        "max-lora-rank",
        "max-loras-per-batch",
        # the rest
        "decode-log-interval",
        "enable-metrics",
        "log-level",
        "random-seed",
        "watchdog-timeout",
    }
)
LISTS: Final = frozenset({"lora-target-modules"})  # their values are lists, comma-separated in a preset
_VALUE_CHARS_MAX: Final = 200


def checked(flags: Mapping[str, Flag]) -> dict[str, Flag | list[str]]:
    """The flags as SGLang's configuration file takes them. Raises ValueError that names the first one refused."""
    taken: dict[str, Flag | list[str]] = {}
    for name, value in flags.items():
        if name not in ALLOWED:
            near = name.lstrip("-").replace("_", "-")
            hint = f'; write it "{near}"' if near in ALLOWED else "; see docs/sglang.md for those that may be"
            raise ValueError(f"the flag {name[:60]!r} of SGLang cannot be set by a preset{hint}")
        if isinstance(value, str) and not _is_plain(value):
            raise ValueError(f"the flag {name!r} has the value {value[:60]!r}; words, digits and . _ - , : are taken")
        taken[name] = [part.strip() for part in str(value).split(",")] if name in LISTS else value
    return taken


def _is_plain(value: str) -> bool:
    """A word: no path, no option, nothing that a shell or a parser would read as something else."""
    is_short = 0 < len(value) <= _VALUE_CHARS_MAX
    return is_short and not value.startswith("-") and all(char.isalnum() or char in "._-,: " for char in value)
