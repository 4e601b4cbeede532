"""Settings: what is accepted, and that a refusal names the field, the value and what is allowed."""

import dataclasses
import warnings
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch

from legato.config import ContinuousBatchingConfig, WorkloadHints
from legato.engine.policy import SCHEDULING_POLICIES, SchedulingPolicy
from legato.errors import InvalidValueError, LegatoError
from legato.sampling_params import MAX_SEED, SamplingParams

NOT_BOOLS = (None, 0, 1, "yes", 1.0)
NOT_INTEGERS = ("1", 1.0, nan, True, [1])
NOT_NUMBERS = ("0.5", True, nan, inf, -inf, [0.5], 1j)

# Field: (accepted values, wrong values, what a refusal says is allowed).
CONFIG: dict[str, tuple[tuple[Any, ...], tuple[Any, ...], str]] = {
    "page_size": ((4, 16, 1 << 20), (3, 0, -4, None, *NOT_INTEGERS), "an integer, at least 4"),
    "num_blocks": ((None, 1, 10**6), (0, -1, *NOT_INTEGERS), "an integer, at least 1, or None"),
    "max_batch_tokens": ((None, 1, 8192), (0, -1, *NOT_INTEGERS), "an integer, at least 1, or None"),
    "max_memory_percent": ((None, 0.01, 1, 1.0), (0, 0.0, 1.01, -0.1, *NOT_NUMBERS), "above 0 and at most 1, or None"),
    "max_requests_per_batch": ((None, 1, 1024), (0, -1, *NOT_INTEGERS), "an integer, at least 1, or None"),
    "scheduler_type": (
        ("fifo", "prefill_first"),
        ("lifo", "FIFO", "", None, 0, ["fifo"]),
        "one of fifo, prefill_first",
    ),
    "safety_margin": ((None, 0, 0.0, 0.5, 1), (-0.1, 1.1, *NOT_NUMBERS), "at least 0 and at most 1, or None"),
    "allow_block_sharing": ((True, False), NOT_BOOLS, "True or False"),
    "eviction_policy": (
        ("lru", "newest_filled"),
        ("fifo", "LRU", "", None, 0, ["lru"]),
        "one of lru, newest_filled",
    ),
    "return_logprobs": ((True, False), NOT_BOOLS, "True or False"),
    "per_request_processors": ((True, False), NOT_BOOLS, "True or False"),
    "use_cuda_graph": (
        (None, True, False, (True, False), (False, False)),
        (0, 1, "yes", (True,), (True, False, True), (1, 0), (None, True), ()),
        "True, False, None or a pair of bools (varlen, decode)",
    ),
    "q_padding_interval_size": ((0, 64), (-1, None, *NOT_INTEGERS), "an integer, at least 0"),
    "kv_padding_interval_size": ((0, 64), (-1, None, *NOT_INTEGERS), "an integer, at least 0"),
    "use_async_batching": ((None, True, False), (0, 1, "yes"), "True or False or None"),
    "default_compile_level": ((0, 1, 2, 3), (-1, 4, None, *NOT_INTEGERS), "an integer, from 0 to 3"),
    "varlen_compile_config": ((None,), ("default", True, 2), "CompileConfig"),
    "decode_compile_config": ((None,), ("default", True, 2), "CompileConfig"),
    "max_blocks_per_request": ((None, 0, 32), (-1, *NOT_INTEGERS), "an integer, at least 0, or None"),
    "cpu_offload_space": ((None, 0.0, 0, 1.5), (-1, *NOT_NUMBERS), "a finite number, at least 0, or None"),
    "cpu_offload_space_safety_threshold": (
        (0.01, 0.8, 1),
        (None, 0, 1.1, *NOT_NUMBERS),
        "a finite number, above 0 and at most 1",
    ),
    "cpu_group_timeout": ((None, 0.1, 300), (0, -1, *NOT_NUMBERS), "a finite number, above 0, or None"),
    "fused_decoder": ((None, True, False), (0, 1, "yes"), "True or False or None"),
    "kv_cache_dtype": (
        (None, "float32", "bfloat16"),
        ("float16", "int8", "", 0, True, ["float32"], torch.float32),
        "one of float32, bfloat16, or None",
    ),
    "quantization": ((None, "int8"), ("int4", "INT8", "", 8, True, ["int8"]), "one of int8, or None"),
    "speculative": ((None, "ngram"), ("NGRAM", "", 1, True, ["ngram"]), "one of ngram, or None"),
    "num_speculative_tokens": ((1, 15), (0, 16, 1.5, None), "an integer, from 1 to 15"),
    "auto_switch_to_flash": ((True, False), NOT_BOOLS, "True or False"),
    "seed": ((None, 0, 1, 1 << 40), (-1, *NOT_INTEGERS), "an integer, at least 0, or None"),
    "max_queue_size": ((0, 1, 10**6), (-1, None, *NOT_INTEGERS), "an integer, at least 0"),
    "stream_interval": ((0, 0.05, 3), (-0.1, None, *NOT_NUMBERS), "a finite number, at least 0"),
    "drop_unsupported_processors": ((True, False), NOT_BOOLS, "True or False"),
    "block_size": ((None,), (), ""),  # see below
}

