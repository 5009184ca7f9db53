"""Text to token ids, piece by piece, each piece once: the next turn of a chat costs its new text.

    text  --cut-->  piece | piece | piece | new piece
                    known   known   known   tokenized            (`cutting.py`, `piece_cache.py`)

Two libraries can tokenize a piece: `tokenizers`, which is the reference, and `fastokens`, which
is several times faster. Which one runs, and where texts may be cut, is settled when a model is
loaded: on texts that are made to be difficult, the ids must be those of `tokenizers` on the whole
text. Where they are not, the slower way is taken, and `TextTokenizer` says which and why. What
`fastokens` fails at, such as a million spaces in a row, the reference does, and it is counted.
"""

from __future__ import annotations

import importlib
import math
import random
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from kvway_core.blocks import Image
from kvway_core.cutting import Cutter
from kvway_core.errors import ConfigError
from kvway_core.images import PlacedImage
from kvway_core.piece_cache import DEFAULT_CACHE_BYTES, PieceCache

AUTO: Final = "auto"
FASTOKENS: Final = "fastokens"
TOKENIZERS: Final = "tokenizers"
LIBRARIES: Final = (AUTO, FASTOKENS, TOKENIZERS)

_FIRST_CHARS_PER_TOKEN: Final = 4.0
_RATIO_TOKENS: Final = 4096.0
"""So many of the last tokens say how long a token is."""

_TELLING_TOKENS: Final = 64
"""So many tokens of a text say more of how long its others are than other texts do."""
_HEAD_CHARS: Final = 4096
_NUM_PROBES: Final = 24
_PROBE_PARTS: Final = 40
_PROBE_RUN: Final = 8192
"""Characters of the one probe that is long."""

