"""`ContinuousBatchingConfig`'s fields as flags of a command."""

import inspect
import re
import tomllib
from collections.abc import Callable
from dataclasses import Field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from legato.config import NOT_IMPLEMENTED, ContinuousBatchingConfig
from legato.docstrings import described_fields
from legato.errors import InvalidValueError

# Deprecated, or of no effect: nothing that a new command line should offer.
_WITHOUT_FLAG = {"block_size", "per_request_processors", "auto_switch_to_flash", *NOT_IMPLEMENTED}
_PANELS = {
    "Model": ("quantization", "fused_decoder"),
    "Memory": (
        "page_size", "num_blocks", "max_memory_percent", "safety_margin", "kv_cache_dtype", "allow_block_sharing",
        "eviction_policy", "cpu_offload_space", "cpu_offload_space_safety_threshold",
    ),
    "Scheduling": ("max_batch_tokens", "max_requests_per_batch", "max_queue_size", "scheduler_type"),
    "Answers": (
        "seed", "speculative", "num_speculative_tokens", "stream_interval", "return_logprobs",
        "drop_unsupported_processors",
    ),
}  # fmt: skip


Command = Callable[..., None]


def with_settings(**own_texts: str) -> Callable[[Command], Command]:
    """A command with a flag for every setting in place of its `**settings`; those not given are None.

    Args:
        own_texts: what settings do, where it is something else in this command.
    """
    texts = {**described_fields(ContinuousBatchingConfig), **own_texts}
    types = get_type_hints(ContinuousBatchingConfig)

    def with_flags(command: Command) -> Command:
        signature = inspect.signature(command)
        own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        flags = [_flag(one, types[one.name], texts.get(one.name, "")) for one in config_flags()]
        flagged: Any = command
        flagged.__signature__ = signature.replace(parameters=own + flags)
        return command

    return with_flags


def config_flags() -> list[Field[Any]]:
    """Fields that have a flag, panel by panel; one that no panel names comes last."""
    order = [name for names in _PANELS.values() for name in names]
    found = [one for one in fields(ContinuousBatchingConfig) if one.name not in _WITHOUT_FLAG]
    return sorted(found, key=lambda one: order.index(one.name) if one.name in order else len(order))


def _flag(setting: Field[Any], kind: Any, text: str) -> inspect.Parameter:
    name = setting.name
    panel = next((panel for panel, names in _PANELS.items() if name in names), "Engine")
    if setting.default is None:
        text, default = text.replace("None: ", "Left out: "), ""
    else:  # a command line has no way to say None
        text, default = re.sub(r"[;.] None: [^.;]*", "", text), f"  [default: {str(setting.default).lower()}]"
    option = typer.Option(help=text[:1].upper() + text[1:] + default, rich_help_panel=panel, show_default=False)
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def read_settings(path: Path | None, flags: dict[str, Any]) -> ContinuousBatchingConfig:
    """Settings of a TOML file, overruled by the flags that were given.

    Raises:
        InvalidValueError: the file is no TOML, names what is no setting, or a value is out of range.
    """
    try:
        settings = {} if path is None else tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidValueError(f"{path} is not TOML: {error}") from error
    known = [one.name for one in fields(ContinuousBatchingConfig)]
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        near = get_close_matches(unknown[0], known, 1)
        hint = f": is {near[0]} meant?" if near else ""
        raise InvalidValueError(f"{path} has {unknown[0]!r}, which is not a setting of ContinuousBatchingConfig{hint}")
    given = {name: value for name, value in flags.items() if value is not None}
    return ContinuousBatchingConfig(**{**settings, **given})


class CommandWithPanels(TyperCommand):
    """Its help lists options subject by subject."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, then each panel's options, those without a panel first."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                plain = "Arguments" if param.param_type_name == "argument" else "Options"
                panels.setdefault(getattr(param, "rich_help_panel", None) or plain, []).append(record)
        for name, records in panels.items():
            with formatter.section(name):
                formatter.write_dl(records)