SAMPLING: dict[str, tuple[tuple[Any, ...], tuple[Any, ...], str]] = {
    "temperature": ((0, 0.0, 0.7, 2, 100.0), (-0.1, None, *NOT_NUMBERS), "a finite number, at least 0"),
    "top_k": ((0, 1, 50), (-2, *NOT_INTEGERS), "an integer, at least -1, or None"),
    "top_p": ((0.01, 0.9, 1, 1.0), (0, 0.0, 1.1, -1, None, *NOT_NUMBERS), "a finite number, above 0 and at most 1"),
    "max_tokens": ((None, 1, 10**6), (0, -1, *NOT_INTEGERS), "an integer, at least 1, or None"),
    "stop_token_ids": (
        ((), (1, 2), [3], {4}, None, 5, np.array([6, 7]), range(3)),
        ("12", b"12", {1: 2}, 1.0, [1.5], ["1"], [[1]], [None], True, np.array([[1]])),
        "sequence of token ids",
    ),
    "seed": ((None, 0, MAX_SEED), (-1, MAX_SEED + 1, *NOT_INTEGERS), f"an integer, from 0 to {MAX_SEED}, or None"),
    "ignore_eos": ((True, False), NOT_BOOLS, "True or False"),
    "include_prompt": ((True, False), NOT_BOOLS, "True or False"),
    "include_stop_str_in_output": ((True, False), NOT_BOOLS, "True or False"),
    "min_p": ((0, 0.0, 0.5, 1), (-0.1, 1.1, None, *NOT_NUMBERS), "a finite number, at least 0 and at most 1"),
    "typical_p": ((0.01, 1, 1.0), (0, 1.1, None, *NOT_NUMBERS), "a finite number, above 0 and at most 1"),
    "repetition_penalty": (
        (1e-6, 0.1, 1, 2.5, 1e6),
        (0, -1, 1e-7, 2e6, None, *NOT_NUMBERS),
        "a finite number, at least 1e-06 and at most",
    ),
    "presence_penalty": ((-2, 0.0, 2), (-2.1, 2.1, None, *NOT_NUMBERS), "a finite number, at least -2 and at most 2"),
    "frequency_penalty": ((-2, 0.0, 2), (-2.1, 2.1, None, *NOT_NUMBERS), "a finite number, at least -2 and at most 2"),
    "logit_bias": (({}, {3: 1.0}), (None, [1], "a"), "a dict of token ids and numbers"),
    "bad_words_ids": (((), ((1,), (2, 3))), ("abc", 5, [[]]), "a list of lists of token ids"),
    "suppress_tokens": (((), (1, 2)), ("12", 1.0, [1.5], ["1"]), "sequence of token ids"),
    "min_new_tokens": ((0, 5), (-1, None, *NOT_INTEGERS), "an integer, at least 0"),
    "stop": (((), ("a", "bc")), ("", [""], 5, [1]), "a text or a list of texts, none of them empty"),
    "logprobs": ((None, 0, 20), (-1, 21, *NOT_INTEGERS), "an integer, from 0 to 20, or None"),
    "prompt_logprobs": ((None, 0, 20), (-1, 21, *NOT_INTEGERS), "an integer, from 0 to 20, or None"),
    "logprobs_mode": (("raw", "processed"), ("both", None, 1), '"processed" or "raw"'),
    "json_schema": ((None, {"type": "object"}, "{}"), (5, [1]), "a JSON schema, as a dict or as text, or None"),
    "regex": ((None, "a+"), ("", 5, [1]), "a text that is not empty, or None"),
    "grammar": ((None, "start: /a/"), ("", 5, [1]), "a text that is not empty, or None"),
    "choice": (((), ("a", "bc")), ("", [""], 5, [1]), "a text or a list of texts, none of them empty"),
    "best_of": ((None, 1, 64), (0, 1025, *NOT_INTEGERS), "an integer, from 1 to 1024, or None"),
    "n": ((1, 64), (0, -1, None, *NOT_INTEGERS), "an integer, from 1 to 1024"),
    "logits_processors": (((), (print,)), (5, [5], None), "a list of callables"),
    "processors": (({}, {"min_length": 3}), (5,), "a dict of settings of transformers' GenerationConfig"),
}

