"""lm-evaluation-harness: a small task of our own over HTTP, and by its transformers model on the same weights.

Multiple choice and the log-likelihood of a last word. The prompts are sent as token ids and as texts. All scores are
those of transformers, and all log-likelihoods up to rounding.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from recipes.client_programs.steps import MODEL, command, must, told, uses

LINES = (
    ("Tom had a red ball. He threw the ball to his", ("dog", "window", "seven", "sky")),
    ("Lily was sad because she lost her", ("doll", "quickly", "under", "is")),
    ("The sun was hot, so they drank cold", ("water", "trees", "shoes", "book")),
    ("Ben was tired. He went to", ("bed", "apple", "blue", "ran")),
    ("The cat saw a mouse and began to", ("run", "chair", "happy", "the")),
    ("Mom said, it is time to eat", ("dinner", "car", "jump", "song")),
    ("They went to the park to", ("play", "green", "him", "was")),
    ("She put on her hat and her", ("coat", "sing", "of", "big")),
    ("The little bird could", ("fly", "stone", "door", "and")),
    ("He was happy and gave her a big", ("hug", "rain", "walk", "soon")),
    ("One day, a girl named", ("Lily", "table", "eat", "very")),
    ("The boy said sorry to his", ("friend", "cloud", "sleep", "what")),
    ("It was dark, so she turned on the", ("light", "spoon", "jumped", "they")),
    ("The dog barked at the", ("cat", "slowly", "said", "an")),
    ("They built a tower with", ("blocks", "laughing", "never", "asleep")),
    ("He ate the apple because he was", ("hungry", "lamp", "door", "two")),
    ("The flowers in the garden were", ("pretty", "shouted", "him", "to")),
    ("Once upon a", ("time", "cry", "shoe", "sad")),
    ("She looked up and saw the", ("moon", "gave", "with", "kindly")),
    ("They lived happily ever", ("after", "spoon", "run", "she")),
)
CHOICES = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
"""
WORD = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{' ' + choices[0]}}}}"
metric_list:
  - metric: perplexity
    aggregation: perplexity
    higher_is_better: false
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
TASKS = {"outrider_choice": CHOICES, "outrider_word": WORD}
CLOSE = 2e-3
"""How much two log-likelihoods of several tokens may differ in float32."""


def main(url: str, target: str) -> None:
    """Try it against a server of the weights of `target`."""
    uses("lm_eval")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        data = folder / "lines.jsonl"
        rows = [{"text": text, "choices": list(words), "answer": 0} for text, words in LINES]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for name, task in TASKS.items():
            (folder / f"{name}.yaml").write_text(task.format(name=name, data=data))
        direct = evaluated(folder, "direct", "hf", f"pretrained={target},dtype=float32")
        served = f"model={MODEL},base_url={url}/v1/completions,tokenizer={target},num_concurrent=4"
        for sent in ("True", "False"):
            found = evaluated(folder, sent, "local-completions", f"{served},tokenized_requests={sent}")
            compare(found, direct, f"tokenized_requests={sent}")
        remote = f"model={MODEL},base_url={url}/v1/completions,tokenizer_backend=remote,tokenized_requests=True"
        compare(evaluated(folder, "remote", "local-completions", remote), direct, "the server's tokenizer")


def evaluated(folder: Path, name: str, model: str, arguments: str) -> dict[str, Any]:
    """The scores and the samples of both tasks."""
    out = folder / name
    words = ("lm_eval", "--model", model, "--model_args", arguments, "--tasks", ",".join(TASKS), "--batch_size", "1")
    offline = {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command(*words, "--include_path", folder, "--log_samples", "--output_path", out, "--device", "cpu", **offline)
    [results] = out.rglob("results_*.json")
    found: dict[str, Any] = {"results": json.loads(results.read_text())["results"], "samples": {}}
    for task in TASKS:
        [samples] = out.rglob(f"samples_{task}_*.jsonl")
        read = [json.loads(line) for line in samples.read_text().splitlines()]
        found["samples"][task] = sorted(read, key=lambda sample: int(sample["doc_id"]))
    return found


def compare(served: dict[str, Any], direct: dict[str, Any], how: str) -> None:
    """End the program unless a server's log-likelihoods and scores are those of transformers."""
    widest, count = 0.0, 0
    for task in TASKS:
        for ours, theirs in zip(served["samples"][task], direct["samples"][task], strict=True):
            for (one,), (other,) in zip(ours["resps"], theirs["resps"], strict=True):
                widest, count = max(widest, abs(float(one[0]) - float(other[0]))), count + 1
                must(str(one[1]) == str(other[1]), f"{how}: greedy or not, as transformers", (ours, theirs))
        for name, value in direct["results"][task].items():
            if name.startswith("acc,") or name.startswith("acc_norm,"):
                must(served["results"][task][name] == value, f"{how}: {name} as transformers", served["results"][task])
    must(count == 5 * len(LINES) and widest < CLOSE, f"{how}: log-likelihoods as transformers", (count, widest))
    score = direct["results"]["outrider_choice"]["acc,none"]
    told(how, f"{count} log-likelihoods equal up to {widest:.1e}, acc {score:g}")
