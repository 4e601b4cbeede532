"""A progress bar over requests, where somebody is looking."""

from collections.abc import Iterator, Sequence

from tqdm import tqdm

from legato.manager import ContinuousBatchingManager
from legato.request import GenerationOutput, RequestSpec


def completed_in_order(
    manager: ContinuousBatchingManager, specs: Sequence[RequestSpec], show: bool
) -> list[list[GenerationOutput]]:
    """`completed`, and then all samples of each request, in the order of their ids."""
    outputs: list[list[GenerationOutput]] = [[] for _ in specs]
    for index, output in completed(manager, specs, show):
        outputs[index].append(output)
    return [sorted(samples, key=lambda one: (len(one.request_id), one.request_id)) for samples in outputs]


def completed(
    manager: ContinuousBatchingManager, specs: Sequence[RequestSpec], show: bool
) -> Iterator[tuple[int, GenerationOutput]]:
    """Run requests under a bar on stderr, if `show` and stderr is a terminal.

    Yields:
        (index in `specs`, final output), in the order of completion.
    """
    before, total = manager.stats.num_generated_tokens, sum(manager.num_samples(spec) for spec in specs)
    with tqdm(total=total, unit="req", disable=None if show else True, dynamic_ncols=True) as bar:

        def describe() -> None:
            stats, seconds = manager.stats, bar.format_dict["elapsed"]
            rate = (stats.num_generated_tokens - before) / max(seconds, 1e-9)
            bar.set_postfix_str(
                f"{rate:.0f} tok/s, batch {stats.num_batch_requests}, cache {stats.cache_used_share:.0%}"
            )

        for index, output in manager.as_completed(specs, None if bar.disable else describe):
            if output.is_finished():
                bar.update()
                yield index, output