HINTS = dict.fromkeys(
    ("max_prompt_length", "max_generated_length", "num_requests", "max_batch_tokens"),
    ((None, 1, 10**6), (0, -1, *NOT_INTEGERS), "an integer, at least 1, or None"),
)

TABLES = {ContinuousBatchingConfig: CONFIG, SamplingParams: SAMPLING, WorkloadHints: HINTS}
ACCEPTED = [(cls, name, v) for cls, table in TABLES.items() for name, row in table.items() for v in row[0]]
WRONG = [(cls, name, v, row[2]) for cls, table in TABLES.items() for name, row in table.items() for v in row[1]]

# Values that ask for machinery that does not exist yet, and values that ask for none of it.
NOT_YET = {
    "use_cuda_graph": ((True, (True, False), (False, True)), (None, False, (False, False), [False, False])),
    "q_padding_interval_size": ((1, 64), (0,)),
    "kv_padding_interval_size": ((1, 64), (0,)),
    "use_async_batching": ((True,), (None, False)),
    "default_compile_level": ((1, 2, 3), (0,)),
    "max_blocks_per_request": ((1, 32), (None, 0)),
    "cpu_group_timeout": ((None, 10.0), (300.0, 300)),
}


def case(values: tuple[Any, ...]) -> str:
    return f"{values[0].__name__}-{values[1]}-{values[2]!r}"


@pytest.mark.parametrize("cls", TABLES)
def test_no_field_is_left_out_here(cls: type) -> None:
    assert {f.name for f in dataclasses.fields(cls)} == set(TABLES[cls])


@pytest.mark.parametrize("accepted", ACCEPTED, ids=case)
def test_accepted_values_are_kept(accepted: tuple[type, str, Any]) -> None:
    cls, name, value = accepted
    kept = getattr(cls(**{name: value}), name)
    if name == "stop_token_ids":
        assert kept == tuple(np.atleast_1d([] if value is None else np.array(list_or_scalar(value))).tolist())
        assert all(type(token) is int for token in kept)
    elif isinstance(value, tuple | dict):
        assert kept == value and type(kept) is type(value)
    else:
        assert kept is value


def list_or_scalar(value: Any) -> Any:
    return list(value) if isinstance(value, set | range) else value


@pytest.mark.parametrize("wrong", WRONG, ids=case)
def test_wrong_values_are_refused_by_name(wrong: tuple[type, str, Any, str]) -> None:
    cls, name, value, allowed = wrong
    with pytest.raises(ValueError, match="is not allowed") as caught:
        cls(**{name: value})
    assert isinstance(caught.value, InvalidValueError)
    assert isinstance(caught.value, LegatoError)
    message = str(caught.value)
    assert message.startswith(f"{name}={value!r} ")
    assert allowed in message


def test_defaults_are_those_promised() -> None:
    config = ContinuousBatchingConfig()
    promised = {
        "page_size": 256,
        "scheduler_type": "fifo",
        "allow_block_sharing": True,
        "eviction_policy": "lru",
        "return_logprobs": False,
        "per_request_processors": False,
        "q_padding_interval_size": 0,
        "kv_padding_interval_size": 0,
        "default_compile_level": 0,
        "cpu_offload_space": 0.0,
        "cpu_offload_space_safety_threshold": 0.8,
        "cpu_group_timeout": 300.0,
        "auto_switch_to_flash": True,
        "max_queue_size": 0,
        "num_speculative_tokens": 12,
        "stream_interval": 0.0,
        "drop_unsupported_processors": True,
    }
    for f in dataclasses.fields(config):
        assert getattr(config, f.name) == promised.get(f.name), f.name
    assert {name: policy.safety_margin for name, policy in SCHEDULING_POLICIES.items()} == {
        "fifo": 0.15,
        "prefill_first": 0.0,
    }


def test_a_long_value_is_shortened_in_the_message() -> None:
    with pytest.raises(ValueError, match=r"scheduler_type='x+\.\.\. is not allowed") as caught:
        ContinuousBatchingConfig(scheduler_type="x" * 10_000)
    assert len(str(caught.value)) < 200


def test_a_registered_policy_is_a_scheduler_type(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="scheduler_type='mine'"):
        ContinuousBatchingConfig(scheduler_type="mine")
    monkeypatch.setitem(SCHEDULING_POLICIES, "mine", SchedulingPolicy(list, 0.0))
    assert ContinuousBatchingConfig(scheduler_type="mine").scheduler_type == "mine"
    with pytest.raises(ValueError, match="one of fifo, mine, prefill_first"):
        ContinuousBatchingConfig(scheduler_type="yours")


