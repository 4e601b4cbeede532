"""Prefix caching as a manager's users meet it: hits, tenants, weights that change, and watching it happen."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from legato import ContinuousBatchingConfig, ContinuousBatchingManager, GenerationConfig, InvalidValueError
from legato.engine.observer import StepRecord
from tests.parity.reference import reference
from tests.tiny import tiny_llama

CONFIG = ContinuousBatchingConfig(page_size=4, num_blocks=200, max_batch_tokens=64)
GENERATION = GenerationConfig(max_new_tokens=6, do_sample=False)
PROMPT = [5, 9, 2, 71, 33, 8, 4, 60, 7, 12, 3, 44, 90, 1, 28, 6, 19, 77]


@pytest.fixture
def model() -> Any:
    return tiny_llama()


@pytest.fixture
def manager(model: Any) -> Iterator[ContinuousBatchingManager]:
    manager = model.init_continuous_batching(GENERATION, CONFIG)
    manager.start()
    yield manager
    manager.stop(hard_stop=True)
    manager.destroy()


def ask(manager: ContinuousBatchingManager, prompt: list[int] = PROMPT, **kwargs: Any) -> tuple[int, list[int]]:
    """Tokens found in the cache, and the answer."""
    request_id = manager.add_request(prompt, **kwargs)
    output = manager.get_result(request_id, timeout=60)
    assert output is not None
    return output.num_cached_tokens, output.generated_tokens


def test_a_prompt_asked_again_is_found_but_for_its_last_page(model: Any, manager: ContinuousBatchingManager) -> None:
    answer = reference(model, PROMPT, 6).tokens
    assert ask(manager) == (0, answer)
    assert ask(manager) == (16, answer)
    assert manager.stats.num_cached_tokens == 16


def test_a_conversation_finds_its_earlier_turns_with_their_answers(manager: ContinuousBatchingManager) -> None:
    _, answer = ask(manager)
    assert ask(manager, [*PROMPT, *answer, 50, 51])[0] == 20


def test_tenants_share_with_themselves_only(manager: ContinuousBatchingManager) -> None:
    found = [ask(manager, cache_salt=salt)[0] for salt in ("a", "b", None, "", "a", "b", None, "")]
    assert found == [0, 0, 0, 0, 16, 16, 16, 16]
    with pytest.raises(InvalidValueError, match=r"cache_salt=7"):
        manager.add_request(PROMPT, cache_salt=7)  # type: ignore[arg-type]


def adam(model: Any, fused: bool) -> None:
    model(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused).step()
    model.zero_grad()


def write_in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.add_(0.3)


def write_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.5)


def replace_parameter(model: Any) -> None:
    projection = model.model.layers[0].self_attn.v_proj
    projection.weight = torch.nn.Parameter(projection.weight.detach() + 0.3)


def load_assigned(model: Any) -> None:
    changed = {name: value * 1.5 for name, value in model.state_dict().items()}
    model.load_state_dict(changed, assign=True)


CHANGES: dict[str, Callable[[Any], None]] = {
    "AdamW": lambda model: adam(model, fused=False),
    "fused AdamW": lambda model: adam(model, fused=True),
    "in place": write_in_place,
    "data": write_data,
    "replaced": replace_parameter,
    "load_state_dict(assign=True)": load_assigned,
}


@pytest.mark.parametrize("paused", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_nothing_from_before_a_change_of_weights_is_used_after_it(
    model: Any, manager: ContinuousBatchingManager, name: str, paused: bool
) -> None:
    before = ask(manager)[1]
    if paused:
        with manager.pause():
            CHANGES[name](model)
    else:
        CHANGES[name](model)
    after = reference(model, PROMPT, 6).tokens
    assert after != before, "the change changed nothing"
    assert ask(manager) == (0, after)
    assert ask(manager) == (16, after)


def test_a_persistent_manager_notices_what_was_trained_between_two_calls(model: Any) -> None:
    for _ in range(2):
        outputs = model.generate_batch(
            [PROMPT], GENERATION, CONFIG, progress_bar=False, persistent_manager=True
        ).values()
        assert [output.generated_tokens for output in outputs] == [reference(model, PROMPT, 6).tokens]
        adam(model, fused=True)
    with model.continuous_batching_context_manager(GENERATION, CONFIG):
        pass  # ends the persistent one


def test_one_may_begin_and_cease_to_watch_at_any_time(manager: ContinuousBatchingManager) -> None:
    records: list[StepRecord] = []
    done = threading.Event()

    def switch() -> None:
        while not done.is_set():
            manager.watch(records.append)
            time.sleep(0.0003)  # let the engine have the interpreter
            manager.watch(None)
            time.sleep(0.0003)

    thread = threading.Thread(target=switch)
    thread.start()
    try:
        for i in range(60):
            ask(manager, [i, *PROMPT])
    finally:
        done.set()
        thread.join()
    assert all(record.ended >= record.started for record in records)


def test_an_observer_that_raises_is_told_no_more_and_harms_nobody(manager: ContinuousBatchingManager) -> None:
    told = []

    def observer(record: StepRecord) -> None:
        told.append(record)
        raise ValueError("planted")

    manager.watch(observer)
    assert len(ask(manager)[1]) == 6
    assert len(told) == 1


def test_an_observer_that_makes_way_for_another_before_it_raises_leaves_that_one(
    manager: ContinuousBatchingManager,
) -> None:
    records: list[StepRecord] = []

    def observer(record: StepRecord) -> None:
        manager.watch(records.append)
        raise ValueError("planted")

    manager.watch(observer)
    ask(manager)
    assert records
