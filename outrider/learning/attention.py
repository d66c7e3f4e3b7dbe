r"""Attention of training: many groups of queries, each of which sees the context and some keys of its own.

With a mask over all keys most of the work goes to keys of other groups, which no query of a group sees.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from outrider.lm.head import attend

MOST_SCORES = 1 << 24
"""Scores that stay until the backward, at most: 64 MB in float32. Where there are more, all keys are attended to, by a
kernel that keeps none."""


class GroupKeys:
    """Keeps keys and values of training; changes in place. Gradients flow through it.

    What a layer stores first is the context. Later queries see the context and the keys of their own group.

    Args:
        block_size: Queries of a group; their keys are not stored. None: every place is a group of its own, and its keys
            of all later calls stay.
    """

    def __init__(self, block_size: int | None = None) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._block_size, self._context = block_size, 0

    def update(
        self, keys: Float[Tensor, "rows heads width dim"], values: Float[Tensor, "rows heads width dim"], layer_idx: int
    ) -> tuple[Float[Tensor, "rows heads keys dim"], Float[Tensor, "rows heads keys dim"]]:
        """Called by attention layers, as `outrider.lm.slots.head_inputs.KVCache` says. The newest keys are the last."""
        before = self._kept.get(layer_idx)
        if before is None:
            self._context = keys.shape[2]
        else:
            keys, values = torch.cat([before[0], keys], 2), torch.cat([before[1], values], 2)
        if before is None or self._block_size is None:
            self._kept[layer_idx] = keys, values
        return keys, values

    def attend(
        self,
        queries: Float[Tensor, "rows heads width dim"],
        keys: Float[Tensor, "rows shared keys dim"],
        values: Float[Tensor, "rows shared keys dim"],
        mask: Bool[Tensor, "rows 1 width keys"],
    ) -> Float[Tensor, "rows heads width dim"]:
        """What `outrider.lm.head.attend` returns; no group sees the keys of another one."""
        groups = queries.shape[2] // (self._block_size or 1)
        alone = self._block_size is None
        return among_own(queries, keys, values, mask, context=self._context, groups=groups, scattered=alone)


def among_own(
    queries: Float[Tensor, "rows heads width dim"],
    keys: Float[Tensor, "rows shared keys dim"],
    values: Float[Tensor, "rows shared keys dim"],
    mask: Bool[Tensor, "rows 1 width keys"],
    *,
    context: int,
    groups: int,
    scattered: bool,
) -> Float[Tensor, "rows heads width dim"]:
    """What `attend` returns, where no query sees the own keys of another group.

    The context's keys come first, then those of all groups. The queries of a group stand beside each other.

    Args:
        mask: Every query sees a key at least.
        context: Number of the context's keys.
        groups: Number of groups.
        scattered: Whether the first own key of every group comes first, then the second one of every group, and so on.
            Otherwise those of a group stand beside each other.
    """
    rows, heads, width, dim = queries.shape
    shared, per_group = keys.shape[1], (keys.shape[2] - context) // groups
    if not per_group or rows * heads * width * (context + per_group) > MOST_SCORES:
        return attend(queries, keys, values, mask)

    def grouped(of_keys: Float[Tensor, "rows shared keys dim"]) -> Float[Tensor, "rows shared 1 groups own dim"]:
        some = of_keys[:, :, None, context:]
        return (
            some.unflatten(3, (per_group, groups)).transpose(3, 4)
            if scattered
            else some.unflatten(3, (groups, per_group))
        )

    # The query heads of a key head stand beside each other.
    asking = (queries * dim**-0.5).unflatten(1, (shared, -1))
    of_context = asking @ keys[:, :, None, :context].mT
    of_own = (asking.unflatten(3, (groups, -1)) @ grouped(keys).mT).flatten(3, 4)
    group_mask = mask[..., context:].unflatten(2, (groups, -1))
    group_mask = group_mask.unflatten(4, (per_group, groups) if scattered else (groups, per_group)).diagonal(
        0, 2, 5 if scattered else 4
    )
    seen = torch.cat([mask[..., :context], group_mask.movedim(-1, 2).flatten(2, 3)], -1)[:, None]
    scores = torch.cat([of_context, of_own], -1).masked_fill(~seen, -torch.inf)
    shares = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(values.dtype)
    own_shares = shares[..., context:].unflatten(3, (groups, -1))
    output = shares[..., :context] @ values[:, :, None, :context] + (own_shares @ grouped(values)).flatten(3, 4)
    return output.flatten(1, 2)