def test_block_size_is_page_size_with_a_warning_where_it_was_written() -> None:
    with pytest.warns(FutureWarning, match=r"block_size.*page_size") as caught:
        config = ContinuousBatchingConfig(block_size=32)
    assert caught[0].filename == __file__
    assert (config.page_size, config.block_size) == (32, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dataclasses.replace(config).page_size == 32
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match=r"page_size=3 .*at least 4"):
        ContinuousBatchingConfig(block_size=3)


def test_page_size_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ContinuousBatchingConfig(page_size=32)


def test_sampling_params_from_a_mapping() -> None:
    params = SamplingParams.from_mapping({"temperature": 0.5, "top_k": 3})
    assert params == SamplingParams(temperature=0.5, top_k=3)
    with pytest.raises(ValueError, match=r"'beams'; known ones are bad_words_ids, begin_suppress_tokens, best_of"):
        SamplingParams.from_mapping({"top_k": 3, "beams": 4})
    with pytest.raises(ValueError, match="top_k=-2"):
        SamplingParams.from_mapping({"top_k": -2})


@pytest.mark.parametrize("name", NOT_YET)
def test_what_is_not_built_yet_is_refused_by_name(name: str) -> None:
    asking, inert = NOT_YET[name]
    for value in inert:
        ContinuousBatchingConfig(**{name: value}).require_implemented()
    for value in asking:
        config = ContinuousBatchingConfig(**{name: value})
        with pytest.raises(NotImplementedError, match="not implemented yet") as caught:
            config.require_implemented()
        assert str(caught.value).startswith(f"{name}={value!r} ")


@pytest.mark.parametrize("name", sorted(set(CONFIG) - set(NOT_YET)))
def test_what_is_built_is_never_refused_as_not_yet_built(name: str) -> None:
    for value in CONFIG[name][0]:
        ContinuousBatchingConfig(**{name: value}).require_implemented()


def test_convert_takes_its_own_kind_none_and_transformers_class() -> None:
    from transformers.generation import CompileConfig
    from transformers.generation import ContinuousBatchingConfig as TheirConfig

    config = ContinuousBatchingConfig(page_size=8)
    assert ContinuousBatchingConfig.convert(config) is config
    assert ContinuousBatchingConfig.convert(None) == ContinuousBatchingConfig()
    assert ContinuousBatchingConfig.convert(TheirConfig()) == ContinuousBatchingConfig()
    settings = {
        "page_size": 16,
        "num_blocks": 12,
        "max_batch_tokens": 300,
        "max_memory_percent": 0.5,
        "max_requests_per_batch": 7,
        "scheduler_type": "prefill_first",
        "safety_margin": 0.25,
        "allow_block_sharing": False,
        "return_logprobs": True,
        "per_request_processors": True,
        "use_cuda_graph": (True, False),
        "q_padding_interval_size": 64,
        "kv_padding_interval_size": 128,
        "use_async_batching": True,
        "default_compile_level": 2,
        "varlen_compile_config": CompileConfig(dynamic=True),
        "decode_compile_config": CompileConfig(dynamic=False),
        "max_blocks_per_request": 16,
        "cpu_offload_space": 2.0,
        "cpu_offload_space_safety_threshold": 0.5,
        "cpu_group_timeout": None,
        "auto_switch_to_flash": False,
        "seed": 3,
        "max_queue_size": 9,
        "drop_unsupported_processors": False,
    }
    assert ContinuousBatchingConfig.convert(TheirConfig(**settings)) == ContinuousBatchingConfig(**settings)
    for name in ("varlen_compile_config", "decode_compile_config"):
        config = ContinuousBatchingConfig.convert(TheirConfig(**{name: settings[name]}))
        with pytest.raises(NotImplementedError, match=f"{name}=.* not implemented yet"):
            config.require_implemented()
    assert ContinuousBatchingConfig.convert(TheirConfig(block_size=64)).page_size == 64
    with pytest.raises(ValueError, match="page_size=2"):
        ContinuousBatchingConfig.convert(TheirConfig(page_size=2))
    with pytest.raises(NotImplementedError, match="disable_nccl_graph_mixing=False"):
        ContinuousBatchingConfig.convert(TheirConfig(disable_nccl_graph_mixing=False))


@pytest.mark.parametrize("stranger", [{}, {"page_size": 16}, 16, "fifo", SamplingParams(), ContinuousBatchingConfig])
def test_convert_refuses_anything_else(stranger: object) -> None:
    with pytest.raises(TypeError, match="must be a ContinuousBatchingConfig, not "):
        ContinuousBatchingConfig.convert(stranger)
