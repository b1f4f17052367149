"""Pictures for a training: added in a browser, kept as torchvision's ImageFolder reads them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2ptrain.photos.least_certain import LeastCertain

__all__ = ["LeastCertain"]


def __getattr__(name: str) -> Any:
    """Load it when it is used: the page needs no torch."""
    if name not in __all__:
        raise AttributeError(f"module 'p2ptrain.photos' has no attribute {name!r}")
    from p2ptrain.photos import least_certain

    return least_certain.LeastCertain
