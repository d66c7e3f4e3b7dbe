"""Options of requests: how outputs are drawn, where they end, which grammar they follow."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.core.inputs import InputError, parse_json, shown, text_of
from outrider.core.option import CheckedOptions, option

if TYPE_CHECKING:
    from outrider.constraints.grammar import Grammar
    from outrider.core.types import Sampling
    from outrider.engine.generation import Generation
else:
    Grammar = Sampling = Generation = object

FORMS = {"json_schema": "json", "regex": "regex", "grammar": "grammar"}
"""Options that give a grammar, by their names in the body of a request to a server."""
DRAWING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "seed",
)
"""Options that are fields of `Sampling`."""
ENDING = ("max_new_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos")
"""Options that are fields of `Generation`."""
ENDS, GRAMMAR = "Ends of outputs", "Grammar, tools"
"""Headings in the help."""


@dataclass(frozen=True, kw_only=True)
class RequestOptions(CheckedOptions):
    """Options of requests. None takes the value of the model's generation config, or no setting.

    Attributes:
        max_new_tokens: Most tokens of an output. By default 128, in `chat` and `train data` 256.
        min_tokens: Fewest tokens before an output may end by an end token.
        temperature: Divides the logits; 0 is greedy. By default what the model's generation config says.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the likeliest tokens up to this mass, in (0, 1].
        min_p: Drop tokens below this share of the likeliest, in [0, 1].
        repetition_penalty: Above 1 discourages tokens of prompt and output.
        frequency_penalty: Subtracted once per occurrence in the output.
        presence_penalty: Subtracted once if in the output.
        logit_bias: Added to the logits of tokens, as JSON by token id, such as `{"15": -2.5}`; -Infinity forbids one.
        seed: Makes the draws repeatable, 0 .. 2**64 - 1.
        stop: End before this text; may be given several times.
        stop_token_ids: End with this token; may be given several times.
        ignore_eos: Continue after the model's end tokens.
        json_schema: Output JSON that fits a schema: a file, or its text.
        regex: Output text that matches this regular expression.
        grammar: Output text of this file's grammar: GBNF (rule `root`) or Lark (rule `start`).
        tools: Tools of a chat: a file with a JSON list of schemas.
    """

    max_new_tokens: int | None = option(None, least=1, heading=ENDS)
    min_tokens: int | None = option(None, heading=ENDS)
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: str | None = None
    seed: int | None = None
    stop: tuple[str, ...] = option((), heading=ENDS)
    stop_token_ids: tuple[int, ...] = option((), heading=ENDS)
    ignore_eos: bool = option(False, heading=ENDS)
    json_schema: str | None = option(None, heading=GRAMMAR)
    regex: str | None = option(None, heading=GRAMMAR)
    grammar: Path | None = option(None, heading=GRAMMAR)
    tools: Path | None = option(None, heading=GRAMMAR)

    def options(self) -> dict[str, Any]:
        """The options that were given."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}

    def sampling(self, usual: "Sampling") -> "Sampling":
        """The default settings, overridden by the given options."""
        from dataclasses import replace

        settings: dict[str, Any] = {name: value for name, value in self.options().items() if name in DRAWING}
        if self.logit_bias is not None:
            settings["logit_bias"] = _biases(self.logit_bias)
        return replace(usual, **settings)

    def generation(self, usual: "Sampling") -> "Generation":
        """What is asked of each request: the default settings, overridden by the given options, and the others."""
        from outrider.engine.generation import Generation

        ending = {name: value for name, value in self.options().items() if name in ENDING}
        return Generation(
            sampling=self.sampling(usual), constraint=self.constraint(), tools=self.tool_schemas(), **ending
        )

    def body(self) -> dict[str, Any]:
        """The given options as fields of a request to a server, which has its own values for the others.

        Example:
            >>> RequestOptions(max_new_tokens=4, temperature=0.0, stop=("x",)).body()
            {'max_tokens': 4, 'temperature': 0.0, 'stop': ['x']}
        """
        body: dict[str, Any] = {}
        for name, value in self.options().items():
            if name == "logit_bias":
                body[name] = parse_json(value, "logit_bias")
            elif name == "tools":
                body[name] = self.tool_schemas()
            elif name not in FORMS:
                key = "max_tokens" if name == "max_new_tokens" else name
                body[key] = list(value) if isinstance(value, tuple) else value
        if (form := self.form()) is not None:
            body["structured_outputs"] = {FORMS[form[0]]: form[1]}
        return body

    def form(self) -> tuple[str, str] | None:
        """The grammar that was given: its option, and its text. None without one."""
        forms = [name for name in ("json_schema", "regex", "grammar") if getattr(self, name) is not None]
        if len(forms) > 1:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in forms)
            raise InputError(f"{names} were given together; an output follows one of them")
        if self.json_schema is not None:
            text = self.json_schema
            inline = text.lstrip().startswith("{") or text.strip() in ("true", "false")
            schema = text if inline else text_of(Path(text), "JSON schema", "a file, or the schema itself")
            return "json_schema", schema
        if self.grammar is not None:
            return "grammar", text_of(self.grammar, "grammar", "a file")
        return None if self.regex is None else ("regex", self.regex)

    def constraint(self) -> "Grammar | None":
        """The constraint on outputs, if one was given."""
        if (form := self.form()) is None:
            return None
        from outrider.constraints.grammar import json_schema, regex, rules

        kind, text = form
        match kind:
            case "json_schema":
                return json_schema(text)
            case "regex":
                return regex(text)
            case _:
                return rules(text)

    def tool_schemas(self) -> list[dict[str, Any]] | None:
        """The tools of the file, if one was given. Raises InputError if it holds anything else."""
        if self.tools is None:
            return None
        schemas = parse_json(text_of(self.tools, "tools", "a file with a JSON list of tools"), str(self.tools))
        if not isinstance(schemas, list) or not schemas or not all(isinstance(each, dict) for each in schemas):
            raise InputError(
                f"{self.tools} must hold a JSON list of tools, such as "
                '[{"type": "function", "function": {"name": "weather", "parameters": {}}}]'
            )
        return schemas


def _biases(text: str) -> dict[int, float]:
    """Biases by token id, of a JSON object, whose keys are texts."""
    try:
        return {int(token): float(bias) for token, bias in json.loads(text).items()}
    except (AttributeError, TypeError, ValueError, OverflowError, RecursionError) as error:
        wanted = """a JSON object of token ids and numbers, such as '{"15": -2.5}'"""
        raise InputError(f"logit_bias must be {wanted}, got {shown(text)}") from error
