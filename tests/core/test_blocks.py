"""Block hashes: pinned vectors, the formula written twice, and what must never collide."""

from __future__ import annotations

import itertools
import json
import struct
import subprocess
import sys
from collections.abc import Callable

import pytest
import xxhash
from hypothesis import assume, given
from hypothesis import strategies as st

from kvway_core.blocks import (
    DEFAULT_BLOCK_SIZE,
    SCHEME,
    BlockHash,
    HashChain,
    Image,
    Namespace,
    block_hashes,
    event_hash,
    packed_block_hashes,
    packed_tokens,
)

ROOT = Namespace("model").root()
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=80)


def test_golden_vectors(golden: Callable[[str, str], None]) -> None:
    """A change here breaks every cache and every router in the field: it needs a new SCHEME."""
    namespaces = [
        Namespace("model"),
        Namespace("model", 32),
        Namespace("model", cache_salt="salt"),
        Namespace("HuggingFaceTB/SmolLM2-135M-Instruct", 16, "adapter", "v1", "s\u00e4lt"),
    ]
    prompts = [[], [0], list(range(15)), list(range(16)), list(range(50)), [2**32 - 1] * 64]
    vectors = [
        {
            "namespace": [ns.model, ns.block_size, ns.adapter, ns.adapter_version, ns.cache_salt],
            "root": ns.root().hex(),
            "blocks": [
                [h.hex() for h in block_hashes(p, parent=ns.root(), block_size=ns.block_size)]
                for p in prompts
            ],
        }
        for ns in namespaces
    ]
    document = {"scheme": SCHEME, "prompts": prompts, "vectors": vectors}
    golden("block_hashes.json", json.dumps(document, indent=1) + "\n")


IMAGES = [[Image(0, b"cat")], [Image(17, b"cat"), Image(17, b""), Image(31, b"dog")]]


def test_golden_vectors_of_images(golden: Callable[[str, str], None]) -> None:
    """What is pinned is the bytes behind the tokens of an image's block."""
    packed = packed_tokens(list(range(50)))
    chains = [packed_block_hashes(packed, parent=ROOT, images=images) for images in IMAGES]
    document = [
        {
            "images": [[i.place, i.content.hex()] for i in images],
            "blocks": [h.hex() for h in chain],
        }
        for images, chain in zip(IMAGES, chains, strict=True)
    ]
    golden("block_hashes_images.json", json.dumps(document, indent=1) + "\n")


