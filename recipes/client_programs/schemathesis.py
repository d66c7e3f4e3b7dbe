"""schemathesis: requests made from the server's OpenAPI description, right ones and wrong ones.

No answer may be an error of the server, and every status and content type must be documented.
"""

import re
import tempfile
from pathlib import Path

from recipes.client_programs.steps import ADMIN_KEY, command, must, told, uses

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
HOOKS = '''
import schemathesis

LONG = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@schemathesis.hook
def map_body(context, body):
    """Short outputs: what is tried is the answer, not the model."""
    if isinstance(body, dict):
        for name in LONG:
            if isinstance(body.get(name), int) and not isinstance(body[name], bool):
                body[name] = min(body[name], 4)
        if isinstance(body.get("n"), int) and not isinstance(body["n"], bool):
            body["n"] = min(body["n"], 17)
        if "prompt" in body or "messages" in body:
            body.setdefault("max_tokens", 4)
        if "input" in body:
            body.setdefault("max_output_tokens", 4)
    return body
'''


def main(url: str, target: str, examples: str = "40") -> None:
    """Try it against a server.

    Args:
        examples: Requests of each route and phase.
    """
    uses("schemathesis")
    with tempfile.TemporaryDirectory() as made:
        hooks = Path(made) / "hooks.py"
        hooks.write_text(HOOKS)
        words = ("schemathesis", "run", f"{url}/openapi.json", "--checks", CHECKS, "--max-examples", examples)
        rest = ("--seed", "1", "--phases", "examples,coverage,fuzzing", "--request-timeout", "60", "--workers", "1")
        key = ("-H", f"Authorization: Bearer {ADMIN_KEY}", "--no-color")
        printed = command(*words, *rest, *key, SCHEMATHESIS_HOOKS=str(hooks), PYTHONPATH="")
    # With a failure its status is 1, which ends this program.
    tried = re.search(r"Operations:\s+(\d+) selected / (\d+) total", printed)
    must(tried and tried[1] == tried[2], "all operations are tried", printed[-1500:])
    passed = re.findall(r"(Coverage|Fuzzing) \(in .*?\)\s+\S+ (\d+) passed", printed)
    most = tried[1] if tried else ""
    must(passed == [("Coverage", most), ("Fuzzing", most)], "all operations pass", printed[-1500:])
    cases = re.search(r"(\d[\d,]*) generated", printed)
    made_all = f"; {cases[1]} requests" if cases else ""
    told(f"coverage and fuzzing: {most} of {most} operations{made_all}", printed[-200:])
