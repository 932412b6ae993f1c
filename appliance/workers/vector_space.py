"""What two vectors must share to be compared, as a text.

    model=BAAI/bge-small-en-v1.5 weights=5c38ec7c405ec4b44b94cc5a9bb96e735b38267a pooling=cls prompts=9f86d081884c7d65
    width=384

(in one line). `weights` is the revision, or `sha256:` and a digest of the weights where the files are a folder of the
operator's own or nobody says which revision they are. `prompts` is a digest of the model's prompts for queries and
documents, which are one space; "none" for a model without any; "missing" for vectors of a model that wants prompts and
got none; for a default prompt that is neither, a digest of its own. `width` is before padding. The precision that the
model ran in is left out: such vectors may be compared.
"""

import hashlib
from pathlib import Path

import msgspec

from appliance.presets import Facts
from appliance.workers import model_files
from appliance.workers.digests import digest
from appliance.workers.prompts import ModelPrompts, model_prompts

_DIGEST_CHARS = 16


class VectorSpace(msgspec.Struct, frozen=True):
    """What of that does not depend on the call."""

    model: str
    weights: str = ""
    pooling: str = ""
    prompts: ModelPrompts = ModelPrompts()

    @classmethod
    def of(cls, facts: Facts, folder: Path, *, is_own_folder: bool) -> "VectorSpace":
        """Read from the model's files; hashes the weights where they have no other name. Blocks.

        `is_own_folder`: the operator named the folder, so that the preset's revision says nothing of it. Raises
        ValueError or StartupError for files that cannot be read.
        """
        packaged = facts.package.version if facts.package else ""
        revision = "" if is_own_folder else facts.revision or packaged
        return cls(
            facts.name,
            revision or f"sha256:{_weights_digest(facts, folder)}",
            model_files.pooling(folder),
            model_prompts(facts, folder),
        )

    def text(self, *, prompt: str | None, width: int) -> str:
        """Of vectors that were made with this prompt; None: of a model that wants one and got none."""
        pooling = self.pooling or "-"
        return f"model={self.model} weights={self.weights} pooling={pooling} prompts={self._mark(prompt)} width={width}"

    def _mark(self, prompt: str | None) -> str:
        own = (self.prompts.query, self.prompts.document)
        if prompt is None:
            return "missing"
        if self.prompts.is_any and prompt in own:
            return _digest("\0".join(own))
        return _digest(prompt) if prompt else "none"


def _weights_digest(facts: Facts, folder: Path) -> str:
    """Of all weights; those that the preset lists were checked before and are not read again."""
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.safetensors"))
    return _digest("\n".join(f"{name} {facts.sha256.get(name) or digest(folder / name)}" for name in paths))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_DIGEST_CHARS]
