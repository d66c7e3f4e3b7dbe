"""New weights for vLLM's drafter, by its own routes. vLLM is a fake here."""

import pytest

from outrider import InputError
from outrider.serve.client.remote import Remote
from outrider.serve.vllm.launch import Launch
from outrider.serve.vllm.process import VllmProcess
from outrider.serve.vllm.weights import WeightRoutes
from tests.serve.vllm.conftest import DRAFTS


def test_after_weights_that_do_not_fit_others_may_come(gpu_python, tmp_path):
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_bytes(b"good" * 10)
    bad.write_bytes(b"bad")
    launch = Launch(target="/a/target", speculation=DRAFTS, updates_weights=True)
    with VllmProcess(gpu_python, launch) as process:
        routes = WeightRoutes(process.remote)
        with pytest.raises(InputError, match=r"^vLLM failed at /update_weights: .*no parameter named") as refused:
            routes.renew(bad)
        assert "example.org" not in str(refused.value)
        routes.renew(good)
        assert process.remote.get("/seen")["steps"][-5:] == [
            "start_draft_weight_update",
            "update_weights",
            40,
            "finish_weight_update",
            "resume",
        ]


def test_a_vllm_without_routes_for_weights_says_how_to_start_it(python, tmp_path):
    with VllmProcess(python, Launch(target="t")) as process:
        wanted = "this vLLM has no route /pause; start it with `outrider serve --engine vllm --weight-updates`"
        with pytest.raises(InputError, match=wanted):
            WeightRoutes(Remote(url=process.remote.url)).renew(tmp_path / "w")
