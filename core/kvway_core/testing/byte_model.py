"""A model folder whose tokens are bytes: real files for real tokenizers, no download."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvway_core.token_bytes import byte_alphabet

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
IM_START_ID = 256
IM_END_ID = 257
VOCAB_SIZE = 258
MAX_MODEL_LEN = 8192

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_byte_model(model_dir: Path) -> Path:
    """Writes a model folder and returns it. Token id b is byte b; two special tokens follow.

    The folder loads with `PromptEncoder.load` and with transformers' AutoTokenizer. Its config
    describes a tiny Llama, so that a model of it can be made with random weights; there are none.

    Args:
        model_dir: Made if it does not exist; files of the same names are replaced.
    """
    model_dir.mkdir(parents=True, exist_ok=True)
    _tokenizer().save(str(model_dir / "tokenizer.json"))
    _write_json(
        model_dir / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MAX_MODEL_LEN,
            "eos_token": IM_END,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(
        model_dir / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": MAX_MODEL_LEN,
            "bos_token_id": IM_START_ID,
            "eos_token_id": IM_END_ID,
            "tie_word_embeddings": True,
        },
    )
    return model_dir


def _tokenizer() -> Tokenizer:
    """Returns the tokenizer: byte-level BPE without a single merge."""
    vocab = {char: byte for byte, char in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (IM_START, IM_END)]
    )
    return tokenizer


def _write_json(path: Path, content: dict[str, object]) -> None:
    """Writes a JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
