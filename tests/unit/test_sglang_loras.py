"""LoRA adapters of an SGLang server that is played: what is taken, what is refused and why, and what of it is known."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from safetensors.numpy import save_file

from appliance.workers.engines.sglang.adapter import EXIT_DONE
from appliance.workers.engines.sglang.client import ServerInfo, ServerRefused, ServerUnreachable
from appliance.workers.engines.sglang.lora_files import CONFIG, WEIGHTS, check_lora, check_shapes
from appliance.workers.engines.sglang.loras import Limits, Loras, limits_of
from appliance.workers.wire import Adapters, Begin, Fault, LoadAdapter, Step, Stop, UnloadAdapter
from tests.unit.test_sglang_client import Node, client_of

Shapes = dict[str, tuple[int, ...]]

RANK, WIDTH, NARROW = 2, 8, 4
ATTENTION = "model.layers.0.self_attn"
MODEL: Shapes = {
    f"{ATTENTION}.q_proj.weight": (WIDTH, WIDTH),
    f"{ATTENTION}.k_proj.weight": (NARROW, WIDTH),
    f"{ATTENTION}.v_proj.weight": (NARROW, WIDTH),
    f"{ATTENTION}.o_proj.weight": (WIDTH, WIDTH),
    "model.layers.0.mlp.packed.qweight": (1, 1),
}
SETTINGS: dict[str, Any] = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": 4,
    "target_modules": ["q_proj", "v_proj"],
    "bias": "none",
    "rank_pattern": {},
    "modules_to_save": None,
    "use_rslora": False,
}
LIMITS = Limits(count_max=2, rank_max=RANK)


def halves(module: str, *, out: int = WIDTH, rank: int = RANK, width: int = WIDTH) -> Shapes:
    path = f"base_model.model.{module}"
    return {f"{path}.lora_A.weight": (rank, width), f"{path}.lora_B.weight": (out, rank)}


SHAPES = {**halves(f"{ATTENTION}.q_proj"), **halves(f"{ATTENTION}.v_proj", out=NARROW)}


def save(folder: Path, shapes: Shapes) -> None:
    folder.mkdir(exist_ok=True)
    save_file({name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}, folder / WEIGHTS)


def adapter_in(folder: Path, shapes: Shapes | None = None, **settings: Any) -> Path:
    save(folder, SHAPES if shapes is None else shapes)
    (folder / CONFIG).write_text(json.dumps(SETTINGS | settings))
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    save(tmp_path / "base", MODEL)
    return tmp_path / "base"


def test_an_adapter_of_the_model_is_taken(base: Path, tmp_path: Path) -> None:
    check_lora(adapter_in(tmp_path / "a"), base=base, rank_max=RANK)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"r": RANK + 1}, "max-lora-rank is 2"),
        ({"r": 0}, r"\$\.r"),
        ({"target_modules": "all-linear"}, "target_modules"),
        ({"target_modules": ["k_proj"]}, "target_modules"),
        ({"bias": "all"}, "bias"),
        ({"use_dora": True}, "use_dora"),
        ({"use_rslora": True}, "use_rslora"),
        ({"rank_pattern": {"q_proj": 1}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
def test_a_setting_that_would_be_ignored_or_refused_late_is_named(
    base: Path, tmp_path: Path, settings: dict[str, Any], word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        check_lora(adapter_in(tmp_path / "a", **settings), base=base, rank_max=RANK)


def test_a_folder_without_the_files_of_an_adapter_is_refused(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a"

    def refused(word: str) -> None:
        with pytest.raises(ValueError, match=word):
            check_lora(folder, base=base, rank_max=RANK)

    refused(f"has no {CONFIG}")
    adapter_in(folder)
    (folder / WEIGHTS).unlink()
    refused(f"has no {WEIGHTS}")
    (folder / WEIGHTS).write_bytes(b"no tensors")
    refused("no sound safetensors file")
    save(folder, SHAPES)
    (folder / "more.safetensors").touch()
    refused("more.safetensors")
    (folder / "more.safetensors").unlink()
    (folder / CONFIG).write_text("[")
    refused(f"{CONFIG} is not one")


@pytest.mark.parametrize(
    ("shapes", "word"),
    [
        ({}, "no tensors"),
        ({**SHAPES, "base_model.model.lm_head.weight": (1, 1)}, "only lora_A and lora_B"),
        ({**SHAPES, **halves(f"{ATTENTION}.o_proj")}, "target_modules"),
        ({**SHAPES, **halves("model.layers.7.self_attn.q_proj")}, "another model"),
        (halves(f"{ATTENTION}.q_proj", rank=RANK + 1) | halves(f"{ATTENTION}.v_proj", out=NARROW), "the rank 2"),
        (halves(f"{ATTENTION}.q_proj", width=WIDTH + 1) | halves(f"{ATTENTION}.v_proj", out=NARROW), r"needs \[2, 8\]"),
        (halves(f"{ATTENTION}.q_proj") | halves(f"{ATTENTION}.v_proj"), r"needs \[4, 2\]"),
        (halves(f"{ATTENTION}.q_proj"), "without v_proj"),
        (halves(f"{ATTENTION}.v_proj", out=NARROW), "without q_proj"),
        ({name: shape for name, shape in SHAPES.items() if "q_proj.lora_B" not in name}, "the other half"),
    ],
)
def test_tensors_that_sglang_would_die_of_are_named(shapes: Shapes, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        check_shapes(shapes, model=MODEL, rank=RANK, targets=["q_proj", "v_proj"])


def test_a_module_that_is_stored_in_another_form_is_taken_by_its_name() -> None:
    check_shapes(halves("model.layers.0.mlp.packed"), model=MODEL, rank=RANK, targets=["mlp.packed"])


@pytest.mark.parametrize(
    ("said", "limits"),
    [
        ({}, Limits(0, 0)),
        ({"enable_lora": True, "dp_size": 2, "max_lora_rank": 8}, Limits(0, 0)),
        ({"enable_lora": True, "max_lora_rank": 8}, Limits(3, 8)),
        ({"enable_lora": True, "max_lora_rank": 8, "max_loaded_loras": 5}, Limits(5, 8)),
    ],
)
def test_the_limits_are_what_the_server_says(said: dict[str, Any], limits: Limits) -> None:
    fields = {"version": "1", "max_total_num_tokens": 1, "max_req_input_len": 1, "max_loras_per_batch": 3}

    assert limits_of(msgspec.convert(fields | said, ServerInfo)) == limits


class Server:
    """Answers as SGLang does about adapters, or as it is told to."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.status = 200
        self.hangs_up = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        name = (await request.json())["lora_name"]
        if self.hangs_up:
            assert request.transport is not None
            request.transport.close()
        if self.status != 200:
            return web.json_response({"error_message": "the tensors are cursed, in /srv/a"}, status=self.status)
        if request.path == "/load_lora_adapter":
            self.names.add(name)
        elif name not in self.names:
            return web.json_response({"error_message": f"LoRA with name {name} does not exist"}, status=400)
        self.names.discard(name) if request.path == "/unload_lora_adapter" else None
        return web.json_response({"success": True})


