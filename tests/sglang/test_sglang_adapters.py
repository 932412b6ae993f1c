"""LoRA adapters on a real SGLang, and what stands between it and the machine's other users."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from appliance.jobs import Sampling
from appliance.workers.engine_process import EngineRefused
from appliance.workers.engines.sglang import asking
from appliance.workers.engines.sglang.client import Client, ServerRefused
from appliance.workers.engines.sglang.environment import Environment
from appliance.workers.engines.sglang.flags import ALLOWED
from appliance.workers.engines.sglang.launch import environment_of
from appliance.workers.engines.sglang.loras import Loras, limits_of
from appliance.workers.engines.sglang.server import Server
from appliance.workers.wire import Begin, Grown, Load, Step
from appliance.workers.writing.engine import TextEngineProcess
from tests.sglang.reference import Reference

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

READY_S = 240.0
RANK, ALPHA = 4, 8
LOADED_MAX = 4
FLAGS: dict[str, str | int | float | bool] = {
    "max-total-tokens": 4096,
    "enable-lora": True,
    "max-lora-rank": RANK,
    "max-loras-per-batch": 3,
    "max-loaded-loras": LOADED_MAX,
    "lora-target-modules": "q_proj,v_proj",
}


class Adapted:
    """A LoRA adapter of random numbers, large enough to change what is said."""

    def __init__(self, folder: Path, smollm2: Path, *, seed: int) -> None:
        config = json.loads((smollm2 / "config.json").read_text())
        hidden = config["hidden_size"]
        widths = {"q_proj": hidden, "v_proj": hidden // config["num_attention_heads"] * config["num_key_value_heads"]}
        numbers = torch.Generator().manual_seed(seed)
        self.folder = folder
        self.changes: dict[str, torch.Tensor] = {}
        tensors: dict[str, torch.Tensor] = {}
        for layer in range(config["num_hidden_layers"]):
            for name, width in widths.items():
                path = f"model.layers.{layer}.self_attn.{name}"
                down = torch.randn(RANK, hidden, generator=numbers) * 0.1
                up = torch.randn(width, RANK, generator=numbers) * 0.1
                tensors[f"base_model.model.{path}.lora_A.weight"] = down
                tensors[f"base_model.model.{path}.lora_B.weight"] = up
                self.changes[f"{path}.weight"] = (ALPHA / RANK) * (up @ down)
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(
            json.dumps(
                {
                    "peft_type": "LORA",
                    "task_type": "CAUSAL_LM",
                    "base_model_name_or_path": str(smollm2),
                    "r": RANK,
                    "lora_alpha": ALPHA,
                    "lora_dropout": 0.0,
                    "bias": "none",
                    "target_modules": sorted(widths),
                }
            )
        )


@asynccontextmanager
async def running(environment: Environment, order: Load) -> AsyncIterator[tuple[Server, Client]]:
    server = Server(environment, order, kind="cpu", threads=2)
    async with asyncio.timeout(READY_S), server, server.client() as client:
        await server.ready(client)
        yield server, client


async def text(client: Client, number: int, prompt: list[int], *, adapter: str = "", count: int = 12) -> list[int]:
    begin = Begin(number, "m", np.array(prompt, dtype="<i4").tobytes(), count, adapter=adapter)
    begin = msgspec.structs.replace(begin, sampling=msgspec.structs.replace(begin.sampling, temperature=0.0))
    ids: list[int] = []
    async with aclosing(client.generate(asking.request_of(begin))) as events:
        async for event in events:
            assert event.error is None, event.error
            ids += event.output_ids
    return ids


async def test_adapters_are_loaded_mixed_and_gone(
    environment: Environment, order: Load, smollm2: Path, tmp_path: Path
) -> None:
    """One start for all of it: a server takes a while."""
    adapters = {name: Adapted(tmp_path / name, smollm2, seed=seed) for seed, name in enumerate(("one", "two"))}
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    prompt = list(tokenizer.encode("The river runs through the old town", add_special_tokens=False).ids)
    expected: dict[str, list[int]] = {}
    for name, changes in (("", {}), *((name, adapter.changes) for name, adapter in adapters.items())):
        reference = Reference(smollm2)
        reference.add_to_weights(changes)
        expected[name] = reference.greedy(prompt, 12)
    assert len({tuple(ids) for ids in expected.values()}) == 3, "the adapters change nothing"

    async with running(environment, msgspec.structs.replace(order, flags=FLAGS)) as (server, client):
        await _check_locked(server)
        loras = Loras(client, base=smollm2, limits=limits_of(await client.info()))
        for name, adapter in adapters.items():
            await loras.load(name, adapter.folder)

        names = ["", "one", "two", "one", ""]
        mixed = await asyncio.gather(
            *(text(client, number, prompt, adapter=name) for number, name in enumerate(names, start=1))
        )
        assert mixed == [expected[name] for name in names]

        with pytest.raises(ServerRefused):
            await client.load_lora("broken", str(tmp_path))

        await loras.unload("one")
        assert loras.names == {"two"}
        assert await text(client, 10, prompt, adapter="two") == expected["two"]
        # Why the names are kept: SGLang itself would serve this one again.
        assert await text(client, 11, prompt, adapter="one") == expected["one"]


async def test_a_node_has_adapters_loaded_and_names_them(
    environment: Environment, command: list[str], order: Load, smollm2: Path, tmp_path: Path
) -> None:
    """By frames, as the node does it."""
    adapted = Adapted(tmp_path / "one", smollm2, seed=0)
    wide, lying = Adapted(tmp_path / "wide", smollm2, seed=1), Adapted(tmp_path / "lying", smollm2, seed=1)
    for folder, rank in ((wide.folder, 16 * RANK), (lying.folder, RANK // 2)):
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | {"r": rank}))
    prompt = Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode("The river", add_special_tokens=False).ids
    reference = Reference(smollm2)
    reference.add_to_weights(adapted.changes)
    expected = reference.greedy(prompt, 12)
    engine = TextEngineProcess(
        command, name="sglang", sockets_dir=tmp_path, start_timeout_s=READY_S, batch_timeout_s=READY_S
    )
    grown: dict[int, list[Grown]] = {}
    stepped = asyncio.Condition()

    async def on_step(step: Step) -> None:
        async with stepped:
            for one in step.grown:
                grown.setdefault(one.sequence, []).append(one)
            stepped.notify_all()

    def begin(sequence: int, count: int) -> None:
        ids = np.array(prompt, dtype="<i4").tobytes()
        engine.begin(Begin(sequence, "m", ids, count, sampling=Sampling(temperature=0.0), adapter="one"))

    async def heard(is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(READY_S), stepped:
            await stepped.wait_for(is_so)

    async def finish_of(sequence: int) -> str:
        await heard(lambda: any(one.finish for one in grown.get(sequence, ())))
        return grown[sequence][-1].finish

    async with engine:
        engine.listen(on_step)
        await engine.load(msgspec.structs.replace(order, flags=FLAGS))
        begin(1, 4)
        assert await finish_of(1) == "fault", "it is not loaded"
        (tmp_path / "half").mkdir()
        (tmp_path / "half" / "adapter_config.json").write_text("{}")
        with pytest.raises(EngineRefused, match=r"adapter_model\.safetensors"):
            await engine.load_adapter("half", tmp_path / "half")
        with pytest.raises(EngineRefused, match="max-lora-rank"):
            await engine.load_adapter("wide", wide.folder)
        with pytest.raises(EngineRefused, match="its config the rank"):
            await engine.load_adapter("lying", lying.folder)
        assert await engine.load_adapter("one", adapted.folder) == ("one",)
        with pytest.raises(EngineRefused, match="of this name"):
            await engine.load_adapter("one", adapted.folder)

        begin(2, 12)
        assert await finish_of(2) == "length"
        assert [token for one in grown[2] for token in one.ids] == expected

        begin(3, 200)
        await heard(lambda: 3 in grown)
        assert await engine.unload_adapter("one") == ()
        assert await finish_of(3) == "length", "a text that runs with it goes on"
        begin(4, 4)
        assert await finish_of(4) == "fault"
        for number in range(LOADED_MAX):
            await engine.load_adapter(f"copy {number}", adapted.folder)
        with pytest.raises(EngineRefused, match="max-loaded-loras"):
            await engine.load_adapter("one", adapted.folder)
        await engine.unload_adapter("copy 0")
        assert "one" in await engine.load_adapter("one", adapted.folder)
        begin(5, 12)
        assert await finish_of(5) == "length"
        assert [token for one in grown[5] for token in one.ids] == expected


async def _check_locked(server: Server) -> None:
    """Without the key nothing is answered, and the key is not to be seen."""
    url = server.client()._url
    async with aiohttp.ClientSession() as stranger:
        for path in ("/server_info", "/v1/models", "/generate"):
            async with stranger.get(url + path) as response:
                assert response.status == 401, path
    family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    assert not any(server._key in " ".join(process.cmdline()) for process in family)
    listening = {
        connection.laddr.ip
        for process in family
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening <= {"127.0.0.1", "::1"}, listening


async def test_every_flag_that_may_be_set_is_one_of_sglang(environment: Environment) -> None:
    script = """
import argparse, json
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps(sorted(parser._option_string_actions)))
"""
    process = await asyncio.create_subprocess_exec(
        str(environment.python),
        "-c",
        script,
        env=environment_of("cpu", os.environ, threads=1),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    output, _ = await process.communicate()
    known = set(msgspec.json.decode(output.splitlines()[-1], type=list[str]))

    assert {f"--{flag}" for flag in ALLOWED} <= known
