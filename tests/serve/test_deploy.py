"""What lies in `deploy/` fits the server: options exist, and the dashboard asks for series that are told."""

import json
import re
from pathlib import Path

import typer

from outrider.cli.commands import app

DEPLOY = Path(__file__).parent.parent.parent / "deploy"


def test_every_series_of_the_dashboard_is_told(client):
    board = json.loads((DEPLOY / "grafana" / "outrider.json").read_text("utf-8"))
    asked = " ".join(target["expr"] for panel in board["panels"] for target in panel["targets"])
    names = set(re.findall(r"\b(?:vllm|outrider):\w+", asked))
    # Requests by route are told from the first one on.
    client.get("/health")
    text = client.get("/metrics").text
    assert len(names) > 15
    assert [name for name in sorted(names) if not re.search(rf"^{name}[ {{]", text, re.MULTILINE)] == []


def test_options_of_the_containers_exist():
    options = {name for param in typer.main.get_command(app).commands["serve"].params for name in param.opts}
    text = (DEPLOY / "Containerfile").read_text("utf-8")
    [line] = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    words = json.loads(line)
    assert words[:2] == ["outrider", "serve"]
    assert {word for word in words if word.startswith("--")} <= options


def test_the_version_of_torch_is_that_of_the_constraints():
    pinned = re.search(r"^torch==\S+$", (DEPLOY.parent / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    assert f"ARG TORCH={pinned[0]}\n" in (DEPLOY / "Containerfile").read_text("utf-8")
