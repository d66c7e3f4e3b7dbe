"""Which options of a command a backend can use: the one place that says so. Imports nothing heavy."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from outrider.core.inputs import InputError
from outrider.setup import Setup

LEAVE_OUT = "it is about Outrider's own engine; leave it out"
WORKLOAD = frozenset(
    ("workload", "num_prompts", "rounds", "concurrency", "rate", "trace", "trace_speed", "trace_unit", "trace_block")
)
"""Options of `bench` that say what is asked, and when."""


@dataclass(frozen=True, kw_only=True)
class BackendSupport:
    """What a kind of backend can use of the options of a command.

    Attributes:
        option: The option that chooses the backend.
        used: The options that it can use; None are all but those of `instead`.
        instead: What to do in place of options that it cannot use.
    """

    option: str
    used: frozenset[str] | None = None
    instead: Mapping[str, str] = field(default_factory=dict)

    def check(self, *groups: Any) -> None:
        """Raise InputError for an option that was given and that the backend cannot use.

        Args:
            groups: Options as dataclasses, or by name.

        Example:
            >>> URL.check(Setup(drafter="ngram"))
            Traceback (most recent call last):
                ...
            outrider.core.inputs.InputError: --drafter is not for --url: the server has its own setup
        """
        for name in (name for group in groups for name in given_options(group)):
            if name in self.instead if self.used is None else name not in self.used:
                advice = self.instead.get(name, LEAVE_OUT)
                raise InputError(f"--{name.replace('_', '-')} is not for {self.option}: {advice}")


def given_options(group: Any) -> list[str]:
    """The names of the options that are not at their defaults."""
    if isinstance(group, Mapping):
        return [name for name, value in group.items() if value]
    return [each.name for each in fields(group) if getattr(group, each.name) != each.default]


ENGINE = BackendSupport(
    option="Outrider's own engine",
    instead={"weight_updates": "its server takes new weights of the drafter where it has an --admin-key"},
)
VLLM = BackendSupport(
    option="--engine vllm",
    used=WORKLOAD
    | {"target", "drafter", "tree", "verifier", "length", "decoding", "allow_lossy", "tokenizer", "revision", "dtype"}
    | {"max_slots", "max_context", "ignore_generation_config", "trust_remote_code", "threads", "objective"}
    | {"host", "port", "api_key", "allow_no_key", "served_model_name", "cors_origin", "chat_template"}
    | {"trust_request_chat_template", "weight_updates", "engine", "engine_args", "vllm_python"},
    instead={
        "vocab_size": "vLLM draws from all token ids; leave it out",
        "max_prefill_tokens": "vLLM has --max-num-batched-tokens; give it with --engine-args",
        "max_warm_slots": "vLLM keeps prefixes of prompts in all memory that its cache has; leave it out",
        "max_warm_tokens": "vLLM keeps prefixes of prompts in all memory that its cache has; leave it out",
        "device": "vLLM runs on the device that its build is for; leave it out",
        "weights": "vLLM has --quantization; give it with --engine-args",
        "activations": "vLLM rounds activations where its --quantization does; give it with --engine-args",
        "device_map": "vLLM places layers by its own flags; give --engine-args '--tensor-parallel-size 2' or similar",
        "tp_plan": "vLLM divides a target by its own flags; give --engine-args '--tensor-parallel-size 2' or similar",
        "quantization_config": "vLLM has --quantization; give it with --engine-args",
        "attn_implementation": "vLLM has --attention-backend; give it with --engine-args",
        "pad_to": "vLLM lays out its own batches; leave it out",
        "forward": "vLLM runs its own forwards; leave it out",
        "reproducible": "vLLM has no verifier `coupled`, so texts depend on the batch; leave it out",
        "learn": "train with `outrider learn`, from a log of prompts and answers",
        "with": "name the drafter with --drafter and --length",
        "other_drafter": "vLLM has one drafter; leave it out",
        "response_template": "give vLLM's --reasoning-parser and --tool-call-parser with --engine-args",
        "priority": "give vLLM's --scheduling-policy priority with --engine-args",
        "per_request_metrics": "vLLM's answers always have their summary; leave it out",
        "otlp_traces_endpoint": "vLLM has the same flag; give it with --engine-args",
        "admin_key": "vLLM has no routes of Outrider's; --weight-updates opens its own ones for new weights",
        "log_answers": "vLLM keeps no answers; let a gateway before it write them, for `outrider learn --from FILE`",
    },
)
URL = BackendSupport(
    option="--url",
    used=WORKLOAD | {"objective"},
    instead=dict.fromkeys((each.name for each in fields(Setup)), "the server has its own setup")
    | dict.fromkeys(("engine", "engine_args", "vllm_python", "learn"), "the server has its own engine; leave it out")
    | {"with": "a server has one configuration; leave it out"},
)
