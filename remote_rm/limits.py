"""How much the service takes on before it says no; the flags of `serving_arguments` have the same defaults."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ServiceLimits:
    """What the service accepts, and what one of its workers may use."""

    max_queued_items: int = 10_000
    """With so many items waiting for a worker, a request that needs one is refused with 503."""
    max_request_bytes: int = 64 * 2**20
    """A larger body is refused with 413."""
    worker_memory_bytes: int = 2**30
    """Address space: an expression that outgrows it fails with a MemoryError instead of filling the machine."""

    def __post_init__(self) -> None:
        """Raise a ValueError unless every limit is at least 1."""
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


DEFAULT_LIMITS = ServiceLimits()
