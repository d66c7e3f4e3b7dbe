"""Whether an engine says with this drafter what Outrider says, in about as many steps.

`python check.py --target TARGET` decodes the prompts of `expected.json` with the engine, by `engine.py` beside this
file. `--url URL` asks a server that runs instead. It needs Python and the engine, and not Outrider.

The exit status is 1 if an output differs or if the steps do.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

TOLERANCE = 0.03
"""How much tokens per step may differ, as a share."""
Decode = Callable[[Mapping[str, Any], str, str | None], Mapping[str, Any]]
"""Takes what is expected, the target and the address of a server. Returns `tokens` of each prompt, no more than are
expected of it, and `steps`: how often the target verified a draft; None if the engine does not tell."""


def judged(expected: Mapping[str, Any], decoded: Mapping[str, Any]) -> tuple[list[str], bool]:
    """What to print, and whether all is well.

    In float32 every token must be the same. In other dtypes two tokens may be equally likely up to rounding, so
    that engines may choose otherwise; then only the steps are compared, and differences are told.
    """
    pairs = list(zip(expected["tokens"], decoded["tokens"], strict=True))
    wrong = [i for i, (ours, theirs) in enumerate(pairs) if list(ours) != list(theirs)]
    lines = [f"{len(pairs) - len(wrong)} of {len(pairs)} outputs have the tokens that Outrider expects"]
    for i in wrong:
        ours, theirs = pairs[i]
        place = next((k for k, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(map(len, pairs[i])))
        lines.append(f"output {i} differs at token {place}: {theirs[place : place + 4]}, not {ours[place : place + 4]}")
    good = not wrong or expected["dtype"] != "float32"
    if decoded.get("steps"):
        verified = expected["verified_tokens"] + sum(len(theirs) - len(ours) for ours, theirs in pairs)
        here, there = expected["tokens_per_step"], verified / decoded["steps"]
        lines.append(f"{there:.3f} tokens per step; Outrider has {here:.3f}")
        near = abs(there - here) <= TOLERANCE * here
        if not near and there < here:
            lines.append("too few draft tokens are accepted: a norm, a hidden state or a position differs")
        good = good and near
    else:
        lines.append("the engine does not say how many steps it took")
    return lines, good


def main(decode: Decode, arguments: Sequence[str] | None = None) -> int:
    """Compare, print, and return the exit status."""
    expected = json.loads((Path(__file__).parent / "expected.json").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description="Whether the engine decodes as Outrider does.")
    parser.add_argument("--target", default=expected["target"], help="The target's hub id or folder.")
    parser.add_argument("--url", help="Address of a server of the engine, instead of starting the engine.")
    options = parser.parse_args(arguments)
    if options.target is None and options.url is None:
        parser.error("give --target, the target's hub id or folder, or --url")
    lines, good = judged(expected, decode(expected, options.target, options.url))
    print("\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main(importlib.import_module("engine").decode))
