"""A language model used in another model's vocabulary (token-level intersection, Timor et al. 2025)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from outrider.lm.protocol import LM, Extension, Segment
from outrider.lm.vocabulary import Translation


@dataclass(frozen=True, kw_only=True)
class _Node:
    """A pending token of the target's vocabulary.

    Attributes:
        numbers: Pending numbers of its pieces in the model's slot; none where they would pass its context.
        last: Pending number of the newest piece on its path; -1 where that is committed.
        size: Tokens of the model along its path, the committed ones included; more than its context holds where the
            path is not fed any more.
    """

    numbers: tuple[int, ...]
    last: int
    size: int


@dataclass(kw_only=True)
class _Slot:
    """A slot, with lengths in both vocabularies; changes in place.

    Attributes:
        slot: The model's slot.
        sizes: For every committed token, the tokens of the model up to and including it.
        pending: The pending nodes.
        fed: Pending nodes of the model's slot.
    """

    slot: int
    sizes: list[int] = field(default_factory=list)
    pending: list[_Node] = field(default_factory=list)
    fed: int = 0


class Translated:
    r"""A draft model behind the `LM` protocol, in the vocabulary of a target whose tokenizer differs.

    Tokens that both vocabularies have are fed unchanged. Any other token is fed as the pieces of its text. Lengths are
    counted in the target's tokens. The logits are those of the shared tokens, and -inf at all others, so that the model
    proposes

    $q(x) = q'(x) / \sum_{y \in T \cap D} q'(y)$ for $x \in T \cap D$.

    The verifier gets these same rows, so lossless verifiers stay lossless.

    Tokens outside the intersection can only be recovered or bonus tokens. A path that no longer fits the model's
    context gets flat logits. Reading the pieces copies tokens to the host at each call, also while a draft grows.

    Args:
        lm: The model.
        translation: The map between the two vocabularies.

    Example:
        >>> from outrider.lm.tabular import TabularLM
        >>> inner = TabularLM(lambda prefix: np.array([0.5, 0.2, 0.3]), vocab_size=3)
        >>> words = Translation(vocab_size=2, ours=np.array([1]), theirs=np.array([2]), pieces=lambda t: (2,) * (2 - t))
        >>> lm = Translated(inner, words)
        >>> slot = lm.open()
        >>> lm.extend([Segment(slot=slot, tokens=torch.tensor([0]))]).logits.softmax(-1)
        tensor([[0., 1.]], dtype=torch.float64)
        >>> lm.commit({slot: [0]})
        >>> lm.length(slot), inner.length(slot)
        (1, 2)

    References:
        Timor et al. 2025, Algorithm 4. https://arxiv.org/abs/2502.05202
    """

    def __init__(self, lm: LM, translation: Translation) -> None:
        self.lm = lm
        self.translation = translation
        self.vocab_size = translation.vocab_size
        self.max_context = lm.max_context
        self.max_slots = lm.max_slots
        self.crops = lm.crops
        self.chains_only = lm.chains_only
        self.device, self.dtype = lm.device, lm.dtype
        self._ours = torch.from_numpy(translation.ours).to(lm.device)
        self._theirs = torch.from_numpy(translation.theirs).to(lm.device)
        self._slots: dict[int, _Slot] = {}

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        return self.lm.modules

    def cast(self, dtype: torch.dtype) -> "Translated":
        return Translated(self.lm.cast(dtype), self.translation)

    def open(self) -> int:
        slot = self.lm.open()
        self._slots[slot] = _Slot(slot=slot)
        return slot

    def length(self, slot: int) -> int:
        return len(self._slots[slot].sizes)

    def extend(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> Extension:
        """As `LM.extend`; there are no taps, because hidden states are not those of the target's tokens."""
        if taps:
            raise ValueError(f"a translated model has no taps, got {list(taps)}")
        inner: list[Segment] = []
        sources: list[int] = []
        read = 0
        for segment in segments:
            state = self._slots[segment.slot]
            before, first = state.fed, len(state.pending)
            fed = self._fed(state, segment)
            fresh = state.pending[first:]
            wanted = fresh[len(fresh) - segment.num_wanted :]
            if fed is None:
                sources += [-1] * len(wanted)
                continue
            newest = len(wanted) == 1 and wanted[0].numbers[-1:] == (state.fed - 1,)
            kept = 1 if newest else state.fed - before if any(node.numbers for node in wanted) else 0
            inner.append(replace(fed, logits=kept))
            shift = read - (state.fed - 1 if newest else before)
            sources += [shift + node.numbers[-1] if node.numbers else -1 for node in wanted]
            read += kept
        logits = self.lm.extend(inner).logits if inner else torch.zeros(0, self.lm.vocab_size, device=self.device)
        return Extension(logits=self._translated(logits, sources), taps={})

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        nodes = {slot: [self._slots[slot].pending[i] for i in path] for slot, path in paths.items()}
        self.lm.commit({slot: [number for node in path for number in node.numbers] for slot, path in nodes.items()})
        for slot, path in nodes.items():
            state = self._slots[slot]
            state.sizes += [node.size for node in path]
            state.pending, state.fed = [], 0

    def truncate(self, slot: int, length: int) -> None:
        state = self._slots[slot]
        del state.sizes[length:]
        state.pending, state.fed = [], 0
        self.lm.truncate(slot, min(self._size(state), self.lm.length(slot)))

    def copy(self, source: int, length: int) -> int:
        sizes = self._slots[source].sizes[:length]
        fed = min(sizes[-1] if sizes else 0, self.lm.length(source))
        slot = self.lm.copy(source, fed)
        self._slots[slot] = _Slot(slot=slot, sizes=sizes)
        return slot

    def release(self, slot: int, *, clean: bool = False) -> None:
        del self._slots[slot]
        self.lm.release(slot, clean=clean)

    def _size(self, state: _Slot) -> int:
        return state.sizes[-1] if state.sizes else 0

    def _fed(self, state: _Slot, segment: Segment) -> Segment | None:
        """Append a segment's nodes to the slot; their pieces, or None where none of them fits the context."""
        tokens, parents = segment.tokens.tolist(), segment.parents
        newest = len(state.pending) - 1
        above = range(newest, newest + len(tokens)) if parents is None else parents.tolist()
        pieces: list[int] = []
        links: list[int] = []
        before, root = state.fed, _Node(numbers=(), last=-1, size=self._size(state))
        room = self.lm.max_context - self.lm.length(state.slot)
        for token, parent in zip(tokens, above, strict=True):
            under = state.pending[parent] if parent >= 0 else root
            last, size = under.last, under.size
            spelt, opening = self.translation.pieces(token), self.translation.opening
            if size == 0 and spelt[: len(opening)] != opening:
                spelt = (*opening, *spelt)
            size += len(spelt)
            fits = size <= self.lm.max_context and state.fed + len(spelt) <= room
            numbers = tuple(range(state.fed, state.fed + len(spelt))) if fits else ()
            # What is not fed leaves a gap, and nothing can be fed behind it.
            size = size if fits else self.lm.max_context + 1
            for number, piece in zip(numbers, spelt, strict=False):
                pieces.append(piece)
                links.append(last)
                last = number
            state.fed += len(numbers)
            state.pending.append(_Node(numbers=numbers, last=last, size=size))
        if not pieces:
            return None
        chain = links == list(range(before - 1, before - 1 + len(links)))
        piece_ids = torch.tensor(pieces).to(self.device)
        return Segment(slot=state.slot, tokens=piece_ids, parents=None if chain else np.array(links))

    def _translated(self, logits: Float[Tensor, "read inner"], sources: Sequence[int]) -> Float[Tensor, "wanted vocab"]:
        """The rows of the wanted nodes, in the target's vocabulary; -1 is a node that has none."""
        wanted_rows = logits.new_full((len(sources), self.vocab_size), -torch.inf)
        if not sources:
            return wanted_rows
        rows = torch.tensor(sources).to(logits.device)
        shared = logits.new_zeros(len(sources), len(self._ours))
        if len(logits):
            shared = logits.index_select(0, rows.clamp_min(0)).index_select(1, self._theirs)
            shared[rows < 0] = 0
        wanted_rows[:, self._ours] = shared
        return wanted_rows
