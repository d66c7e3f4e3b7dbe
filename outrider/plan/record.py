"""What planning reads: texts that a target said, and what a drafter's rows say of them. As values, and as a file."""

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from outrider.core import files
from outrider.core.inputs import InputError

FORMAT = 1
"""Version of the file."""


@dataclass(frozen=True, kw_only=True)
class TargetText:
    """A text that the target said alone.

    Attributes:
        prompt: Number of tokens before it.
        tokens: Its token ids.
        log_probs: Log of the target's probability of each token; 0 at temperature 0.
        ended: Whether an end token ended it. Otherwise it reached its token limit.
    """

    prompt: int
    tokens: Int[np.ndarray, " text"]
    log_probs: Float[np.ndarray, " text"]
    ended: bool


@dataclass(frozen=True, kw_only=True)
class DraftRows:
    """What a drafter's rows say of one text.

    The first axis of most arrays is the place at which a draft begins, the second the depth of its token. Where rows
    depend on the tokens alone, there is one depth, and a deeper row is that of a later place.

    Attributes:
        pure: Whether rows depend on the tokens alone.
        log_probs: Log of the drafter's probability of the text's token; -inf where it rules the token out or has no
            guess. At temperature 0 it is 0 or -inf.
        coupled: Probability that draft and target agree, given that the target's token is the text's, if both share
            their noise.
        guesses: Draft tokens that a draft at each place would have, at most.
        trees: For each kind of `outrider.plan.tree_coverage`, the chances at each place and depth.
    """

    pure: bool
    log_probs: Float[np.ndarray, "text depth"]
    coupled: Float[np.ndarray, "text depth"]
    guesses: Int[np.ndarray, " text"]
    trees: Mapping[str, Float[np.ndarray, "text levels ..."]] = field(default_factory=dict)

    def ahead(self, values: Float[np.ndarray, "text depth ..."], place: int, depth: int) -> Float[np.ndarray, "n ..."]:
        """The values of a draft that begins at a place, down to a depth or to the end of the text.

        Example:
            >>> values = np.array([[0.1], [0.2], [0.3]])
            >>> rows = DraftRows(pure=True, log_probs=values, coupled=values, guesses=np.array([2, 2, 1]))
            >>> rows.ahead(rows.coupled, 1, 5).tolist()
            [0.2, 0.3]
        """
        if self.pure:
            return values[place : place + depth, 0]
        return values[place, : max(0, min(depth, len(values) - place))]


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """One recorded run.

    Attributes:
        texts: What the target said to each prompt.
        drafts: For each drafter, its rows along each text.
        temperature: Of the texts.
        slowness: Seconds of the run's plain steps over those of the cost table; 1 if unknown.
        header: What the record depends on: hashes of models and prompts, settings, versions.
    """

    texts: tuple[TargetText, ...]
    drafts: Mapping[str, tuple[DraftRows, ...]]
    temperature: float
    slowness: float = 1.0
    header: Mapping[str, Any] = field(default_factory=dict)

    @property
    def context(self) -> int:
        """Tokens of a request, in the middle of its text, on average."""
        return round(float(np.mean([text.prompt + len(text.tokens) / 2 for text in self.texts])))

    def save(self, file: Path) -> None:
        """Write the record. The old file stays until the new one is complete."""
        head = {
            "format": FORMAT,
            "header": dict(self.header),
            "temperature": self.temperature,
            "slowness": self.slowness,
            "prompts": [text.prompt for text in self.texts],
            "ended": [text.ended for text in self.texts],
            "drafters": {
                name: {"pure": rows[0].pure, "trees": sorted(rows[0].trees)} for name, rows in self.drafts.items()
            },
        }
        arrays = {"head": np.frombuffer(json.dumps(head).encode(), dtype=np.uint8)}
        for i, text in enumerate(self.texts):
            arrays |= {f"text/{i}/tokens": text.tokens, f"text/{i}/log_probs": text.log_probs}
        for name, each in self.drafts.items():
            for i, rows in enumerate(each):
                place = f"drafter/{name}/{i}"
                arrays |= {f"{place}/{part}": getattr(rows, part) for part in ("log_probs", "coupled", "guesses")}
                arrays |= {f"{place}/tree/{kind}": values for kind, values in rows.trees.items()}
        written = io.BytesIO()
        np.savez_compressed(written, allow_pickle=False, **arrays)
        with files.written(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            files.replace(file, written.getvalue())

    @classmethod
    def read(cls, file: Path) -> "RecordedRun":
        """The record in a file. Raises InputError if it holds none."""
        try:
            with np.load(file, allow_pickle=False) as arrays:
                head = json.loads(bytes(arrays["head"]))
                if head["format"] != FORMAT:
                    raise InputError(f"{file} was recorded by another version; delete it to record anew")
                texts = tuple(
                    TargetText(
                        prompt=prompt,
                        tokens=arrays[f"text/{i}/tokens"],
                        log_probs=arrays[f"text/{i}/log_probs"],
                        ended=ended,
                    )
                    for i, (prompt, ended) in enumerate(zip(head["prompts"], head["ended"], strict=True))
                )
                drafts = {}
                for name, entry in head["drafters"].items():
                    places = [f"drafter/{name}/{i}" for i in range(len(texts))]
                    drafts[name] = tuple(
                        DraftRows(
                            pure=entry["pure"],
                            **{part: arrays[f"{place}/{part}"] for part in ("log_probs", "coupled", "guesses")},
                            trees={kind: arrays[f"{place}/tree/{kind}"] for kind in entry["trees"]},
                        )
                        for place in places
                    )
        except (OSError, KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{file} is no record of `outrider plan`: {error}") from error
        return cls(
            texts=texts,
            drafts=drafts,
            temperature=head["temperature"],
            slowness=head["slowness"],
            header=head["header"],
        )


def hash_of(values: object) -> str:
    """SHA-256 of values of JSON."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
