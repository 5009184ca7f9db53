"""The plain way to compute a shared beginning once: transformers alone, one cache, copied.

    prefix ──model, once──> cache ──deepcopy──> request 1 ──generate──> answer 1
                                  ──deepcopy──> request 2 ──generate──> answer 2

This is what one starts from, and for a few requests one after another it is enough. What it costs:
each request copies the whole prefix before its first token, and holds that copy until it ends; it
is known beforehand what the shared part is; and nothing is ever given up, so memory is yours to
count. `make bench-cache` measures it beside kvway's paged cache. Versions of transformers before
5.24 call the argument `cache` past_key_values.

    kvway fetch                 prints the folder of the model
    python docs/examples/plain_transformers.py FOLDER
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

if TYPE_CHECKING:
    from collections.abc import Sequence

HANDBOOK = (
    "You answer for a small library in a harbour town. It opens at 10 and closes at 18, on "
    "Saturdays at 14. A card costs 12 euros a year. Books are lent for 28 days; a late one costs "
    "20 cents a day. The reading room has 45 seats. "
)
QUESTIONS = (
    "Question: When do you close on Saturday? Answer:",
    "Question: What does a card cost? Answer:",
    "Question: How many seats are there? Answer:",
)


def main(argv: Sequence[str]) -> int:
    """Answer a few questions about one long text, and print what each cost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a folder as `kvway fetch` makes it")
    parser.add_argument(
        "--prefix-tokens", type=int, default=1024, help="tokens of the shared text"
    )
    parser.add_argument("--max-tokens", type=int, default=16, help="tokens of each answer")
    args = parser.parse_args(argv)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    handbook = tokenizer(HANDBOOK)["input_ids"]
    prefix = (handbook * (args.prefix_tokens // len(handbook) + 1))[: args.prefix_tokens]

    started = time.perf_counter()
    cache = prefill(model, prefix)
    print(f"prefix     {len(prefix)} tokens, {_ms(started)}, {kv_bytes(cache) / 2**20:.1f} MiB")
    for question in QUESTIONS:
        prompt = prefix + tokenizer(question)["input_ids"]
        started = time.perf_counter()
        own = copy.deepcopy(cache)
        copied = _ms(started)
        (tokens,) = continue_from(model, own, [prompt], args.max_tokens)
        memory = f"{kv_bytes(own) / 2**20:.1f} MiB"
        print(f"request    copy {copied}, all {_ms(started)}, {memory} of its own")
        print(f"           {question} {tokenizer.decode(tokens)!r}")
    return 0


def prefill(model: Any, prefix: Sequence[int]) -> DynamicCache:
    """Compute the keys and values of the shared tokens, once."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        # The scores of one position are thrown away; those of all would be a gigabyte of them.
        model(torch.tensor([list(prefix)]), cache=cache, logits_to_keep=1)
    return cache


def continue_from(
    model: Any, cache: DynamicCache, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[list[int]]:
    """Return the greedy answers to whole prompts of one length that begin with the cached tokens.

    The cache has one row per prompt, and grows by what is computed: hand in a copy, or the next
    request finds this one's tokens in it. Exactly `max_tokens` tokens each.
    """
    ids = torch.tensor([list(prompt) for prompt in prompts])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        cache=cache,
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    answers: list[list[int]] = out[:, ids.shape[1] :].tolist()
    return answers


def kv_bytes(cache: DynamicCache) -> int:
    """Return the bytes of all keys and values in a cache."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def _ms(started: float) -> str:
    return f"{1000 * (time.perf_counter() - started):.0f} ms"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
