"""The losses of distillation: their laws, their gradients, and the same values in chunks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Float
from torch import Tensor

from outrider.core.types import InputError
from outrider.learning.divergences import (
    CACHED,
    NAMED,
    among_likeliest,
    chunked,
    cross_entropy,
    divergence,
    over_top_rows,
)
from outrider.learning.top_rows import TopRows

NAMES = [*NAMED, "jsd:beta=0.3", "lk:decay=1"]


def pairs(rows: int = 6, vocab: int = 11, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    """Random logits of a target and a drafter, in float64."""
    return scale * torch.randn(rows, vocab, dtype=torch.float64), scale * torch.randn(rows, vocab, dtype=torch.float64)


def closed_form(name: str, p: Float[Tensor, "n vocab"], q: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    """The gradient with respect to the drafter's logits, from the papers."""
    below = (q < p).double()
    tvd = q * ((q * below).sum(-1, keepdim=True) - below)
    alpha = torch.minimum(p, q).sum(-1, keepdim=True)
    kind, _, field = name.partition(":")
    if kind == "fkl":
        return q - p
    if kind == "rkl":
        ratio = (q / p).log()
        return q * (ratio - (q * ratio).sum(-1, keepdim=True))
    if kind == "jsd":
        beta = float(field.partition("=")[2] or 0.5)
        g = (1 - beta) * (q / (beta * p + (1 - beta) * q)).log()
        return q * (g - (q * g).sum(-1, keepdim=True))
    if kind == "nla":
        return tvd / alpha
    if kind == "lk":
        share = torch.exp(-float(field.partition("=")[2] or 3) * alpha)
        return share * (q - p) + (1 - share) * tvd
    return tvd


@pytest.mark.parametrize("name", NAMES)
def test_gradient_is_the_closed_form(name: str) -> None:
    target, draft = pairs()
    draft.requires_grad_()
    (gradient,) = torch.autograd.grad(divergence(name)(target, draft).sum(), draft)
    expected = closed_form(name, target.softmax(-1), draft.detach().softmax(-1))
    assert torch.allclose(gradient, expected, rtol=1e-9, atol=1e-12), (gradient - expected).abs().max()


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("lk")])
def test_gradient_agrees_with_finite_differences(name: str) -> None:
    target, draft = pairs(rows=3, vocab=7)
    of, width = divergence(name), 1e-6
    expected = closed_form(name, target.softmax(-1), draft.softmax(-1))
    for row in range(3):
        for token in range(7):
            nudge = torch.zeros_like(draft)
            nudge[row, token] = width
            slope = (of(target, draft + nudge) - of(target, draft - nudge))[row] / (2 * width)
            assert abs(slope - expected[row, token]) < 1e-7, (row, token, slope, expected[row, token])


def test_gradient_of_the_mixed_loss_holds_its_share_fixed() -> None:
    target, draft = pairs(rows=2, vocab=5)
    of, width = divergence("lk"), 1e-6
    alpha = torch.minimum(target.softmax(-1), draft.softmax(-1)).sum(-1)
    share = torch.exp(-3 * alpha)
    expected = closed_form("lk", target.softmax(-1), draft.softmax(-1))

    def held(logits: Tensor) -> Tensor:
        return share * divergence("fkl")(target, logits) + (1 - share) * divergence("tvd")(target, logits)

    assert torch.allclose(of(target, draft), held(draft))
    for token in range(5):
        nudge = torch.zeros_like(draft)
        nudge[:, token] = width
        slope = (held(draft + nudge) - held(draft - nudge)) / (2 * width)
        assert torch.allclose(slope, expected[:, token], atol=1e-7), (slope, expected[:, token])


@pytest.mark.parametrize("name", [*NAMES, *(f"{name}:top_k=4" for name in NAMED)])
def test_no_gradient_reaches_the_target(name: str) -> None:
    target, draft = pairs()
    target.requires_grad_(), draft.requires_grad_()
    divergence(name)(target, draft).sum().backward()
    assert target.grad is None
    assert draft.grad is not None


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32), scale=st.floats(0.01, 8))
@settings(max_examples=30, deadline=None)
def test_zero_iff_equal(name: str, seed: int, scale: float) -> None:
    torch.manual_seed(seed)
    target, draft = pairs(scale=scale)
    of = divergence(name)
    assert (of(target, draft) > 0).all()
    shift = 3.0
    assert of(target, target + shift).abs().max() < 1e-12


