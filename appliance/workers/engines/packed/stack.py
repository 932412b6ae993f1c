"""The layers of an encoder, on rows: nothing here knows where one text ends, except attention's plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from appliance.workers.engines.packed.attention import Plan, attend, has_varlen, varlen_plan
from appliance.workers.engines.packed.linear import Linear
from appliance.workers.engines.packed.masks import Part
from appliance.workers.engines.packed.pack import Pack
from appliance.workers.engines.packed.rotary import Angles, Rotary, turned


class Norm(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Masks(Protocol):
    def plan(self, pack: Pack) -> list[Part]: ...


@dataclass(frozen=True)
class LayerNorm:
    weight: torch.Tensor
    bias: torch.Tensor | None
    epsilon: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


@dataclass(frozen=True)
class RmsNorm:
    """Scaled by the root mean square over the last dimension, computed in float32."""

    weight: torch.Tensor
    epsilon: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        exact = x.float()
        scaled = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return scaled.to(x.dtype) * self.weight


@dataclass(frozen=True)
class View:
    """What one kind of layer sees and how it counts: planned once per batch, shared by its layers."""

    masks: Masks
    is_causal: bool = False
    rotary: Rotary | None = None
    # What one kernel call over all texts would need to know; None where the masks cannot be said that way.
    varlen_window: tuple[int, int] | None = None

    def of(self, pack: Pack, *, is_varlen: bool) -> "Among":
        angles = self.rotary.angles(pack.positions) if self.rotary is not None else None
        if is_varlen and self.varlen_window is not None:
            return Among(varlen_plan(pack, window=self.varlen_window), self.is_causal, angles)
        return Among(self.masks.plan(pack), self.is_causal, angles)


class Seen(Protocol):
    """What the rows of one pass see in one layer."""

    @property
    def angles(self) -> Angles | None: ...

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[rows, heads, head_dim] queries over keys and values to [rows, heads * head_dim]."""


@dataclass(frozen=True)
class Among:
    """A `View` of one batch: each text sees itself."""

    plan: Plan
    is_causal: bool
    angles: Angles | None

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, self.plan, is_causal=self.is_causal)


@dataclass(frozen=True)
class SelfAttention:
    """Queries, keys and values in one product."""

    qkv: Linear
    out: Linear
    heads: int
    key_heads: int
    head_dim: int
    q_norm: Norm | None = None
    k_norm: Norm | None = None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, seen: Seen) -> torch.Tensor:
        heads, keys = self.heads, self.key_heads
        qkv = self.qkv(x).view(x.shape[0], heads + 2 * keys, self.head_dim)
        if seen.angles is None and self.q_norm is None:
            q, k, v = torch.split(qkv, [heads, keys, keys], dim=1)
        else:
            qk, v = torch.split(qkv, [heads + keys, keys], dim=1)
            q, k = self._turned(qk, seen.angles)
        return self.out.added(seen.attend(q, k, v), residual)

    def _turned(self, qk: torch.Tensor, angles: Angles | None) -> tuple[torch.Tensor, torch.Tensor]:
        split = [self.heads, self.key_heads]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = torch.split(qk, split, dim=1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        if angles is not None:
            qk = turned(qk, angles)
        q, k = torch.split(qk, split, dim=1)
        return q, k


class FeedForward(Protocol):
    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Mlp:
    inner: Linear  # with the activation
    outer: Linear

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.outer.added(self.inner.activated(x), residual)


@dataclass(frozen=True)
class GatedMlp:
    """SwiGLU, GeGLU: an activated gate times a plain product (Shazeer 2020)."""

    gate: Linear  # with the activation
    up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.down.added(self.gate.activated(x).mul_(self.up(x)), residual)


class Layer(Protocol):
    @property
    def attention(self) -> SelfAttention: ...

    @property
    def view(self) -> int:
        """Which of the stack's views this layer has."""

    def __call__(self, x: torch.Tensor, seen: Seen) -> torch.Tensor: ...


@dataclass(frozen=True)
class PostNormLayer:
    """Normalized after each residual sum (BERT)."""

    attention: SelfAttention
    attention_norm: Norm
    mlp: FeedForward
    mlp_norm: Norm
    view: int = 0

    def __call__(self, x: torch.Tensor, seen: Seen) -> torch.Tensor:
        x = self.attention_norm(self.attention(x, x, seen))
        return self.mlp_norm(self.mlp(x, x))


@dataclass(frozen=True)
class PreNormLayer:
    """Normalized on the way into each block (ModernBERT, Qwen3); the first of ModernBERT's has no first norm."""

    attention_norm: Norm | None
    attention: SelfAttention
    mlp_norm: Norm
    mlp: FeedForward
    view: int = 0

    def __call__(self, x: torch.Tensor, seen: Seen) -> torch.Tensor:
        x = self.attention(x if self.attention_norm is None else self.attention_norm(x), x, seen)
        return self.mlp(self.mlp_norm(x), x)


@dataclass(frozen=True)
class Embedding:
    """Token vectors, plus positions' where the model has them, normalized where it does that."""

    words: torch.Tensor  # [vocabulary, width]
    positions: torch.Tensor | None  # [positions, width], the vector of token type 0 included
    second_type: torch.Tensor | None  # [2, width]: what tokens of type 0 and 1 add to that
    norm: Norm | None

    def __call__(self, pack: Pack) -> torch.Tensor:
        x = functional.embedding(pack.ids, self.words)
        if self.positions is not None:
            x = x.add_(functional.embedding(pack.positions, self.positions))
        if pack.types is not None and self.second_type is not None:
            x = x.add_(functional.embedding(pack.types, self.second_type))
        return x if self.norm is None else self.norm(x)


@dataclass(frozen=True)
class Stack:
    """An encoder from packed token ids to one vector per token."""

    embedding: Embedding
    views: Sequence[View]
    layers: Sequence[Layer]
    final_norm: Norm | None
    first_position: int = 0
    pad_id: int | None = None  # where the model numbers positions around padding

    @property
    def width(self) -> int:
        return int(self.embedding.words.shape[1])

    @property
    def vocabulary(self) -> int:
        return int(self.embedding.words.shape[0])

    def __call__(self, pack: Pack) -> torch.Tensor:
        """[tokens, width]"""
        x = self.embedding(pack)
        is_varlen = has_varlen(x, head_dim=self.layers[0].attention.head_dim)
        seen = [view.of(pack, is_varlen=is_varlen) for view in self.views]
        for layer in self.layers:
            x = layer(x, seen[layer.view])
        if pack.rows != pack.tokens:
            x = x[: pack.tokens]
        return x if self.final_norm is None else self.final_norm(x)
