"""The example for Kubernetes starts vLLM as an export says, and its parts fit each other."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.handoff.exported_drafter import ExportedDrafter
from outrider.heads.eagle3 import SPEC

FILE = Path(__file__).parent.parent.parent / "deploy" / "kubernetes" / "vllm.yaml"


@pytest.fixture(scope="module")
def parts() -> dict[tuple[str, str], Any]:
    found = list(yaml.safe_load_all(FILE.read_text(encoding="utf-8")))
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def test_the_parts_name_each_other(parts):
    pod = parts["Deployment", "vllm"]["spec"]["template"]
    assert parts["Deployment", "vllm"]["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    assert parts["Service", "vllm"]["spec"]["selector"] == pod["metadata"]["labels"]
    [container] = pod["spec"]["containers"]
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == volumes.keys()
    claims = {
        each["persistentVolumeClaim"]["claimName"] for each in volumes.values() if "persistentVolumeClaim" in each
    }
    assert claims == {name for kind, name in parts if kind == "PersistentVolumeClaim"}
    assert parts["Service", "vllm"]["spec"]["ports"][0]["targetPort"] in {each["name"] for each in container["ports"]}
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"
    assert container["resources"]["requests"]["nvidia.com/gpu"] == container["resources"]["limits"]["nvidia.com/gpu"]


def test_its_command_is_that_of_an_export(parts):
    [container] = parts["Deployment", "vllm"]["spec"]["template"]["spec"]["containers"]
    values = parts["ConfigMap", "speculative"]["data"]
    arguments = [re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], each) for each in container["args"]]
    config = json.loads(arguments[arguments.index("--speculative-config") + 1])
    drafter = ExportedDrafter(
        name="eagle3", method="eagle3", exports=SPEC.exports, target=None, dtype="bfloat16", length=5, lengths={}
    )
    assert config == {**drafter.speculative(), "model": "/drafter"}
    assert (arguments[0], container["command"]) == ("org/target", ["vllm", "serve"])
