"""Failures that single devices report and no other device confirms. Pure.

A device may report that its part fails, or that a link has ended. One report is believed, but not
forever: a device that stops the same step again and again is planned around. A job ends for an
error that two devices had one after the other, or the holder itself.
"""

MAX_COMPLAINTS = 3
"""Times in a row, without a step between, that one device alone may stop a job."""


class Complaints:
    """Of one job.

    Args:
        holder: id of the device with the data.
    """

    def __init__(self, holder: str) -> None:
        self._holder = holder
        self._step = -1
        self._times: dict[str, int] = {}  # by device, since the last step
        self._links: dict[tuple[str, str], int] = {}  # by device and the other end, the same
        self._failed: set[str] = set()  # devices whose part has failed

    def is_too_often(self, device: str, step: int) -> bool:
        """It has stopped the job once more, of which `step` updates count."""
        self._since(step)
        self._times[device] = self._times.get(device, 0) + 1
        return device != self._holder and self._times[device] > MAX_COMPLAINTS

    def is_link_false(self, device: str, other: str, step: int) -> bool:
        """It says once more that its link to `other` has ended: whether that is not believed."""
        self._since(step)
        self._links[device, other] = self._links.get((device, other), 0) + 1
        if self._links.get((other, device)):
            return False
        return device != self._holder and self._links[device, other] > MAX_COMPLAINTS

    def ends_job(self, device: str) -> bool:
        """Its part has failed: whether that is the job's fault, as other devices had it too."""
        others = self._failed - {device}
        self._failed.add(device)
        return device == self._holder or bool(others)

    def _since(self, step: int) -> None:
        if step != self._step:
            self._step = step
            self._times.clear()
            self._links.clear()