@given(seed=st.integers(0, 2**32), scale=st.floats(0.01, 30))
@settings(max_examples=30, deadline=None)
def test_total_variation_is_one_minus_acceptance(seed: int, scale: float) -> None:
    torch.manual_seed(seed)
    target, draft = pairs(scale=scale)
    alpha = torch.minimum(target.softmax(-1), draft.softmax(-1)).sum(-1)
    assert torch.allclose(divergence("tvd")(target, draft), 1 - alpha, atol=1e-12)
    assert torch.allclose(divergence("nla")(target, draft), -alpha.log(), rtol=1e-9, atol=1e-12)


def test_jensen_shannon_tends_to_both_kls() -> None:
    target, draft = pairs(scale=1.0)
    small = 1e-6
    forward = divergence(f"jsd:beta={small}")(target, draft) / small
    backward = divergence(f"jsd:beta={1 - small}")(target, draft) / small
    assert torch.allclose(forward, divergence("fkl")(target, draft), rtol=1e-4)
    assert torch.allclose(backward, divergence("rkl")(target, draft), rtol=1e-4)


def test_symmetric_jensen_shannon_does_not_tell_target_from_drafter() -> None:
    target, draft = pairs()
    assert torch.allclose(divergence("jsd")(target, draft), divergence("jsd")(draft, target))


def test_divergences_of_bfloat16_logits_are_computed_in_float32() -> None:
    target, draft = (each.bfloat16() for each in pairs())
    for name in NAMES:
        found = divergence(name)(target, draft)
        assert found.dtype == torch.float32
        assert torch.equal(found, divergence(name)(target.float(), draft.float()))


def test_tokens_that_the_target_rules_out_cost_what_is_drafted_there() -> None:
    target = torch.tensor([[0.0, 0.0, -torch.inf]])
    draft = torch.zeros(1, 3, requires_grad=True)
    for name, expected in [("fkl", math.log(1.5)), ("tvd", 1 / 3), ("nla", math.log(1.5)), ("rkl", math.inf)]:
        assert divergence(name)(target, draft).item() == pytest.approx(expected), name
    divergence("fkl")(target, draft).sum().backward()
    assert torch.allclose(draft.grad, torch.tensor([[-1 / 6, -1 / 6, 1 / 3]]))


def test_nothing_in_common_is_still_finite_and_has_a_gradient() -> None:
    target, draft = torch.tensor([[0.0, -500.0]]), torch.tensor([[-500.0, 0.0]], requires_grad=True)
    found = divergence("nla")(target, draft)
    found.sum().backward()
    assert found.item() == pytest.approx(500 - math.log(2))
    assert draft.grad.abs().max() > 0.1


@pytest.mark.parametrize("name", NAMED)
@given(seed=st.integers(0, 2**32), k=st.integers(1, 10))
@settings(max_examples=20, deadline=None)
def test_merged_outcomes_make_no_divergence_larger(name: str, seed: int, k: int) -> None:
    torch.manual_seed(seed)
    target, draft = pairs()
    if name == "lk":  # Its share of the Kullback-Leibler divergence depends on the acceptance.
        name = "lk:decay=0"
    joint = "," if ":" in name else ":"
    whole, few = divergence(name)(target, draft), divergence(f"{name}{joint}top_k={k}")(target, draft)
    assert (few <= whole + 1e-4).all(), (few, whole)
    assert torch.allclose(few, over_top_rows(divergence(name), TopRows.of(target, k), draft))


def test_top_k_is_blind_to_what_is_within_the_rest() -> None:
    target, draft = torch.tensor([[0.6, 0.2, 0.1, 0.1]]).log(), torch.tensor([[0.6, 0.0001, 0.1999, 0.2]]).log()
    assert divergence("tvd")(target, draft).item() == pytest.approx(0.1999, abs=1e-6)
    assert divergence("tvd:top_k=1")(target, draft).item() == pytest.approx(0, abs=1e-6)


def test_hard_labels_cost_the_negative_log_probability() -> None:
    _, draft = pairs()
    tokens = torch.tensor([0, 1, 2, 3, 4, 5])
    expected = -draft.log_softmax(-1)[torch.arange(6), tokens]
    assert torch.allclose(cross_entropy(tokens, draft), expected)