@given(
    tokens,
    st.integers(1, 20),
    st.lists(st.builds(Image, st.integers(0, 90), st.binary(max_size=20)), max_size=4),
)
def test_images_are_hashed_with_the_block_that_they_begin_in(
    token_ids: list[int], block_size: int, images: list[Image]
) -> None:
    images.sort(key=lambda image: image.place)
    parent: bytes = ROOT
    expected = []
    for start in range(0, len(token_ids) // block_size * block_size, block_size):
        preimage = parent + struct.pack(f"<{block_size}I", *token_ids[start : start + block_size])
        for place, content in images:
            if start <= place < start + block_size:
                preimage += b"I" + struct.pack("<II", place - start, len(content)) + content
        parent = xxhash.xxh3_128_digest(preimage)
        expected.append(parent)
    packed = packed_tokens(token_ids)
    chain = packed_block_hashes(packed, parent=ROOT, block_size=block_size, images=images)
    assert chain == expected


@given(tokens, st.integers(1, 20))
def test_the_chain_follows_its_formula(token_ids: list[int], block_size: int) -> None:
    parent: bytes = ROOT
    expected = []
    for start in range(0, len(token_ids) // block_size * block_size, block_size):
        block = struct.pack(f"<{block_size}I", *token_ids[start : start + block_size])
        parent = xxhash.xxh3_128(parent + block).digest()
        expected.append(parent)
    assert block_hashes(token_ids, parent=ROOT, block_size=block_size) == expected


def test_the_root_follows_its_formula() -> None:
    fields = [(b"S", b"kvway-1"), (b"B", b"16"), (b"M", b"m\xc3\xa9"), (b"A", b"a")]
    fields += [(b"V", b"1"), (b"C", b"salt")]
    preimage = b"".join(tag + struct.pack("<I", len(text)) + text for tag, text in fields)
    namespace = Namespace("m\u00e9", 16, "a", "1", "salt")
    assert namespace.root() == xxhash.xxh3_128(preimage).digest()


def test_only_full_blocks_have_a_hash() -> None:
    assert block_hashes([], parent=ROOT) == []
    assert block_hashes([1] * (DEFAULT_BLOCK_SIZE - 1), parent=ROOT) == []
    assert len(block_hashes([1] * DEFAULT_BLOCK_SIZE, parent=ROOT)) == 1
    assert len(block_hashes([1] * (2 * DEFAULT_BLOCK_SIZE + 5), parent=ROOT)) == 2


@given(tokens, st.lists(st.integers(0, 40), max_size=10))
def test_a_chain_does_not_care_how_its_tokens_came(token_ids: list[int], cuts: list[int]) -> None:
    chain = HashChain(ROOT, 4)
    edges = sorted({0, len(token_ids), *(cut for cut in cuts if cut < len(token_ids))})
    for start, end in itertools.pairwise(edges):
        chain.extend(token_ids[start:end])
    assert chain.hashes == block_hashes(token_ids, parent=ROOT, block_size=4)
    assert chain.num_tokens == len(token_ids)


@given(tokens, tokens)
def test_hashes_agree_exactly_as_far_as_the_blocks_do(one: list[int], other: list[int]) -> None:
    shared = 0
    while one[shared * 4 : shared * 4 + 4] == other[shared * 4 : shared * 4 + 4]:
        if len(one) < shared * 4 + 4:
            break
        shared += 1
    ones = block_hashes(one, parent=ROOT, block_size=4)
    others = block_hashes(other, parent=ROOT, block_size=4)
    assert ones[:shared] == others[:shared]
    assert not set(ones[shared:]) & set(others[shared:])


@given(st.lists(st.text(max_size=5), min_size=10, max_size=10))
def test_other_namespaces_have_other_roots(texts: list[str]) -> None:
    one = Namespace(texts[0], 16, texts[1], texts[2], texts[3])
    other = Namespace(texts[4], 16, texts[5], texts[6], texts[7])
    assume(one != other)
    assert one.root() != other.root()


def test_a_field_cannot_pose_as_another() -> None:
    roots = {
        Namespace("ab").root(),
        Namespace("a", adapter="b").root(),
        Namespace("a", adapter_version="b").root(),
        Namespace("a", cache_salt="b").root(),
        Namespace("a", adapter="bC\x01\x00\x00\x00c").root(),
        Namespace("a", 1).root(),
    }
    assert len(roots) == 6


def test_the_event_hash_is_the_low_half() -> None:
    assert event_hash(BlockHash(bytes(range(16)))) == 0x08090A0B0C0D0E0F
    assert event_hash(BlockHash(bytes(16))) == 0


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_a_token_that_is_no_uint32_is_refused(token_id: int) -> None:
    chain = HashChain(ROOT, 1)
    chain.extend([7])
    with pytest.raises(ValueError, match="32 unsigned bits"):
        chain.extend([1, token_id])
    assert chain.num_tokens == 1
    assert chain.hashes == block_hashes([7], parent=ROOT, block_size=1)


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_needs_a_token(block_size: int) -> None:
    with pytest.raises(ValueError, match="block_size"):
        Namespace("m", block_size)
    with pytest.raises(ValueError, match="block_size"):
        HashChain(ROOT, block_size)
    with pytest.raises(ValueError, match="block_size"):
        block_hashes([1], parent=ROOT, block_size=block_size)


def test_importing_hashes_is_cheap() -> None:
    heavy = [
        "aiohttp",
        "asyncio",
        "jinja2",
        "msgspec",
        "numpy",
        "structlog",
        "tokenizers",
        "torch",
        "zmq",
    ]
    code = f"import sys, kvway_core.blocks; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.strip() == b"[]"
