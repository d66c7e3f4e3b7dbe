"""outrider chat: a conversation through the tokenizer's template; keys and values are kept between turns."""

import sys
from typing import Annotated

import typer
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from outrider.cli import options
from outrider.cli.options import Setup
from outrider.engine.engine import Engine
from outrider.engine.output import succeeded
from outrider.types import InputError, Sampling


def chat(
    system: Annotated[str | None, typer.Option(help="A system message that stands before the conversation.")] = None,
    target: options.Target = None,
    drafter: options.Drafter = None,
    tree: options.Tree = "chain",
    verifier: options.Verifier = None,
    length: options.Length = None,
    decoding: options.Decoding = "step",
    allow_lossy: options.AllowLossy = False,
    max_new_tokens: options.MaxNewTokens = 256,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    max_context: options.MaxContext = None,
    compile: options.Compile = False,
    prepack: options.Prepack = None,
    device: options.Device = None,
    dtype: options.Dtype = "auto",
    attn_implementation: options.Attention = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Talk with the target. An empty line is ignored; `/reset` begins anew; `/quit` or end of input leaves."""
    engine = Setup(
        target=target,
        drafter=drafter,
        tree=tree,
        verifier=verifier,
        length=length,
        decoding=decoding,
        allow_lossy=allow_lossy,
        device=device,
        dtype=dtype,
        attn_implementation=attn_implementation,
        revision=revision,
        trust_remote_code=trust_remote_code,
        batch_size=1,
        max_context=max_context,
        compile=compile,
        prepack=prepack,
    ).engine()
    if engine.tokenizer is None or engine.tokenizer.chat_template is None:
        raise InputError("the target's tokenizer has no chat template; use `outrider generate`")
    settings = options.sampling(
        engine.sampling,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    engine.eos_ids |= _turn_markers(engine.tokenizer)
    opening = [] if system is None else [{"role": "system", "content": system}]
    messages = list(opening)
    console = Console(stderr=True, highlight=False)
    while (line := _ask(console)) is not None:
        if line == "/reset":
            messages = list(opening)
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                messages.append({"role": "assistant", "content": _answer(engine, messages, settings, max_new_tokens)})
            except InputError as error:
                if len(messages) == len(opening) + 1:
                    raise
                # What was said so far is not lost.
                messages.pop()
                console.print(f"error: {error}; /reset begins anew", style="red", markup=False)


def _turn_markers(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The special token, if any, with which the template begins a user's turn after an answer: an answer ends there."""
    talk = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
    ends, goes_on = (list(tokenizer.apply_chat_template(talk[:n], return_dict=False)) for n in (2, 3))
    following = goes_on[len(ends) :]
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    same = goes_on[: len(ends)] == ends
    return frozenset(following[:1]) & special if same else frozenset()


def _ask(console: Console) -> str | None:
    """One line of input; None at its end."""
    if sys.stdin.isatty():
        console.print("> ", style="bold", end="")
    try:
        line = input().strip()
    except (EOFError, KeyboardInterrupt):
        return None
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8 text: {error.reason} at byte {error.start}") from error
    return None if line == "/quit" else line


def _answer(engine: Engine, messages: list[dict[str, str]], settings: Sampling, max_new_tokens: int) -> str:
    """Print the assistant's turn as it comes, and give it back. An interrupt ends the turn, not the conversation."""
    id = engine.add(messages, max_new_tokens=max_new_tokens, sampling=settings)
    output = None
    try:
        while output is None:
            for update in engine.step():
                print(succeeded(update).text, end="", flush=True)
                output = update.output
    except KeyboardInterrupt:
        output = engine.cancel(id)
    print()
    if output is None:
        return ""
    line = f"[{len(output.tokens)} tokens, {output.num_steps} steps, block efficiency {output.block_efficiency:.2f}]"
    Console(stderr=True, highlight=False, markup=False).print(line, style="dim")
    return output.text
