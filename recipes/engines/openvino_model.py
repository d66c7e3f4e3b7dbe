"""A Hugging Face model in OpenVINO's format: `openvino_model.py SOURCE OUT`, run where optimum-intel is installed.

The weights are written in float32, which holds those of bfloat16 exactly; what is computed in is the driver's choice.
"""

import sys
from pathlib import Path

import openvino
import torch
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM
from transformers import PreTrainedTokenizerFast


def convert(source: Path, out: Path) -> None:
    """Write the model and its tokenizer, without which no pipeline can be made."""
    options = {"export": True, "compile": False, "load_in_8bit": False, "torch_dtype": torch.float32}
    model = OVModelForCausalLM.from_pretrained(source, **options)
    model.save_pretrained(out)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"))
    there, back = convert_tokenizer(tokenizer, with_detokenizer=True)
    openvino.save_model(there, out / "openvino_tokenizer.xml")
    openvino.save_model(back, out / "openvino_detokenizer.xml")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
