"""Blockwise heads before they are bound to a target, and what refines their drafts."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.core.types import InputError
from outrider.drafters.blockwise import BlockwiseDrafter
from outrider.drafters.blockwise_paths import PathsDrafter
from outrider.drafters.head_path import HeadPath
from outrider.drafters.model import ModelPath
from outrider.drafters.rescored import RescoredDrafter
from outrider.drafters.state_heads import running
from outrider.heads.blockwise import is_blockwise, read_blockwise
from outrider.heads.parts.backoff import FILE, BackoffModel, read_backoff
from outrider.lm.hf.checkpoint import TargetShape, local_file, read_config
from outrider.lm.target_info import TargetInfo


@dataclass(frozen=True, kw_only=True)
class BlockwisePath(HeadPath):
    """Blockwise heads in a directory or at a hub id: `blockwise:path=...`.

    Attributes:
        path: Directory or hub id.
        device: Where they run; by default on the target's device.
        dtype: The dtype that they compute in; by default the target's.
        revision: Branch, tag or commit of a hub id.
        max_context: Longest context of the rescorer; by default the target's.
        rescorer: A small draft model that chooses among the likeliest tokens of each head: a directory or a hub id.
        lam: How much the rescorer's logits count, 0 to 1; those of the head count the rest.
        paths: How many of the best paths through the heads' likeliest tokens are drafted; by default the heads' own
            guesses are drafted as they are.
        mu: How much the n-gram model counts in the score of a path, 0 or more.
        top_k: How many of a head's likeliest tokens are refined.
        beam: Prefixes that the search for paths keeps at each depth.
    """

    rescorer: str | None = None
    lam: float = 0.5
    paths: int | None = None
    mu: float = 0.5
    top_k: int = 16
    beam: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rescorer is not None and self.paths is not None:
            raise InputError("blockwise heads draft either with a rescorer or by paths; leave out rescorer or paths")
        if not 0 <= self.lam <= 1:
            raise InputError(f"lam must be in 0..1, got {self.lam}")
        if not self.mu >= 0:
            raise InputError(f"mu must be >= 0, got {self.mu}")
        for name in ("paths", "top_k", "beam"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be >= 1, got {value}")

    @classmethod
    def recognises(cls, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return is_blockwise(config)

    def bind(self, target_info: TargetInfo) -> BlockwiseDrafter:
        """Load the heads, and what refines their drafts."""
        config = read_config(self.path, revision=self.revision)
        heads = read_blockwise(self.path, target_info.ends(), revision=self.revision)
        self.check_target(TargetShape.of(config, self.path), heads.config.hidden_size, target_info)
        self.check_vocabulary(heads.config.vocab_size, target_info)
        heads = heads.to(*self.place(target_info)).requires_grad_(False)
        given: dict[str, Any] = {
            "heads": heads,
            "running": running(heads, target_info),
            "tap": target_info.num_layers,
            "vocab_size": target_info.vocab_size,
            "norm": target_info.norm,
        }
        if self.rescorer is not None:
            model = ModelPath(path=self.rescorer, device=self.device, dtype=self.dtype, max_context=self.max_context)
            return RescoredDrafter(**given, rescorer=model.bind(target_info), lam=self.lam, top_k=self.top_k)
        if self.paths is not None:
            return PathsDrafter(
                **given,
                model=self._grams(heads.config.vocab_size) if self.mu else None,
                paths=self.paths,
                mu=self.mu,
                top_k=self.top_k,
                beam=self.beam,
            )
        return BlockwiseDrafter(**given)

    def _grams(self, vocab_size: int) -> BackoffModel:
        """The n-gram model beside the heads. Raises InputError if there is none, or it is of another vocabulary."""
        file = local_file(self.path, FILE, revision=self.revision)
        if file is None:
            raise InputError(
                f"there is no n-gram model ({FILE}) in {self.path}; train the heads with one, or give mu=0"
            )
        model = read_backoff(file)
        if model.vocab_size != vocab_size:
            raise InputError(f"{file} knows {model.vocab_size:,} tokens, and the heads beside it {vocab_size:,}")
        return model
