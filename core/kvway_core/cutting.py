r"""Where a text may be cut so that its pieces, tokenized one by one, give the text's own tokens.

    <|im_start|>system\nYou are ..<|im_end|>\n | <|im_start|>user\nSome long | text.\n | More of it
                             before an added token          before a space     before a line

Three kinds of cuts are certain:

* Before an added token that is found in the text as it is written, before normalization. Whatever
  tokenizers does, it first takes these out, and treats what lies between them apart. Not before a
  token that takes white space along or asks what stands beside it. The piece begins *with* the
  token, so that what treats only the beginning of a text otherwise (Metaspace) sees none.
* Before a space behind something that is no white space, where no word goes on over it: the
  pre-tokenizer splits there, whatever stands around; or, where there is no pre-tokenizer, nothing
  in the vocabulary has the two side by side, so that no merge can join them.
* Before a word that begins a line, behind a line that ends in no white space: some scripts have no
  spaces. The pre-tokenizer must split at white space and put nothing before a text.

What is not recognised here is not cut. `Cutter.of` reads the tokenizer's own parts; whoever uses
the result compares it with the whole once more on the tokenizer itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

_SPECIAL_CHARS: Final = 512
_INNER_CHARS: Final = 2048
_WINDOW_CHARS: Final = 32 * 1024
_NO_SPACE: Final = r"[!-~\w\u2018-\u201f\u2026\u3001-\u3003\u3008-\u3011\uff01-\uff5e]"
"""Characters that are white space to nobody, whichever version of Unicode they go by."""
_LINE: Final = r"\n\w"
"""The end of a line and a word: patterns may take other signs along with the end of a line."""

_MARK: Final = "\u2581"
"""What SentencePiece writes for a space."""

_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)
_SAFE: Final = frozenset(
    {
        *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", _CONTRACTIONS),
        *(r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+"),
        *(r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}", r"\p{N}{1,3}"),
        *(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
        *(_WORDS[0], _WORDS[1], f"{_WORDS[0]}{_CONTRACTIONS}?", f"{_WORDS[1]}{_CONTRACTIONS}?"),
        *(r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    }
)
"""Alternatives of the patterns of GPT-2, Llama 3, Qwen, Mistral and gpt-oss.

