"""Small tokenizers of every kind that models have, and what texts for them are made of."""

from __future__ import annotations

import functools

from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN3 = LLAMA3.replace("{1,3}", "")
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_END = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT_OSS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_END}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_END}"
    rf"|\p{{N}}{{1,3}}{_REST}"
)
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}{_REST}"
)

CORPUS = (
    "The quick brown fox doesn't jump over 123 lazy dogs. It's they're I'LL we've don't\n"
    "def read(text: str) -> list[int]:\n    return [1, 22, 333]\r\n\n\tvalue == other!!\n"
    "\u4e16\u754c\u4f60\u597d \u3053\u3093\u306b\u3061\u306f \u0441\u043b\u043e\u0432\u043e "
    "caf\u00e9 na\u00efve <b> </b>   spaces      and a foo  bar\n"
)

TEXTS = (
    *("a", "the", "quick", "foo", "it's", "'LL", "don", "'t", "12345", ".", "!!", "//", "_", ">"),
    *(" ", " ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", "\0", "\u00a0", "\u3000", "\u2028"),
    *("\u200b", "\u4e16\u754c", "\u3002", "caf\u00e9", "e\u0301", "\u0301", "\U0001f642"),
    *("x\nfoo", ".\nthe", "\u3002\n\u4e16", "1\n2", "a\n_", "\n/", "\xe9\n\u0301"),
    *("\U0001f468\u200d\U0001f469", "\u01c5", "\u0600", "\x1c", "\x85", "\u2581", "\u017f"),
)

ADDED: dict[str, list[AddedToken]] = {
    "none": [],
    "plain": [
        AddedToken("<|s|>", special=True),
        AddedToken("<|s|><|e|>", special=True),
        AddedToken("<|e|>", special=True),
        AddedToken("<tool>", normalized=False),
    ],
    "stripping": [
        AddedToken("<|s|>", special=True),
        AddedToken("<|l|>", lstrip=True, special=True),
        AddedToken("<|r|>", rstrip=True, special=True),
        AddedToken("  ", normalized=False),
    ],
    "words": [
        AddedToken("<|s|>", special=True),
        AddedToken("foo", single_word=True, normalized=False),
        AddedToken("the<|s|>", normalized=False),
        AddedToken("quick", normalized=False),
    ],
    "normalized": [
        AddedToken("<|s|>", special=True),
        AddedToken("caf\u00e9", normalized=True),
        AddedToken("foo", normalized=True, lstrip=True),
    ],
    "over spaces": [AddedToken("<|s|>", special=True), AddedToken("a foo", normalized=True)],
    "normalized that strip": [
        AddedToken("<|s|>", special=True),
        AddedToken("foo", normalized=True, rstrip=True),
    ],
}


def _byte_level(splitter: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitter
    return _trained(tokenizer, bytes_too=True)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _trained(tokenizer: Tokenizer, *, bytes_too: bool = False) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet() if bytes_too else []
    trainer = trainers.BpeTrainer(vocab_size=450, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([CORPUS] * 3, trainer)
    return tokenizer


def _metaspace(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator([CORPUS] * 3, trainer)
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150,
        special_tokens=["<unk>"],
        unk_token="<unk>",  # noqa: S106
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS] * 3, trainer)
    return tokenizer


def _sentencepiece(*, prefix: bool, merges: tuple[tuple[str, str], ...] = ()) -> Tokenizer:
    """Spaces are a character of the vocabulary, words are not parted: Llama 2 and Gemma."""
    mark = "\u2581"
    all_merges = [
        *((mark, mark), ("t", "h"), ("th", "e"), (mark, "the"), ("f", "o"), ("fo", "o")),
        *((mark, "foo"), ("1", "2"), (mark, "a")),
        *merges,
    ]
    tokens = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        mark,
        *map(chr, range(33, 127)),
    ]
    tokens += [left + right for left, right in all_merges]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(dict.fromkeys(tokens))},
            merges=all_merges,
            unk_token="<unk>",  # noqa: S106
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", mark)
    if prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(mark), spaces])
    else:
        tokenizer.normalizer = spaces
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return tokenizer


def _normalized(normalizer: normalizers.Normalizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = _split(QWEN3)
    return _trained(tokenizer, bytes_too=True)


def _bert() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))  # noqa: S106
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator([CORPUS] * 3, trainer)
    return tokenizer


MAKERS = {
    "gpt-2": lambda: _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt-2 with prefix space": lambda: _byte_level(
        pre_tokenizers.ByteLevel(add_prefix_space=True)
    ),
    "smollm": lambda: _byte_level(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    ),
    "llama 3": lambda: _byte_level(_split(LLAMA3)),
    "gpt-oss": lambda: _byte_level(_split(GPT_OSS)),
    "mistral": lambda: _byte_level(_split(TEKKEN)),
    "qwen 3": lambda: _normalized(normalizers.NFC()),
    "lowercase": lambda: _normalized(normalizers.Lowercase()),
    "a pattern that joins words": lambda: _byte_level(_split(r"\w+ \w+|\s+|\S+")),
    "metaspace, always": lambda: _metaspace("always"),
    "metaspace, first": lambda: _metaspace("first"),
    "metaspace, never": lambda: _metaspace("never"),
    "unigram": _unigram,
    "llama 2": lambda: _sentencepiece(prefix=True),
    "gemma": lambda: _sentencepiece(prefix=False, merges=((">", "\u2581"), (">\u2581", "a"))),
    "bert": _bert,
}

WORDS, TOKENS, NOWHERE = "words", "added_tokens", "nowhere"
CUT = dict.fromkeys(MAKERS, WORDS) | dict.fromkeys(
    ("lowercase", "a pattern that joins words", "llama 2", "bert"), TOKENS
)
"""Where texts of each are cut if they have plain added tokens."""
LINES = {"gpt-2", "smollm", "llama 3", "gpt-oss", "mistral", "qwen 3"}
"""Of those that are cut at words, those that are cut at lines too."""


@functools.cache
def tokenizer_of(kind: str, added: str) -> Tokenizer:
    """Returns a tokenizer of a kind with added tokens; not to be changed."""
    tokenizer = MAKERS[kind]()
    tokenizer.add_tokens(ADDED[added])
    ids = tokenizer.get_vocab()
    first = min(ids, key=lambda token: ids[token])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[first, "$A", first], special_tokens=[(first, ids[first])]
    )
    return tokenizer


def texts_of(added: str, *, max_size: int = 40) -> st.SearchStrategy[str]:
    """Texts of words, spaces, rare characters and the added tokens themselves."""
    tokens = [token.content for token in ADDED[added]] or ["<|s|>"]
    parts = st.sampled_from(TEXTS) | st.sampled_from(tokens) | st.text(max_size=3)
    return st.lists(parts, max_size=max_size).map("".join)
