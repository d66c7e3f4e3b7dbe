"""A driver without an engine: its mode says which answers it gives."""

import os
import signal

from recipes.engines.talk import Asked, Decode, Options, drive


def load(options: Options) -> Decode:
    if options.mode == "does not start":
        raise RuntimeError("no such instruction")
    if options.mode == "eagle":
        raise ValueError("no such head")
    answered = 0

    def decode(asked: Asked) -> list[list[int]]:
        nonlocal answered
        answered += 1
        if options.mode == "alone" and len(asked.prompts) > 1:
            raise ValueError("one prompt\nat a time")
        if options.mode == "dies" and answered > 3:
            os.write(2, b"a first line\nout of luck\n")
            os.kill(os.getpid(), signal.SIGKILL)
        print("engines print what they like")
        length = asked.new_tokens - (options.mode == "short")
        return [[7] * length for _ in asked.prompts]

    if options.mode == "medusa":
        decode.counts = lambda: {"drafts": 2, "draft_tokens": 10, "accepted_tokens": 5}  # type: ignore[attr-defined]
    return decode


if __name__ == "__main__":
    drive(load)
