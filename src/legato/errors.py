"""What can go wrong, by whose fault: the caller's, one request's, or the engine's."""


class LegatoError(Exception):
    """Base of every error that Legato raises on purpose."""


class InvalidValueError(LegatoError, ValueError):
    """A setting or a request that can never work. The message names the field, the value and what is allowed."""


class QueueFullError(LegatoError):
    """`max_queue_size` requests are waiting already; nothing was queued."""


class UnsupportedModelError(LegatoError, ValueError):
    """The model cannot be served with the tokens `model.generate` would give. The message says why."""


class MissingExtraError(LegatoError, ImportError):
    """An optional dependency is not installed. The message says how to get it."""


class OutOfCacheMemoryError(LegatoError, MemoryError):
    """The memory budget holds no useful cache. The message names the figures that would fit."""


class EngineError(LegatoError, RuntimeError):
    """The engine failed and every unfinished request with it; `__cause__` is the original exception."""


class ManagerStateError(LegatoError, RuntimeError):
    """A call that the manager's present state forbids (for instance starting it after `destroy()`)."""
