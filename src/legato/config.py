"""`ContinuousBatchingConfig`: how memory and steps are arranged. What the model generates is `GenerationConfig`'s."""

import dataclasses
import warnings
from dataclasses import dataclass
from typing import Any, Literal

from legato.cache.eviction import EVICTION_POLICIES
from legato.checks import check_bool, check_int, check_number, refuse
from legato.engine.policy import SCHEDULING_POLICIES

MIN_PAGE_SIZE = 4
MIN_BATCH_TOKENS = 256
DEFAULT_BATCH_TOKENS = 8192
DEFAULT_REQUESTS_PER_BATCH = 1024
KV_CACHE_DTYPES = ("float32", "bfloat16")
QUANTIZATIONS = ("int8",)
SPECULATIVE = ("ngram",)
# Tokens of a pass that guesses: up to there a pass costs little more than one of a single token, the way of the weights
# from memory.
MAX_TOKENS_WITH_DRAFTS = 16


@dataclass(frozen=True)
class WorkloadHints:
    """What the caller knows of the requests to come; helps to size the cache.

    Args:
        max_prompt_length: tokens of the longest prompt, or None.
        max_generated_length: new tokens of the longest answer, or None.
        num_requests: requests in all, or None.
        max_batch_tokens: tokens in one pass at most where the config leaves it open, or None: as told there.
    """

    max_prompt_length: int | None = None
    max_generated_length: int | None = None
    num_requests: int | None = None
    max_batch_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            check_int(name, value, 1, optional=True)