@pytest.mark.parametrize("name", [*NAMES, "fkl:top_k=3"])
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunked_equals_unchunked(name: str, chunk: int) -> None:
    torch.manual_seed(1)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    head = torch.nn.Linear(5, 11).double()
    target, of = torch.randn(7, 11, dtype=torch.float64), divergence(name)
    weights = torch.rand(7, dtype=torch.float64)

    def gradients(values: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad((weights * values).sum(), [hidden, head.weight, head.bias]))

    whole = of(target, head(hidden))
    parts = chunked(lambda rows, logits: of(target[rows], logits), hidden, head, chunk=chunk)
    assert torch.allclose(parts, whole, rtol=1e-12)
    for ours, expected in zip(gradients(parts), gradients(whole), strict=True):
        assert torch.allclose(ours, expected, rtol=1e-9, atol=1e-12)


def test_the_forward_kl_of_more_rows_than_the_cache_holds_is_that_of_each_row() -> None:
    rows, vocab = 2 * (CACHED // 50_000) + 1, 50_000
    target, draft = pairs(rows, vocab)
    target[1, 7] = -torch.inf
    draft.requires_grad_()
    weights, of = torch.rand(rows, dtype=torch.float64), divergence("fkl")
    values = of(target, draft)
    (gradient,) = torch.autograd.grad((weights * values).sum(), draft)
    alone = torch.cat([of(target[i : i + 1], draft[i : i + 1]) for i in range(rows)])
    assert torch.allclose(values, alone, rtol=1e-12)
    p, q = target.softmax(-1), draft.detach().softmax(-1)
    assert torch.allclose(values, torch.where(p > 0, p * (p / q).log(), 0).sum(-1), rtol=1e-9)
    assert torch.allclose(gradient, weights[:, None] * (q - p), rtol=1e-9, atol=1e-15)


def test_a_token_is_among_the_likeliest_if_fewer_are_likelier() -> None:
    logits, tokens = torch.randn(40, 9), torch.randint(0, 9, (40,))
    order = logits.argsort(-1, descending=True)
    for count in (1, 3, 9, 20):
        expected = [token in order[row, :count].tolist() for row, token in enumerate(tokens.tolist())]
        assert among_likeliest(tokens, logits, count).tolist() == expected
    assert not among_likeliest(tokens + 9, logits, 9).any()


def test_chunks_of_a_large_vocabulary_keep_no_logits() -> None:
    vocab, rows, chunk = 128_000, 32, 4
    hidden = torch.randn(rows, 8, requires_grad=True)
    head, target_head = torch.nn.Linear(8, vocab, bias=False), torch.nn.Linear(8, vocab, bias=False)
    states, largest, kept = torch.randn(rows, 8), [0], [0]

    def loss(where: slice, logits: Tensor) -> Tensor:
        largest[0] = max(largest[0], logits.numel())
        with torch.no_grad():
            target = target_head(states[where])
        return divergence("tvd")(target, logits)

    def pack(tensor: Tensor) -> Tensor:
        kept[0] += tensor.numel() if tensor.data_ptr() != head.weight.data_ptr() else 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        values = chunked(loss, hidden, head, chunk=chunk)
    assert largest[0] == chunk * vocab
    assert kept[0] < vocab, "the graph holds logits"
    values.sum().backward()
    assert hidden.grad is not None
    assert head.weight.grad is not None
    assert largest[0] == chunk * vocab


def test_no_rows_have_no_loss_and_a_gradient_of_zero() -> None:
    hidden, head = torch.zeros(0, 4, requires_grad=True), torch.nn.Linear(4, 9)
    found = chunked(lambda rows, logits: divergence("fkl")(torch.zeros(0, 9), logits), hidden, head)
    found.sum().backward()
    assert found.shape == (0,)
    assert not head.weight.grad.any()


@pytest.mark.parametrize(
    ("given_name", "message"),
    [
        ("rkll", "unknown divergence 'rkll'; did you mean 'rkl'? Available: fkl, rkl, jsd, tvd, nla, lk"),
        ("jsd:bet=1", "unknown divergence 'jsd' field 'bet'; did you mean 'beta'? Available: beta, top_k"),
        ("jsd:beta=half", "divergence 'jsd' field 'beta' must be a number, got 'half'"),
        ("jsd:beta=1", "beta must be above 0 and below 1, got 1.0; use fkl or rkl at the ends"),
        ("fkl:top_k=0", "divergence 'fkl' field 'top_k' must be >= 1, got 0"),
        ("lk:decay=-1", "decay must be >= 0, got -1.0"),
    ],
)
def test_wrong_names_get_one_sentence(given_name: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        divergence(given_name)
    assert str(raised.value) == message
