"""The yardstick of all parity tests: transformers' `generate`, one prompt at a time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from legato import GenerationOutput, RequestStatus

NEAR_TIE = 1e-4


@dataclass(frozen=True)
class Reference:
    """Greedy tokens of one prompt, and at each step how far the likeliest logit was ahead of the next."""

    tokens: list[int]
    leads: list[float]

    def cut_after(self, stop_token_ids: Iterable[int]) -> "Reference":
        """What is left when the first of these tokens ends the sequence."""
        stops = set(stop_token_ids)
        end = next((i + 1 for i, token in enumerate(self.tokens) if token in stops), len(self.tokens))
        return Reference(self.tokens[:end], self.leads[:end])


def reference(model: Any, input_ids: Sequence[int], max_new_tokens: int, **kwargs: Any) -> Reference:
    """`model.generate` on this prompt alone."""
    result = model.generate(
        torch.tensor([input_ids], device=model.device),
        attention_mask=torch.ones((1, len(input_ids)), dtype=torch.long, device=model.device),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **kwargs,
    )
    top = torch.stack([logits[0].float().topk(2).values for logits in result.logits])
    return Reference(result.sequences[0, len(input_ids) :].tolist(), (top[:, 0] - top[:, 1]).tolist())


def count_near_ties(outputs: Sequence[GenerationOutput], references: Sequence[Reference]) -> int:
    """Check token for token; returns how many sequences differ from where the reference had a near tie.

    Any other difference fails.
    """
    ties = 0
    for output, expected in zip(outputs, references, strict=True):
        assert output.status is RequestStatus.FINISHED, output.error
        if output.generated_tokens == expected.tokens:
            continue
        pairs = zip(output.generated_tokens, expected.tokens, strict=False)
        step = next(
            (i for i, (ours, theirs) in enumerate(pairs) if ours != theirs),
            min(len(output.generated_tokens), len(expected.tokens)),
        )
        assert step < len(expected.leads), f"{output.request_id}: {len(output.generated_tokens)} tokens, too many"
        assert expected.leads[step] < NEAR_TIE, (
            f"{output.request_id} differs at step {step}, where the reference leads by {expected.leads[step]:.6f}: "
            f"{output.generated_tokens} instead of {expected.tokens}"
        )
        ties += 1
    return ties
