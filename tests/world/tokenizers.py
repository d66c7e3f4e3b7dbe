"""Small tokenizers of several kinds."""

import json

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.world.zoo import VOCAB

TEXT = """The old man went down to the sea in the morning. The sea was calm and the man was glad. He said to the sea:
give me a fish, and I will give you a song. The sea gave him nothing, for the sea has no need of songs. In the evening
the old man went home, and his wife asked him what he had brought. Nothing, he said, but the sea was calm. 1 2 3 4 5!
"""


def byte_level(size: int, text: str = TEXT, begin: str | None = None, end: str = "<|end|>") -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on a text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = [end] if begin is None else [end, begin]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=end, bos_token=begin)


def sentencepiece(size: int) -> PreTrainedTokenizerFast:
    """A BPE in SentencePiece's manner: ▁ for spaces, a space before the text, bytes as <0x41>."""
    bpe = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace()
    bpe.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    named = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=named, show_progress=False)
    bpe.train_from_iterator(TEXT.replace("\n", " ").split("."), trainer)
    whole = json.loads(bpe.to_str())
    vocab = whole["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    bpe = Tokenizer.from_str(json.dumps(whole))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def letters() -> PreTrainedTokenizerFast:
    """Every token is a letter."""
    words = Tokenizer(models.WordLevel({chr(0x4E00 + i): i for i in range(VOCAB)}, unk_token=chr(0x4E00)))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words)
