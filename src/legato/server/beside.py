"""What takes its time with long texts: beside the loop, and no longer than a call may take."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from legato.errors import InvalidValueError
from legato.server.errors import ApiError

Made = TypeVar("Made")


@dataclass(frozen=True)
class Deadline:
    """Of a call.

    Attributes:
        seconds: that it may take in all.
        at: when they are over, by the loop's clock; None: it takes as long as it takes.
    """

    seconds: float | None
    at: float | None

    @classmethod
    def after(cls, seconds: float | None) -> "Deadline":
        """From now on."""
        return cls(seconds, None if seconds is None else asyncio.get_running_loop().time() + seconds)

    def error(self) -> ApiError:
        """What the client is told when it is over."""
        told = f"timeout: the answer was not complete after {self.seconds} seconds"
        return ApiError(408, told, "timeout", kind="timeout_error", code="timeout")


class Beside:
    """A few threads of their own: each that works takes a core from the engine.

    Args:
        num_threads: so many work at a time, and the others wait.
        name: of the threads.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def run(
        self, make: Callable[..., Made], *given: Any, deadline: Deadline, renamed: Mapping[str, str] | None = None
    ) -> Made:
        """What `make` makes of what is given.

        Args:
            deadline: of the call; one that has begun then goes on in its thread.
            renamed: what fields are called in the call, where that is not their own name.

        Raises:
            ApiError: something is wrong with what is given, or it is too late.
        """
        making = asyncio.get_running_loop().run_in_executor(self._threads, make, *given)
        try:
            async with asyncio.timeout_at(deadline.at):
                return await making
        except InvalidValueError as error:
            raise ApiError.invalid(str(error), renamed) from error
        except TimeoutError as error:
            raise deadline.error() from error
