"""outrider train blockwise, parallel: train a head that guesses all draft tokens at once, each without the others."""

from dataclasses import asdict

from outrider.cli.marginal_options import BlockwiseOptions, ParallelOptions
from outrider.cli.train_head import Given, Task, fitted_tree, run_head
from outrider.core.inputs import unknown
from outrider.heads.parallel import FORMS
from outrider.training.blockwise import Blockwise, blockwise_learner
from outrider.training.parallel import Parallel, parallel_learner


def run_blockwise(task: Task, heads: BlockwiseOptions) -> None:
    """Train blockwise heads, count an n-gram model, and find the tree that fits the heads' accuracies."""

    def make(given: Given) -> Blockwise:
        return blockwise_learner(
            given.target,
            loss=given.loss,
            num_heads=task.options.depth,
            intermediate_size=heads.intermediate_size,
            documents=given.documents,
            order=heads.ngram_order,
            least=heads.ngram_least,
            one_head=heads.one_head,
            begin=task.options.begin,
            decay=task.options.decay,
            seed=task.settings.seed,
            device=given.device,
        )

    about = {name: value for name, value in asdict(heads).items() if name != "tree_nodes"}
    run_head(task, "blockwise", make, about=about, more=fitted_tree(task, heads.tree_nodes))


def run_parallel(task: Task, head: ParallelOptions) -> None:
    """Train a parallel head."""
    if head.form not in FORMS:
        raise unknown("form", head.form, FORMS)

    def make(given: Given) -> Parallel:
        return parallel_learner(
            given.target,
            loss=given.loss,
            form=head.form,
            num_slots=task.options.depth - 1 if head.slots is None else head.slots,
            layers=head.layers,
            decay=task.options.decay,
            num_groups=head.num_groups,
            noise=head.noise,
            intermediate_size=head.intermediate_size,
            begin=task.options.begin,
            seed=task.settings.seed,
            device=given.device,
        )

    run_head(task, "parallel", make, about=asdict(head))
