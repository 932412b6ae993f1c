"""How a node starts this engine; without an import of anything the engine needs."""

import sys
from pathlib import Path


def sglang_command(environment: Path, *, threads: int) -> list[str]:
    """The command that runs SGLang behind our adapter under this interpreter, for an `EngineProcess`.

    `environment` is the folder that `appliance engines install sglang` made (`Environment.of(state_dir).folder`);
    `threads` are those of an engine on a CPU.
    """
    module = "appliance.workers.engines.sglang.host"
    return [sys.executable, "-m", module, "--environment", str(environment), "--threads", str(threads)]
