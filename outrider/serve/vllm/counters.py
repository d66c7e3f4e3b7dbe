"""What vLLM counts of its speculation: as `/metrics` has it, and as an answer has it for its own request."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
SERIES = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)(?: \d+)?$")
POSITION = re.compile(r'(?:^|,)position="(\d+)"')


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Draft tokens, and how many of them were accepted.

    Attributes:
        num_drafts: Steps of requests that drafted.
        accepted_per_position: How often the draft token at depth 1, 2, ... was accepted.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens over draft tokens; 0 without any."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens of a step that drafts, the target's own included; 1 without drafts."""
        return 1 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)

    @classmethod
    def of_metrics(cls, text: str) -> "Acceptance | None":
        """The counts of Prometheus text, summed over engines; None if nothing is speculated there.

        Example:
            >>> Acceptance.of_metrics('''# HELP ...
            ... vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 4.0
            ... vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 12.0
            ... vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 9.0
            ... vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 4.0
            ... vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 5.0''')
            Acceptance(num_drafts=4, num_draft_tokens=12, num_accepted_tokens=9, accepted_per_position=(4, 5))
        """
        sums: dict[str, int] = {}
        positions: dict[int, int] = {}
        for line in text.splitlines():
            match = SERIES.match(line)
            if match is None or match["name"] not in (DRAFTS, DRAFT_TOKENS, ACCEPTED, BY_POSITION):
                continue
            count = round(float(match["value"]))
            if match["name"] == BY_POSITION:
                place = POSITION.search(match["labels"] or "")
                if place is not None:
                    positions[int(place[1])] = positions.get(int(place[1]), 0) + count
            else:
                sums[match["name"]] = sums.get(match["name"], 0) + count
        if DRAFTS not in sums:
            return None
        return cls(
            num_drafts=sums[DRAFTS],
            num_draft_tokens=sums.get(DRAFT_TOKENS, 0),
            num_accepted_tokens=sums.get(ACCEPTED, 0),
            accepted_per_position=tuple(positions.get(i, 0) for i in range(max(positions, default=-1) + 1)),
        )

    @classmethod
    def of_answer(cls, metrics: Mapping[str, Any] | None) -> "Acceptance | None":
        """The counts in the `metrics` of an answer; None if it has none.

        Example:
            >>> numbers = {"acceptance_histogram": [1, 0, 2], "num_draft_tokens": 6, "num_spec_steps": 3}
            >>> Acceptance.of_answer({"speculative_decoding": numbers})
            Acceptance(num_drafts=3, num_draft_tokens=6, num_accepted_tokens=4, accepted_per_position=(2, 2))
        """
        numbers = (metrics or {}).get("speculative_decoding")
        if not numbers:
            return None
        steps: Sequence[int] = numbers["acceptance_histogram"]
        positions = tuple(sum(steps[depth:]) for depth in range(1, len(steps)))
        return cls(
            num_drafts=sum(steps),
            num_draft_tokens=numbers["num_draft_tokens"],
            num_accepted_tokens=sum(positions),
            accepted_per_position=positions,
        )

    @classmethod
    def total(cls, parts: Sequence["Acceptance"]) -> "Acceptance":
        """The counts of several together.

        Example:
            >>> part = Acceptance(num_drafts=1, num_draft_tokens=2, num_accepted_tokens=1, accepted_per_position=(1, 0))
            >>> Acceptance.total([part, part]).accepted_per_position
            (2, 0)
        """
        return cls(
            num_drafts=sum(part.num_drafts for part in parts),
            num_draft_tokens=sum(part.num_draft_tokens for part in parts),
            num_accepted_tokens=sum(part.num_accepted_tokens for part in parts),
            accepted_per_position=tuple(
                map(sum, itertools.zip_longest(*(part.accepted_per_position for part in parts), fillvalue=0))
            ),
        )

    def since(self, before: "Acceptance") -> "Acceptance":
        """What was counted after an earlier reading of the same counters."""
        old = (*before.accepted_per_position, *([0] * len(self.accepted_per_position)))
        return Acceptance(
            num_drafts=self.num_drafts - before.num_drafts,
            num_draft_tokens=self.num_draft_tokens - before.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens - before.num_accepted_tokens,
            accepted_per_position=tuple(n - o for n, o in zip(self.accepted_per_position, old, strict=False)),
        )