None of them matches a space behind anything but white space, and none looks back. With `\\s+`
among them, a space behind something else always begins a match.
"""


@dataclass(frozen=True, slots=True)
class Cutter:
    """Finds the cuts of one tokenizer. They depend on what is before them and at them alone.

    So two texts that begin alike are cut alike, as far as they agree and a token more.

    Attributes:
        specials: Every added token that is found before normalization, the longest first; None to
            cut at none.
        avoided: Those of them that are not cut at.
        cuts_specials: Whether there are others.
        inner: What ends in a character that may be parted from what is before it: a space, or the
            first of a line; None to cut inside no text.
        why: Why not, in words; empty where both kinds of cuts are made.
        min_special: Characters of a piece that ends at an added token, at least.
        min_inner: Characters of any other piece but the last, at least.
        longest: Characters of the longest added token.
        window: Characters that are searched at once: no other thread runs meanwhile.
    """

    specials: re.Pattern[str] | None
    avoided: frozenset[str]
    cuts_specials: bool
    inner: re.Pattern[str] | None
    why: str
    min_special: int = _SPECIAL_CHARS
    min_inner: int = _INNER_CHARS
    longest: int = 0
    window: int = _WINDOW_CHARS

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """Returns how a tokenizer's texts may be cut.

        Complexity:
            O(vocabulary) where there is no pre-tokenizer, else O(added tokens).
        """
        added = list(tokenizer.get_added_tokens_decoder().values())
        found = [token for token in added if not token.normalized and token.content]
        words_matter = any(token.single_word for token in found)
        avoided = frozenset(
            token.content for token in found if not _parts(token, words_matter=words_matter)
        )
        cuttable = len(avoided) < len(found)
        pattern, why = _inner_cut(tokenizer, added)
        if not cuttable:
            why = "; ".join(filter(None, ("no added token to cut before", why)))
        return cls(
            specials=re.compile(_longest_first(t.content for t in found)) if found else None,
            avoided=avoided,
            cuts_specials=cuttable,
            inner=pattern,
            why=why,
            longest=max((len(token.content) for token in found), default=0),
        )

    @property
    def kind(self) -> str:
        """Where texts are cut: "words" (and added tokens), "added_tokens" or "nowhere"."""
        if self.inner is not None:
            return "words"
        return "added_tokens" if self.cuts_specials else "nowhere"

    def without_inner(self, why: str) -> Cutter:
        """Returns a cutter for added tokens alone."""
        return replace(self, inner=None, why=why)

    def without_any(self, why: str) -> Cutter:
        """Returns a cutter that leaves texts whole."""
        return replace(self, specials=None, cuts_specials=False, inner=None, why=why)

    def often(self) -> Cutter:
        """Returns a cutter that cuts wherever it may, for tests of the cuts."""
        return replace(self, min_special=1, min_inner=1)

    def ends(self, text: str) -> Iterator[int]:
        """Yields where each piece ends, in order; the last one with the text. None if empty.

        Lazily: what is behind the last piece that was asked for was not looked at.
        """
        begin = behind = 0
        for start, stop in self._found(text):
            while self.inner is not None:
                # What is before the cut must not be part of an added token either.
                at = self.inner.search(text, max(begin + self.min_inner - 1, behind), start)
                if at is None:
                    break
                begin = at.end() - 1
                yield begin
            if start == stop:
                behind = max(behind, start - 2)  # what is parted may begin with the last two
                continue
            behind = stop
            if start - begin >= self.min_special and text[start:stop] not in self.avoided:
                yield start
                begin = start
        if begin < len(text):
            yield len(text)

    def cuts_at(self, text: str, places: Iterable[int]) -> list[int]:
        """Returns those of some places, in order, that an added token begins at and may be cut."""
        wanted = set(places)
        starts = []
        for start, stop in self._found(text) if wanted and self.cuts_specials else ():
            if start in wanted and text[start:stop] not in self.avoided and start < stop:
                starts.append(start)
            if start >= max(wanted):
                break
        return starts

    def _found(self, text: str) -> Iterator[tuple[int, int]]:
        """Yields the added tokens as tokenizers finds them, and the ends of windows without one.

        The last one is the end of the text.
        """
        at = 0
        while at < len(text):
            end = min(at + self.window, len(text))
            match = None
            if self.specials is not None:
                # What begins in the window is seen whole.
                match = self.specials.search(text, at, end + self.longest)
            if match is not None and match.start() < end:
                yield match.span()
                at = match.end()
            else:
                yield end, end
                at = end


def _parts(token: AddedToken, *, words_matter: bool) -> bool:
    """Says whether a text may be cut before a token.

    Args:
        token: The token.
        words_matter: Whether a token before it may ask what stands behind itself.
    """
    first = token.content[0]
    return not (
        token.lstrip
        or token.single_word
        or first.isspace()
        or (words_matter and (first.isalnum() or first == "_"))
    )


def _longest_first(words: Iterable[str]) -> str:
    """Returns a pattern of words that finds, of those that begin at one place, the longest.

    A tree of them, since there may be thousands, most with the same beginning.
    """
    root: dict[str, dict[str, object]] = {}
    for word in words:
        node = root
        for char in word:
            node = node.setdefault(char, {})  # type: ignore[assignment]  # a tree has no type
        node[""] = {}
    return _pattern(root)


def _pattern(node: Mapping[str, object]) -> str:
    literal = ""
    while len(node) == 1:
        ((char, below),) = node.items()
        if not char:
            return literal
        assert isinstance(below, dict)  # noqa: S101  made above
        literal, node = literal + re.escape(char), below
    branches = [
        re.escape(char) + _pattern(below)
        for char, below in node.items()
        if char and isinstance(below, dict)
    ]
    return f"{literal}(?:{'|'.join(branches)}){'?' if '' in node else ''}"


def _inner_cut(
    tokenizer: Tokenizer, added: Iterable[AddedToken]
) -> tuple[re.Pattern[str] | None, str]:
    """Returns where a text between added tokens may be cut, or why nowhere."""
    for token in added:
        if token.normalized and (
            token.rstrip or re.search(rf".[\s{_MARK}]", token.content, re.DOTALL)
        ):
            return None, "an added token goes over a space"
    normalizer = _state(tokenizer.normalizer)
    splitters = list(_flat(_state(tokenizer.pre_tokenizer), "pretokenizers"))
    if not splitters or all(map(_splits_plain_spaces, splitters)):
        return _cut_by_vocabulary(tokenizer, normalizer)
    if normalizer is not None and normalizer.get("type") != "NFC":
        return None, f"normalizer {normalizer.get('type')}"
    for splitter in splitters:
        if not (_parts_words(splitter) or _is_local(splitter)):
            return None, f"pre-tokenizer {splitter.get('type')}"
    if not any(map(_parts_words, splitters)):
        return None, "no pre-tokenizer that parts words"
    lines = all(map(_parts_lines, splitters)) and not any(
        token.normalized and (token.lstrip or token.content[:1].isspace()) for token in added
    )
    return re.compile(f"{_NO_SPACE}(?: |{_LINE})" if lines else f"{_NO_SPACE} "), ""


def _cut_by_vocabulary(
    tokenizer: Tokenizer, normalizer: Mapping[str, object] | None
) -> tuple[re.Pattern[str] | None, str]:
    """Returns the cuts that no merge goes over: no piece has such a character before a space."""
    model = tokenizer.model
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _MARK}
    if normalizer != spaces:
        kind = normalizer.get("type") if normalizer else None
        return None, f"no pre-tokenizer, and normalizer {kind}"
    affixes = isinstance(model, BPE) and (
        model.continuing_subword_prefix or model.end_of_word_suffix
    )
    if not isinstance(model, BPE) or affixes or model.ignore_merges or model.dropout:
        return None, f"no pre-tokenizer, and model {type(model).__name__}"
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if _MARK not in vocabulary:
        return None, "no pre-tokenizer, and no token for a space"
    joined = {
        piece[at - 1]
        for piece in vocabulary
        if _MARK in piece.lstrip(_MARK)
        for at in range(1, len(piece))
        if piece[at] == _MARK
    }
    kept = "".join(map(re.escape, sorted(joined)))
    return re.compile((f"(?![{kept}])" if kept else "") + f"{_NO_SPACE} "), ""


def _splits_plain_spaces(splitter: Mapping[str, object]) -> bool:
    """Says whether it splits at spaces, of which the normalizer has left none."""
    return splitter.get("type") == "Split" and splitter.get("pattern") == {"String": " "}


def _parts_words(splitter: Mapping[str, object]) -> bool:
    """Says whether a pre-tokenizer always begins something new at a space behind a word."""
    kind = splitter.get("type")
    if kind == "ByteLevel":
        return splitter.get("use_regex", True) is True
    if kind == "Metaspace":
        return splitter.get("split", True) is True and splitter.get("replacement") == _MARK
    if kind != "Split":
        return kind in {"WhitespaceSplit", "Whitespace"}
    pattern = splitter.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, Mapping) else None
    alternatives = set(_alternatives(regex)) if isinstance(regex, str) else set()
    is_plain = splitter.get("behavior") == "Isolated" and splitter.get("invert") is False
    return is_plain and r"\s+" in alternatives and alternatives <= _SAFE


def _parts_lines(splitter: Mapping[str, object]) -> bool:
    """Says whether it begins something new at a word behind the end of a line, and adds nothing.

    Of one that parts words, or that only looks at digits or bytes.
    """
    kind = splitter.get("type")
    if kind == "ByteLevel":
        return splitter.get("add_prefix_space") is False
    return kind in {"Split", "Digits"}


def _is_local(splitter: Mapping[str, object]) -> bool:
    """Says whether what it does before and behind such a space is the same without the other."""
    return splitter.get("type") in {"ByteLevel", "Digits"}


def _alternatives(regex: str) -> Iterator[str]:
    """Yields the alternatives of a pattern that are in no group and no class."""
    begin = depth = 0
    in_class = False
    at = 0
    while at < len(regex):
        char = regex[at]
        if char == "\\":
            at += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and depth == 0:
            yield regex[begin:at]
            begin = at + 1
        at += 1
    yield regex[begin:]


def _state(part: Normalizer | PreTokenizer | None) -> Mapping[str, object] | None:
    """Returns a part of a tokenizer as its file has it."""
    if part is None:
        return None
    state = json.loads(part.__getstate__())
    return state if isinstance(state, Mapping) else None


def _flat(state: Mapping[str, object] | None, key: str) -> Iterator[Mapping[str, object]]:
    """Yields a part, or those that it is made of."""
    inner = state.get(key) if state is not None else None
    if isinstance(inner, list):
        for part in inner:
            yield from _flat(part, key)
    elif state is not None:
        yield state