@asynccontextmanager
async def played(
    base: Path, *, limits: Limits = LIMITS, unload_wait_s: float = 10
) -> AsyncIterator[tuple[Server, Loras]]:
    server = Server()
    async with client_of(server.answer) as client, asyncio.timeout(10):
        yield server, Loras(client, base=base, limits=limits, unload_wait_s=unload_wait_s)


async def test_as_many_are_loaded_as_the_flags_take_and_each_under_its_own_name(base: Path, tmp_path: Path) -> None:
    folder = adapter_in(tmp_path / "a")
    async with played(base) as (server, loras):
        for name, word in [("", "printable"), ("a\n", "printable"), ("x" * 257, "256")]:
            with pytest.raises(ValueError, match=word):
                await loras.load(name, folder)
        await loras.load("a", folder)
        with pytest.raises(ValueError, match="of this name is loaded"):
            await loras.load("a", folder)
        await loras.load("b", folder)
        with pytest.raises(ValueError, match="2 adapters are loaded"):
            await loras.load("c", folder)
        assert server.names == loras.names == {"a", "b"}

        await loras.unload("a")
        with pytest.raises(ValueError, match="is not loaded"):
            await loras.unload("a")
        await loras.load("c", folder)
        assert server.names == loras.names == {"b", "c"}


async def test_a_model_without_adapters_says_which_flag_it_needs(base: Path, tmp_path: Path) -> None:
    async with played(base, limits=Limits(0, 0)) as (_, loras):
        with pytest.raises(ValueError, match="enable-lora"):
            await loras.load("a", adapter_in(tmp_path / "a"))


async def test_what_sglang_refuses_leaves_the_name_free(base: Path, tmp_path: Path) -> None:
    folder = adapter_in(tmp_path / "a")
    async with played(base) as (server, loras):
        server.status = 400
        with pytest.raises(ServerRefused, match="cursed"):
            await loras.load("a", folder)
        server.status = 200
        await loras.load("a", folder)

        assert loras.names == {"a"}