_PROBES: Final = (
    *("a", "Z", "the", "it's", "'LL", "don't", "_", "=", "==", ".", "!!", "//", "</", ">", "|"),
    *(" ", " ", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\0", "\u00a0", "\u3000", "\u0085"),
    *("\u2028", "\u200b", "\ufeff", "\x1c", "\u2581", "1", "12345", "\u00bd", "\u2460", "\u0663"),
    *("\u00e9", "e\u0301", "\u0301", "\u4e16\u754c", "\u3002", "\U0001f642", "\u1112", "\ud55c"),
    *("\U0001f468\u200d\U0001f469", "\u0627", "\u0600", "\u0915\u093f", "\u01c5", "\u02b0"),
    *("\u017f", "\u0130", "\u212a", "\ufb01", "\uff9e", "<", "<|"),
)
"""What a probe is made of, beside added tokens."""

_Encode = Callable[[str], Sequence[int]]


class TextTokenizer:
    """Tokenizes texts as one model does. All methods may be called from several threads.

    Attributes:
        backend: What tokenizes: "tokenizers" or "fastokens".
        backend_why: Why that one, in words.
        cutter: Where texts are cut, and why not where they are not.
        cache: The pieces that are known.
        num_failed: Pieces that `fastokens` failed at, and `tokenizers` did.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        path: Path | None = None,
        library: str = AUTO,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        """Takes a tokenizer, and finds out what is certain of it.

        Args:
            tokenizer: The reference. It must not be changed afterwards.
            path: Its file, for `fastokens`; without it `tokenizers` runs.
            library: One of `LIBRARIES`; `auto` is the fastest whose ids are the same.
            cache_bytes: Memory for pieces.

        Raises:
            ConfigError: `fastokens` was asked for by name and cannot be taken.
        """
        self._tokenizer = tokenizer
        # A ratio of sums: characters and tokens, of the last ones more.
        self._tokens = _RATIO_TOKENS
        self._chars = _FIRST_CHARS_PER_TOKEN * _RATIO_TOKENS
        self.cache = PieceCache(max_bytes=cache_bytes)
        probes = list(_probes(tokenizer))
        whole = [self._reference(text) for text in probes]
        self._encode, self.backend, self.backend_why = self._pick(library, path, probes, whole)
        self.cutter = self._checked(Cutter.of(tokenizer), probes, whole)
        self._around: tuple[array[int], array[int]] | None = None
        self._lock = threading.Lock()
        self.num_failed = 0

    @property
    def chars_per_token(self) -> float:
        """How long a token of the last texts was on average."""
        return self._chars / self._tokens

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Returns the token ids of a text.

        Args:
            text: Any text; added tokens written in it become those tokens.
            add_special_tokens: Whether the tokenizer puts its own (BOS) around it.
        """
        return self.read(text, add_special_tokens=add_special_tokens).finish().tolist()

    def read(
        self,
        text: str,
        *,
        add_special_tokens: bool = False,
        images: Sequence[PlacedImage] = (),
    ) -> TextReader:
        """Returns a reader of a text, with images in it, that has read nothing yet."""
        before, after = self._put_around() if add_special_tokens else (_NONE, _NONE)
        return TextReader(self, text, before=before, after=after, images=images)

    def piece(self, text: str) -> tuple[array[int], bool]:
        """Returns the ids of a piece, not to be changed, and whether they were known."""
        known = self.cache.get(text)
        if known is not None:
            return known, True
        ids = array("I", self._encode_piece(text))
        self.cache.put(text, ids)
        if ids:  # a text without tokens says nothing of how long one is
            with self._lock:
                kept = max(0.0, 1.0 - len(ids) / _RATIO_TOKENS)
                self._tokens = self._tokens * kept + len(ids)
                self._chars = self._chars * kept + len(text)
        return ids, False

    def _encode_piece(self, text: str) -> Sequence[int]:
        """Returns the ids of a piece, by the reference where the faster library fails."""
        if self.backend == TOKENIZERS:
            return self._encode(text)
        try:
            return self._encode(text)
        except Exception:  # noqa: BLE001  whatever it cannot do: the reference can, or says why
            with self._lock:
                self.num_failed += 1
            return self._reference(text)

    # -- what is settled at load ----------------------------------------------------------------

    def _reference(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        # Unlike `encode`, the batch call lets other threads run meanwhile, and counts no offsets.
        batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def _pick(
        self, library: str, path: Path | None, probes: Sequence[str], whole: Sequence[list[int]]
    ) -> tuple[_Encode, str, str]:
        """Returns what encodes a piece, its name, and why it was taken."""
        if library == TOKENIZERS:
            return self._reference, TOKENIZERS, "asked for"
        encode, refusal = _fastokens(path)
        if encode is not None:
            differ = sum(
                not _gives(encode, text, ids) for text, ids in zip(probes, whole, strict=True)
            )
            if not differ:
                why = "asked for" if library == FASTOKENS else "faster, and gives the same ids"
                return encode, FASTOKENS, why
            refusal = f"fastokens gives other ids for {differ} of {len(probes)} texts"
        if library == FASTOKENS:
            raise ConfigError([f"the tokenizer cannot be fastokens: {refusal}; take tokenizers"])
        return self._reference, TOKENIZERS, refusal

    def _checked(
        self, cutter: Cutter, probes: Sequence[str], whole: Sequence[list[int]]
    ) -> Cutter:
        """Returns the cutter without the cuts that do not give the same ids."""
        if cutter.inner is not None and not self._agrees(cutter, probes, whole):
            cutter = cutter.without_inner("cuts before spaces gave other ids")
        if cutter.kind != "nowhere" and not self._agrees(cutter, probes, whole):
            return cutter.without_any("cuts gave other ids")
        return cutter

    def _agrees(self, cutter: Cutter, probes: Sequence[str], whole: Sequence[list[int]]) -> bool:
        often = cutter.often()
        return all(
            [token for piece in pieces(text, often) for token in self._encode(piece)] == ids
            for text, ids in zip(probes, whole, strict=True)
        )

    def _put_around(self) -> tuple[array[int], array[int]]:
        """Returns the tokens that the tokenizer puts before and behind any text."""
        if self._around is None:
            plain = self._reference("a")
            framed = self._reference("a", add_special_tokens=True)
            num_more = len(framed) - len(plain)
            at = next(i for i in range(num_more + 1) if framed[i : i + len(plain)] == plain)
            self._around = array("I", framed[:at]), array("I", framed[at + len(plain) :])
        return self._around


class TextReader:
    """One text that is tokenized from the front, as far as it is asked for. Not thread-safe.

    Attributes:
        token_ids: The first ids of the text, exact. Not to be changed.
        done: Whether they are all of them.
        piece_keys: What names each beginning that ends with a piece read, and one piece more.
        images: Images among the tokens read, in order. One that begins inside a piece, as it has
            no added token of its own, is where the piece begins.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        text: str,
        *,
        before: array[int],
        after: array[int],
        images: Sequence[PlacedImage] = (),
    ) -> None:
        """Starts at the front; for `TextTokenizer.read`."""
        self._tokenizer = tokenizer
        self._text = text
        self._after = after
        self._pieces = pieces(text, tokenizer.cutter, [image.place for image in images])
        self._images = deque(images)
        self.images: list[Image] = []
        self._next: str | None = None
        self._num_chars = 0
        self.token_ids = array("I", before)
        self.piece_keys: list[int] = []
        self.done = False
        self._look()

    @property
    def text(self) -> str:
        """The whole text."""
        return self._text

    @property
    def head(self) -> str:
        """The first characters of the text, what a router can place it by in need."""
        return self._text[:_HEAD_CHARS]

    @property
    def num_tokens(self) -> int:
        """How many tokens the text has; about so many while it is not done."""
        num_read = len(self.token_ids)
        if self.done:
            return num_read
        ratio = self._tokenizer.chars_per_token
        if num_read >= _TELLING_TOKENS:
            ratio = self._num_chars / num_read
        left = len(self._text) - self._num_chars
        return num_read + math.ceil(left / ratio) + len(self._after)

    def advance(self, num_chars: int) -> int:
        """Reads until so many characters were new, or to the end; known pieces are free.

        Returns:
            How many of these characters are left, none or less if it did not come to the end.
        """
        piece = self._next
        while piece is not None and num_chars > 0:
            ids, known = self._tokenizer.piece(piece)
            self._num_chars += len(piece)
            while self._images and self._images[0].place < self._num_chars:
                self.images.append(Image(len(self.token_ids), self._images.popleft().content))
            self.token_ids.extend(ids)
            if not known:
                num_chars -= len(piece)
            piece = self._look()
        return num_chars

    def finish(self) -> array[int]:
        """Reads to the end and returns all ids, not to be changed."""
        _ = self.advance(len(self._text) + 1)
        return self.token_ids

    def _look(self) -> str | None:
        """Takes the next piece and returns it, or ends."""
        piece = self._next = next(self._pieces, None)
        if piece is not None:
            keys, end = self.piece_keys, self._num_chars + len(piece)
            images = [image.content for image in self._images if image.place < end]
            keys.append(hash((keys[-1] if keys else 0, piece, *images)))
        elif not self.done:
            self.done = True
            self.token_ids.extend(self._after)
        return piece


_NONE: Final = array("I")


def pieces(text: str, cutter: Cutter, places: Sequence[int] = ()) -> Iterator[str]:
    """Yields the pieces of a text, lazily; each place that may be cut at begins one."""
    section = 0
    for cut in (*cutter.cuts_at(text, places), len(text)):
        part, begin = text[section:cut], 0
        for end in cutter.ends(part):
            yield part[begin:end]
            begin = end
        section = cut


def _gives(encode: _Encode, text: str, ids: Sequence[int]) -> bool:
    """Says whether a library gives these ids; not if it fails."""
    try:
        return list(encode(text)) == ids
    except Exception:  # noqa: BLE001  it cannot
        return False


def _fastokens(path: Path | None) -> tuple[_Encode | None, str]:
    """Returns fastokens' way to encode a piece, or why there is none."""
    if path is None:
        return None, "no file to load"
    try:
        tokenizer = importlib.import_module(FASTOKENS).Tokenizer.from_file(str(path))
    except ImportError:
        return None, "fastokens is not installed"
    except Exception as exc:  # noqa: BLE001  a library that does not know this kind of tokenizer
        return None, f"fastokens cannot load it: {type(exc).__name__}"
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(text: str) -> array[int]:
        ids, _ = tokenizer.encode_batch_flat([text])
        return array("I", ids)

    return encode, ""


def _probes(tokenizer: Tokenizer) -> Iterable[str]:
    """Yields texts that show where cuts or another library go wrong; the same ones every time."""
    rng = random.Random(0)  # noqa: S311  not a secret
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    some = rng.sample(added, min(len(added), 40))
    for _ in range(_NUM_PROBES):
        yield "".join(
            rng.choice(some) if some and rng.random() < 0.1 else rng.choice(_PROBES)
            for _ in range(_PROBE_PARTS)
        )
    yield "the" + " \n" * (_PROBE_RUN // 2) + "end"
