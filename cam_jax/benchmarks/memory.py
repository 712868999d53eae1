"""Memory of this process as the system counts it."""

from pathlib import Path

_STATUS = Path("/proc/self/status")


def memory_bytes() -> int | None:
    """Resident now; None where the system does not say (not Linux)."""
    return _field("VmRSS")


def peak_bytes() -> int | None:
    """The most that was ever resident, or None."""
    return _field("VmHWM")


def reset_peak() -> bool:
    """Let the peak count from now on. False, and nothing done, where that cannot be."""
    try:
        # 5 resets the peak (proc(5), /proc/pid/clear_refs).
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _field(name: str) -> int | None:
    if not _STATUS.is_file():
        return None
    for line in _STATUS.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return None