@pytest.mark.parametrize("was_loaded", [True, False])
async def test_what_sglang_does_not_answer_can_be_unloaded_and_loaded_again(
    base: Path, tmp_path: Path, was_loaded: bool
) -> None:
    folder = adapter_in(tmp_path / "a")
    async with played(base) as (server, loras):
        server.hangs_up, server.status = True, 200 if was_loaded else 500
        with pytest.raises(ServerUnreachable):
            await loras.load("a", folder)
        assert loras.names == frozenset(), "it cannot be named"
        with pytest.raises(ValueError, match="not unloaded yet"):
            await loras.load("a", folder)

        server.hangs_up, server.status = False, 200
        await loras.unload("a")
        assert server.names == set()
        await loras.load("a", folder)
        assert loras.names == {"a"}


async def test_an_unload_that_fails_can_be_asked_for_again(base: Path, tmp_path: Path) -> None:
    async with played(base) as (server, loras):
        await loras.load("a", adapter_in(tmp_path / "a"))
        server.status = 500
        with pytest.raises(ServerRefused):
            await loras.unload("a")
        assert loras.names == frozenset()
        server.status = 200
        await loras.unload("a")

        assert server.names == set()


async def test_unloading_waits_for_the_texts_that_are_written_with_it(base: Path, tmp_path: Path) -> None:
    async with played(base) as (server, loras):
        await loras.load("a", adapter_in(tmp_path / "a"))
        may_end = asyncio.Event()
        text: asyncio.Task[None] = asyncio.create_task(_wait(may_end))
        loras.follow("a", text)
        loras.follow("never", text)
        unloading = asyncio.create_task(loras.unload("a"))
        await asyncio.sleep(0)
        assert (server.names, loras.names) == ({"a"}, frozenset())
        may_end.set()
        await unloading
        assert server.names == set()


async def test_texts_that_take_too_long_are_counted_and_their_adapter_unloaded_later(
    base: Path, tmp_path: Path
) -> None:
    folder = adapter_in(tmp_path / "a")
    async with played(base, unload_wait_s=0.001) as (server, loras):
        await loras.load("a", folder)
        may_end = asyncio.Event()
        text: asyncio.Task[None] = asyncio.create_task(_wait(may_end))
        loras.follow("a", text)
        with pytest.raises(ValueError, match="1 texts are still written"):
            await loras.unload("a")
        assert (server.names, loras.names) == ({"a"}, frozenset())
        may_end.set()
        await text
        await loras.unload("a")

        assert server.names == set()


async def test_a_node_hears_of_each_change_in_the_order_that_it_asked_for(base: Path, tmp_path: Path) -> None:
    folder, empty = str(adapter_in(tmp_path / "a")), str(tmp_path)
    asked: list[tuple[LoadAdapter | UnloadAdapter, Adapters | Fault]] = [
        (LoadAdapter("a", empty), Fault(-1, "invalid", f"the adapter's folder has no {CONFIG}")),
        (UnloadAdapter("a"), Fault(-1, "invalid", "the adapter is not loaded")),
        (LoadAdapter("b", folder), Adapters(("b",))),
        (LoadAdapter("a", folder), Adapters(("a", "b"))),
        (UnloadAdapter("b"), Adapters(("a",))),
    ]
    async with played(base) as (_, loras), Node() as node:
        adapter = node.adapter(tmp_path)
        serving = asyncio.create_task(adapter.serve())
        node.send(asked[0][0])
        assert await node.receive() == Fault(-1, "invalid", "the model is not loaded")
        adapter._loras = loras
        for order, _ in asked:
            node.send(order)
        answers = [await node.receive() for _ in asked]
        node.send(Stop())
        assert await serving == EXIT_DONE

    assert answers == [answer for _, answer in asked]


@pytest.mark.parametrize(
    ("status", "hangs_up", "expected"),
    [
        (400, False, Fault(-1, "invalid", "the tensors are cursed, in <path>")),
        (500, False, Fault(-1, "failed", "the tensors are cursed, in <path>")),
        (500, True, Fault(-1, "failed", "SGLang does not say what became of the adapter; unload it")),
    ],
)
async def test_a_node_hears_why_an_adapter_is_not_loaded_and_cannot_name_it(
    base: Path, tmp_path: Path, status: int, hangs_up: bool, expected: Fault
) -> None:
    async with played(base) as (server, loras), Node() as node:
        server.status, server.hangs_up = status, hangs_up
        adapter = node.adapter(tmp_path)
        serving = asyncio.create_task(adapter.serve())
        adapter._client, adapter._loras = loras._client, loras
        node.send(LoadAdapter("a", str(adapter_in(tmp_path / "a"))))
        answer = await node.receive()
        adapter._vocabulary, adapter._tokens_max = 9, 9
        node.send(Begin(4, "m", b"\0\0\0\0", 1, adapter="a"))
        step = await node.receive()
        node.send(Stop())
        await serving

    assert answer == expected
    assert isinstance(step, Step)
    assert (step.grown[0].finish, step.grown[0].fault) == ("fault", "the adapter is not loaded")


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
