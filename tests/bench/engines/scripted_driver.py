"""A driver without an engine: its mode says which answers it gives."""

import os
import signal

from outrider.bench.engines.driver import Driver, DriverRequest, EngineOutput, Options, serve


class Scripted(Driver):
    """Answers as its mode says."""

    def start(self, options: Options) -> None:
        if options.mode == "does not start":
            raise RuntimeError("no such instruction")
        if options.mode == "eagle":
            raise ValueError("no such head")
        self.mode, self.answered = options.mode, 0

    def ask(self, asked: DriverRequest) -> EngineOutput:
        self.answered += 1
        if self.mode == "alone" and len(asked.prompts) > 1:
            raise ValueError("one prompt\nat a time")
        if self.mode == "dies" and self.answered > 3:
            os.write(2, b"a first line\nout of luck\n")
            os.kill(os.getpid(), signal.SIGKILL)
        print("engines print what they like")
        length = asked.new_tokens - (self.mode == "short")
        counts = {"drafts": 2, "draft_tokens": 10, "accepted_tokens": 5} if self.mode == "medusa" else {}
        return EngineOutput(tokens=[[7] * length for _ in asked.prompts], counts=counts)


if __name__ == "__main__":
    serve(Scripted())
