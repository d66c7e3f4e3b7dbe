"""What a head is, in one value: its module, its drafter, its options, what it learns, and how it is recognised."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from outrider.core.inputs import InputError, field_values
from outrider.drafters.exports import Exports
from outrider.drafters.protocol import Drafter
from outrider.heads.head import Head, TrainedHead
from outrider.heads.objective import HeadContext, HeadObjective
from outrider.learning.options import HeadOptions
from outrider.lm.target_info import TargetInfo

NOWHERE = Exports()
"""Of a head that no other engine knows."""


@runtime_checkable
class DrafterOfHead(Protocol):
    """A class of drafters that can be made with a head."""

    def of(self, head: Any, target: TargetInfo, trained: TrainedHead) -> Drafter:
        """The drafter with a head that `Head.load` has read.

        Args:
            target: What it drafts for.
            trained: Where the head runs, and what else the user said.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """A kind of head. A head's file ends with its spec, and the catalog names the spec as text.

    Attributes:
        name: Its name in the catalog.
        head: Its module.
        drafter: The class that drafts with it.
        published: Whether a checkpoint is of this kind, by its config and the names of its tensors.
        trained: What a user can say of such a head on disk.
        options: What it can be told in training; the first lines of the words are the help of its command. None: it is
            not trained here.
        objective: What it learns; None with `options`.
        exports: Which other engines run it, and by which names.
    """

    name: str
    head: type[Head]
    drafter: Any
    published: Callable[[Mapping[str, Any], Collection[str]], bool]
    trained: type[TrainedHead] = TrainedHead
    options: type[HeadOptions] | None = None
    objective: type[HeadObjective] | None = None
    exports: Exports = NOWHERE

    def at(self, path: str, **fields: Any) -> TrainedHead:
        """A head of this kind in a directory or at a hub id; the fields are those of `trained`."""
        return self.trained(spec=self, path=path, **fields)

    def named(self, text: str) -> TrainedHead:
        """A head in `PATH`, or in `PATH,key=value` with fields of `trained`. Raises InputError for other fields."""
        path, _, rest = text.partition(",")
        return self.at(path, **field_values(f"drafter {self.name!r}", self.trained, rest))

    def learner(self, options: HeadOptions, context: HeadContext) -> HeadObjective:
        """A new head of a target, or the head that `options.init_from` names, ready to learn.

        Raises:
            InputError: An option is not allowed, or the head on disk does not fit the target.
        """
        if self.options is None or self.objective is None:
            raise InputError(f"{self.name} is not trained here")
        options.check()
        if options.init_from is None:
            torch.manual_seed(context.seed)
            head = self.head.new(options, context)
        else:
            head = self.head.init_from(self.named(options.init_from), options, context)
        head.freeze()
        return self.objective(head.float().train().to(context.place), options, context)
