"""`LLM`: text in, text out."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from types import TracebackType
from typing import Any

from legato.best_of import all_samples, best_samples
from legato.config import ContinuousBatchingConfig, WorkloadHints
from legato.errors import InvalidValueError, ManagerStateError
from legato.manager import ContinuousBatchingManager
from legato.model_api import enable
from legato.models import load_model, load_tokenizer
from legato.progress import completed_in_order
from legato.request import GenerationOutput, RequestSpec
from legato.sampling_params import SamplingParams
from legato.text import Message, OutputPieces, decode, encode, encode_chat

DEFAULT_MAX_TOKENS = 256

Prompt = str | Sequence[int]


class LLM:
    """A model with its tokenizer, served by a manager that starts at the first use.

    Args:
        model: an alias of `legato pull`, a folder, a `.gguf` file, a hub id, or a model that is loaded already.
        tokenizer: a tokenizer or a name; None: the model's own, which needs `model` to be a name.
        continuous_batching_config: memory and scheduling.
        workload_hints: what is known of the requests to come.
        **load: given to transformers' `from_pretrained`. Without `dtype`, weights are float32 on a CPU, whatever the
            checkpoint has, and the checkpoint's own type on a GPU (`device_map="cuda"`).

    Raises:
        ValueError: a setting that cannot work.
        UnsupportedModelError: a model that cannot be served.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: WorkloadHints | None = None,
        **load: Any,
    ) -> None:
        if isinstance(model, str | os.PathLike):
            tokenizer = model if tokenizer is None else tokenizer
            model = load_model(model, **default_dtype(load))
        elif tokenizer is None:
            raise InvalidValueError("tokenizer=None is not allowed with a loaded model: give its tokenizer")
        elif load:
            raise InvalidValueError(f"{sorted(load)[0]} is not allowed with a model that is loaded already")
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str | os.PathLike) else tokenizer
        self.model = enable(model)
        self._config = continuous_batching_config
        self._hints = workload_hints
        self._manager: ContinuousBatchingManager | None = None
        self._making = threading.Lock()  # several threads may be the first

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[GenerationOutput]:
        """Answer prompts.

        Args:
            prompts: texts or token ids, or a single one of either.
            sampling_params: one for all or one for each; None: as the model's generation config says.
            use_tqdm: show a progress bar where stderr is a terminal.

        Returns:
            Final outputs in input order, with `text`; `n` of them for each prompt. A prompt that can never be served
            has status FAILED.

        Raises:
            EngineError: the engine failed; `__cause__` is why.
        """
        return self._run([self._encode(prompt) for prompt in _as_list(prompts)], sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[GenerationOutput]:
        """Answer a conversation, or several at once, through the model's chat template. Else as `generate`.

        Raises:
            InvalidValueError: there is no chat template, or it refuses the messages.
        """
        conversations: Any = [messages] if messages and isinstance(messages[0], dict) else messages
        return self._run([encode_chat(self.tokenizer, c) for c in conversations], sampling_params, use_tqdm)

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Iterator[str]:
        """Answer one prompt, or one conversation, piece by piece.

        Closing the iterator early cancels the request. Pieces never end inside a character.

        Raises:
            InvalidValueError: the prompt can never be served.
            ManagerStateError: stopped before the end.
            EngineError: the engine failed; `__cause__` is why.
        """
        is_chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], dict)
        input_ids = encode_chat(self.tokenizer, prompt) if is_chat else self._encode(prompt)  # type: ignore[arg-type]
        if sampling_params is not None and max(sampling_params.n, sampling_params.best_of or 1) > 1:
            given = f"n={sampling_params.n}, best_of={sampling_params.best_of}"
            raise InvalidValueError(f"{given} is not allowed: a stream is of one answer")
        spec = self._spec(input_ids, sampling_params, streaming=True)
        return self._stream(replace(spec, sampling={**spec.sampling, "n": 1, "best_of": None}))

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        completions: Prompt | Sequence[Prompt],
        top: int = 0,
        use_tqdm: bool = True,
    ) -> list[GenerationOutput]:
        """Log-probabilities of given completions, each after its prompt; nothing is generated.

        Args:
            prompts, completions: texts or token ids, as many of one as of the other. Texts are tokenized together, and
                the completion begins after as many tokens as the prompt has by itself.
            top: also the likeliest tokens in each place, so many, up to 20.
            use_tqdm: show a progress bar where stderr is a terminal.

        Returns:
            Final outputs in input order; `prompt_logprobs` has an entry for each token of prompt and completion, None
            for those of the prompt. One that can never be served has status FAILED.

        Raises:
            InvalidValueError: there are more of one than of the other.
            EngineError: the engine failed; `__cause__` is why.
        """
        given, wanted = _as_list(prompts), _as_list(completions)
        if len(given) != len(wanted):
            raise InvalidValueError(f"completions has {len(wanted)} entries for {len(given)} prompts")
        pairs = [self._encode_pair(prompt, completion) for prompt, completion in zip(given, wanted, strict=True)]
        specs = [RequestSpec(ids, sampling={"prompt_logprobs": top}, score_from=start) for ids, start in pairs]
        return [output for (output,) in completed_in_order(self.manager, specs, use_tqdm)]

    def close(self) -> None:
        """Stop at once and free the cache. The next call starts anew."""
        with self._making:
            manager, self._manager = self._manager, None
        if manager is not None:
            manager.stop(hard_stop=True)
            manager.destroy()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def manager(self) -> ContinuousBatchingManager:
        """The running manager behind this object."""
        with self._making:
            if self._manager is None:
                self._manager = self.model.init_continuous_batching(
                    None, self._config, self._hints, tokenizer=self.tokenizer
                )
                self._manager.start()
            return self._manager

    def _run(
        self,
        inputs: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        show_progress: bool,
    ) -> list[GenerationOutput]:
        each = list(params) if isinstance(params, Sequence) else [params] * len(inputs)
        if len(each) != len(inputs):
            raise InvalidValueError(f"sampling_params has {len(each)} entries for {len(inputs)} prompts")
        specs = [self._spec(ids, None if p is None else all_samples(p)) for ids, p in zip(inputs, each, strict=True)]
        outputs = completed_in_order(self.manager, specs, show_progress)
        wanted = self.manager.config.return_logprobs
        outputs = [
            samples if p is None else best_samples(samples, p, wanted or p.logprobs is not None)
            for samples, p in zip(outputs, each, strict=True)
        ]
        for samples, p in zip(outputs, each, strict=True):
            for output in samples:
                output.text = self._text(output, p)
        return [output for samples in outputs for output in samples]

    def _text(self, output: GenerationOutput, params: SamplingParams | None) -> str:
        text = decode(self.tokenizer, output.generated_tokens) if output.text is None else output.text
        return decode(self.tokenizer, output.prompt_ids) + text if params and params.include_prompt else text

    def _stream(self, spec: RequestSpec) -> Iterator[str]:
        pieces = OutputPieces(self.tokenizer)
        if spec.sampling.get("include_prompt"):
            yield decode(self.tokenizer, spec.input_ids)
        with closing(self.manager.as_completed([spec])) as outputs:
            for _, output in outputs:
                if output.error is not None:
                    kind = InvalidValueError if output.finish_reason == "error" else ManagerStateError
                    raise kind(output.error)
                if piece := pieces.push(output):
                    yield piece

    def _spec(self, input_ids: Sequence[int], params: SamplingParams | None, streaming: bool = False) -> RequestSpec:
        sampling = {} if params is None else params.as_dict()
        max_tokens = sampling.get("max_tokens") or self._default_max_tokens
        return RequestSpec(input_ids, max_tokens, streaming=streaming, sampling=sampling)

    @property
    def _default_max_tokens(self) -> int:
        return getattr(self.model.generation_config, "max_new_tokens", None) or DEFAULT_MAX_TOKENS

    def _encode_pair(self, prompt: Any, completion: Any) -> tuple[list[int], int]:
        """Token ids of both, and where the completion begins."""
        if isinstance(prompt, str) and isinstance(completion, str):
            whole, start = self._encode(prompt + completion), len(self._encode(prompt))
        else:
            start = len(self._encode(prompt))
            whole = [*self._encode(prompt), *self._encode_rest(completion)]
        return whole, max(1, start)  # nothing tells how likely a first token is

    def _encode_rest(self, text: Any) -> list[int]:
        """Of a text that goes on: nothing is put in front of it."""
        if not isinstance(text, str):
            return list(text)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _encode(self, prompt: Any) -> list[int]:
        return encode(self.tokenizer, prompt) if isinstance(prompt, str) else prompt


def default_dtype(load: dict[str, Any]) -> dict[str, Any]:
    """`from_pretrained` arguments with the data type settled: few CPUs are quicker in bfloat16 than in float32."""
    if "dtype" in load or "torch_dtype" in load:
        return load
    return {"dtype": "float32" if load.get("device_map") in (None, "cpu") else "auto", **load}


def _as_list(prompts: Any) -> list[Any]:
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)
