"""What a spaCy model's folder may hold before anything of it is loaded.

A spaCy model is no safetensors, and its settings name the functions that build it. So every file must be listed by
digest in the facts, and the settings may name spaCy's own functions only.
"""

import configparser
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from appliance.errors import StartupError

CONFIG: Final = "config.cfg"
_READ_SECTIONS: Final = ("nlp", "components")  # those that are built when a model is loaded
_NAMED: Final = re.compile(r'"?@\w+"?\s*[:=]\s*"([^"]*)"')
_CALLBACKS: Final = ("before_creation", "after_creation", "after_pipeline_creation")
_OWN: Final = ("spacy.", "spacy-legacy.")


def check_spacy_folder(folder: Path, listed: Collection[str]) -> None:
    """Raises StartupError for a file that is not listed, and for settings that name somebody else's code."""
    if not (folder / CONFIG).is_file():
        raise StartupError(f"{folder} has no {CONFIG}; it is no spaCy model, get it again")
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name not in listed:
            raise StartupError(
                f"{path} is not among the facts' sha256; a spaCy model is loaded only if every file of it is listed"
            )
    for name in _named(folder / CONFIG):
        if not name.startswith(_OWN):
            raise StartupError(f"{folder / CONFIG} names {name[:80]!r}, which is code that is not spaCy's own")


def _named(path: Path) -> Iterator[str]:
    """The functions that loading the model would call."""
    config = configparser.RawConfigParser()
    try:
        config.read_string(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, configparser.Error) as exc:
        raise StartupError(f"{path} cannot be read: {exc}") from exc
    for section in config.sections():
        if section.partition(".")[0] in _READ_SECTIONS:
            for key, value in config.items(section):
                yield from _NAMED.findall(f"{key} = {value}")
                if key in _CALLBACKS and value != "null":
                    yield value
