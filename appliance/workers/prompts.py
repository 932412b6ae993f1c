"""The text that a model wants before an input, by what the input is for."""

import logging
from pathlib import Path

import msgspec

from appliance import telemetry
from appliance.jobs import Intent
from appliance.presets import Facts
from appliance.workers import model_files

# Names under which models keep a prompt in config_sentence_transformers.json; sentence-transformers itself writes the
# first of each, empty, into every file.
_QUERY_NAMES = ("query", "search_query")
_DOCUMENT_NAMES = ("document", "passage", "corpus", "search_document")

_log = logging.getLogger(__name__)


class ModelPrompts(msgspec.Struct, frozen=True):
    """What one model wants before its inputs; "" is nothing."""

    query: str = ""
    document: str = ""
    default: str | None = None  # where nobody says what an input is; None: the model's files name none

    @property
    def is_any(self) -> bool:
        """Whether the model tells queries and documents apart, or wants something before either."""
        return bool(self.query or self.document)


def model_prompts(facts: Facts, folder: Path) -> ModelPrompts:
    """Those of the preset or configuration, else those in the model's files. Raises ValueError for unreadable ones."""
    if facts.prompts is not None:
        return ModelPrompts(facts.prompts.query, facts.prompts.document)
    config = model_files.prompt_config(folder)
    named = {name: prompt for name, prompt in config.prompts.items() if prompt}
    default = config.default_prompt_name
    return ModelPrompts(
        query=next((named[name] for name in _QUERY_NAMES if name in named), ""),
        document=next((named[name] for name in _DOCUMENT_NAMES if name in named), ""),
        default=None if default is None else named.get(default, ""),
    )


class Prompter:
    """Chooses the prompt of each call, and tells the operator once when clients leave the choice open."""

    def __init__(self, model: str, prompts: ModelPrompts) -> None:
        self.prompts = prompts
        self._model = model
        self._is_announced = False

    def choose(self, intent: Intent | None, *, inputs: int) -> str | None:
        """The prompt for so many inputs, "" for an empty one; None where the model has some and none is chosen."""
        if intent is not None:
            return self.prompts.query if intent == "query" else self.prompts.document
        if self.prompts.default is not None:
            return self.prompts.default
        if not self.prompts.is_any:
            return ""
        telemetry.MISSING_PROMPTS.labels(self._model).inc(inputs)
        if not self._is_announced:  # two threads that come at once may say it twice
            self._is_announced = True
            _log.warning(
                "%s wants a prompt before queries or documents, and a client did not say which it sent: none was used, "
                'and search is worse for it. Let clients set "input_type", or ask for the model "%s@query" or '
                '"%s@document", or give an alias in appliance.toml an `intent`',
                self._model,
                self._model,
                self._model,
            )
        return None
