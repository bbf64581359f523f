"""`attn_implementation="longctx"` in models of transformers: packed documents are each alone."""

from typing import Any

import pytest
import torch

import longctx.transformers  # noqa: F401
from tests.model.transformers_shapes import reference

LENGTHS = (17, 5, 30)


def packed() -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Documents, their tokens in one sequence, and their positions."""
    generator = torch.Generator().manual_seed(1)
    each = [torch.randint(3, 301, (1, n), generator=generator) for n in LENGTHS]
    return each, torch.cat(each, dim=1), torch.cat([torch.arange(n) for n in LENGTHS])[None]


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss", "deepseek_v3", "gemma2"])
@pytest.mark.parametrize("by_lengths", [False, True])
def test_documents_are_each_alone(kind: str, by_lengths: bool) -> None:
    model = reference(kind)
    each, tokens, positions = packed()
    alone = torch.cat([model(ids, use_cache=False).logits for ids in each], dim=1)
    model.set_attn_implementation("longctx")
    given: dict[str, Any] = {"position_ids": positions}
    if by_lengths:
        offsets = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
        given |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    logits = model(tokens, use_cache=False, **given).logits
    assert (logits - alone).norm() < 1e-5 * alone.norm()


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_padded_batch_generates_as_eager_does(kind: str) -> None:
    model = reference(kind)
    tokens = torch.randint(3, 301, (2, 12), generator=torch.Generator().manual_seed(2))
    is_text = torch.ones_like(tokens)
    is_text[0, :5] = 0
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(tokens, attention_mask=is_text, **settings)
    model.set_attn_implementation("longctx")
    assert torch.equal(model.generate(tokens, attention_mask=is_text, **settings), expected)


def test_a_mask_of_all_pairs_is_refused() -> None:
    model = reference("llama")
    model.set_attn_implementation("longctx")
    tokens = packed()[1]
    pairs = torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool)
    with pytest.raises(ValueError, match="attention_mask of 4 dimensions"):
        model(tokens, attention_mask=pairs, use_cache=False)