@dataclass
class ContinuousBatchingConfig:
    """Memory and scheduling. Every None is resolved when a manager is made, from the memory that is free then.

    Args:
        page_size: tokens of K and V that one page holds for one layer, at least 4.
        num_blocks: cache capacity in whole-model blocks of `page_size` tokens. None: what fits.
        max_batch_tokens: query tokens in one forward pass. None: 8192, lowered to what memory allows, at least 256.
        max_memory_percent: share, in (0, 1], of the free memory that the cache may take. None: 0.9 (0.8 with sampling)
            on a device with its own memory, half of that where the processor shares it.
        max_requests_per_batch: requests in one pass. None: the number of prompts submitted, else 1024, then clamped.
        scheduler_type: "fifo", "prefill_first" or a name given to `register_scheduling_policy`.
        safety_margin: share of the cache, in [0, 1], kept for running requests. None: the scheduler's own default.
        allow_block_sharing: prefix caching: requests that begin alike share K and V of what they have in common.
        eviction_policy: whose cached K and V go first when room is needed: "lru" or "newest_filled".
        return_logprobs: log-probability of each generated token, after the logits processors.
        per_request_processors: accepted for transformers' sake: requests always may set their own sampling.
        use_cuda_graph: replay recorded CUDA graphs: None, a bool, or a pair of bools (varlen, decode).
        q_padding_interval_size: padding step of query lengths in graphs, in tokens; 0: a preset.
        kv_padding_interval_size: padding step of K/V lengths in graphs, in tokens; 0: a preset.
        use_async_batching: prepare batch N+1 while batch N computes.
        default_compile_level: 0 (none) to 3.
        varlen_compile_config: transformers' `CompileConfig` for mixed batches.
        decode_compile_config: transformers' `CompileConfig` for decode batches.
        max_blocks_per_request: columns of the decode block table; 0: decode fast path off.
        cpu_offload_space: GiB of host memory for swapped-out caches; None: sized by the threshold.
        cpu_offload_space_safety_threshold: cap of that, as a share of available memory, in (0, 1].
        cpu_group_timeout: seconds a collective of the CPU group may block; None: no limit.
        fused_decoder: compute with Legato's own decoder in place of the model's modelling code, in float32 whatever
            the type of the weights. None: where it can; True: refuse a model where it cannot; False: never.
        kv_cache_dtype: type of K and V in the cache, "float32" or "bfloat16". None: float32 with the fused decoder,
            else the model's own, which then is the only choice.
        quantization: "int8": the fused decoder keeps weights as whole numbers of 8 bits, a scale for each output, the
            head included; activations may be rounded to 16 bits, a scale for each token. None: weights as they are.
        speculative: "ngram": guess how answers go on from what their own prompts and answers say, several tokens ahead,
            and keep what turns out right: tokens stay those of one at a time, and come faster where much is copied and
            few requests run. Requests with penalties, grammars or processors do without. None: no guesses.
        num_speculative_tokens: tokens of a guess at most, 1 to 15.
        auto_switch_to_flash: run a model loaded as eager or sdpa on FlashAttention where it is to be had.
        seed: sampling seed of requests that bring none.
        max_queue_size: waiting requests accepted; 0: no limit.
        stream_interval: seconds from one part of a streamed answer to the next, for `as_completed_async` and over HTTP;
            its first and last part do not wait. 0: each token as it comes.
        drop_unsupported_processors: drop, with a warning, logits processors that cannot work here; False: refuse them.
        block_size: deprecated name of `page_size`.

    Raises:
        ValueError: naming the field, the value and what is allowed.
    """

    page_size: int = 256
    num_blocks: int | None = None
    max_batch_tokens: int | None = None
    max_memory_percent: float | None = None
    max_requests_per_batch: int | None = None
    scheduler_type: str = "fifo"
    safety_margin: float | None = None
    allow_block_sharing: bool = True
    eviction_policy: str = "lru"
    return_logprobs: bool = False
    per_request_processors: bool = False
    use_cuda_graph: bool | tuple[bool, bool] | None = None
    q_padding_interval_size: int = 0
    kv_padding_interval_size: int = 0
    use_async_batching: bool | None = None
    default_compile_level: int = 0
    varlen_compile_config: Any = None
    decode_compile_config: Any = None
    max_blocks_per_request: int | None = None
    cpu_offload_space: float | None = 0.0
    cpu_offload_space_safety_threshold: float = 0.8
    cpu_group_timeout: float | None = 300.0
    fused_decoder: bool | None = None
    kv_cache_dtype: str | None = None
    quantization: Literal["int8"] | None = None
    speculative: Literal["ngram"] | None = None
    num_speculative_tokens: int = 12
    auto_switch_to_flash: bool = True
    seed: int | None = None
    max_queue_size: int = 0
    stream_interval: float = 0.0
    drop_unsupported_processors: bool = True
    block_size: int | None = None

    def __post_init__(self) -> None:
        if self.block_size is not None:
            warnings.warn("block_size is deprecated: use page_size", FutureWarning, stacklevel=3)
            self.page_size, self.block_size = self.block_size, None
        self._check_sizes()
        self._check_choices()

    def _check_sizes(self) -> None:
        check_int("page_size", self.page_size, MIN_PAGE_SIZE)
        check_int("num_blocks", self.num_blocks, 1, optional=True)
        check_int("max_batch_tokens", self.max_batch_tokens, 1, optional=True)
        check_int("max_requests_per_batch", self.max_requests_per_batch, 1, optional=True)
        check_int("max_blocks_per_request", self.max_blocks_per_request, 0, optional=True)
        check_int("q_padding_interval_size", self.q_padding_interval_size, 0)
        check_int("kv_padding_interval_size", self.kv_padding_interval_size, 0)
        check_int("max_queue_size", self.max_queue_size, 0)
        check_number("stream_interval", self.stream_interval, 0)
        check_int("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_TOKENS_WITH_DRAFTS - 1)
        check_int("seed", self.seed, 0, optional=True)
        check_number("max_memory_percent", self.max_memory_percent, 0, 1, above=True, optional=True)
        check_number("safety_margin", self.safety_margin, 0, 1, optional=True)
        check_number("cpu_offload_space", self.cpu_offload_space, 0, optional=True)
        check_number("cpu_offload_space_safety_threshold", self.cpu_offload_space_safety_threshold, 0, 1, above=True)
        check_number("cpu_group_timeout", self.cpu_group_timeout, 0, above=True, optional=True)

    def _check_choices(self) -> None:
        if not isinstance(self.scheduler_type, str) or self.scheduler_type not in SCHEDULING_POLICIES:
            raise refuse("scheduler_type", self.scheduler_type, f"one of {', '.join(sorted(SCHEDULING_POLICIES))}")
        if not isinstance(self.eviction_policy, str) or self.eviction_policy not in EVICTION_POLICIES:
            raise refuse("eviction_policy", self.eviction_policy, f"one of {', '.join(sorted(EVICTION_POLICIES))}")
        check_int("default_compile_level", self.default_compile_level, 0, 3)
        check_bool("allow_block_sharing", self.allow_block_sharing)
        check_bool("return_logprobs", self.return_logprobs)
        check_bool("per_request_processors", self.per_request_processors)
        check_bool("auto_switch_to_flash", self.auto_switch_to_flash)
        check_bool("drop_unsupported_processors", self.drop_unsupported_processors)
        check_bool("use_async_batching", self.use_async_batching, optional=True)
        check_bool("fused_decoder", self.fused_decoder, optional=True)
        if self.kv_cache_dtype is not None and self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise refuse("kv_cache_dtype", self.kv_cache_dtype, f"one of {', '.join(KV_CACHE_DTYPES)}, or None")
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            raise refuse("quantization", self.quantization, f"one of {', '.join(QUANTIZATIONS)}, or None")
        if self.speculative is not None and self.speculative not in SPECULATIVE:
            raise refuse("speculative", self.speculative, f"one of {', '.join(SPECULATIVE)}, or None")
        graph: Any = self.use_cuda_graph
        pair = isinstance(graph, tuple | list) and len(graph) == 2 and all(isinstance(g, bool) for g in graph)
        if not (graph is None or isinstance(graph, bool) or pair):
            raise refuse("use_cuda_graph", graph, "True, False, None or a pair of bools (varlen, decode)")
        if isinstance(graph, list):
            self.use_cuda_graph = (graph[0], graph[1])
        for name in ("varlen_compile_config", "decode_compile_config"):
            value = getattr(self, name)
            if value is not None and type(value).__name__ != "CompileConfig":  # transformers', not imported for this
                raise refuse(name, value, "a transformers CompileConfig, or None")

    def require_implemented(self) -> None:
        """Refuse settings whose machinery does not exist yet, so that none silently does nothing.

        Raises:
            NotImplementedError: naming the field and the value.
        """
        for name, inert in NOT_IMPLEMENTED.items():
            value = getattr(self, name)
            if value not in inert:
                allowed = " or ".join(repr(v) for v in inert)
                raise NotImplementedError(f"{name}={value!r} is not implemented yet; leave it at {allowed}")

    @classmethod
    def convert(cls, config: "ContinuousBatchingConfig | Any | None") -> "ContinuousBatchingConfig":
        """`config` itself, the defaults for None, or the same settings read off transformers' class of that name.

        Raises:
            TypeError: any other object.
            NotImplementedError: a transformers setting, changed from its default, that Legato does not have.
        """
        if config is None:
            return cls()
        if isinstance(config, cls):
            return config
        if type(config).__name__ != cls.__name__ or not dataclasses.is_dataclass(config):
            raise TypeError(f"continuous_batching_config must be a {cls.__name__}, not {type(config).__name__}")
        settings = {}
        for f in dataclasses.fields(config):
            value = getattr(config, f.name)
            if f.name == "block_size":  # all that releases before page_size have
                settings.update({} if value is None else {"page_size": value})
            elif f.name in _DEFAULTS:
                settings[f.name] = value
            elif value != f.default:
                raise NotImplementedError(f"{f.name}={value!r}: Legato has no such setting")
        return cls(**settings)


_DEFAULTS = {f.name: f.default for f in dataclasses.fields(ContinuousBatchingConfig)}

# Fields whose machinery is still to come, with the values that ask for none of it.
NOT_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "use_cuda_graph": (None, False, (False, False)),
    "q_padding_interval_size": (0,),
    "kv_padding_interval_size": (0,),
    "use_async_batching": (None, False),
    "default_compile_level": (0,),
    "varlen_compile_config": (None,),
    "decode_compile_config": (None,),
    "max_blocks_per_request": (None, 0),
    "cpu_group_timeout": (300.0,),
}
