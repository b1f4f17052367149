"""A household of real processes in which something goes wrong all the time; see `__main__`."""

from tools.chaos.household import Chaos, Outcome, Settings

__all__ = ["Chaos", "Outcome", "Settings"]
